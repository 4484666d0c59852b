"""TRACE's budget: root rollouts and continuations where the predictor expects contrast (paper section 4)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from trace_jax.budget.contrast import RootObjective, any_contrast
from trace_jax.budget.explore import PAIR, add_pairs
from trace_jax.budget.prefix import agreement, allocate_prefixes
from trace_jax.budget.root import allocate_roots, clamp_probability, feasible_cap, is_feasible
from trace_jax.budget.root_dp import allocate_table
from trace_jax.budget.strategy import prompt_scores


@dataclasses.dataclass(frozen=True)
class Trace:
    """Solves Eq. 13 over the pool, then Eq. 16 for each prompt. About M(1 + N/2) budget units (appendix E.5).

    The defaults are the paper's; `max_per_prompt`, `min_per_prompt`, `objective` and `explore_roots` are ours. Where
    the predictor hands out draws of its belief, both stages maximise the mean over draws.

    ValueError for M or limits that no group can have, N < 0, or exploration that leaves no feasible rest of M.
    """

    root_budget: int  # M, root rollouts of one step over all prompts
    continuations_per_root: int  # N
    max_per_prompt: int | None = None  # most root rollouts of a prompt; the paper has no limit
    min_per_prompt: int = 2  # fewest root rollouts of a prompt that the optimum opens
    objective: RootObjective | None = None  # what root rollouts are worth, see `contrast`; None: V_root, as the paper
    explore_roots: int = 0  # of the M: for prompts that the optimum left out, 2 each, see `explore`

    name: ClassVar[str] = "trace"
    needs_predictor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        least, most, explored = self.min_per_prompt, self.max_per_prompt, self.explore_roots
        if least < 2:
            raise ValueError(f"min_per_prompt is {least}; contrast takes at least 2 rollouts")
        if self.root_budget < least:
            raise ValueError(f"root_budget is {self.root_budget}; contrast takes at least {least} rollouts")
        if self.continuations_per_root < 0:
            raise ValueError(f"continuations_per_root is {self.continuations_per_root}; use 0 (no forks) or more")
        if most is not None and most < least:
            raise ValueError(f"max_per_prompt is {most}; use {least} or more, or None for no limit")
        if explored < 0 or explored % PAIR or explored > self.root_budget - least:
            raise ValueError(
                f"explore_roots is {explored}; use an even number from 0 to root_budget - min_per_prompt = "
                f"{self.root_budget - least}"
            )
        if explored and not is_feasible(self.root_budget, self.root_budget - explored, most, least):
            raise ValueError(
                f"explore_roots is {explored}, which leaves {self.root_budget - explored} of root_budget "
                f"{self.root_budget}, no sum of {least} to {most} rollouts each; change one of the four"
            )

    def roots(
        self, success_probability: np.ndarray | None, pool_size: int, rng: np.random.Generator
    ) -> np.ndarray:
        """m int64 [pool_size], the optimum of Eq. 13 or of `objective`, and explored prompts.

        ValueError as `allocate_roots`, or without a score (or S draws of one) per prompt.
        """
        scores = prompt_scores(self.name, success_probability, pool_size)
        return add_pairs(
            lambda total: self._optimum(scores, total, rng),
            lambda total: is_feasible(pool_size, total, self.max_per_prompt, self.min_per_prompt),
            self.root_budget,
            self.explore_roots // PAIR,
            rng,
        )

    def forks(
        self, success: np.ndarray, value: np.ndarray | None, rollout: np.ndarray, total: int, rng: np.random.Generator
    ) -> np.ndarray:
        """K int64 [A], the optimum of Eq. 16. ValueError as `agreement` and `allocate_prefixes`, or without values."""
        if value is None:
            raise ValueError(f"trace needs a predicted success for each of {len(success)} anchors, got none")
        return allocate_prefixes(agreement(success, value), total, rng=rng)

    def _optimum(self, scores: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
        least, most = self.min_per_prompt, self.max_per_prompt
        if self.objective is None and least == 2:
            return allocate_roots(scores, total, max_per_prompt=most, rng=rng)
        cap = feasible_cap(scores.shape[-1], total, most, least)
        table_BM = (self.objective or any_contrast)(clamp_probability(scores), cap)
        return allocate_table(table_BM, total, min_per_prompt=least, max_per_prompt=most, rng=rng)
