"""Speed limits of the root allocator, on one core: seconds of processor time, so that other work does not count."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from trace_jax.budget.root import allocate_roots

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
