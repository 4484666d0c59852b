"""The DP reference itself. Oracle: enumeration of every allocation."""

from __future__ import annotations

import itertools

import numpy as np

from trace_jax.budget.root import root_value
from trace_jax.budget.root_dp import allocate_roots_dp


def test_matches_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(600):
        size, cap = int(rng.integers(1, 5)), int(rng.integers(2, 7))
        table = np.array(list(itertools.product([0, *range(2, cap + 1)], repeat=size)))
        total = int(table[rng.integers(len(table))].sum())  # of some allocation, so there is one
        v = rng.choice(rng.uniform(0.001, 0.999, size=3), size)
        best = root_value(v, table[table.sum(axis=1) == total]).sum(axis=1).max()
        m = allocate_roots_dp(v, total, max_per_prompt=cap)
        assert m.sum() == total and np.all((m == 0) | ((m >= 2) & (m <= cap)))
        assert abs(root_value(v, m).sum() - best) < 1e-12


def test_zero_budget():
    assert allocate_roots_dp([0.5, 0.1], 0).tolist() == [0, 0]
