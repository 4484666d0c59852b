"""How much contrast an allocation buys, judged by measured success rates. Arrays in, numbers out; all of it ours.

A predictor is scored by what the allocator does with it. Every prompt (or anchor) has some rollouts outside of any
budget. One half of them allocates for the oracle, the other half judges every allocation; an oracle judged by the
rollouts that it chose with would look better than the truth. Learned scores must know neither half.

Chances of m rollouts that end alike are estimated without bias: plugging the rate k/R of R rollouts into v^m is too
high on average (v^m is convex), so contrast would look too rare, most of all near 0 and 1. The share of the m-subsets
of the R rollouts that are all right, C(k, m) / C(R, m), has the mean v^m exactly. Where m > R there is no such subset,
and k/R is plugged in after all; the reports say for which share of what was chosen (`plugged_in`).

A report is a dict of floats for each named predictor, for "oracle", which allocates by the rates of the choosing half
(and is only as good as they are), and for "uniform", which knows nothing. That of a named predictor also holds, for
each measure, `shuffled_<measure>`, the mean over random permutations of its scores, and its own measure as a share of
the oracle's and of the shuffled one; NaN where that is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from trace_jax.budget.prefix import agreement, allocate_prefixes
from trace_jax.budget.root import allocate_roots

_RESERVED = ("uniform", "oracle")

# (scores [B] or [S, B], M, rng) -> root rollouts int [B] of that sum
Allocate = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Measured:
    """How many of each item's rollouts were right. ValueError for counts that are no such counts."""

    successes: np.ndarray  # int [n], 0 <= k <= R
    rollouts: np.ndarray  # int [n], R >= 1; one number stands for all

    def __post_init__(self) -> None:
        k, size = np.asarray(self.successes), np.asarray(self.rollouts)
        if k.ndim != 1 or size.shape not in ((), k.shape):
            raise ValueError(f"measured: {k.shape} successes and {size.shape} rollouts; pass two vectors of one length")
        if not (np.issubdtype(k.dtype, np.integer) and np.issubdtype(size.dtype, np.integer)):
            raise ValueError(f"measured: counts must be integers, not {k.dtype} and {size.dtype}")
        size = np.broadcast_to(size, k.shape)
        bad = np.flatnonzero((k < 0) | (k > size) | (size < 1))
        if bad.size:
            raise ValueError(f"measured: item {bad[0]} has {k[bad[0]]} successes of {size[bad[0]]} rollouts")
        object.__setattr__(self, "successes", k.astype(np.int64))
        object.__setattr__(self, "rollouts", size.astype(np.int64))

    @property
    def rate(self) -> np.ndarray:
        """float64 [n]; k / R."""
        return self.successes / self.rollouts


def split_half(measured: Measured, rng: np.random.Generator) -> tuple[Measured, Measured]:
    """Two halves of each item's rollouts, drawn without replacement: (for choosing, for judging).

    Independent of each other given the true rates. The first has floor(R / 2). Raises ValueError where R < 2.
    """
    if np.any(measured.rollouts < 2):
        raise ValueError(f"measured: an item has {measured.rollouts.min()} rollout; halves need at least 2")
    k, half = measured.successes, measured.rollouts // 2
    first = rng.hypergeometric(k, measured.rollouts - k, half)
    return Measured(first, half), Measured(k - first, measured.rollouts - half)


def contrast_chance(measured: Measured, m: ArrayLike) -> np.ndarray:
    """float64 [n]; unbiased for `1 - v^m - (1-v)^m` where 2 <= m <= R, else as the module says; 0 where m < 2.

    Args:
      m: int [n], or one number, >= 0.
    """
    k, m = measured.successes, np.broadcast_to(m, measured.successes.shape)
    alike = _all_right(k, measured.rollouts, m) + _all_right(measured.rollouts - k, measured.rollouts, m)
    return np.where(m >= 2, 1.0 - alike, 0.0)


def flip_chance(measured: Measured, outcome: ArrayLike, copies: ArrayLike) -> np.ndarray:
    """float64 [n]; unbiased for `1 - q^K`, the chance that one of K continuations ends otherwise (paper Eq. 14-15).

    Args:
      measured: the continuations of each anchor.
      outcome: r [n], 0 or 1: the factual outcome.
      copies: K int [n], or one number, >= 0; K <= R for no bias.
    """
    k, copies = measured.successes, np.broadcast_to(copies, measured.successes.shape)
    same = np.where(np.asarray(outcome) == 1, k, measured.rollouts - k)
    return 1.0 - _all_right(same, measured.rollouts, copies)


def brier(probability: ArrayLike, measured: Measured) -> float:
    """Brier score, the mean over all single rollouts: of an item with k of R, `p^2 - 2 p k/R + k/R`; NaN without items.

    A perfect predictor gets the mean of v(1-v), not 0.
    """
    p, (k, size) = np.asarray(probability, np.float64), (measured.successes, measured.rollouts)
    return float(np.sum(size * p**2 - 2 * p * k + k) / np.sum(size)) if p.size else float("nan")


def class_rates(group: ArrayLike, measured: Measured) -> np.ndarray:
    """float64 [n]; the success rate of the other items of each item's class: what knowing the class alone predicts.

    An item without others in its class gets the rate of all others, a lone item 1/2.

    Args:
      group: [n], the class of each item (numbers or strings).
      measured: the rollouts to take rates from.
    """
    _, index = np.unique(np.asarray(group), return_inverse=True)
    k, size = measured.successes, measured.rollouts
    other_k, other = (np.bincount(index, weights=v)[index] - v for v in (k, size))
    all_k, all_size = k.sum() - k, size.sum() - size
    overall = np.where(all_size > 0, all_k / np.maximum(all_size, 1), 0.5)
    return np.where(other > 0, other_k / np.maximum(other, 1), overall)


def root_regret(
    scores: Mapping[str, np.ndarray],
    chosen: Measured,
    judged: Measured,
    root_budget: int,
    rng: np.random.Generator,
    *,
    allocate: Allocate | None = None,
    uniform_rollouts: int = 8,
    permutations: int = 20,
) -> dict[str, dict[str, float]]:
    """Stage 1: what an allocator buys with each predictor's scores.

    Args:
      scores: of each named predictor float [B] in [0, 1], or [S, B], S draws; not named "uniform" or "oracle".
      chosen, judged: two halves of the prompts' rollouts, for the oracle's choice and to judge all.
      root_budget: M, at least 2.
      rng: ties and permutations.
      allocate: the allocator, which must spend M exactly; None is `allocate_roots` without a limit, the paper's.
      uniform_rollouts: G of "uniform": G rollouts for each prompt of a random subset, in the mean over all subsets
        (which is the mean over all prompts).
      permutations: of a predictor's scores over the prompts, for its control.

    Returns:
      `effective_ratio`: expected share of active prompts with contrast among their bare rollouts; shares of it are
      `share_of_oracle`, `share_of_shuffled`. `groups_per_unit`: expected number of such prompts per rollout, which is
      what the paper's allocator maximises; `groups_share_of_oracle`, `groups_share_of_shuffled`. `active`: number of
      active prompts (NaN for "uniform", whose subset is left open). `plugged_in`: share of them with m > R.

    Raises:
      ValueError: scores of another length or name, or what the allocator rejects.
    """
    if root_budget < 2:
        raise ValueError(f"root_budget is {root_budget}; without 2 rollouts there is nothing to judge")

    allocate = allocate or _paper

    def spend(values: np.ndarray) -> dict[str, float]:
        return _judge_roots(judged, allocate(values, root_budget, rng))

    uniform = _judge_roots(judged, np.full(judged.successes.size, uniform_rollouts)) | {"active": float("nan")}
    report = {"uniform": uniform, "oracle": spend(chosen.rate)}
    shares = {"effective_ratio": "share", "groups_per_unit": "groups_share"}
    return report | _compared(scores, spend, report["oracle"], judged, rng, permutations, shares)


def prefix_regret(
    scores: Mapping[str, np.ndarray],
    chosen: Measured,
    judged: Measured,
    outcome: ArrayLike,
    prompt: ArrayLike,
    total: ArrayLike,
    rng: np.random.Generator,
    *,
    permutations: int = 20,
) -> dict[str, dict[str, float]]:
    """Stage 2: what `allocate_prefixes` buys with each predictor's scores of A anchors, prompt by prompt.

    Args:
      scores, chosen, judged: as in `root_regret`, for A anchors.
      outcome: r [A], 0 or 1: the outcome of the bare rollout on which each anchor lies.
      prompt: [A], the prompt of each anchor.
      total: continuations of each prompt, int [P] in the order of `np.unique(prompt)`, or one number for all.
      rng: ties and permutations; a permutation moves scores among all anchors.
      permutations: of a predictor's scores, for its control.

    Returns:
      `flips_per_continuation`: expected number of anchors whose outcome flips, per continuation, nested anchors counted
      as if they were independent (as the allocator's objective does); shares of it are `share_of_oracle`,
      `share_of_shuffled`. `forked`: number of anchors with a continuation. `plugged_in`: share of them with K > R.
      "uniform" is as even as can be within a prompt, the rest on random anchors; all figures in the mean.

    Raises:
      ValueError: scores of another length or name, a budget of 0, or what `agreement` and `allocate_prefixes` reject.
    """
    r_A = np.asarray(outcome)
    prompts, index = np.unique(np.asarray(prompt), return_inverse=True)
    total_P = np.broadcast_to(total, prompts.shape)
    if total_P.sum() < 1 or r_A.shape != judged.successes.shape or index.shape != r_A.shape:
        raise ValueError(
            f"{total_P.sum()} continuations for {judged.successes.size} anchors, {r_A.size} outcomes and "
            f"{index.size} prompts' names; pass at least 1, and one of each per anchor"
        )
    members = [np.flatnonzero(index == i) for i in range(prompts.size)]

    def spend(values: np.ndarray) -> dict[str, float]:
        q, k_A = agreement(r_A, values), np.zeros(index.shape, np.int64)
        for at, budget in zip(members, total_P.tolist(), strict=True):
            k_A[at] = allocate_prefixes(q[..., at], budget, rng=rng)
        return _judge_forks(judged, r_A, [(1.0, k_A)])

    uniform = _judge_forks(judged, r_A, _even_spread(index, total_P))
    report = {"uniform": uniform, "oracle": spend(chosen.rate)}
    shares = {"flips_per_continuation": "share"}
    return report | _compared(scores, spend, report["oracle"], judged, rng, permutations, shares)


def _paper(scores: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    return allocate_roots(scores, total, rng=rng)


def _judge_roots(judged: Measured, m_B: np.ndarray) -> dict[str, float]:
    chance, active = contrast_chance(judged, m_B), m_B > 0
    return {
        "effective_ratio": float(chance[active].mean()),
        "groups_per_unit": float(chance.sum() / m_B.sum()),
        "active": float(active.sum()),
        "plugged_in": float((m_B > judged.rollouts)[active].mean()),
    }


def _even_spread(index_A: np.ndarray, total_P: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(chance, K) pairs: floor(total / anchors) for each anchor of a prompt, and one more for a random set of them."""
    anchors_A = np.bincount(index_A)[index_A]
    even_A, more_A = total_P[index_A] // anchors_A, total_P[index_A] % anchors_A / anchors_A
    return [(1.0 - more_A, even_A), (more_A, even_A + 1)]


def _judge_forks(
    judged: Measured, r_A: np.ndarray, mixture: list[tuple[np.ndarray | float, np.ndarray]]
) -> dict[str, float]:
    """Of allocations of which each anchor has K with some chance: (chance, K) pairs."""
    flips, forked, beyond, total = (
        float(sum(np.sum(chance * of(k)) for chance, k in mixture))
        for of in (
            lambda k: flip_chance(judged, r_A, k),
            lambda k: k > 0,
            lambda k: k > judged.rollouts,
            lambda k: k,
        )
    )
    return {"flips_per_continuation": flips / total, "forked": forked, "plugged_in": beyond / forked}


def _compared(
    scores: Mapping[str, np.ndarray],
    spend: Callable[[np.ndarray], dict[str, float]],
    oracle: dict[str, float],
    judged: Measured,
    rng: np.random.Generator,
    permutations: int,
    shares: Mapping[str, str],
) -> dict[str, dict[str, float]]:
    """Each predictor's report: its own, its permutations' mean, and the shares (by measure: how their names begin)."""
    if permutations < 1:
        raise ValueError(f"permutations is {permutations}; use at least 1")
    report = {}
    for name, values in scores.items():
        values = np.asarray(values, np.float64)
        if name in _RESERVED or values.shape[-1:] != judged.successes.shape:
            raise ValueError(
                f"scores {name!r} have shape {values.shape} for {judged.successes.size} items; pass one each, under a "
                f"name other than {' and '.join(_RESERVED)}"
            )
        own = spend(values)
        shuffled = [spend(rng.permutation(values, axis=-1)) for _ in range(permutations)]
        for measure, share in shares.items():
            control = float(np.mean([each[measure] for each in shuffled]))
            own[f"shuffled_{measure}"] = control
            own[f"{share}_of_oracle"] = _ratio(own[measure], oracle[measure])
            own[f"{share}_of_shuffled"] = _ratio(own[measure], control)
        report[name] = own
    return report


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def _all_right(k: np.ndarray, size: np.ndarray, m: np.ndarray) -> np.ndarray:
    """float64 [n]; `C(k, m) / C(R, m) = prod_{i<m} (k - i) / (R - i)` where m <= R, `(k/R)^m` beyond."""
    i = np.arange(int(np.max(np.minimum(m, size), initial=0)))[:, None]
    factors = np.where(i < m, np.maximum(k - i, 0) / np.maximum(size - i, 1), 1.0)
    return np.where(m <= size, np.prod(factors, axis=0), (k / size) ** m)
