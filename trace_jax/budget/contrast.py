"""What m root rollouts of a prompt are worth: tables of objectives for `root_dp.allocate_table`.

Each function takes v float [B] in [0, 1], or float [S, B] for S draws of it, and `cap`. It returns the value of
m = 0..cap rollouts, the mean over draws, float64 [B, cap + 1]. The first two columns are 0, since a lone
rollout has no contrast. ValueError where v has another shape, or is outside [0, 1] or NaN. Clamping is the caller's
(`root.clamp_probability`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from trace_jax.budget import checks

RootObjective = Callable[[ArrayLike, int], np.ndarray]  # (v [B] or [S, B], cap) -> values [B, cap + 1]

_BLOCK = 512  # binomials at once: two buffers of 65 outcomes fit a core's cache


def any_contrast(success_probability: ArrayLike, cap: int) -> np.ndarray:
    """V_root, the chance that the rollouts do not all end alike: `1 - v^m - (1-v)^m` (paper Eq. 12-13)."""
    v_SB = _draws(success_probability)
    table_BM = _zeros(v_SB, cap)
    success_SB, failure_SB = v_SB.copy(), 1.0 - v_SB  # v^m and (1-v)^m
    for m in range(2, cap + 1):
        success_SB *= v_SB
        failure_SB *= 1.0 - v_SB
        table_BM[:, m] = (1.0 - success_SB - failure_SB).mean(axis=0)
    return table_BM


def pairs(success_probability: ArrayLike, cap: int) -> np.ndarray:
    """Expected number of unlike pairs per rollout, `E[k(m-k)] / m = (m-1) v(1-v)`, k of m rollouts succeed (ours).

    Of the m(m-1)/2 pairs each is unlike with chance 2v(1-v). Why pairs: a group's policy gradient is a sum over its
    pairs, `sum_s (R_s - mean R) g_s = (1/m) sum_{u<v} (R_u - R_v)(g_u - g_v)`, and only unlike pairs add to it.

    It is linear in m, so its optimum pours the budget into the prompts nearest one half, each up to the cap: it needs a
    `max_per_prompt`.
    """
    v_SB = _draws(success_probability)
    table_BM = _zeros(v_SB, cap)
    unlike_B = (v_SB * (1.0 - v_SB)).mean(axis=0)
    table_BM[:, 2:] = unlike_B[:, None] * np.arange(1, cap)
    return table_BM


def advantage_mass(success_probability: ArrayLike, cap: int) -> np.ndarray:
    """Expected mean absolute advantage of the group, `E[2 sqrt(p(1-p))]`, p = k/m, k ~ Binomial(m, v) (ours).

    Of m rewards in {0, 1}, a share p is 1. Their mean is p, their population variance p(1-p), so k rollouts have the
    advantage (1-p)/sigma and m-k have -p/sigma, and `sum_i |A_i| / m = [p(1-p) + (1-p)p] / sigma = 2 sqrt(p(1-p))`.
    It is 1 for a balanced group and 0 for one without contrast; unlike V_root it tells a balanced eight from one odd
    rollout among eight.

    The binomials follow from each other by `P_m(k) = v P_(m-1)(k-1) + (1-v) P_(m-1)(k)`: sums of positive terms, which
    keeps them accurate for every m. Time O(B S cap^2).
    """
    v_SB = _draws(success_probability)
    flat_R = v_SB.ravel()
    value_RM = np.concatenate(
        [_advantage_mass(flat_R[start : start + _BLOCK], cap) for start in range(0, max(flat_R.size, 1), _BLOCK)]
    )
    return value_RM.reshape(*v_SB.shape, cap + 1).mean(axis=0)


def _advantage_mass(v_R: np.ndarray, cap: int) -> np.ndarray:
    w_R = 1.0 - v_R
    value_MR = np.zeros((cap + 1, v_R.size))
    chance_KR, scratch_KR = np.zeros((2, cap + 1, v_R.size))  # chance_KR[k]: that k of m rollouts succeed
    chance_KR[0] = 1.0
    for m in range(1, cap + 1):
        np.multiply(chance_KR[:m], v_R, out=scratch_KR[:m])
        chance_KR[: m + 1] *= w_R
        chance_KR[1 : m + 1] += scratch_KR[:m]
        k = np.arange(m + 1)
        value_MR[m] = 2.0 * np.sqrt(k * (m - k)) / m @ chance_KR[: m + 1]
    return value_MR.T


def _draws(success_probability: ArrayLike) -> np.ndarray:
    return np.atleast_2d(checks.probability_draws("success_probability", success_probability))


def _zeros(v_SB: np.ndarray, cap: int) -> np.ndarray:
    return np.zeros((v_SB.shape[1], cap + 1))
