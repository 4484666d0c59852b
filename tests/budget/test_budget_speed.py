"""Speed limits of the root allocators, on one core: seconds of processor time, so that other work does not count."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from trace_jax.budget.contrast import advantage_mass
from trace_jax.budget.root import allocate_roots
from trace_jax.budget.root_dp import allocate_table

POOLS = {
    "uniform": lambda rng, size: rng.random(size),
    "constant": lambda rng, size: np.full(size, 0.3),
    "saturated": lambda rng, size: rng.beta(0.1, 0.1, size),
    "one_open": lambda rng, size: np.where(np.arange(size) == 0, 0.5, 0.0),
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("size", "total", "limit"), [(512, 1024, 0.010), (100_000, 200_000, 2.0)])
def test_root_allocation_is_fast(pool, size, total, limit):
    rng = np.random.default_rng(0)
    v = POOLS[pool](rng, size)
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        m = allocate_roots(v, total, rng=rng)
        seconds.append(time.thread_time() - start)
        assert m.sum() == total
    assert statistics.median(seconds) < limit, seconds


def median_seconds(work) -> float:
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds)


@pytest.mark.parametrize("pool", POOLS)
def test_root_allocation_under_draws_is_fast(pool):
    rng = np.random.default_rng(0)
    v = np.stack([POOLS[pool](rng, 512) for _ in range(16)])
    assert median_seconds(lambda: allocate_roots(v, 1024, rng=rng)) < 0.025


@pytest.mark.parametrize(("size", "total", "cap", "limit"), [(64, 128, None, 0.02), (512, 1024, 64, 0.25)])
def test_table_allocation_is_fast(size, total, cap, limit):
    rng = np.random.default_rng(0)
    v = rng.random(size)
    table = advantage_mass(v, cap or total)
    assert median_seconds(lambda: advantage_mass(v, cap or total)) < limit
    assert median_seconds(lambda: allocate_table(table, total, max_per_prompt=cap, rng=rng)) < limit
