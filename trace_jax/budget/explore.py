"""Root rollouts for prompts that the allocator would never open (ours)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

PAIR = 2  # rollouts of an explored prompt: the smallest group


def add_pairs(
    solve: Callable[[int], np.ndarray],
    feasible: Callable[[int], bool],
    total: int,
    pairs: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Solves for `total - 2 pairs` rollouts, and gives 2 each to `pairs` prompts drawn from those that received none.

    Without them a predictor is fitted only to prompts that it chose itself, and a prompt that it once called hopeless
    or solved stays so. If that solution leaves fewer than `pairs` prompts at 0, the rollouts without one go back to the
    optimum: it is solved again with as many pairs as there were prompts at 0, until there are enough, at the latest
    without any pair. A number of pairs with an infeasible rest counts as too many by one.

    Args:
      solve: total -> m int64 [B] of that sum.
      feasible: whether `solve` has a solution for a total.
      total: M, rollouts to hand out.
      pairs: the most prompts to explore, 2 pairs <= total.
      rng: draws the explored prompts uniformly, without replacement; not used for pairs = 0.

    Returns:
      m int64 [B], whose sum is `total` exactly.

    Raises:
      ValueError: of `solve`, if it has no solution for any of these totals.
    """
    while pairs:
        if feasible(total - PAIR * pairs):
            m_B = solve(total - PAIR * pairs)
            closed = np.flatnonzero(m_B == 0)
            if closed.size >= pairs:
                m_B[rng.choice(closed, pairs, replace=False)] = PAIR
                return m_B
            pairs = closed.size
        else:
            pairs -= 1
    return solve(total)
