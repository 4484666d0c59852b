"""Stage 2: how many continuations each anchor of a prompt receives (paper Eq. 14-16)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from trace_jax.budget import checks
from trace_jax.budget.greedy import greedy_counts, power_gains, tie_order


def agreement(success: ArrayLike, value: ArrayLike) -> np.ndarray:
    """The chance that one fresh continuation repeats what happened, `q = r V + (1 - r)(1 - V)` (paper Eq. 14-15).

    Args:
      success: r [A], 0 or 1: the outcome of the bare rollout on which each anchor lies.
      value: V float [A] in [0, 1]: the predicted success rate from each anchor; or float [S, A], S draws of it.

    Returns:
      q float64 [A], or [S, A].

    Raises:
      ValueError: a success other than 0 and 1, a value outside [0, 1], or unequal shapes.
    """
    r_A = checks.probability_vector("success", success)
    v = checks.probability_draws("value", value)
    if r_A.size != v.shape[-1]:
        raise ValueError(f"success has {r_A.size} entries and value {v.shape[-1]}; pass one of each per anchor")
    bad = np.flatnonzero((r_A != 0) & (r_A != 1))
    if bad.size:
        raise ValueError(f"success[{bad[0]}] is {r_A[bad[0]]}, not 0 or 1; pass the 0/1 success, not a graded reward")
    return np.where(r_A == 1, v, 1.0 - v)


def prefix_value(agreement: ArrayLike, num_continuations: ArrayLike) -> np.ndarray:
    """The chance that one of k continuations ends otherwise, `1 - q^k` (paper Eq. 14-15); float64, broadcast."""
    return 1.0 - np.asarray(agreement, dtype=np.float64) ** np.asarray(num_continuations)


def allocate_prefixes(agreement: ArrayLike, total: int, *, rng: np.random.Generator | None = None) -> np.ndarray:
    """Maximises `sum_a (1 - q_a^K_a)` subject to `sum_a K_a = total`, K_a >= 0 (paper Eq. 16).

    Continuation k of an anchor gains `q^(k-1) (1-q)`, never more than the one before it, so handing out each to the
    anchor that gains most is exact. Where gains are equal, also where they underflow to 0, the anchor with the fewest
    continuations is served first (our choice).

    With S draws of each q (ours), it maximises `sum_a mean_s (1 - q_sa^K_a)`. The gains, mean_s q_s^(k-1) (1-q_s), are
    means of non-increasing sequences and so do not increase either: the same greedy is exact.

    Args:
      agreement: q float [A] in [0, 1], the anchors of one prompt; or float [S, A], S draws of it. A single draw is the
        prediction itself.
      total: m_i N, continuations to hand out.
      rng: breaks the remaining ties by a random permutation of the anchors; None breaks them by index.

    Returns:
      K int64 [A], whose sum is `total` exactly.

    Raises:
      ValueError: q is no vector of probabilities or of draws of them, total < 0, or there is no anchor to spend a
        positive total on.
    """
    q_SA = np.atleast_2d(checks.probability_draws("agreement", agreement))
    total, size = checks.whole_total(total), q_SA.shape[1]
    if total and not size:
        raise ValueError(f"total is {total}, but the prompt has no anchor; spend it on root rollouts instead")
    order_A = tie_order(size, rng)
    q_SA = q_SA[:, order_A]
    gain = _flip_gain(q_SA[0]) if len(q_SA) == 1 else power_gains((1.0 - q_SA) / len(q_SA), q_SA)
    k_A = np.empty(size, dtype=np.int64)
    k_A[order_A] = greedy_counts(size, total, gain, max_count=total)
    return k_A


def _flip_gain(q_A: np.ndarray) -> Callable[[int, int], float]:
    """`gain(i, k)`: what anchor i gains by continuation k + 1."""
    q, flip = q_A.tolist(), (1.0 - q_A).tolist()
    return lambda i, k: q[i] ** k * flip[i]
