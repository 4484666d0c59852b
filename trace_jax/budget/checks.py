"""Checks of the allocators' inputs."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike


def probability_vector(name: str, values: ArrayLike) -> np.ndarray:
    """Returns `values` as float64 [n].

    Raises:
      ValueError: it is not a vector, or an entry is NaN or outside [0, 1]; the message begins with `name`.
    """
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1:
        raise ValueError(f"{name} has shape {vector.shape}; pass a vector with one probability per entry")
    return probability_draws(name, vector)


def probability_draws(name: str, values: ArrayLike) -> np.ndarray:
    """Returns `values` as float64 [n], or float64 [S, n] for S draws of a belief about each of n probabilities.

    Raises:
      ValueError: another shape, no draw at all, or an entry that is NaN or outside [0, 1]; the message begins with
        `name`.
    """
    draws = np.asarray(values, dtype=np.float64)
    if draws.ndim not in (1, 2) or (draws.ndim == 2 and not draws.shape[0]):
        raise ValueError(f"{name} has shape {draws.shape}; pass [n], or [S, n] for S >= 1 draws of each probability")
    bad = np.argwhere(~((draws >= 0) & (draws <= 1)))  # written so that NaN counts as outside
    if bad.size:
        first = tuple(bad[0])
        where = ", ".join(map(str, first))
        raise ValueError(f"{name}[{where}] is {draws[first]}, outside [0, 1]; pass finite probabilities, not logits")
    return draws


def whole_total(total: int) -> int:
    """Returns a budget as a Python int.

    Raises:
      TypeError: it is not an integer.
      ValueError: it is negative.
    """
    total = operator.index(total)
    if total < 0:
        raise ValueError(f"total is {total}; a budget is 0 or more")
    return total
