"""Stage 1: how many root rollouts each prompt of the pool receives (paper Eq. 12-13)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from trace_jax.budget import checks
from trace_jax.budget.greedy import greedy_counts, power_gains, tie_order

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
    """Moves v into [MIN_PROBABILITY, 1 - MIN_PROBABILITY]; float64 [B], or [S, B] for S draws of each.

    ValueError where v has another shape, or is outside [0, 1] or NaN.
    """
    v = checks.probability_draws("success_probability", success_probability)
    return np.clip(v, MIN_PROBABILITY, 1.0 - MIN_PROBABILITY)


def is_feasible(pool_size: int, total: int, max_per_prompt: int | None, min_per_prompt: int = 2) -> bool:
    """Whether some m_i in {0} u {min_per_prompt, ..., max_per_prompt} sum to `total` over `pool_size` prompts.

    n open prompts take any total from n min to n cap, cap = min(total, max_per_prompt), so some n <= pool_size must
    have n min <= total <= n cap; the smallest n that the cap allows, ceil(total / cap), decides.
    """
    if total == 0:
        return True
    fewest = -(-total // (total if max_per_prompt is None else min(total, max_per_prompt)))
    return fewest <= pool_size and fewest * min_per_prompt <= total


def feasible_cap(pool_size: int, total: int, max_per_prompt: int | None, min_per_prompt: int = 2) -> int:
    """The most rollouts that one prompt can receive, `min(total, max_per_prompt)`.

    Raises:
      ValueError: no allocation exists (`is_feasible`), or limits that no group can have.
    """
    total, least = checks.whole_total(total), min_per_prompt
    if least < 2:
        raise ValueError(f"min_per_prompt is {least}, but a lone rollout has nothing to contrast with; use 2 or more")
    if max_per_prompt is not None and max_per_prompt < least:
        raise ValueError(f"max_per_prompt is {max_per_prompt}; use {least} or more, or None for no limit")
    if 0 < total < least:
        why = "a lone rollout has nothing to contrast with" if least == 2 else f"min_per_prompt is {least}"
        raise ValueError(f"total is {total}, and {why}; use 0, or {least} and more")
    cap = total if max_per_prompt is None else min(total, max_per_prompt)
    if pool_size * cap < total:
        raise ValueError(
            f"total is {total}, but {pool_size} prompts with at most {cap} rollouts each take {pool_size * cap}; "
            "lower the total, enlarge the pool or raise max_per_prompt"
        )
    if not is_feasible(pool_size, total, cap, least):
        if cap == 2:
            raise ValueError(
                f"total is {total}, but 0 or 2 rollouts each make an even sum; change total or max_per_prompt"
            )
        full = total // cap
        raise ValueError(
            f"total is {total}, but {full} prompts with at most {cap} rollouts each take {full * cap} and "
            f"{full + 1} with at least {least} each take {(full + 1) * least}; change total or one of the limits"
        )
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

    With S draws v_s of a belief about each v (ours), it maximises `sum_i mean_s V_root(v_si, m_i)`, expected V_root.
    Its gains are the means over s of those above: 0, then mean_s p_s [v_s^(m-1) + (1-v_s)^(m-1)]. The mean of the
    envelopes is concave, as every one of them is; its first three gains are equal, mean_s p_s each, as they are in
    every one of them; and it agrees with the mean of V_root wherever m != 1. Nothing else is asked of f above and in
    `_repair`, so the same greedy is exact.

    Args:
      success_probability: v float [B] in [0, 1], the predicted success rate of each prompt; or float [S, B], S draws of
        it. A single draw is the prediction itself.
      total: M, rollouts to hand out; 0, or 2 and more.
      max_per_prompt: the most rollouts that a prompt may receive, at least 2; None for no limit (the paper has none).
      rng: breaks ties by a random permutation of the prompts; None breaks them by index.

    Returns:
      m int64 [B], whose sum is `total` exactly.

    Raises:
      ValueError: v is no vector of probabilities or of draws of them, or no allocation exists (`feasible_cap`).
    """
    v_SB = np.atleast_2d(clamp_probability(success_probability))
    size = v_SB.shape[1]
    cap = feasible_cap(size, total, max_per_prompt)
    order_B = tie_order(size, rng)
    v_SB = v_SB[:, order_B]
    gain = _envelope_gain(v_SB[0]) if len(v_SB) == 1 else _expected_envelope_gain(v_SB)
    counts = greedy_counts(size, total, gain, max_count=cap, opening=min(_FLAT_GAINS, cap))
    _repair(counts, gain, cap)
    m_B = np.empty(size, dtype=np.int64)
    m_B[order_B] = counts
    return m_B


def _envelope_gain(v_B: np.ndarray) -> Callable[[int, int], float]:
    """`gain(i, m)`: what f_i gains by its rollout m + 1."""
    v, w, p = v_B.tolist(), (1.0 - v_B).tolist(), (v_B * (1.0 - v_B)).tolist()

    def gain(i: int, m: int) -> float:
        return p[i] if m < _FLAT_GAINS else p[i] * (v[i] ** (m - 1) + w[i] ** (m - 1))

    return gain


def _expected_envelope_gain(v_SB: np.ndarray) -> Callable[[int, int], float]:
    """`gain(i, m)`: what the mean over S draws of f_i gains by rollout m + 1."""
    p_SB = v_SB * (1.0 - v_SB) / len(v_SB)
    later = power_gains(np.concatenate([p_SB, p_SB]), np.concatenate([v_SB, 1.0 - v_SB]))
    first = p_SB.sum(axis=0).tolist()
    return lambda i, m: first[i] if m < _FLAT_GAINS else later(i, m - 1)


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
