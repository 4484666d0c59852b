"""How good predicted success probabilities are. Plain numpy on the host: these numbers are logged and never trained on.

`probability` and `outcome` are vectors of one length n with entries in [0, 1]; an outcome is a 0/1 success or a
backed-up success rate. With n = 0 every score is NaN.
"""

from __future__ import annotations

import numpy as np


def brier(probability: np.ndarray, outcome: np.ndarray) -> float:
    """Brier score, (1/n) sum_i (p_i - y_i)^2: 0 is perfect, 0.25 is what a constant 1/2 gets on 0/1 outcomes.

    Raises ValueError for unequal lengths or entries outside [0, 1].
    """
    p, y = _checked(probability, outcome)
    return float(np.mean(np.square(p - y))) if p.size else float("nan")


def ece(probability: np.ndarray, outcome: np.ndarray, *, num_bins: int = 10) -> float:
    """Expected calibration error over equal-width bins.

        sum_b (n_b / n) |mean_{i in b} y_i - mean_{i in b} p_i|,   bin b = [b / num_bins, (b + 1) / num_bins)

    The last bin includes 1.
    Raises ValueError for unequal lengths, entries outside [0, 1] or num_bins < 1.
    """
    p, y = _checked(probability, outcome)
    bins = _bins(p, num_bins)
    if not p.size:
        return float("nan")
    # n_b |mean y - mean p| = |sum (y - p)|, so the counts cancel.
    return float(np.sum(np.abs(np.bincount(bins, weights=y - p, minlength=num_bins))) / p.size)


def reliability(
    probability: np.ndarray, outcome: np.ndarray, num_bins: int = 10
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a reliability diagram shows: (mean probability, mean outcome, count) of each bin of `ece`.

    float64 [num_bins] twice, NaN in empty bins, and int64 [num_bins]. A calibrated predictor has the first two equal;
    `ece` is the mean of their distance over all entries. Raises ValueError as `ece`.
    """
    p, y = _checked(probability, outcome)
    bins = _bins(p, num_bins)
    count = np.bincount(bins, minlength=num_bins)
    size = np.where(count > 0, count, np.nan)
    return *(np.bincount(bins, weights=v, minlength=num_bins) / size for v in (p, y)), count


def _bins(p: np.ndarray, num_bins: int) -> np.ndarray:
    """The bin of each entry, int64 [n]."""
    if num_bins < 1:
        raise ValueError(f"ece: num_bins={num_bins} must be >= 1")
    # Compared with the edges rather than floor(p * num_bins), which puts 0.29 of 100 bins below its edge.
    return np.searchsorted(np.arange(1, num_bins) / num_bins, p, side="right")


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman rank correlation (paper Eq. 22): Pearson correlation of the ranks, ties sharing their mean rank.

    NaN where it is undefined: fewer than two pairs, or either vector constant.
    Raises ValueError for unequal lengths or entries that are not finite.
    """
    x, y = _vectors(x, y)
    if x.size < 2:
        return float("nan")
    rank_x, rank_y = (_mean_rank(v) for v in (x, y))
    rank_x, rank_y = rank_x - rank_x.mean(), rank_y - rank_y.mean()
    scale = np.sqrt(np.sum(rank_x**2) * np.sum(rank_y**2))
    return float(np.sum(rank_x * rank_y) / scale) if scale > 0 else float("nan")


def _mean_rank(x: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal entries get the mean of the ranks that they fill."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[inverse]


def _vectors(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"calibration: got shapes {a.shape} and {b.shape}; expected two vectors of one length")
    if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        raise ValueError("calibration: an entry is not finite; leave out what was never scored")
    return a, b


def _checked(probability: np.ndarray, outcome: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p, y = _vectors(probability, outcome)
    for name, v in (("probability", p), ("outcome", y)):
        bad = v[(v < 0) | (v > 1)]
        if bad.size:
            raise ValueError(
                f"calibration: {name} {bad[0]} is outside [0, 1]; pass probabilities, not logits or rewards"
            )
    return p, y
