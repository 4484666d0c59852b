"""GRPO's budget: a uniform subset of the pool, the same number of rollouts for each prompt, no forks."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from trace_jax.budget.strategy import flat_prompts, flat_roots, no_forks


@dataclasses.dataclass(frozen=True)
class Grpo:
    """Draws `total_rollouts / rollouts_per_prompt` prompts uniformly without replacement.

    ValueError where the budget is no positive multiple of the group size, or a group has fewer than 2 rollouts.
    """

    rollouts_per_prompt: int  # G
    total_rollouts: int  # rollouts of one step

    name: ClassVar[str] = "grpo"
    needs_predictor: ClassVar[bool] = False
    continuations_per_root: ClassVar[int] = 0

    def __post_init__(self) -> None:
        flat_prompts(self.total_rollouts, self.rollouts_per_prompt)

    def roots(
        self, success_probability: np.ndarray | None, pool_size: int, rng: np.random.Generator
    ) -> np.ndarray:
        """m int64 [pool_size], each 0 or G. Ignores the prediction; ValueError where the pool is too small."""
        return flat_roots(rng.permutation(pool_size), self.total_rollouts, self.rollouts_per_prompt)

    def forks(
        self, success: np.ndarray, value: np.ndarray | None, rollout: np.ndarray, total: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Zeros int64 [A]; ValueError for a positive total."""
        return no_forks(success, total)
