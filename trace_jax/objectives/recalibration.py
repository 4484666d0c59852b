"""Monotone maps from a predictor's raw probabilities to calibrated ones, fitted on the host to outcomes held back.

The paper uses raw scores; all of this is ours. A fit sees n histories: the raw probability p of each, the mean of its
0/1 outcomes and their count. Outcomes are binomial given the calibrated probability, so a history weighs as much as
its outcomes. With no outcome at all both fits return the identity, to the bit.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from scipy import optimize, special

MAX_LOGIT = 14.0  # a float32 sigmoid saturates near 17; a logit beyond 14 is taken as 14, so that a scale can undo it
MIN_SCALE = 0.01  # scores that rank outcomes the wrong way round are flattened, never turned
PRIOR_PRECISION = 1.0  # weak: of the shift as much as 4 outcomes at p = 1/2, of scale - 1 as much as 1 at logit 2

_TEMPERATURE, _ISOTONIC = 1.0, 2.0  # the first number of a map's vector form
_ITERATIONS = 100
_HALVINGS = 40


class Recalibration(Protocol):
    """A non-decreasing map of [0, 1] into itself."""

    def apply(self, probability: np.ndarray) -> np.ndarray:
        """float64, of the shape of `probability`. Raises ValueError for entries outside [0, 1]."""
        ...

    def to_array(self) -> np.ndarray:
        """A short float64 vector from which `from_array` makes the same map, to the bit."""
        ...


@dataclasses.dataclass(frozen=True)
class Temperature:
    """`sigmoid(scale * logit(p) + shift)`, scale > 0 (Platt's scaling); logits are cut to -+MAX_LOGIT before."""

    scale: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a scale that is not positive or numbers that are not finite."""
        if not (0 < self.scale < np.inf and np.isfinite(self.shift)):
            raise ValueError(f"temperature: scale {self.scale}, shift {self.shift}; use a finite scale > 0 and shift")

    def apply(self, probability: np.ndarray) -> np.ndarray:
        """float64, strictly increasing in the cut logit; with scale 1 and shift 0 `probability` itself, uncut."""
        p = _probabilities(probability)
        return p if (self.scale, self.shift) == (1.0, 0.0) else special.expit(self.scale * _logit(p) + self.shift)

    def to_array(self) -> np.ndarray:
        """float64 [3]."""
        return np.array([_TEMPERATURE, self.scale, self.shift])


@dataclasses.dataclass(frozen=True)
class Isotonic:
    """Linear between k knots, constant outside of them: scores beyond the outer knots become ties."""

    centre: tuple[float, ...] = (0.0, 1.0)  # strictly increasing, in [0, 1]
    value: tuple[float, ...] = (0.0, 1.0)  # non-decreasing, in [0, 1]

    def __post_init__(self) -> None:
        """Raises ValueError for knots of another form."""
        x, y = np.array(self.centre), np.array(self.value)
        inside = all(np.all((v >= 0) & (v <= 1)) for v in (x, y))  # NaN is outside
        if x.size == 0 or x.shape != y.shape or not inside or np.any(np.diff(x) <= 0) or np.any(np.diff(y) < 0):
            raise ValueError(f"isotonic: knots at {x.tolist()} with values {y.tolist()}; both must rise within [0, 1]")

    def apply(self, probability: np.ndarray) -> np.ndarray:
        """float64, non-decreasing up to rounding."""
        p = _probabilities(probability)
        return np.interp(p.ravel(), self.centre, self.value).reshape(p.shape)

    def to_array(self) -> np.ndarray:
        """float64 [1 + 2k]."""
        return np.array([_ISOTONIC, *self.centre, *self.value])


def from_array(vector: np.ndarray) -> Temperature | Isotonic:
    """The map that `to_array` described. Raises ValueError for any other vector."""
    v = np.asarray(vector)
    if v.ndim == 1 and v.dtype == np.float64 and v.size >= 3 and v.size % 2:  # a cast to float32 would lose bits
        kind, *numbers = v.tolist()
        if kind == _TEMPERATURE and v.size == 3:
            return Temperature(*numbers)
        if kind == _ISOTONIC:
            half = len(numbers) // 2
            return Isotonic(tuple(numbers[:half]), tuple(numbers[half:]))
    raise ValueError(f"recalibration: no map is written as {v.dtype} {v.tolist()}; pass what to_array() returned")


def fit_temperature(probability: np.ndarray, mean: np.ndarray, count: np.ndarray) -> Temperature:
    """The scale a and shift b that minimise, with x = logit(p) and PRIOR_PRECISION lam,

        -sum_i count_i [mean_i log s(a x_i + b) + (1 - mean_i) log(1 - s(a x_i + b))] + lam/2 [(a - 1)^2 + b^2]

    over a >= MIN_SCALE, s being the sigmoid. The prior keeps both finite where all outcomes are alike or scores
    separate them. The function is strictly convex: where its minimum has too small a scale, the minimum that is allowed
    lies on the edge. Newton's method with step halving, until no step lowers the function.

    Args:
      probability: float [n] in [0, 1], raw scores.
      mean: float [n] in [0, 1], mean outcome of each history.
      count: [n], number of its outcomes, >= 0; those with 0 say nothing.

    Raises:
      ValueError: unequal lengths, or entries outside their range.
    """
    p, y, n = _checked(probability, mean, count)
    if not p.size:
        return Temperature()
    x = _logit(p)
    scale, shift = _newton(np.stack([x, np.ones_like(x)]), np.zeros_like(x), y, n, np.array([1.0, 0.0]))
    if scale < MIN_SCALE:
        scale = MIN_SCALE
        (shift,) = _newton(np.ones((1, x.size)), scale * x, y, n, np.array([0.0]))
    return Temperature(float(scale), float(shift))


def fit_isotonic(probability: np.ndarray, mean: np.ndarray, count: np.ndarray) -> Isotonic:
    """The non-decreasing step function of greatest binomial likelihood (pool adjacent violators), made continuous.

    Each of its steps becomes a knot: at the mean raw score of the step's outcomes, with their mean as value. A step of
    n outcomes that are all alike is moved to 1/(n + 2) or 1 - 1/(n + 2), but not beyond its neighbour (our choice:
    no outcome count makes a probability 0 or 1). One step alone makes a constant map, which ranks nothing; so for few
    or one-sided outcomes prefer `fit_temperature`.

    Arguments and errors as in `fit_temperature`.
    """
    p, y, n = _checked(probability, mean, count)
    if not p.size:
        return Isotonic()
    x, group = np.unique(p, return_inverse=True)
    weight = np.bincount(group, weights=n)
    level = np.bincount(group, weights=n * y) / weight
    fit = optimize.isotonic_regression(np.clip(level, 0.0, 1.0), weights=weight)
    size = np.add.reduceat(weight, fit.blocks[:-1])
    centre = np.maximum.accumulate(np.add.reduceat(weight * x, fit.blocks[:-1]) / size)
    value = np.clip(fit.x[fit.blocks[:-1]], 0.0, 1.0)
    value[0] = max(value[0], min([1 / (size[0] + 2), *value[1:2]]))
    value[-1] = min(value[-1], max([1 - 1 / (size[-1] + 2), *value[-2:-1]]))
    last = np.append(np.diff(centre) > 0, True)  # scores one rounding apart may share a centre
    return Isotonic(tuple(centre[last].tolist()), tuple(value[last].tolist()))


def _newton(basis: np.ndarray, offset: np.ndarray, y: np.ndarray, n: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """The weights w that minimise the penalised binomial loss of logits `w @ basis + offset`; starts at the prior."""

    def loss(w: np.ndarray) -> float:
        z = w @ basis + offset
        fit = -np.sum(n * (y * special.log_expit(z) + (1 - y) * special.log_expit(-z)))
        return float(fit + PRIOR_PRECISION / 2 * np.sum((w - prior) ** 2))

    w, best = prior, loss(prior)
    for _ in range(_ITERATIONS):
        s = special.expit(w @ basis + offset)
        gradient = basis @ (n * (s - y)) + PRIOR_PRECISION * (w - prior)
        hessian = (basis * (n * s * (1 - s))) @ basis.T + PRIOR_PRECISION * np.eye(w.size)
        step = np.linalg.solve(hessian, gradient)
        for halving in range(_HALVINGS):
            tried = w - step * 0.5**halving
            if (lower := loss(tried)) < best:
                w, best = tried, lower
                break
        else:
            break  # no step lowers it: the minimum, as far as float64 can tell
    return w


def _logit(p: np.ndarray) -> np.ndarray:
    return np.clip(special.logit(p), -MAX_LOGIT, MAX_LOGIT)


def _probabilities(probability: np.ndarray) -> np.ndarray:
    p = np.asarray(probability, np.float64)
    bad = p[~((p >= 0) & (p <= 1))]  # written so that NaN counts as outside
    if bad.size:
        raise ValueError(f"recalibration: probability {bad[0]} is outside [0, 1]; pass probabilities, not logits")
    return p


def _checked(probability: np.ndarray, mean: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As float64, without the histories that have no outcome."""
    p, y, n = _probabilities(probability), np.asarray(mean, np.float64), np.asarray(count, np.float64)
    if p.ndim != 1 or not p.shape == y.shape == n.shape:
        raise ValueError(f"recalibration: got shapes {p.shape}, {y.shape}, {n.shape}; pass three vectors of one length")
    if not np.all((n >= 0) & (n < np.inf)):
        raise ValueError("recalibration: a count is negative or not finite; pass numbers of outcomes")
    p, y, n = (v[n > 0] for v in (p, y, n))
    bad = y[~((y >= 0) & (y <= 1))]
    if bad.size:
        raise ValueError(f"recalibration: mean outcome {bad[0]} is outside [0, 1]; pass success rates, not rewards")
    return p, y, n
