"""Llama 3's RoPE scaling from the table of frequency divisors that GGUF files store in its place."""

from __future__ import annotations

import numpy as np

from trace_jax.models.config import Llama3Scaling


def llama3_scaling(divisors: np.ndarray, theta: float) -> Llama3Scaling:
    """The scaling whose frequencies are theta^(-2i/H) / divisors[i], i < H/2.

    With c_i the turns per token of pair i, divisor d_i and factor f = max d: (1/d - 1/f) / (1 - 1/f) is
    (original c - low) / (high - low) between its bounds 0 and 1, a line in c whose slope and offset give original and
    high once low is set to 1 (all three can be scaled together without changing anything).
    Raises ValueError for a table that is not of this form (LongRoPE's, for one).
    """
    divisors = np.asarray(divisors, np.float64)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ValueError("rope_freqs.weight holds numbers that are not above 0 and finite; get the file again")
    turns = theta ** (-np.arange(divisors.size) / divisors.size) / (2 * np.pi)
    factor = round(float(divisors.max()), 3)
    if factor <= 1:
        raise ValueError("rope_freqs.weight scales no frequency as Llama 3 does; use another file")
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (share > 1e-4) & (share < 1 - 1e-4)
    if between.sum() >= 2:
        slope, offset = np.polyfit(turns[between], share[between], 1)
        if slope > 0 > offset:
            high = 1 - 1 / offset
            scaling = Llama3Scaling(factor, 1.0, round(high, 3), round(slope * (high - 1)))
            if np.allclose(_divisors(scaling, turns), divisors, rtol=1e-4):
                return scaling
    raise ValueError("rope_freqs.weight is no table of Llama 3's scaling, which alone is computed; use another file")


def _divisors(scaling: Llama3Scaling, turns: np.ndarray) -> np.ndarray:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = np.clip((scaling.original_max_positions * turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / scaling.factor + share)
