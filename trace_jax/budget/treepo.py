"""TreePO's budget as the paper's baseline: trees of one shape, on random prompts, from random branch points.

The paper's tree optimiser with random allocation (appendix E.4-E.5), not the method of that name of another paper.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from trace_jax.budget import checks
from trace_jax.budget.strategy import flat_prompts, flat_roots


@dataclasses.dataclass(frozen=True)
class TreePo:
    """A uniform subset of the pool, the same number of bare rollouts for each prompt, N random branch points in each.

    About M(1 + N/2) budget units, as `Trace`. The paper has 4 bare rollouts and N = 2 (appendix E.5). ValueError where
    M is no positive multiple of the bare rollouts of a prompt, those are fewer than 2, or N < 0.
    """

    rollouts_per_prompt: int  # bare rollouts of a chosen prompt
    root_budget: int  # M, root rollouts of one step over all prompts
    continuations_per_root: int  # N

    name: ClassVar[str] = "treepo"
    needs_predictor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        flat_prompts(self.root_budget, self.rollouts_per_prompt)
        if self.continuations_per_root < 0:
            raise ValueError(f"continuations_per_root is {self.continuations_per_root}; use 0 (no forks) or more")

    def roots(
        self, success_probability: np.ndarray | None, pool_size: int, rng: np.random.Generator
    ) -> np.ndarray:
        """m int64 [pool_size], each 0 or `rollouts_per_prompt`. ValueError where the pool is too small."""
        return flat_roots(rng.permutation(pool_size), self.root_budget, self.rollouts_per_prompt)

    def forks(
        self, success: np.ndarray, value: np.ndarray | None, rollout: np.ndarray, total: int, rng: np.random.Generator
    ) -> np.ndarray:
        """K int64 [A]: N continuations for each bare rollout, from anchors of that rollout (paper appendix E.5).

        They start at different anchors, drawn uniformly, where the rollout has enough; otherwise its anchors differ by
        at most one (our choice). The share of a rollout without an anchor is drawn in the same way from all anchors
        of the prompt (our choice), so that the sum is `total` exactly.

        ValueError for a positive total without an anchor, or one that is less than N for each rollout named.
        """
        total, rollout_A = checks.whole_total(total), np.asarray(rollout)
        if total and not rollout_A.size:
            raise ValueError(f"total is {total}, but the prompt has no anchor; spend it on root rollouts instead")
        forked = np.unique(rollout_A)
        spare = total - forked.size * self.continuations_per_root
        if spare < 0:
            raise ValueError(
                f"total is {total}, but {forked.size} bare rollouts with {self.continuations_per_root} continuations "
                f"each take {total - spare}; pass the anchors of the rollouts that the total pays for"
            )
        k_A = np.zeros(rollout_A.size, dtype=np.int64)
        for one in forked:
            anchors = np.flatnonzero(rollout_A == one)
            k_A[anchors] += _spread(anchors.size, self.continuations_per_root, rng)
        if spare:
            k_A += _spread(k_A.size, spare, rng)
        return k_A


def _spread(size: int, total: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [size], each `total // size`, and one more for a uniform subset that uses up the rest."""
    counts = np.full(size, total // size, dtype=np.int64)
    counts[rng.permutation(size)[: total % size]] += 1
    return counts
