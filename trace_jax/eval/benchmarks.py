"""Which questions an evaluation asks: a task's benchmarks by name, how often each is sampled, their prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment
from trace_jax.tasks.base import Task
from trace_jax.types import Prompt

WHOLE = "eval"  # the one benchmark of a task without named ones: its held-out split
# Samples of a prompt, by task and data set, as in the paper's evaluation; AIME25 as AIME24, and AMC of two years as of
# one, are ours.
PAPER_SAMPLES: Mapping[str, Mapping[str, int]] = {
    "math": {
        "aime24": 32,
        "aime25": 32,
        "amc23": 16,
        "amc": 16,
        "math500": 4,
        "minerva": 4,
        "olympiadbench": 4,
        "mmlu_pro": 1,
        "arc_challenge": 4,
        "gpqa_diamond": 8,
    },
    "multihop_qa": {"hotpotqa": 1, "2wikimultihopqa": 1, "musique": 1, "bamboogle": 1},
    "bfcl": {"bfcl_base": 4, "bfcl_long_context": 4, "bfcl_miss_func": 4, "bfcl_miss_param": 4},
}


def benchmarks(task: Task, prompts: int) -> dict[str, Sequence[int]]:
    """Name -> indices of the "eval" split, in the task's order.

    A task of data sets names them itself (`task.benchmarks()`); any other has one, `WHOLE`, of the first `prompts`.
    """
    named = getattr(task, "benchmarks", None)
    if named is not None:
        return dict(named())
    size = task.size("eval")
    return {WHOLE: range(prompts if size is None else min(prompts, size))}


def too_long(task: Task) -> Mapping[str, int]:
    """Name -> records of the benchmark that no prompt is made of because it would be too long; {} where none can be."""
    counted = getattr(task, "too_long", None)
    return {} if counted is None else counted()


def select(
    available: Mapping[str, Sequence[int]], names: Sequence[str] | None, prompts: int | None
) -> dict[str, Sequence[int]]:
    """The benchmarks that are asked for (None: all), each cut to its first `prompts` questions (None: all of them).

    Raises ValueError for a name that the task does not have, for one that is given twice, and for one without
    questions.
    """
    names = list(available) if names is None else list(names)
    for name in names:
        if name not in available:
            raise ValueError(unknown(name, available))
        if names.count(name) > 1:
            raise ValueError(f"--benchmarks names {name!r} twice; name each once")
        if len(available[name]) == 0:
            raise ValueError(f"--benchmarks: {name!r} has no questions; leave it out")
    return {name: available[name][:prompts] for name in names}


def unknown(name: str, available: Iterable[str]) -> str:
    """The line for a benchmark that the task does not have."""
    return f"--benchmarks names {name!r}; this task has {', '.join(available)}"


def make_prompts(environment: Environment, limits: Limits, split: str, indices: Iterable[int]) -> list[Prompt]:
    """The prompts of these indices. Raises ValueError for one that leaves no room for an answer."""
    limit, prompts = limits.context_length, []
    for index in indices:
        prompt = environment.prompt(environment.task.instance(split, index))
        if prompt.tokens.shape[0] >= limit:
            raise ValueError(
                f"config.model.context_length is {limit}, but prompt {prompt.uid} alone has {prompt.tokens.shape[0]} "
                "tokens; raise it or make the task's prompts shorter"
            )
        prompts.append(prompt)
    return prompts
