"""A step's rollouts over all prompts: a limit on episodes in flight, and no barrier between the two stages.

Each prompt goes from its bare rollouts to its continuations on its own, as soon as its own rollouts are back; a
straggler of another prompt holds up nobody (paper section 4.2, "prompt-local").
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from trace_jax.budget.account import CONTINUATION_UNITS, ROOT_UNITS
from trace_jax.budget.strategy import Strategy
from trace_jax.engines.base import Engine
from trace_jax.rollout.agent import Episode
from trace_jax.rollout.collect import Collected, Predictor, collect_prompt, sample_prompt
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.runner import Runner, Sampling
from trace_jax.rollout.slots import EpisodeSlots, run_all
from trace_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a batch is."""

    units: float  # planned budget units; a fallback with an odd number of continuations stays half a unit below
    units_done: float  # of finished episodes
    prompts: int
    prompts_done: int
    generated_tokens: int  # of finished episodes


OnProgress = Callable[[Progress], None]


async def collect_batch(
    engine: Engine,
    environment: Environment,
    strategy: Strategy,
    predictor: Predictor | None,
    prompts: Sequence[Prompt],
    rollouts: np.ndarray,
    *,
    sampling: Sampling,
    concurrency: int,
    on_progress: OnProgress | None = None,
) -> list[Collected]:
    """Grows a tree for every prompt that was given rollouts.

    Args:
      engine, environment, strategy, predictor: see `collect_prompt`.
      prompts: the candidate pool, unique uids.
      rollouts: int [pool], m_i; prompts with 0 are skipped and have no tree.
      sampling: how episodes are sampled.
      concurrency: episodes in flight at once, at least 1.
      on_progress: called after each finished episode and each finished prompt.

    Returns:
      One `Collected` per prompt with m_i > 0, sorted by uid.

    Raises:
      ValueError: before anything is spent, where a prompt does not fit the context, a uid appears twice, or `rollouts`
        is not one count >= 0 per prompt. Later, the first unexpected exception, after all other work was cancelled.
    """
    counts = np.asarray(rollouts)
    if counts.shape != (len(prompts),) or np.any(counts < 0):
        raise ValueError(
            f"rollouts has shape {counts.shape} and minimum {counts.min(initial=0)}; "
            f"give one count >= 0 for each of the {len(prompts)} prompts"
        )
    per_root = ROOT_UNITS + strategy.continuations_per_root * CONTINUATION_UNITS
    watch = _Watch(float(counts.sum()) * per_root, int(np.count_nonzero(counts)), on_progress)
    runner = Runner(engine, environment, sampling, EpisodeSlots(concurrency), watch.episode)
    runner.check_prompts(prompts)
    active = [(prompt, m) for prompt, m in zip(prompts, counts.tolist(), strict=True) if m > 0]
    jobs = [functools.partial(collect_prompt, runner, strategy, predictor, prompt, m) for prompt, m in active]
    return await _run_jobs(watch, jobs)


async def sample_batch(
    engine: Engine,
    environment: Environment,
    prompts: Sequence[Prompt],
    samples: int,
    *,
    sampling: Sampling,
    concurrency: int,
    on_progress: OnProgress | None = None,
) -> list[Collected]:
    """`samples` independent rollouts of every prompt as flat trees, sorted by uid; for evaluation.

    Arguments and errors as `collect_batch`; `samples` must be at least 1.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; each prompt needs at least 1")
    watch = _Watch(len(prompts) * samples * ROOT_UNITS, len(prompts), on_progress)
    runner = Runner(engine, environment, sampling, EpisodeSlots(concurrency), watch.episode)
    runner.check_prompts(prompts)
    return await _run_jobs(watch, [functools.partial(sample_prompt, runner, prompt, samples) for prompt in prompts])


async def _run_jobs(watch: _Watch, jobs: Sequence[Callable[[], Awaitable[Collected]]]) -> list[Collected]:
    """Runs one job a prompt, all at once; results sorted by uid."""

    async def one(job: Callable[[], Awaitable[Collected]]) -> Collected:
        collected = await job()
        watch.prompt()
        return collected

    results = await run_all(one(job) for job in jobs)
    return sorted(results, key=lambda collected: collected.tree.prompt_uid)


class _Watch:
    """Counts what is finished and reports it."""

    def __init__(self, units: float, prompts: int, on_progress: OnProgress | None):
        self._progress = Progress(units, 0.0, prompts, 0, 0)
        self._report = on_progress

    def episode(self, episode: Episode) -> None:
        """One episode more is finished."""
        self._update(
            units_done=self._progress.units_done + episode.counts.units,
            generated_tokens=self._progress.generated_tokens + episode.counts.generated_tokens,
        )

    def prompt(self) -> None:
        """One prompt more is finished."""
        self._update(prompts_done=self._progress.prompts_done + 1)

    def _update(self, **changes: float) -> None:
        self._progress = dataclasses.replace(self._progress, **changes)
        if self._report is not None:
            self._report(self._progress)
