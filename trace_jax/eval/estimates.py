r"""What k samples of each prompt say about a policy: avg@k, pass@k, and how sure that is. Arrays in, numbers out.

The unit of chance is the prompt: samples of one prompt share its difficulty, so they are not independent, and each
prompt gives one value. The values' mean over P prompts has the standard error `s / sqrt(P)`, s with ddof 1; it holds
for prompts seen as drawn from a larger set.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import special

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of one value per prompt, each in [0, 1]."""

    value: float
    standard_error: float  # NaN for a single prompt
    low: float  # of the confidence interval; NaN for a single prompt
    high: float
    prompts: int


def over_prompts(values: np.ndarray) -> Estimate:
    """Mean, standard error and 95 % interval of `values`, float [P] in [0, 1].

    The interval is Student's, `mean -+ t(0.975, P - 1) * s / sqrt(P)`, cut to [0, 1]. Student's and not a bootstrap's
    (our choice): it needs no random numbers, and for sets as small as AIME's 30 prompts the percentile bootstrap is too
    narrow, by `sqrt((P - 1) / P)` and by the t quantile. Where all prompts have the value 0 it goes up to
    `1 - 0.025^(1 / P)`, the least mean of which P such prompts are no more likely than that (a value in [0, 1] is 0
    with a chance of at most 1 minus its mean), and down as far where all have 1; of any other value common to all it
    has no width.

    Raises ValueError for no values or values outside of [0, 1].
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or values.size == 0 or not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"values of prompts have shape {values.shape}; they must be a list of numbers from 0 to 1")
    mean, size = float(values.mean()), values.size
    if size == 1:
        return Estimate(mean, float("nan"), float("nan"), float("nan"), 1)
    error = float(values.std(ddof=1) / np.sqrt(size))
    half = float(special.stdtrit(size - 1, (1 + CONFIDENCE) / 2)) * error
    if mean in (0.0, 1.0):
        half = 1 - ((1 - CONFIDENCE) / 2) ** (1 / size)
    return Estimate(mean, error, max(mean - half, 0.0), min(mean + half, 1.0), size)


def solved_by_any(correct: np.ndarray, samples: np.ndarray | int, k: int) -> np.ndarray:
    """Chance that at least one of k samples of a prompt is right: unbiased, float64 [P].

    `1 - C(n - c, k) / C(n, k)` for c right ones of n samples (Chen et al., 2021, arXiv 2107.03374): the share of the
    k-subsets of the n samples that hold a right one. Computed as `1 - prod_{i=0}^{k-1} (n - c - i) / (n - i)`, whose
    factors lie in [0, 1], so that nothing overflows.

    Args:
      correct: int [P], c of each prompt.
      samples: int [P] or one number for all, n.
      k: at least 1 and at most the least n.

    Raises:
      ValueError: k or a count is out of range.
    """
    correct = np.asarray(correct)
    samples = np.broadcast_to(np.asarray(samples), correct.shape)
    if correct.ndim != 1 or correct.size == 0:
        raise ValueError(f"counts of right samples have shape {correct.shape}; they must be a list of at least one")
    if not (np.issubdtype(correct.dtype, np.integer) and np.issubdtype(samples.dtype, np.integer)):
        raise ValueError(f"counts must be integers, not {correct.dtype} and {samples.dtype}")
    if np.any(correct < 0) or np.any(correct > samples):
        raise ValueError("a prompt has fewer right samples than 0 or more than samples")
    if not 1 <= k <= samples.min():
        raise ValueError(f"pass@{k} needs at least 1 and at most n samples, and a prompt has n = {samples.min()}")
    i = np.arange(k)[:, None]
    return 1.0 - np.prod(np.maximum(samples - correct - i, 0) / (samples - i), axis=0)


def pass_at_k(correct: np.ndarray, samples: np.ndarray | int, k: int) -> Estimate:
    """pass@k: `solved_by_any` averaged over prompts."""
    return over_prompts(solved_by_any(correct, samples, k))
