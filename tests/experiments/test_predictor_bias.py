"""The chain's values by enumeration, the estimates by closed forms, and which targets are biased."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.predictor import bias

EVERYWHERE = np.ones(len(bias.STATES), bool)


@pytest.mark.parametrize("chance", bias.CHANCES)
def test_values_by_enumeration(chance):
    """All ways in which the turns to come can go, each with its probability."""
    for turns, good in itertools.product(range(bias.MAX_TURNS + 1), range(bias.NEEDED + 1)):
        total = 0.0
        for ways in itertools.product((0, 1), repeat=bias.MAX_TURNS - turns):
            if good + sum(ways) >= bias.NEEDED:
                total += np.prod([chance if way else 1 - chance for way in ways])
        assert bias.value(chance, turns, good) == pytest.approx(total, abs=1e-12)
        inside = good <= turns < bias.MAX_TURNS and good < bias.NEEDED and 0 < total < 1
        assert ((chance, turns, good) in bias.STATES) == inside
    assert bias.value(0.35, 2, 1) == pytest.approx(1 - bias.value(0.65, 2, 1))  # one of each: symmetric


@pytest.mark.parametrize("forks, continuations", [("none", 0), ("random", 8), ("trace", 8), ("trace_blurred", 8)])
def test_trees_spend_their_budget_and_end_by_the_rule(forks, continuations):
    for seed in range(5):
        tree = bias.grown(0.65, bias.FORKS[forks], np.random.default_rng(seed))
        good, leaf = bias._good_turns(tree), np.isfinite(tree.success)
        assert leaf.sum() == 4 + continuations
        np.testing.assert_array_equal(tree.success[leaf], good[leaf] == 3)
        assert good[~leaf].max() < 3


def test_estimates_of_one_state_by_hand():
    """Weights 1: the mean, its error the population deviation / sqrt(n). Weights 1, 3: (1 * 0 + 3 * 0.4) / 4 = 0.3."""
    error = np.array([[0.1], [0.3], [-0.1], [0.5]])
    mean, deviation = bias.signed(bias.Errors(error, np.ones((4, 1))), np.array([True]))
    assert (mean, deviation) == pytest.approx((0.2, np.std(error) / 2))
    weighted = bias.Errors(np.array([[0.0], [1.2]]), np.array([[1.0], [3.0]]))
    # influences: (0 - 0.3 * 1) / 4 and (1.2 - 0.3 * 3) / 4
    assert bias.signed(weighted, np.array([True])) == pytest.approx((0.3, np.hypot(0.3, 0.3) / 4))
    # halves 0.2 and 0.2: the sign lasts. With the second half at -0.2 it does not, and the bias is none.
    assert bias.absolute(bias.Errors(error, np.ones((4, 1))), np.array([True]))[0] == pytest.approx(0.2)
    error[2:] *= -1
    assert bias.absolute(bias.Errors(error, np.ones((4, 1))), np.array([True]))[0] == pytest.approx(-0.2)
    assert bias.signed(bias.Errors(error, np.zeros((4, 1))), np.array([True])) is None


def test_noise_is_no_bias():
    rng = np.random.default_rng(0)
    errors = bias.Errors(rng.normal(size=(400, 18)), np.ones((400, 18)))
    mean, deviation = bias.absolute(errors, EVERYWHERE)
    assert abs(mean) < 4 * deviation and deviation == pytest.approx(1 / np.sqrt(400 * 18), rel=0.1)


@pytest.fixture(scope="module")
def errors():
    """2000 trees for TRACE with true values, 500 for the other kinds of forks."""
    trees = {forks: 2000 if forks == "trace" else 500 for forks in bias.FORKS}
    return {f: bias.simulate(place, trees[f], np.random.default_rng(1)) for f, place in bias.FORKS.items()}


@pytest.mark.parametrize("forks", bias.FORKS)
@pytest.mark.parametrize("name", ["bare", "direct_count"])
def test_unbiased_targets(errors, name, forks):
    """Within 4 standard errors in every state; closed form of the variance where nothing is forked: V (1 - V)."""
    for state in np.eye(len(bias.STATES), dtype=bool):
        mean, deviation = bias.signed(errors[forks][name], state)
        assert abs(mean) < 4 * deviation
    root = bias.STATES.index((0.35, 0, 0))
    mean, deviation = bias.signed(errors["none"][name], np.arange(len(bias.STATES)) == root)
    rollouts = 250 * 4
    expected = bias.VALUES[root] * (1 - bias.VALUES[root]) / rollouts
    assert deviation == pytest.approx(np.sqrt(expected), rel=0.1)


def test_eq_18_is_drawn_towards_one_half(errors):
    for forks in ("trace", "trace_blurred"):
        mean, deviation = bias.absolute(errors[forks]["backed_up"], EVERYWHERE)
        assert mean > 4 * deviation and mean > 0.03
        for name in ("backed_up", "backed_up_count"):
            low, low_error = bias.signed(errors[forks][name], bias.VALUES < 0.5)
            high, high_error = bias.signed(errors[forks][name], bias.VALUES > 0.5)
            assert low > 4 * low_error and high < -4 * high_error


def test_equal_weights_push_direct_targets_away_from_one_half(errors):
    found = errors["trace"]["direct_equal"]
    low, low_error = bias.signed(found, bias.VALUES < 0.5)
    high, high_error = bias.signed(found, bias.VALUES > 0.5)
    assert low < 0 < high and high - low > 4 * np.hypot(low_error, high_error)


def test_published_file_has_every_name():
    found = bias.measure(8, seed=0)
    summaries = bias.summaries(found, 8)
    assert all(one["n"] == 0 or one["low"] <= one["mean"] <= one["high"] for one in summaries.values())
    published = json.loads(Path(bias.__file__).with_name("bias.json").read_text())
    assert published.keys() == summaries.keys()
    assert {"bias/backed_up/trace", "bias/direct_count/random/depth=3", "bias/bare/none/low"} <= published.keys()
    rows = bias.table(found).splitlines()
    assert len(rows) == 2 + len(bias.FORKS) * len(bias.TARGETS)
