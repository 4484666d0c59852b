"""TRACE's budget: root rollouts and continuations where the predictor expects contrast (paper section 4)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from trace_jax.budget.prefix import agreement, allocate_prefixes
from trace_jax.budget.root import allocate_roots


@dataclasses.dataclass(frozen=True)
class Trace:
    """Solves Eq. 13 over the pool, then Eq. 16 for each prompt. About M(1 + N/2) budget units (appendix E.5).

    ValueError for M = 1 or M < 0, N < 0, or a cap below 2.
    """

    root_budget: int  # M, root rollouts of one step over all prompts
    continuations_per_root: int  # N
    max_per_prompt: int | None = None  # most root rollouts of a prompt; the paper has no limit

    name: ClassVar[str] = "trace"
    needs_predictor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.root_budget < 2:
            raise ValueError(f"root_budget is {self.root_budget}; contrast takes at least 2 rollouts")
        if self.continuations_per_root < 0:
            raise ValueError(f"continuations_per_root is {self.continuations_per_root}; use 0 (no forks) or more")
        if self.max_per_prompt is not None and self.max_per_prompt < 2:
            raise ValueError(f"max_per_prompt is {self.max_per_prompt}; use 2 or more, or None for no limit")

    def roots(
        self, success_probability: np.ndarray | None, pool_size: int, rng: np.random.Generator
    ) -> np.ndarray:
        """m int64 [pool_size], the optimum of Eq. 13. ValueError as `allocate_roots`, or without a score per prompt."""
        if success_probability is None or len(success_probability) != pool_size:
            got = "none" if success_probability is None else len(success_probability)
            raise ValueError(f"trace needs a predicted success for each of {pool_size} prompts, got {got}")
        return allocate_roots(success_probability, self.root_budget, max_per_prompt=self.max_per_prompt, rng=rng)

    def forks(
        self, success: np.ndarray, value: np.ndarray | None, rollout: np.ndarray, total: int, rng: np.random.Generator
    ) -> np.ndarray:
        """K int64 [A], the optimum of Eq. 16. ValueError as `agreement` and `allocate_prefixes`, or without values."""
        if value is None:
            raise ValueError(f"trace needs a predicted success for each of {len(success)} anchors, got none")
        return allocate_prefixes(agreement(success, value), total, rng=rng)
