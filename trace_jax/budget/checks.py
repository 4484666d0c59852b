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
    bad = np.flatnonzero(~((vector >= 0) & (vector <= 1)))  # written so that NaN counts as outside
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {vector[bad[0]]}, outside [0, 1]; pass finite probabilities, not logits")
    return vector


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
