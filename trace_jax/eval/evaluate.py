"""Held-out evaluation: k samples of each prompt, mean success, and its spread over difficulty classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trace_jax.budget.account import BudgetCount
from trace_jax.engines.base import Engine
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.runner import Sampling
from trace_jax.rollout.scheduler import OnProgress, sample_batch
from trace_jax.types import NodeKind, Prompt


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation measured."""

    success: float  # avg@k: mean 0/1 success over all samples of all prompts
    standard_error: float  # of `success`, over prompts: samples of one prompt are not independent
    mixed: float  # share of prompts that are solved by some samples and not by others
    by_group: dict[str, float]  # mean success of each difficulty class
    counts: BudgetCount  # what it cost; never part of the training budget


async def evaluate(
    engine: Engine,
    environment: Environment,
    prompts: Sequence[Prompt],
    samples: int,
    *,
    sampling: Sampling,
    concurrency: int,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Samples every prompt `samples` times with the noise of `sampling` and averages the 0/1 success.

    Equal `sampling` draws equal noise, so two evaluations of one policy are equal, and two policies are compared on
    common random numbers.
    """
    results = await sample_batch(
        engine, environment, prompts, samples, sampling=sampling, concurrency=concurrency, on_progress=on_progress
    )
    rates = {c.tree.prompt_uid: float(np.mean(c.tree.success[c.tree.kind == NodeKind.LEAF])) for c in results}
    groups: dict[str, list[float]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(rates[prompt.uid])
    values = np.array(list(rates.values()))
    return Evaluation(
        success=float(values.mean()),
        standard_error=float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else float("nan"),
        mixed=float(np.mean((values > 0) & (values < 1))),
        by_group={name: float(np.mean(groups[name])) for name in sorted(groups)},
        counts=sum((c.counts for c in results), BudgetCount()),
    )
