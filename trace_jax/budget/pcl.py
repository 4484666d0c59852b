"""PCL's budget: the prompts whose predicted success is nearest one half, the same number of rollouts for each."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from trace_jax.budget.strategy import flat_prompts, flat_roots, no_forks, prompt_scores


@dataclasses.dataclass(frozen=True)
class Pcl:
    """Takes the `total_rollouts / rollouts_per_prompt` prompts with the smallest |v - 1/2| (a baseline of the paper).

    The paper calls it "the subset chosen by its difficulty predictor" with as many flat rollouts as GRPO; the distance
    to one half is the rule of prompt curriculum learning itself. Errors as `Grpo`.
    """

    rollouts_per_prompt: int  # G
    total_rollouts: int  # rollouts of one step

    name: ClassVar[str] = "pcl"
    needs_predictor: ClassVar[bool] = True
    continuations_per_root: ClassVar[int] = 0

    def __post_init__(self) -> None:
        flat_prompts(self.total_rollouts, self.rollouts_per_prompt)

    def roots(
        self, success_probability: np.ndarray | None, pool_size: int, rng: np.random.Generator
    ) -> np.ndarray:
        """m int64 [pool_size], each 0 or G. Equal distances are served in random order (our choice).

        Of S draws of each v, float [S, pool_size], their mean counts: it is the predicted success rate.
        ValueError where the pool is too small, or without a probability for each prompt.
        """
        v_B = np.atleast_2d(prompt_scores(self.name, success_probability, pool_size)).mean(axis=0)
        order_B = rng.permutation(pool_size)
        ranking = order_B[np.argsort(np.abs(v_B[order_B] - 0.5), kind="stable")]
        return flat_roots(ranking, self.total_rollouts, self.rollouts_per_prompt)

    def forks(
        self, success: np.ndarray, value: np.ndarray | None, rollout: np.ndarray, total: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Zeros int64 [A]; ValueError for a positive total."""
        return no_forks(success, total)
