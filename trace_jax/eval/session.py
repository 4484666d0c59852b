"""Samples the prompts of a benchmark that a file has no outcomes of yet: so an evaluation goes on after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trace_jax.engines.base import Engine
from trace_jax.eval.outcomes import Outcomes, OutcomesFile, digest, of_prompt
from trace_jax.rollout.agent import Episode
from trace_jax.rollout.collect import sample_prompt
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.runner import Runner, Sampling
from trace_jax.rollout.slots import EpisodeSlots, run_all
from trace_jax.types import Prompt


def missing(prompts: Sequence[Prompt], samples: int, file: OutcomesFile) -> list[Prompt]:
    """The prompts without outcomes, in order. ValueError where the file's are of other tokens or another number."""
    left = []
    for prompt in prompts:
        found = file.outcomes.get(prompt.uid)
        if found is None:
            left.append(prompt)
        elif len(found.successes) != samples:
            raise ValueError(
                f"{prompt.uid} was sampled {len(found.successes)} times in this folder, --samples is {samples} now; "
                "put it back or choose another folder"
            )
        elif found.prompt != digest(prompt):
            raise ValueError(
                f"prompt {prompt.uid} had other tokens when it was sampled in this folder (data, template or tokenizer "
                "changed); choose another folder"
            )
    return left


async def sample(
    engine: Engine,
    environment: Environment,
    prompts: Sequence[Prompt],
    samples: int,
    file: OutcomesFile,
    *,
    sampling: Sampling,
    concurrency: int,
    on_episode: Callable[[Episode], None] | None = None,
    on_prompt: Callable[[Outcomes], None] | None = None,
) -> None:
    """Samples each prompt `samples` times and adds its outcomes to `file` as soon as it is finished.

    Each sample's noise is derived from (seed, uid, its number), so with an engine that keeps its contract the outcomes
    do not depend on which prompts are sampled together. Earlier prompts go first. Errors as `scheduler.sample_batch`.
    """
    begin = time.monotonic() - max((o.elapsed for o in file.outcomes.values()), default=0.0)
    runner = Runner(engine, environment, sampling, EpisodeSlots(concurrency), on_episode)
    runner.check_prompts(prompts)

    async def one(prompt: Prompt) -> None:
        collected = await sample_prompt(runner, prompt, samples)
        outcomes = of_prompt(prompt, collected, round(time.monotonic() - begin, 3))
        file.add(outcomes)
        if on_prompt is not None:
            on_prompt(outcomes)

    await run_all(one(prompt) for prompt in prompts)
