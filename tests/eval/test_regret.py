"""Estimators by enumeration of all outcomes and of all subsets, reports by hand and in the limit of many rollouts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from trace_jax.budget.root import allocate_roots
from trace_jax.eval import regret
from trace_jax.eval.regret import Measured
from trace_jax.objectives import calibration


def _every_count(size):
    """Each possible number of successes of R = `size` rollouts, as R + 1 items."""
    return Measured(np.arange(size + 1), size)


def _chances(size, v):
    return np.array([math.comb(size, k) * v**k * (1 - v) ** (size - k) for k in range(size + 1)])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_chances_are_shares_of_subsets(size):
    measured = _every_count(size)
    for m in range(size + 1):
        contrast, flips = regret.contrast_chance(measured, m), regret.flip_chance(measured, np.ones(size + 1), m)
        for k in range(size + 1):
            subsets = list(itertools.combinations([1] * k + [0] * (size - k), m))
            mixed = np.mean([len(set(s)) > 1 for s in subsets])
            some_wrong = np.mean([0 in s for s in subsets])
            np.testing.assert_allclose([contrast[k], flips[k]], [mixed, some_wrong], atol=1e-14)


@pytest.mark.parametrize("v", [0.0, 0.03, 0.4, 1.0])
def test_chances_are_unbiased_up_to_the_rollouts_measured(v):
    size = 6
    measured, chances = _every_count(size), _chances(size, v)
    for m in range(2, size + 1):
        np.testing.assert_allclose(chances @ regret.contrast_chance(measured, m), 1 - v**m - (1 - v) ** m, atol=1e-14)
        for r, q in ((1, v), (0, 1 - v)):
            got = chances @ regret.flip_chance(measured, np.full(size + 1, r), m)
            np.testing.assert_allclose(got, 1 - q**m, atol=1e-14)
    # beyond, the rate is plugged in, and contrast looks rarer than it is
    m, rate = size + 1, np.arange(size + 1) / size
    np.testing.assert_allclose(regret.contrast_chance(measured, m), 1 - rate**m - (1 - rate) ** m, atol=1e-14)
    assert chances @ regret.contrast_chance(measured, m) <= 1 - v**m - (1 - v) ** m


def test_items_have_their_own_rollouts_and_allocations():
    # 1 of 2 with m = 2: the one pair is mixed. 2 of 3, m = 2: of 3 pairs 2 are mixed. 1 of 4, m = 3: 3 of 4 triples.
    measured = Measured(np.array([1, 2, 1, 3, 3]), np.array([2, 3, 4, 4, 4]))
    np.testing.assert_allclose(regret.contrast_chance(measured, [2, 2, 3, 1, 0]), [1, 2 / 3, 3 / 4, 0, 0])
    # outcome 0 repeats where a continuation is wrong: 1 - 1/2, 1 - 1/3, 1 - C(3,3)/C(4,3); outcome 1: 1 - 3/4; none
    flips = regret.flip_chance(measured, [0, 0, 0, 1, 1], [1, 1, 3, 1, 0])
    np.testing.assert_allclose(flips, [1 / 2, 2 / 3, 3 / 4, 1 / 4, 0])


def test_halves_are_random_subsets():
    """3 of 5 rollouts right, halves of 2 and 3: the first has j right with chance C(3,j) C(2,2-j) / C(5,2)."""
    n = 4000
    first, second = regret.split_half(Measured(np.full(n, 3), 5), np.random.default_rng(0))
    assert set(first.rollouts) == {2} and set(second.rollouts) == {3}
    np.testing.assert_array_equal(first.successes + second.successes, 3)
    for j, chance in enumerate([0.1, 0.6, 0.3]):
        assert abs(np.mean(first.successes == j) - chance) < 4 * math.sqrt(0.25 / n)
    with pytest.raises(ValueError, match="has 1 rollout"):
        regret.split_half(Measured(np.array([1]), 1), np.random.default_rng(0))


def test_brier_is_that_of_the_single_rollouts():
    rng = np.random.default_rng(0)
    size = rng.integers(1, 6, 20)
    k, p = rng.binomial(size, 0.4), rng.random(20)
    outcomes = np.concatenate([[1] * a + [0] * (b - a) for a, b in zip(k, size, strict=True)])
    want = calibration.brier(np.repeat(p, size), outcomes)
    assert regret.brier(p, Measured(k, size)) == pytest.approx(want, rel=1e-12)
    assert math.isnan(regret.brier([], Measured(np.zeros(0, int), 4)))


def test_class_rates_leave_the_item_out():
    # class a: 1 of 4, 3 of 4, 4 of 4; class b alone: the rate of all others, 8 of 12
    measured = Measured(np.array([1, 0, 3, 4]), 4)
    np.testing.assert_allclose(regret.class_rates(["a", "b", "a", "a"], measured), [7 / 8, 8 / 12, 5 / 8, 4 / 8])
    np.testing.assert_array_equal(regret.class_rates([7], Measured(np.array([1]), 1)), [0.5])


def test_root_report_by_hand():
    """Four prompts, judged 2, 4, 0 and 1 of 4; M = 4. The oracle's half says 1/2, 1, 0, 1.

    The oracle gives all to prompt 0: C(2,4) = 0 subsets alike: contrast 1, so 1 group of 1 active, 1/4 per unit.
    The wrong predictor gives all to prompt 1, which never differs: 0. Its permutations give all to one prompt each,
    with contrast 1, 0, 0, 1 by chance 1/4. Uniform with G = 2: pairs that differ 4/6, 0, 0, 3/6, mean 7/24.
    """
    chosen, judged = Measured(np.array([2, 4, 0, 4]), 4), Measured(np.array([2, 4, 0, 1]), 4)
    scores = {"right": np.array([0.5, 1, 1, 1]), "wrong": np.array([1, 0.5, 1, 1])}
    rng = np.random.default_rng(0)
    got = regret.root_regret(scores, chosen, judged, 4, rng, uniform_rollouts=2, permutations=400)
    assert list(got) == ["uniform", "oracle", "right", "wrong"]
    assert got["oracle"] == {"effective_ratio": 1.0, "groups_per_unit": 0.25, "active": 1.0, "plugged_in": 0.0}
    assert got["uniform"]["effective_ratio"] == pytest.approx(7 / 24)
    assert got["uniform"]["groups_per_unit"] == pytest.approx(7 / 48)
    right, wrong = got["right"], got["wrong"]
    for name in ("effective_ratio", "groups_per_unit", "active", "plugged_in"):
        assert right[name] == got["oracle"][name]
    assert wrong["effective_ratio"] == wrong["share_of_oracle"] == wrong["groups_share_of_shuffled"] == 0.0
    assert right["share_of_oracle"] == right["groups_share_of_oracle"] == 1.0
    for each in (right, wrong):
        assert each["shuffled_effective_ratio"] == pytest.approx(0.5, abs=0.1)
        assert each["shuffled_groups_per_unit"] == pytest.approx(each["shuffled_effective_ratio"] / 4)
    assert right["share_of_shuffled"] == pytest.approx(1 / right["shuffled_effective_ratio"])


def test_an_oracle_that_nobody_confirms_has_no_shares():
    chosen, judged = Measured(np.array([1, 0]), 2), Measured(np.array([2, 0]), 2)
    got = regret.root_regret({"x": np.array([0.5, 0.5])}, chosen, judged, 4, np.random.default_rng(0))
    assert got["oracle"]["effective_ratio"] == 0 and got["oracle"]["plugged_in"] == 1.0  # 4 of 2 rollouts
    assert math.isnan(got["x"]["share_of_oracle"]) and math.isnan(got["x"]["groups_share_of_shuffled"])


def test_two_halves_judge_the_oracle_without_bias():
    """Prompts that are all alike, v = .1: no allocation is better than another, so the oracle's groups are m's value.

    Judged by the half that it chose with, it looks better than the truth; by the other half, it does not.
    """
    v, rng, size = 0.1, np.random.default_rng(1), 4000
    a, b = (Measured(rng.binomial(8, v, size), 8) for _ in range(2))
    scores = {"flat": np.full(size, 0.5)}
    capped = lambda values, total, rng: allocate_roots(values, total, max_per_prompt=3, rng=rng)
    honest = regret.root_regret(scores, a, b, 900, rng, allocate=capped, permutations=1)
    biased = regret.root_regret(scores, a, a, 900, rng, allocate=capped, permutations=1)
    truth = 1 - v**3 - (1 - v) ** 3  # .27: each of 300 prompts has 3 rollouts
    assert honest["oracle"]["active"] == honest["flat"]["active"] == 300
    for name in ("oracle", "flat"):
        assert abs(honest[name]["effective_ratio"] - truth) < 4 * math.sqrt(0.25 / 8 / 300 * 3)
    assert biased["oracle"]["effective_ratio"] > truth + 0.3


def test_prefix_report_by_hand():
    """Two prompts with 3 and 2 anchors, one continuation each; judged 1, 4, 2 and 3, 0 of 4, outcomes 1, 1, 1 and 0, 0.

    q is the chance to repeat: 1/4, 1, 1/2 and 1/4, 1. The oracle and "right" fork anchors 0 and 3: flips 3/4 each.
    "wrong" forks 1 and 4: none. Uniform: mean of (3/4, 0, 1/2) plus mean of (3/4, 0) = 5/12 + 3/8 = 19/24, over 2.
    """
    judged, r = Measured(np.array([1, 4, 2, 3, 0]), 4), np.array([1, 1, 1, 0, 0])
    prompt = ["x", "x", "x", "y", "y"]
    scores = {"right": np.array([0.1, 0.9, 0.8, 0.9, 0.1]), "wrong": np.array([0.9, 0.1, 0.8, 0.1, 0.9])}
    got = regret.prefix_regret(scores, judged, judged, r, prompt, 1, np.random.default_rng(0), permutations=5)
    assert got["oracle"] == {"flips_per_continuation": 0.75, "forked": 2.0, "plugged_in": 0.0}
    assert got["right"]["flips_per_continuation"] == 0.75 and got["right"]["share_of_oracle"] == 1.0
    assert got["wrong"]["flips_per_continuation"] == got["wrong"]["share_of_shuffled"] == 0.0
    assert got["uniform"]["flips_per_continuation"] == pytest.approx(19 / 48)
    assert got["uniform"]["forked"] == pytest.approx(2.0)
    assert 0 < got["right"]["shuffled_flips_per_continuation"] < 0.75


def test_totals_of_prompts_and_uniform_as_the_mean_of_all_even_spreads():
    """"x" has 5 continuations for 3 anchors: two have 2 and one has 1, three such spreads; "y" has none."""
    judged, r = Measured(np.array([1, 3, 2, 3]), 4), np.array([1, 1, 0, 0])
    args = (judged, judged, r, ["x", "x", "x", "y"], [5, 0], np.random.default_rng(0))
    got = regret.prefix_regret({}, *args)
    spreads = [(1, 2, 2, 0), (2, 1, 2, 0), (2, 2, 1, 0)]
    want = np.mean([regret.flip_chance(judged, r, k).sum() for k in spreads]) / 5
    assert got["uniform"]["flips_per_continuation"] == pytest.approx(want)
    assert got["uniform"]["forked"] == pytest.approx(3)


def test_draws_are_spent_by_their_expected_value():
    """Prompt 0 is surely at 1/4, prompt 1 at 0 or 1 with equal chance: their means are 1/4 and 1/2.

    The mean alone prefers prompt 1 (judged without contrast); the draws know that it has none. Three continuations
    after two failures: anchor 1 gains .5, .25, .125 by its mean, but .5, 0, 0 by its draws; anchor 0 gains .25, .19.
    So the mean forks (1, 2), the draws (2, 1), judged 1 - 3/4 + 1 and 1 - 3/6 + 1 flips.
    """
    judged, draws = Measured(np.array([1, 4]), 4), np.array([[0.25, 0.0], [0.25, 1.0]])
    scores = {"mean": draws.mean(axis=0), "draws": draws}
    got = regret.root_regret(scores, judged, judged, 3, np.random.default_rng(0))
    assert got["mean"]["effective_ratio"] == 0 and got["draws"]["effective_ratio"] == pytest.approx(3 / 4)
    assert got["draws"]["share_of_shuffled"] > 1
    # .24: else the mean's second continuation of anchor 1 would tie with the first of anchor 0
    scores = {"mean": np.array([0.24, 0.5]), "draws": draws}
    got = regret.prefix_regret(scores, judged, judged, [0, 0], [7, 7], 3, np.random.default_rng(0))
    assert got["mean"]["flips_per_continuation"] == pytest.approx(1.25 / 3)
    assert got["draws"]["flips_per_continuation"] == pytest.approx(1.5 / 3)


def test_one_generator_state_gives_one_report():
    rng = np.random.default_rng(3)
    a, b = (Measured(rng.binomial(8, 0.5, 30), 8) for _ in range(2))
    scores = {"x": rng.random(30)}
    first, again = (regret.root_regret(scores, a, b, 60, np.random.default_rng(5)) for _ in range(2))
    assert first == again | {"uniform": first["uniform"]}  # whose NaN equals nothing


def test_bad_input_is_named():
    rng, four = np.random.default_rng(0), Measured(np.array([1, 2]), 4)
    with pytest.raises(ValueError, match="item 1 has 5 successes of 4 rollouts"):
        Measured(np.array([1, 5]), 4)
    with pytest.raises(ValueError, match="must be integers, not float64"):
        Measured(np.array([0.5]), 4)
    with pytest.raises(ValueError, match=r"\(2,\) successes and \(3,\) rollouts"):
        Measured(np.array([1, 2]), np.array([4, 4, 4]))
    with pytest.raises(ValueError, match=r"scores 'x' have shape \(3,\) for 2 items"):
        regret.root_regret({"x": np.zeros(3)}, four, four, 4, rng)
    with pytest.raises(ValueError, match="other than uniform and oracle"):
        regret.root_regret({"oracle": np.zeros(2)}, four, four, 4, rng)
    with pytest.raises(ValueError, match="root_budget is 0"):
        regret.root_regret({}, four, four, 0, rng)
    with pytest.raises(ValueError, match="permutations is 0"):
        regret.root_regret({}, four, four, 4, rng, permutations=0)
    with pytest.raises(ValueError, match="0 continuations for 2 anchors"):
        regret.prefix_regret({}, four, four, [1, 0], [0, 0], 0, rng)
    with pytest.raises(ValueError, match="for 2 anchors, 1 outcomes"):
        regret.prefix_regret({}, four, four, [1], [0, 0], 2, rng)
