"""Stage 1 by dynamic programming, as the paper words it: slower than `root.allocate_roots`, kept as its oracle."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trace_jax.budget.root import clamp_probability, feasible_cap, root_value


def allocate_roots_dp(success_probability: ArrayLike, total: int, *, max_per_prompt: int | None = None) -> np.ndarray:
    """Solves the problem of `root.allocate_roots` by `F_i[b] = max(F_{i-1}[b], max_m F_{i-1}[b-m] + V_root(v_i, m))`.

    Time O(B * total * cap), memory O(B * total). Ties are broken by index, otherwise than in `allocate_roots`: compare
    objectives, not allocations.

    Args:
      success_probability: v float [B] in [0, 1], clamped as in `allocate_roots`.
      total: M, rollouts to hand out; 0, or 2 and more.
      max_per_prompt: the most rollouts that a prompt may receive, at least 2; None for no limit.

    Returns:
      m int64 [B], whose sum is `total` exactly.

    Raises:
      ValueError: as `allocate_roots`.
    """
    v_B = clamp_probability(success_probability)
    cap = feasible_cap(v_B.size, total, max_per_prompt)
    best = np.full(total + 1, -np.inf)  # best[b]: value of spending exactly b on the prompts seen so far
    best[0] = 0.0
    choice = np.zeros((v_B.size, total + 1), dtype=np.int64)
    for i, v in enumerate(v_B):
        value = root_value(v, np.arange(cap + 1))
        previous = best.copy()
        for m in range(2, cap + 1):
            candidate = previous[: total + 1 - m] + value[m]
            better = candidate > best[m:]
            best[m:][better] = candidate[better]
            choice[i, m:][better] = m
    m_B = np.zeros(v_B.size, dtype=np.int64)
    left = total
    for i in reversed(range(v_B.size)):
        m_B[i] = choice[i, left]
        left -= m_B[i]
    return m_B
