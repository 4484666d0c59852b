"""Benchmarks of a task, samples of each, and prompts by index."""

from __future__ import annotations

import numpy as np
import pytest

from trace_jax.eval import benchmarks
from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment
from trace_jax.tasks.base import Instance


class Endless:
    """Questions without end; its n-th has n + 1 characters."""

    name, stop, closings, preamble, max_turns, tool_timeout = "q", "\n", ("\n",), "", 2, None

    def size(self, split):
        return None

    def instance(self, split, index):
        return Instance(f"q/{split}/{index}", "x" * index + "\n", index, "")


class Finite(Endless):
    def size(self, split):
        return 5


class Named(Endless):
    def benchmarks(self):
        return {"b": (0, 2, 4, 6), "a": (1, 3, 5), "empty": ()}

    def too_long(self):
        return {"b": 2, "a": 0, "empty": 1}


def test_a_task_without_names_has_one_benchmark():
    assert benchmarks.benchmarks(Endless(), 3) == {"eval": range(3)}
    assert benchmarks.too_long(Endless()) == {} and benchmarks.too_long(Named()) == {"b": 2, "a": 0, "empty": 1}
    assert benchmarks.benchmarks(Finite(), 3) == {"eval": range(3)} and benchmarks.benchmarks(Finite(), 9) == {"eval": range(5)}


def test_choosing_among_named_ones():
    available = benchmarks.benchmarks(Named(), 100)
    assert list(available) == ["b", "a", "empty"]  # the task's order
    assert benchmarks.select(available, ["a", "b"], None) == {"a": (1, 3, 5), "b": (0, 2, 4, 6)}
    assert benchmarks.select(available, ["b"], 2) == {"b": (0, 2)} and benchmarks.select(available, ["a"], 9) == {"a": (1, 3, 5)}
    assert benchmarks.select({"eval": range(10)}, None, 4) == {"eval": range(4)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "c"], "--benchmarks names 'c'; this task has b, a, empty"),
        (["a", "b", "a"], "--benchmarks names 'a' twice"),
        (["empty"], "--benchmarks: 'empty' has no questions"),
    ],
)
def test_choices_that_cannot_be(names, message):
    with pytest.raises(ValueError, match=message):
        benchmarks.select(Named().benchmarks(), names, None)


def test_samples_are_the_papers():
    """Section 6.2 of the paper; AIME25 and the larger AMC are ours."""
    stated = {"aime24": 32, "amc23": 16, "math500": 4, "minerva": 4, "olympiadbench": 4}
    stated |= {"mmlu_pro": 1, "arc_challenge": 4, "gpqa_diamond": 8}
    assert benchmarks.PAPER_SAMPLES["math"] == stated | {"aime25": 32, "amc": 16}
    assert set(benchmarks.PAPER_SAMPLES["multihop_qa"].values()) == {1}
    assert set(benchmarks.PAPER_SAMPLES["bfcl"].values()) == {4}


def test_prompts_by_index():
    encode = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    environment = Environment(Endless(), encode, None, (10,))
    limits = Limits(max_turns=2, max_turn_tokens=4, context_length=8, max_observation_tokens=4)
    prompts = benchmarks.make_prompts(environment, limits, "eval", (6, 0, 3))
    assert [p.uid for p in prompts] == ["q/eval/6", "q/eval/0", "q/eval/3"]
    assert [p.tokens.size for p in prompts] == [7, 1, 4] and prompts[0].state == 6
    with pytest.raises(ValueError, match="context_length is 8, but prompt q/eval/7 alone has 8 tokens; raise it"):
        benchmarks.make_prompts(environment, limits, "eval", (0, 7))
