"""pass@k by enumeration of all subsets, averages and intervals by hand, coverage of the interval by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from trace_jax.eval import estimates


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(samples, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert estimates.solved_by_any(np.array([c]), n, k)[0] == pytest.approx(share, abs=1e-14)


def test_pass_at_k_is_unbiased():
    """The mean over all outcomes of n = 4 samples, weighed by their chance, is 1 - (1 - p)^k."""
    n, p = 4, 0.3
    chance = np.array([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    for k in (1, 2, 4):
        mean = chance @ estimates.solved_by_any(np.arange(n + 1), n, k)
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-14)


def test_pass_at_k_of_many_samples_does_not_overflow():
    # 1 right one of n: C(n-1, k) / C(n, k) = (n - k) / n, so pass@k = k / n.
    assert estimates.solved_by_any(np.array([1]), 20000, 5000)[0] == pytest.approx(0.25, abs=1e-12)
    exact = 1 - math.comb(600, 500) / math.comb(1000, 500)
    assert estimates.solved_by_any(np.array([400]), 1000, 500)[0] == pytest.approx(exact, abs=1e-15)


def test_prompts_may_have_different_numbers_of_samples():
    # 1 of 2 and 1 of 4, k = 2: 1, and 1 - C(3,2)/C(4,2) = 1/2; their mean 3/4.
    assert estimates.pass_at_k(np.array([1, 1]), np.array([2, 4]), 2).value == pytest.approx(0.75)


def test_average_and_interval_by_hand():
    # Rates 1/4, 2/4, 3/4: mean 1/2; s^2 = (1/16 + 0 + 1/16) / 2 = 1/16, so s = 1/4 and the error 1 / (4 sqrt 3).
    # t(0.975, 2) = 4.30265 (tables), half the width 0.62103: cut to [0, 1].
    found = estimates.pass_at_k(np.array([1, 2, 3]), 4, 1)
    assert found == estimates.over_prompts(np.array([0.25, 0.5, 0.75]))  # avg@4
    assert found.value == pytest.approx(0.5) and found.prompts == 3
    assert found.standard_error == pytest.approx(0.25 / math.sqrt(3))
    assert (found.low, found.high) == (0.0, 1.0)
    # Ten of each of 0.4 and 0.6: s^2 = 20 * 0.01 / 19; t(0.975, 19) = 2.0930.
    found = estimates.over_prompts(np.array([0.4, 0.6] * 10))
    half = 2.0930 * math.sqrt(0.2 / 19 / 20)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-5)


def test_the_interval_is_scipys():
    values = np.random.default_rng(0).uniform(0.2, 0.8, 30)
    found = estimates.over_prompts(values)
    low, high = stats.t.interval(0.95, 29, loc=values.mean(), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Prompts of unlike difficulty (Beta), 4 samples each. Pooled samples would cover clearly less."""
    rng, covered, pooled = np.random.default_rng(1), 0, 0
    for _ in range(1000):
        correct = rng.binomial(4, rng.beta(0.5, 0.5, 40))
        found = estimates.pass_at_k(correct, 4, 1)
        covered += found.low <= 0.5 <= found.high
        naive = 1.96 * math.sqrt(found.value * (1 - found.value) / 160)
        pooled += abs(found.value - 0.5) <= naive
    assert 0.925 <= covered / 1000 <= 0.975  # 0.95 with four standard errors of 0.007
    assert pooled / 1000 < 0.85


def test_prompts_that_all_fail_or_all_succeed_leave_room_for_doubt():
    """Where prompts are solved or not, that many failures have a chance of 0.025: Clopper and Pearson's bound."""
    for size in (2, 30):
        bound = stats.binomtest(0, size).proportion_ci(0.95).high
        none, all_of_them = (estimates.over_prompts(np.full(size, value)) for value in (0.0, 1.0))
        assert (none.value, none.standard_error, none.low, none.high) == (0, 0, 0, pytest.approx(bound))
        assert (all_of_them.value, all_of_them.low, all_of_them.high) == (1, pytest.approx(1 - bound), 1)
    same = estimates.over_prompts(np.full(4, 0.5))
    assert (same.low, same.high) == (0.5, 0.5)


def test_a_single_prompt_has_no_interval():
    found = estimates.pass_at_k(np.array([3]), 4, 1)
    assert found.value == 0.75 and np.isnan([found.standard_error, found.low, found.high]).all()


@pytest.mark.parametrize(
    "correct, samples, k, problem",
    [
        ([1, 2], 4, 5, "pass@5"),
        ([1, 2], [4, 3], 4, "n = 3"),
        ([1], 4, 0, "pass@0"),
        ([5], 4, 1, "more than samples"),
        ([-1], 4, 1, "more than samples"),
        ([0.5], 4, 1, "integers"),
        ([], 4, 1, "at least one"),
    ],
)
def test_counts_out_of_range(correct, samples, k, problem):
    with pytest.raises(ValueError, match=problem):
        estimates.pass_at_k(np.array(correct), np.array(samples), k)


@pytest.mark.parametrize("values", [[], [1.5], [-0.1], [float("nan")], [[0.5]]])
def test_values_out_of_range(values):
    with pytest.raises(ValueError, match="numbers from 0 to 1"):
        estimates.over_prompts(np.array(values))
