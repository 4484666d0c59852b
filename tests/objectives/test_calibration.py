"""Calibration scores: hand-derived values, scipy's Spearman, a per-bin loop, undefined cases."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from trace_jax.objectives import calibration


def test_brier_by_hand():
    # (0.8 - 1)^2 = 0.04, (0.3 - 0)^2 = 0.09, (0.5 - 1)^2 = 0.25: mean 0.38 / 3
    np.testing.assert_allclose(calibration.brier([0.8, 0.3, 0.5], [1, 0, 1]), 0.38 / 3)
    assert calibration.brier([0.5] * 4, [0, 1, 1, 0]) == 0.25
    assert calibration.brier([0.0, 1.0], [0, 1]) == 0.0


def test_ece_by_hand():
    # Two bins. [0, 1/2): p = .1, .3, outcomes 0, 1: |.5 - .2| = .3, share 2/4. [1/2, 1]: p = .5, 1, outcomes 1, 1:
    # |1 - .75| = .25, share 2/4. ECE = .15 + .125 = .275. The edge 1/2 belongs to the upper bin, 1 to the last.
    np.testing.assert_allclose(calibration.ece([0.1, 0.3, 0.5, 1.0], [0, 1, 1, 1], num_bins=2), 0.275)
    # One bin compares the overall means: |.75 - .475| = .275, the same here because both bins err to the same side.
    np.testing.assert_allclose(calibration.ece([0.1, 0.3, 0.5, 1.0], [0, 1, 1, 1], num_bins=1), 0.275)


def test_ece_sees_what_the_mean_hides():
    # Scores .2, .8 with outcomes 1, 0: the means agree at .5, but each bin alone is off by |1 - .2| = |0 - .8| = .8.
    assert calibration.ece([0.2, 0.8], [1, 0], num_bins=1) == 0.0
    np.testing.assert_allclose(calibration.ece([0.2, 0.8], [1, 0], num_bins=2), 0.8)


@pytest.mark.parametrize("num_bins", [3, 10, 100])
def test_ece_equals_a_loop_over_bins(num_bins):
    rng = np.random.default_rng(0)
    # every edge itself, beside random scores
    p = np.concatenate([rng.uniform(size=200), np.arange(num_bins + 1) / num_bins])
    y = rng.integers(0, 2, size=p.size)
    total = 0.0
    for b in range(num_bins):
        low, high = b / num_bins, (b + 1) / num_bins
        inside = (p >= low) & ((p < high) if b < num_bins - 1 else (p <= high))
        if inside.any():
            total += inside.mean() * abs(y[inside].mean() - p[inside].mean())
    np.testing.assert_allclose(calibration.ece(p, y, num_bins=num_bins), total, rtol=1e-9)


def test_reliability_by_hand_and_as_what_ece_sums():
    # Two bins as above: means .2 and .75, outcomes .5 and 1, two entries each. Of four bins the third is [1/2, 3/4).
    p, y = [0.1, 0.3, 0.5, 1.0], [0, 1, 1, 1]
    np.testing.assert_allclose(calibration.reliability(p, y, 2), [[0.2, 0.75], [0.5, 1.0], [2, 2]])
    probability, outcome, count = calibration.reliability(p[:3], y[:3], num_bins=4)
    np.testing.assert_array_equal(count, [1, 1, 1, 0])
    np.testing.assert_allclose(probability, [0.1, 0.3, 0.5, np.nan])
    np.testing.assert_allclose(outcome, [0, 1, 1, np.nan])
    rng = np.random.default_rng(1)
    p, y = rng.uniform(size=300), rng.integers(0, 2, 300)
    probability, outcome, count = calibration.reliability(p, y)
    assert count.sum() == 300 and count.dtype == np.int64
    np.testing.assert_allclose(np.sum(count / 300 * np.abs(outcome - probability)), calibration.ece(p, y), rtol=1e-12)


def test_spearman_by_hand():
    # Ranks (1, 2, 3, 4) and (2, 1, 4, 3): d = +-1 each, rho = 1 - 6 * 4 / (4 * 15) = 0.6.
    np.testing.assert_allclose(calibration.spearman([1, 2, 3, 4], [20, 10, 40, 30]), 0.6)
    np.testing.assert_allclose(calibration.spearman([1, 2, 3], [1, 10, 100]), 1.0)  # only the order counts
    np.testing.assert_allclose(calibration.spearman([1, 2, 3], [5, 4, 3]), -1.0)
    # A tie: ranks (1.5, 1.5, 3) against (1, 2, 3): cov = .5*1 + 0 + 1*1 = 1.5, norms sqrt(1.5), sqrt(2).
    np.testing.assert_allclose(calibration.spearman([7, 7, 9], [1, 2, 3]), 1.5 / np.sqrt(1.5 * 2))


def test_spearman_equals_scipy_with_ties():
    rng = np.random.default_rng(0)
    for n in (2, 3, 17, 200):
        x, y = rng.integers(0, 6, size=n) / 5, rng.normal(size=n)
        if np.ptp(x):
            np.testing.assert_allclose(calibration.spearman(x, y), scipy.stats.spearmanr(x, y).statistic, atol=1e-12)


def test_undefined_scores_are_nan_without_a_warning():
    # pytest turns warnings of this package into errors; np.mean of nothing would warn.
    assert np.isnan(calibration.brier([], [])) and np.isnan(calibration.ece([], []))
    assert np.all(np.isnan(calibration.reliability([], [])[:2])) and not calibration.reliability([], [])[2].any()
    assert np.isnan(calibration.spearman([], [])) and np.isnan(calibration.spearman([0.3], [1.0]))
    assert np.isnan(calibration.spearman([0.5, 0.5, 0.5], [0, 1, 1]))
    assert np.isnan(calibration.spearman([0.1, 0.2, 0.3], [1, 1, 1]))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        calibration.brier([0.1, 0.2], [0, 1, 1])
    with pytest.raises(ValueError, match="probability 1.5 is outside"):
        calibration.ece([1.5], [1])
    with pytest.raises(ValueError, match="outcome -1.0 is outside"):
        calibration.brier([0.5], [-1])
    with pytest.raises(ValueError, match="not finite"):
        calibration.spearman([0.1, np.nan], [0, 1])
    with pytest.raises(ValueError, match="num_bins=0"):
        calibration.ece([0.5], [1], num_bins=0)
