"""Tables of root objectives. Oracles: every outcome of m rollouts, one by one; closed forms; scipy's binomial."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from trace_jax.budget.contrast import advantage_mass, any_contrast, pairs
from trace_jax.budget.root import root_value

TABLES = [any_contrast, advantage_mass, pairs]


def mixed(rewards: np.ndarray) -> float:
    return float(rewards.min() != rewards.max())


def mean_absolute_advantage(rewards: np.ndarray) -> float:
    sigma = rewards.std()
    return float(np.abs((rewards - rewards.mean()) / sigma).mean()) if sigma else 0.0


def unlike_pairs_per_rollout(rewards: np.ndarray) -> float:
    return sum(a != b for a, b in itertools.combinations(rewards, 2)) / rewards.size


@pytest.mark.parametrize(
    ("table", "statistic"),
    [(any_contrast, mixed), (advantage_mass, mean_absolute_advantage), (pairs, unlike_pairs_per_rollout)],
)
def test_expectation_over_every_outcome(table, statistic):
    v, cap = np.array([0.0, 0.07, 0.3, 0.5, 0.81, 1.0]), 7
    expected = np.zeros((v.size, cap + 1))
    for m in range(1, cap + 1):
        for outcome in itertools.product([0.0, 1.0], repeat=m):
            rewards = np.array(outcome)
            chance = v ** rewards.sum() * (1 - v) ** (m - rewards.sum())
            expected[:, m] += chance * statistic(rewards)
    np.testing.assert_allclose(table(v, cap), expected, atol=1e-14)


def test_the_pairs_of_a_group_make_its_policy_gradient():
    # sum_s (R_s - mean R) g_s = (1/m) sum over pairs (R_u - R_v)(g_u - g_v), so a group is worth its unlike pairs / m.
    rng = np.random.default_rng(0)
    reward, score = rng.integers(0, 2, 9), rng.standard_normal((9, 4))
    by_pairs = sum((reward[a] - reward[b]) * (score[a] - score[b]) for a, b in itertools.combinations(range(9), 2)) / 9
    np.testing.assert_allclose((reward - reward.mean()) @ score, by_pairs, atol=1e-14)


def test_long_rows():
    v, cap = np.array([1e-3, 0.2, 0.5, 0.999]), 300
    np.testing.assert_allclose(any_contrast(v, cap), root_value(v[:, None], np.arange(cap + 1)), rtol=1e-11, atol=1e-14)
    for m in (2, 50, 300):
        k = np.arange(m + 1)
        expected = (2 * np.sqrt(k / m * (1 - k / m)) * stats.binom.pmf(k, m, v[:, None])).sum(axis=1)
        np.testing.assert_allclose(advantage_mass(v, cap)[:, m], expected, rtol=1e-10)
    # the law of large numbers: with many rollouts k/m is v
    np.testing.assert_allclose(advantage_mass(v, cap)[1:3, -1], [0.8, 1.0], atol=0.005)


@pytest.mark.parametrize("table", TABLES)
def test_draws_are_averaged(table):
    rng = np.random.default_rng(0)
    v_SB = rng.random((5, 200))  # more binomials than are computed at once
    np.testing.assert_allclose(table(v_SB, 9), np.mean([table(v, 9) for v in v_SB], axis=0), atol=1e-14)
    assert table(v_SB[:1], 9).tolist() == table(v_SB[0], 9).tolist()


@settings(max_examples=40, deadline=None)
@given(v=st.lists(st.floats(0, 1), max_size=6), cap=st.integers(0, 20))
def test_shape_symmetry_and_order(v, cap):
    v = np.array(v)
    tables = [table(v, cap) for table in TABLES]
    for table, values in zip(TABLES, tables, strict=True):
        assert values.shape == (v.size, cap + 1) and values.dtype == np.float64
        assert np.all(values[:, :2] == 0.0)
        np.testing.assert_allclose(table(1 - v, cap), values, atol=1e-13)
        assert np.all(np.diff(values[:, 1:], axis=1) > -1e-13)  # a further rollout never makes a group worth less
    assert np.all(tables[1] <= tables[0] + 1e-13)  # a mixed group has an advantage mass of at most 1, others have none


@pytest.mark.parametrize("table", TABLES)
def test_errors(table):
    with pytest.raises(ValueError, match=r"success_probability\[1, 0\] is nan"):
        table([[0.5], [np.nan]], 4)
