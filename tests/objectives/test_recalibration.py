"""Recalibration maps against scipy's minimiser, an isotonic fit by brute force, and hand-derived edge cases."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy import optimize

from trace_jax.objectives import recalibration
from trace_jax.objectives.recalibration import Isotonic, Temperature, fit_isotonic, fit_temperature

FITS = [fit_temperature, fit_isotonic]
GRID = np.concatenate([[0.0, 1e-30, 1e-7], np.linspace(0.001, 0.999, 400), [1 - 1e-7, 1.0]])


def _sigmoid(z):
    return 1 / (1 + np.exp(-z))


def _data(seed, size, scale, shift):
    """Raw scores whose calibrated probability is sigmoid(scale logit + shift), with binomial outcomes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 2, size)
    count = rng.integers(1, 9, size)
    return _sigmoid(x), rng.binomial(count, _sigmoid(scale * x + shift)) / count, count


def _penalised(w, p, mean, count):
    """The documented function, written out with the logarithms of probabilities."""
    s = _sigmoid(w[0] * np.log(p / (1 - p)) + w[1])
    likelihood = np.sum(count * (mean * np.log(s) + (1 - mean) * np.log(1 - s)))
    return -likelihood + 0.5 * ((w[0] - 1) ** 2 + w[1] ** 2)


@pytest.mark.parametrize("size", [1, 3, 40])
def test_temperature_is_the_minimum_that_scipy_finds(size):
    data = _data(size, size, 0.5, -1.0)
    want = optimize.minimize(_penalised, [1.0, 0.0], args=data, method="Nelder-Mead", options={"xatol": 1e-9})
    got = fit_temperature(*data)
    np.testing.assert_allclose([got.scale, got.shift], want.x, atol=1e-5)


def test_temperature_finds_the_map_that_made_the_outcomes():
    got = fit_temperature(*_data(0, 20000, 0.4, 0.7))
    np.testing.assert_allclose([got.scale, got.shift], [0.4, 0.7], atol=0.03)


def test_scores_that_rank_the_wrong_way_round_are_flattened_to_the_base_rate():
    p, mean, count = _data(1, 5000, -1.0, 0.0)
    got = fit_temperature(p, mean, count)
    assert got.scale == recalibration.MIN_SCALE
    rate = np.sum(mean * count) / np.sum(count)
    assert np.all(np.abs(got.apply(p) - rate) < 0.03) and np.all(np.diff(got.apply(np.sort(p))) > 0)


def test_one_sided_separable_and_saturated_outcomes_stay_finite():
    for p, mean, count in [
        ([0.3, 0.5, 0.9], [1, 1, 1], [100, 100, 100]),
        ([0.1, 0.9], [0, 1], [1000, 1000]),
        ([0.0, 1.0, 1.0], [1, 0, 0.5], [5, 5, 5]),
        ([0.5] * 4, [0, 0, 0, 0], [3] * 4),
    ]:
        got = fit_temperature(p, mean, count)
        assert got.scale > 0 and np.all(np.isfinite([got.scale, got.shift]))
    # p = 1/2 has logit 0, so the prior alone sets the scale; the shift has -12 log(1 - s(b)) + b^2/2 minimal, where
    # 12 s(b) = -b: b = -1.8068 gives s = .14102 and 12 s = 1.692; b = -1.73 gives 12 s = 1.81; the root is between.
    assert got.scale == 1.0 and -1.8068 < got.shift < -1.73
    np.testing.assert_allclose(12 * _sigmoid(got.shift), -got.shift, rtol=1e-9)


def _least_squares_by_brute_force(level, weight):
    """The isotonic fit (of squares; pooling gives the binomial one too) of a short vector: the best of all ways to cut it into blocks of equal value that rise."""
    best, size = (np.inf, None), len(level)
    for cuts in range(2 ** (size - 1)):
        block = np.cumsum([0] + [(cuts >> i) & 1 for i in range(size - 1)])
        mean = np.array([np.average(level[block == b], weights=weight[block == b]) for b in range(block[-1] + 1)])
        if np.all(np.diff(mean) >= 0):
            best = min(best, (float(np.sum(weight * (level - mean[block]) ** 2)), tuple(mean[block])))
    return np.array(best[1])


@pytest.mark.parametrize("seed", range(6))
def test_isotonic_knots_are_the_blocks_of_the_monotone_fit(seed):
    rng = np.random.default_rng(seed)
    p, count = np.sort(rng.random(7)), rng.integers(1, 6, 7)
    mean = rng.binomial(count, p) / count
    steps = _least_squares_by_brute_force(mean, count)
    got = fit_isotonic(p, mean, count)
    values = np.unique(np.round(steps, 12))
    inner = slice(1, -1)  # the outer knots may be moved inwards
    np.testing.assert_allclose(got.value[inner], values[inner], atol=1e-9)
    for value, x in zip(values, got.centre, strict=True):
        block = np.abs(steps - value) < 1e-9
        np.testing.assert_allclose(x, np.average(p[block], weights=count[block]))


def test_isotonic_by_hand():
    """Scores .2 (0 of 3), .4 (2 of 4), .6 (1 of 4), .9 (2 of 2); .4 and .6 violate the order: 3 of 8 at .5.

    The outer steps are moved to 1/(3 + 2) = .2 and 1 - 1/(2 + 2) = .75. Half way between .2 and .5: (.2 + .375) / 2.
    """
    got = fit_isotonic([0.6, 0.2, 0.9, 0.4], [0.25, 0.0, 1.0, 0.5], [4, 3, 2, 4])
    np.testing.assert_allclose(got.centre, [0.2, 0.5, 0.9])
    np.testing.assert_allclose(got.value, [0.2, 0.375, 0.75])
    np.testing.assert_allclose(got.apply([[0.0, 0.35], [0.7, 1.0]]), [[0.2, 0.2875], [0.5625, 0.75]])


def test_isotonic_ends_do_not_pass_their_neighbours():
    # 0 of 1, then 1 of 10: 1/3 would lie above .1. And 0 of 1, 1 of 1: 1/3 and 2/3.
    assert fit_isotonic([0.2, 0.6], [0.0, 0.1], [1, 10]).value == (0.1, 0.1)
    np.testing.assert_allclose(fit_isotonic([0.2, 0.6], [0.0, 1.0], [1, 1]).value, [1 / 3, 2 / 3])
    # one step: all successes, all failures, a constant score with 3 of 4
    np.testing.assert_allclose(fit_isotonic([0.2, 0.6], [1.0, 1.0], [2, 4]).apply(GRID), 1 - 1 / 8)
    np.testing.assert_allclose(fit_isotonic([0.7], [0.0], [1]).apply(GRID), 1 / 3)
    np.testing.assert_allclose(fit_isotonic([0.5, 0.5], [1.0, 0.5], [2, 2]).apply(GRID), 0.75)


def test_scores_one_rounding_apart():
    x = 0.1
    p = [x, np.nextafter(x, 1), np.nextafter(np.nextafter(x, 1), 1)]
    got = fit_isotonic(p, [0.1, 0.5, 0.9], [7, 11, 13])
    assert np.all(np.diff(got.apply(p)) >= 0)


@pytest.mark.parametrize("fit", FITS)
def test_without_outcomes_the_map_is_the_identity_to_the_bit(fit):
    for data in [([], [], []), ([0.3, 0.4], [1.0, 0.0], [0, 0])]:
        np.testing.assert_array_equal(fit(*data).apply(GRID), GRID)


@hypothesis.given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4), st.integers(0, 4)), max_size=12), st.sampled_from(FITS)
)
def test_every_map_is_monotone_within_0_and_1_and_survives_its_vector_form(rows, fit):
    p, first, second = (np.array(column) for column in zip(*rows)) if rows else np.zeros((3, 0))
    count = np.maximum(first, second)
    fitted = fit(p, np.minimum(first, second) / np.maximum(count, 1), count)
    got = fitted.apply(GRID)
    assert got.dtype == np.float64 and np.all((got >= 0) & (got <= 1)) and np.all(np.diff(got) >= -1e-15)
    if count.any():
        assert 0 < got[0] and got[-1] < 1
    again = recalibration.from_array(fitted.to_array())
    assert again == fitted and again.to_array().dtype == np.float64
    np.testing.assert_array_equal(again.apply(GRID), got)


def test_any_shape():
    for fitted in (Temperature(0.5, 1.0), Isotonic((0.2, 0.8), (0.3, 0.6))):
        cube = GRID[:24].astype(np.float32).reshape(2, 3, 4)
        np.testing.assert_array_equal(fitted.apply(cube).ravel(), fitted.apply(cube.ravel()))
        assert fitted.apply(0.5).shape == () and fitted.apply(np.zeros((3, 0))).shape == (3, 0)
    # logit 0 -> 1 -> e / (1 + e)
    np.testing.assert_allclose(Temperature(0.5, 1.0).apply(0.5), np.e / (1 + np.e))


def test_bad_input_is_named():
    for fit in FITS:
        with pytest.raises(ValueError, match=r"shapes \(2,\), \(1,\), \(2,\)"):
            fit([0.1, 0.2], [1.0], [1, 1])
        with pytest.raises(ValueError, match="probability 1.5 is outside"):
            fit([1.5], [1.0], [1])
        with pytest.raises(ValueError, match="mean outcome -1.0 is outside"):
            fit([0.5], [-1.0], [1])
        with pytest.raises(ValueError, match="count is negative"):
            fit([0.5], [1.0], [-1])
    with pytest.raises(ValueError, match="probability nan is outside"):
        Temperature().apply([np.nan])
    with pytest.raises(ValueError, match="scale -1.0"):
        Temperature(-1.0, 0.0)
    for knots in [((), ()), ((0.5, 0.4), (0.1, 0.2)), ((0.4, 0.5), (0.3, 0.2)), ((0.4,), (np.nan,))]:
        with pytest.raises(ValueError, match="must rise within"):
            Isotonic(*knots)
    for vector in [np.zeros(3), np.zeros(0), np.array([1.0, 1.0, 0.0], np.float32), np.array([1.0, 1.0])]:
        with pytest.raises(ValueError, match="no map is written as"):
            recalibration.from_array(vector)
