"""The greedy loop. Oracle: picking the largest gains from a full table by sorting."""

from __future__ import annotations

import numpy as np

from trace_jax.budget.greedy import greedy_counts, tie_order


def test_takes_the_largest_entries_of_the_table_of_gains():
    rng = np.random.default_rng(0)
    for _ in range(200):
        size, cap = int(rng.integers(1, 6)), int(rng.integers(1, 8))
        gains = -np.sort(-rng.random((size, cap)), axis=1)
        total = int(rng.integers(0, size * cap + 1))
        counts = greedy_counts(size, total, lambda i, n: gains[i, n] if n < cap else 0.0, max_count=cap)
        largest = np.argsort(-gains, axis=None)[:total]
        assert counts == np.bincount(largest // cap, minlength=size).tolist()


def test_opening_leaves_at_most_one_item_short():
    assert greedy_counts(4, 7, lambda i, n: 1.0, max_count=5, opening=3) == [3, 3, 1, 0]


def test_zero_gains_are_spread_evenly():
    assert greedy_counts(3, 8, lambda i, n: 0.0, max_count=8) == [3, 3, 2]


def test_tie_order_is_a_permutation():
    assert tie_order(4, None).tolist() == [0, 1, 2, 3]
    drawn = tie_order(50, np.random.default_rng(0))
    assert sorted(drawn) == list(range(50)) and drawn.tolist() != list(range(50))
