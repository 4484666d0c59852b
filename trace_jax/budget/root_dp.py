"""Stage 1 by dynamic programming, as the paper words it: for any objective, where `root.allocate_roots` has one."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trace_jax.budget.contrast import any_contrast
from trace_jax.budget.greedy import tie_order
from trace_jax.budget.root import clamp_probability, feasible_cap

_CHUNK = 64  # counts that are compared at once: their candidates for a budget of 1024 fit a core's cache


def allocate_table(
    value_BM: ArrayLike,
    total: int,
    *,
    min_per_prompt: int = 2,
    max_per_prompt: int | None = None,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Maximises `sum_i value[i, m_i]` subject to `sum_i m_i = total`, m_i in {0} u {min_per_prompt..max_per_prompt}.

    Exact for any table: `F_i[b] = max(F_{i-1}[b] + value[i, 0], max_m F_{i-1}[b-m] + value[i, m])`, then the choices
    read backwards. Time O(B total cap), cap = min(total, max_per_prompt); memory O(B total).

    Args:
      value_BM: float [B, M + 1], the value of m = 0..M rollouts of each prompt (`contrast`), M >= cap. Columns
        between 0 and `min_per_prompt`, and behind the cap, do not count.
      total: rollouts to hand out; 0, or `min_per_prompt` and more.
      min_per_prompt: the fewest rollouts of a prompt that receives any, at least 2.
      max_per_prompt: the most rollouts that a prompt may receive; None for no limit.
      rng: breaks ties by a random permutation of the prompts; None breaks them by index. Of equal counts of one
        prompt, the smallest is taken.

    Returns:
      m int64 [B], whose sum is `total` exactly.

    Raises:
      ValueError: the table is no matrix, has too few columns or an entry that is not finite, or no allocation exists
        (`root.feasible_cap`).
    """
    value_BM = np.asarray(value_BM, dtype=np.float64)
    if value_BM.ndim != 2:
        raise ValueError(f"value_BM has shape {value_BM.shape}; pass [prompts, counts], a row of values per prompt")
    size, width = value_BM.shape
    cap = feasible_cap(size, total, max_per_prompt, min_per_prompt)
    if width <= cap:
        raise ValueError(
            f"value_BM has {width} columns, but a prompt may receive 0 to {cap} rollouts; pass {cap + 1} or lower "
            "max_per_prompt"
        )
    bad = np.argwhere(~np.isfinite(value_BM[:, : cap + 1]))
    if bad.size:
        i, m = bad[0]
        raise ValueError(f"value_BM[{i}, {m}] is {value_BM[i, m]}; pass finite values")
    order_B = tie_order(size, rng)
    m_B = np.empty(size, dtype=np.int64)
    m_B[order_B] = _solve(value_BM[order_B], total, min_per_prompt, cap)
    return m_B


def allocate_roots_dp(success_probability: ArrayLike, total: int, *, max_per_prompt: int | None = None) -> np.ndarray:
    """Solves the problem of `root.allocate_roots` by `allocate_table`: slower, kept as its oracle.

    Ties are broken otherwise than in `allocate_roots`: compare objectives, not allocations.

    Args:
      success_probability: v float [B] in [0, 1] or draws of it, float [S, B]; clamped as in `allocate_roots`.
      total: M, rollouts to hand out; 0, or 2 and more.
      max_per_prompt: the most rollouts that a prompt may receive, at least 2; None for no limit.

    Returns:
      m int64 [B], whose sum is `total` exactly.

    Raises:
      ValueError: as `allocate_roots`.
    """
    v = clamp_probability(success_probability)
    cap = feasible_cap(v.shape[-1], total, max_per_prompt)
    return allocate_table(any_contrast(v, cap), total, max_per_prompt=max_per_prompt)


def _solve(value_BM: np.ndarray, total: int, least: int, cap: int) -> list[int]:
    best = np.full((len(value_BM) + 1, total + 1), -np.inf)  # best[i, b]: of spending exactly b on the first i prompts
    best[0, 0] = 0.0
    for i, value in enumerate(value_BM):
        np.add(best[i], value[0], out=best[i + 1])
        for first in range(least, cap + 1, _CHUNK):
            _improve(best[i + 1], best[i], value, first, min(first + _CHUNK, cap + 1))
    counts, left = [0] * len(value_BM), total
    allowed = np.concatenate([[0], np.arange(least, cap + 1)])
    for i in reversed(range(len(value_BM))):
        m = allowed[allowed <= left]
        counts[i] = int(m[np.argmax(best[i, left - m] + value_BM[i, m])])
        left -= counts[i]
    return counts


def _improve(best: np.ndarray, previous: np.ndarray, value: np.ndarray, first: int, end: int) -> None:
    """`best[b] = max(best[b], max_{first <= m < end} previous[b - m] + value[m])`, in place."""
    reach = best.size - first  # budgets first, first + 1, ... can hold such a count
    padded = np.concatenate([np.full(end - first - 1, -np.inf), previous[:reach]])
    # window[j, b] is previous[b - j], b counted from `first`; row j belongs to the count first + j
    window = np.lib.stride_tricks.sliding_window_view(padded, reach)[::-1]
    candidate = window + value[first:end, None]
    np.maximum(best[first:], candidate.max(axis=0), out=best[first:])
