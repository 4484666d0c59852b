"""The greedy loop that both allocators share."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

_TABULATED = 8  # gains of every item that are computed at once; later ones when an item gets that far


def greedy_counts(
    size: int, total: int, gain: Callable[[int, int], float], *, max_count: int, opening: int = 1
) -> list[int]:
    """Hands out `total` units one by one, each to the item that gains most from it.

    Exact for `maximise sum_i F_i(n_i) s.t. sum_i n_i = total, 0 <= n_i <= max_count` with concave F_i. An item that
    receives its first unit receives `opening` of them at once (fewer if the budget ends), so that at most one item is
    left with fewer; this keeps the result optimal where the first `opening` gains of every item are equal.

    Equal gains go to the item with the fewest units, then to the lowest index, so that the budget is spread evenly
    where gains underflow to 0. Time O(total log size).

    Args:
      size: number of items.
      total: units to hand out, at most `size * max_count`.
      gain: `gain(i, n)` is F_i(n + 1) - F_i(n), non-increasing in n.
      max_count: most units that an item may hold.
      opening: size of the first step, 1 <= opening <= max_count (where total > 0).

    Returns:
      The units n_i of each item.
    """
    counts = [0] * size
    heap = [(-gain(i, 0), 0, i) for i in range(size)]
    heapq.heapify(heap)
    left = total
    while left:
        _, count, i = heap[0]
        step = min(left, 1 if count else opening)
        counts[i] = count = count + step
        left -= step
        if count == max_count:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-gain(i, count), count, i))
    return counts


def power_gains(weight_RI: np.ndarray, base_RI: np.ndarray) -> Callable[[int, int], float]:
    """`gain(i, n) = sum_r weight[r, i] base[r, i]^n`, a sum of geometric series per item, tabulated as it is read.

    Rows are doubled when a gain behind their end is asked for, so that reading gains 0..n of an item costs O(R n).

    Args:
      weight_RI: float [R, I].
      base_RI: float [R, I] in [0, 1].
    """
    table_NI = np.empty((_TABULATED, weight_RI.shape[1]))
    term_RI = weight_RI.copy()
    for n in range(_TABULATED):
        table_NI[n] = term_RI.sum(axis=0)
        term_RI *= base_RI
    rows = table_NI.T.tolist()

    def gain(i: int, n: int) -> float:
        row = rows[i]
        if n >= len(row):
            powers = np.arange(len(row), max(2 * len(row), n + 1))
            row.extend((weight_RI[:, i] @ base_RI[:, i, None] ** powers).tolist())
        return row[n]

    return gain


def tie_order(size: int, rng: np.random.Generator | None) -> np.ndarray:
    """The order int64 [size] in which equal items are served: random with `rng`, by index without one.

    Our choice; the paper does not say how ties are broken. At a cold start a predictor is nearly constant, and index
    order would serve the same end of the batch at every step.
    """
    return np.arange(size) if rng is None else rng.permutation(size)
