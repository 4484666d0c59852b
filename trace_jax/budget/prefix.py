"""Stage 2: how many continuations each anchor of a prompt receives (paper Eq. 14-16)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trace_jax.budget import checks
from trace_jax.budget.greedy import greedy_counts, tie_order


def agreement(success: ArrayLike, value: ArrayLike) -> np.ndarray:
    """The chance that one fresh continuation repeats what happened, `q = r V + (1 - r)(1 - V)` (paper Eq. 14-15).

    Args:
      success: r [A], 0 or 1: the outcome of the bare rollout on which each anchor lies.
      value: V float [A] in [0, 1]: the predicted success rate from each anchor.

    Returns:
      q float64 [A].

    Raises:
      ValueError: a success other than 0 and 1, a value outside [0, 1], or unequal shapes.
    """
    r_A = checks.probability_vector("success", success)
    v_A = checks.probability_vector("value", value)
    if r_A.shape != v_A.shape:
        raise ValueError(f"success has {r_A.size} entries and value {v_A.size}; pass one of each per anchor")
    bad = np.flatnonzero((r_A != 0) & (r_A != 1))
    if bad.size:
        raise ValueError(f"success[{bad[0]}] is {r_A[bad[0]]}, not 0 or 1; pass the 0/1 success, not a graded reward")
    return np.where(r_A == 1, v_A, 1.0 - v_A)


def prefix_value(agreement: ArrayLike, num_continuations: ArrayLike) -> np.ndarray:
    """The chance that one of k continuations ends otherwise, `1 - q^k` (paper Eq. 14-15); float64, broadcast."""
    return 1.0 - np.asarray(agreement, dtype=np.float64) ** np.asarray(num_continuations)


def allocate_prefixes(agreement: ArrayLike, total: int, *, rng: np.random.Generator | None = None) -> np.ndarray:
    """Maximises `sum_a (1 - q_a^K_a)` subject to `sum_a K_a = total`, K_a >= 0 (paper Eq. 16).

    Continuation k of an anchor gains `q^(k-1) (1-q)`, never more than the one before it, so handing out each to the
    anchor that gains most is exact. Where gains are equal, also where they underflow to 0, the anchor with the fewest
    continuations is served first (our choice).

    Args:
      agreement: q float [A] in [0, 1], the anchors of one prompt.
      total: m_i N, continuations to hand out.
      rng: breaks the remaining ties by a random permutation of the anchors; None breaks them by index.

    Returns:
      K int64 [A], whose sum is `total` exactly.

    Raises:
      ValueError: q is not a vector of probabilities, total < 0, or there is no anchor to spend a positive total on.
    """
    q_A = checks.probability_vector("agreement", agreement)
    total = checks.whole_total(total)
    if total and not q_A.size:
        raise ValueError(f"total is {total}, but the prompt has no anchor; spend it on root rollouts instead")
    order_A = tie_order(q_A.size, rng)
    q, flip = q_A[order_A].tolist(), (1.0 - q_A[order_A]).tolist()
    k_A = np.empty(q_A.size, dtype=np.int64)
    k_A[order_A] = greedy_counts(q_A.size, total, lambda i, k: q[i] ** k * flip[i], max_count=total)
    return k_A
