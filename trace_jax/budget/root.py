"""Stage 1: how many root rollouts each prompt of the pool receives (paper Eq. 12-13)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from trace_jax.budget import checks
from trace_jax.budget.greedy import greedy_counts, tie_order

MIN_PROBABILITY = 1e-3  # our choice: a saturated predictor would make every prompt worth 0, all of them tied

_FLAT_GAINS = 3  # of the envelope: rollouts 1, 2 and 3 of a prompt gain v(1 - v) each


def root_value(success_probability: ArrayLike, num_rollouts: ArrayLike) -> np.ndarray:
    """The chance that m rollouts of a prompt do not all end alike, `1 - v^m - (1-v)^m` (paper Eq. 12-13).

    Args:
      success_probability: v in [0, 1], any shape.
      num_rollouts: m >= 0, broadcast against v. The value of m = 0 and m = 1 is 0.

    Returns:
      float64, the broadcast shape.
    """
    v, m = np.asarray(success_probability, dtype=np.float64), np.asarray(num_rollouts)
    return np.where(m >= 2, 1.0 - v**m - (1.0 - v) ** m, 0.0)


def clamp_probability(success_probability: ArrayLike) -> np.ndarray:
    """Moves v into [MIN_PROBABILITY, 1 - MIN_PROBABILITY]; float64 [B]. ValueError where v is outside [0, 1] or NaN."""
    v = checks.probability_vector("success_probability", success_probability)
    return np.clip(v, MIN_PROBABILITY, 1.0 - MIN_PROBABILITY)


def feasible_cap(pool_size: int, total: int, max_per_prompt: int | None) -> int:
    """The most rollouts that one prompt can receive, `min(total, max_per_prompt)`.

    Raises:
      ValueError: no m_i in {0, 2, 3, ..., max_per_prompt} sum to `total`.
    """
    total = checks.whole_total(total)
    if max_per_prompt is not None and max_per_prompt < 2:
        raise ValueError(f"max_per_prompt is {max_per_prompt}; use 2 or more, or None for no limit")
    if total == 1:
        raise ValueError("total is 1, and a lone rollout has nothing to contrast with; use 0, or 2 and more")
    cap = total if max_per_prompt is None else min(total, max_per_prompt)
    if pool_size * cap < total:
        raise ValueError(
            f"total is {total}, but {pool_size} prompts with at most {cap} rollouts each take {pool_size * cap}; "
            "lower the total, enlarge the pool or raise max_per_prompt"
        )
    if cap == 2 and total % 2:
        raise ValueError(f"total is {total}, but 0 or 2 rollouts each make an even sum; change total or max_per_prompt")
    return cap


def allocate_roots(
    success_probability: ArrayLike,
    total: int,
    *,
    max_per_prompt: int | None = None,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Maximises `sum_i V_root(v_i, m_i)` subject to `sum_i m_i = total`, `m_i in {0, 2, 3, ...}` (paper Eq. 13).

    Exact for the clamped v (`clamp_probability`, our choice). The paper asks for dynamic programming; this is a
    faster way to the same optimum (ours), O(total log B):

    With p = v(1-v), rollout m + 1 of a prompt gains `p [v^(m-1) + (1-v)^(m-1)]`, but the first one gains 0, so V_root
    is not concave from m = 0. The envelope f(0) = 0, f(1) = p, f(m) = V_root(m) is: its gains are p, p, p, p(1-2p), ...
    It agrees with V_root wherever m != 1, so a greedy optimum of f without an m_i = 1 is the optimum. Since a prompt is
    opened with its three equal gains at once, at most one prompt ends with m_i = 1, and `_repair` mends it.

    Args:
      success_probability: v float [B] in [0, 1], the predicted success rate of each prompt.
      total: M, rollouts to hand out; 0, or 2 and more.
      max_per_prompt: the most rollouts that a prompt may receive, at least 2; None for no limit (the paper has none).
      rng: breaks ties by a random permutation of the prompts; None breaks them by index.

    Returns:
      m int64 [B], whose sum is `total` exactly.

    Raises:
      ValueError: v is not a vector of probabilities, or no allocation exists (`feasible_cap`).
    """
    v_B = clamp_probability(success_probability)
    cap = feasible_cap(v_B.size, total, max_per_prompt)
    order_B = tie_order(v_B.size, rng)
    gain = _envelope_gain(v_B[order_B])
    counts = greedy_counts(v_B.size, total, gain, max_count=cap, opening=min(_FLAT_GAINS, cap))
    _repair(counts, gain, cap)
    m_B = np.empty(v_B.size, dtype=np.int64)
    m_B[order_B] = counts
    return m_B


def _envelope_gain(v_B: np.ndarray) -> Callable[[int, int], float]:
    """`gain(i, m)`: what f_i gains by its rollout m + 1."""
    v, w, p = v_B.tolist(), (1.0 - v_B).tolist(), (v_B * (1.0 - v_B)).tolist()

    def gain(i: int, m: int) -> float:
        return p[i] if m < _FLAT_GAINS else p[i] * (v[i] ** (m - 1) + w[i] ** (m - 1))

    return gain


def _repair(counts: list[int], gain: Callable[[int, int], float], cap: int) -> None:
    """Turns an optimum of the envelope with one m_l = 1 into an optimum of V_root, in place.

    The better of two moves: (A) l gives its rollout to the open prompt that gains most; (B) l takes a second rollout
    from the open prompt that loses least. Why no other allocation is better: let lam = p_l be the gain of the last unit
    that the greedy handed out. An allocation's distance from the relaxed optimum is the sum over prompts of
    [f_i(m_i) - lam m_i] - [f_i(m'_i) - lam m'_i], and no term is negative, because m_i maximises f_i(m) - lam m.
    * m'_l = 0: the others hold one unit more. If an open prompt grew, its term is at least lam - (its next gain): A.
      If instead a closed one was opened, it took two or more, so some other prompt lost one: next case.
    * m'_l >= 2, or as just said: some open prompt i != l shrank, its term is at least (its last gain) - lam: B.
    B leaves i with m_i >= 2, because every open prompt but l holds at least three. A cap of 3 or more changes
    nothing but the set of prompts that can grow. Under a cap of 2 units go out in pairs and the total is even, so that
    there is nothing to repair.
    """
    if 1 not in counts:
        return
    half = counts.index(1)
    lam = gain(half, 0)
    open_prompts = [i for i, m in enumerate(counts) if m >= 2]
    loser = min(open_prompts, key=lambda i: gain(i, counts[i] - 1))
    can_grow = [i for i in open_prompts if counts[i] < cap]
    winner = max(can_grow, key=lambda i: gain(i, counts[i]), default=None)
    if winner is not None and lam - gain(winner, counts[winner]) < gain(loser, counts[loser] - 1) - lam:
        counts[half] -= 1
        counts[winner] += 1
    else:
        counts[half] += 1
        counts[loser] -= 1
