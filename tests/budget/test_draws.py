"""Allocation under draws of a belief. Oracles: every allocation there is, the table DP, the single prediction."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.budget.contrast import any_contrast
from trace_jax.budget.greedy import power_gains
from trace_jax.budget.pcl import Pcl
from trace_jax.budget.prefix import agreement, allocate_prefixes, prefix_value
from trace_jax.budget.root import allocate_roots, clamp_probability, root_value
from trace_jax.budget.root_dp import allocate_roots_dp, allocate_table
from trace_jax.budget.trace import Trace


def draw_beliefs(rng: np.random.Generator, size: int) -> np.ndarray:
    draws = int(rng.integers(2, 5))
    kind = rng.integers(4)
    if kind == 0:
        return rng.random((draws, size))
    if kind == 1:
        return np.repeat(rng.random((draws, 1)), size, axis=1)  # every prompt alike
    if kind == 2:
        return rng.choice([0.0, 0.5, 1.0, 0.25], (draws, size))  # ties, and certain draws
    return rng.beta(0.2, 0.2, (draws, size))


def expected_contrast(v_SB: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Sum over prompts of mean_s V_root(v_si, m_i), by the formula of Eq. 12; m [..., B]."""
    v = clamp_probability(v_SB)
    return np.mean([root_value(row, m) for row in v], axis=0).sum(axis=-1)


def test_roots_match_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(500):
        size, cap = int(rng.integers(1, 5)), int(rng.integers(2, 8))
        allocations = np.array(list(itertools.product([0, *range(2, cap + 1)], repeat=size)))
        total = int(allocations[rng.integers(len(allocations))].sum())
        v = draw_beliefs(rng, size)
        best = expected_contrast(v, allocations[allocations.sum(axis=1) == total]).max()
        for m in (
            allocate_roots(v, total, max_per_prompt=cap, rng=rng),
            allocate_roots_dp(v, total, max_per_prompt=cap),
        ):
            assert m.dtype == np.int64 and m.sum() == total and np.all((m == 0) | ((m >= 2) & (m <= cap)))
            assert abs(expected_contrast(v, m) - best) < 1e-12, (v, total, cap, m)


def test_roots_match_the_table_on_larger_pools():
    rng = np.random.default_rng(1)
    for _ in range(60):
        size, total = int(rng.integers(1, 60)), int(rng.integers(2, 120))
        cap = None if size * 9 < total or rng.random() < 0.5 else 9
        v = draw_beliefs(rng, size)
        m = allocate_roots(v, total, max_per_prompt=cap, rng=rng)
        assert m.sum() == total and not np.any(m == 1)
        table = any_contrast(clamp_probability(v), total)
        best = expected_contrast(v, allocate_table(table, total, max_per_prompt=cap, rng=rng))
        assert abs(expected_contrast(v, m) - best) < 1e-11, (v, total, cap, m)


def test_prefixes_match_enumeration():
    rng = np.random.default_rng(2)
    for _ in range(300):
        size, total = int(rng.integers(1, 5)), int(rng.integers(0, 8))
        allocations = np.array([k for k in itertools.product(range(total + 1), repeat=size) if sum(k) == total])
        success, value = rng.integers(0, 2, size), draw_beliefs(rng, size)
        # the mean over draws of the chance that not all continuations repeat what happened
        flips = np.mean([1 - np.where(success == 1, v, 1 - v) ** allocations for v in value], axis=0).sum(axis=1)
        q = agreement(success, value)
        k = allocate_prefixes(q, total, rng=rng)
        assert k.dtype == np.int64 and k.sum() == total and k.min() >= 0
        assert abs(prefix_value(q, k).mean(axis=0).sum() - flips.max()) < 1e-12


def test_uncertainty_is_worth_contrast_by_hand():
    # One prompt is surely a fair coin; the other is 0 or 1 with equal odds: mean .5 as well, but never a mixed group.
    v = np.array([[0.5, 0.0], [0.5, 1.0]])
    assert allocate_roots(v, 8).tolist() == [8, 0]
    assert sorted(allocate_roots(v.mean(axis=0), 8).tolist()) == [4, 4]
    # Anchors after a success, q = .5 for sure or 0 or 1: first gains .5 and .5, later ones .25 and 0.
    q = agreement([1, 1], v)
    assert allocate_prefixes(q, 5).tolist() == [4, 1]


@settings(max_examples=60, deadline=None)
@given(
    v=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    total=st.integers(2, 60),
    draws=st.integers(2, 5),
    seed=st.integers(0, 9),
)
def test_draws_that_agree_are_one_prediction(v, total, draws, seed):
    v = np.array(v)
    one = allocate_roots(v, total, rng=np.random.default_rng(seed))
    assert allocate_roots(v[None], total, rng=np.random.default_rng(seed)).tolist() == one.tolist()
    same = allocate_roots(np.tile(v, (draws, 1)), total, rng=np.random.default_rng(seed))
    assert abs(expected_contrast(v[None], same) - expected_contrast(v[None], one)) < 1e-12
    k = allocate_prefixes(v, total, rng=np.random.default_rng(seed))
    assert allocate_prefixes(v[None], total, rng=np.random.default_rng(seed)).tolist() == k.tolist()
    same = allocate_prefixes(np.tile(v, (draws, 1)), total, rng=np.random.default_rng(seed))
    assert abs(prefix_value(v, same).sum() - prefix_value(v, k).sum()) < 1e-12


def test_order_of_draws_and_mirror_do_not_matter():
    rng = np.random.default_rng(3)
    for _ in range(30):
        v, total = rng.random((4, 9)), int(rng.integers(2, 40))
        best = expected_contrast(v, allocate_roots(v, total))
        for other in (v[::-1], 1 - v):
            assert abs(expected_contrast(v, allocate_roots(other, total)) - best) < 1e-12


def test_budget_far_beyond_float_underflow_is_spread_evenly():
    assert allocate_roots(np.full((3, 4), 0.5), 20_000).tolist() == [5000] * 4
    assert allocate_prefixes(np.full((2, 4), 0.5), 20_002).tolist() == [5001, 5001, 5000, 5000]
    assert allocate_prefixes([[1.0, 1.0], [1.0, 1.0]], 3).tolist() == [2, 1]


def test_power_gains_are_the_series_in_any_order_of_reading():
    rng = np.random.default_rng(4)
    weight, base = rng.random((3, 2)), rng.random((3, 2))
    gain = power_gains(weight, base)
    for n in (0, 40, 3, 8, 7, 200, 41):
        for i in range(2):
            expected = sum(w * b**n for w, b in zip(weight[:, i], base[:, i], strict=True))
            np.testing.assert_allclose(gain(i, n), expected, rtol=1e-12)


def test_strategies_take_draws():
    rng = np.random.default_rng(5)
    v = rng.random((4, 12))
    assert Trace(20, 1).roots(v, 12, np.random.default_rng(0)).tolist() == (
        allocate_roots(v, 20, rng=np.random.default_rng(0)).tolist()
    )
    success, value = np.array([1, 0, 1]), rng.random((4, 3))
    assert Trace(20, 1).forks(success, value, np.arange(3), 6, np.random.default_rng(0)).tolist() == (
        allocate_prefixes(agreement(success, value), 6, rng=np.random.default_rng(0)).tolist()
    )
    # means .5, .5, .1, .8: the two nearest one half
    means = [[0.0, 0.4, 0.2, 0.9], [1.0, 0.6, 0.0, 0.7]]
    assert Pcl(4, 8).roots(np.array(means), 4, rng).tolist() == [4, 4, 0, 0]


@pytest.mark.parametrize("strategy", [Trace(8, 1), Pcl(4, 8)], ids=lambda s: s.name)
def test_strategies_refuse_draws_of_other_prompts(strategy):
    rng = np.random.default_rng(0)
    for wrong, words in (
        (np.full((5, 3), 0.5), "each of 5 prompts, got 3"),
        (np.float64(0.5), "each of 5 prompts, got 0"),
        (np.ones((0, 5)), r"shape \(0, 5\)"),
        (np.ones((1, 1, 5)), r"shape \(1, 1, 5\)"),
    ):
        with pytest.raises(ValueError, match=words):
            strategy.roots(wrong, 5, rng)
    with pytest.raises(ValueError, match="success has 2 entries and value 3"):
        agreement([1, 0], np.full((2, 3), 0.5))
