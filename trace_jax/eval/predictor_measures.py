"""How good a predictor is where it counts, from its scores and measured success rates. Flat dicts of floats; all ours.

Learned scores are judged by all rollouts of an item, an allocation by half of them (`eval/regret.py`). Three references
stand beside a Brier score: the rate of the other items of the same class (what knowing the class alone predicts), the
rate of all other items (a constant), and the true rates, whose mean v(1-v) is estimated without bias from k of R by
k(R-k) / (R(R-1)). Anchors of one prompt are in one class, so theirs knows a little more than a class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trace_jax.eval import regret
from trace_jax.eval.regret import Measured
from trace_jax.objectives import calibration

LEARNED = "learned"
DEEPEST = 4  # depths from here on are one, as in the metrics of a run
ROOT_MEASURES = ("effective_ratio", "groups_per_unit")
PREFIX_MEASURE = "flips_per_continuation"
ALLOCATIONS = ("uniform", "shuffled", LEARNED, "oracle")


@dataclasses.dataclass(frozen=True)
class Scored:
    """Prompts or anchors with their scores and what came of fresh rollouts."""

    score: np.ndarray  # float [n] in [0, 1], or [S, n]: S draws of each
    measured: Measured
    group: Sequence[str]  # the class of each
    depth: np.ndarray  # int [n]; turns behind it, 0 for a prompt

    @property
    def probability(self) -> np.ndarray:
        """float64 [n]; the score, the mean of its draws."""
        return np.atleast_2d(np.asarray(self.score, np.float64)).mean(axis=0)

    @property
    def size(self) -> int:
        """Number of items."""
        return int(self.depth.shape[0])

    def part(self, chosen: np.ndarray) -> Scored:
        """The items that an index or a mask chooses."""
        measured = Measured(self.measured.successes[chosen], self.measured.rollouts[chosen])
        group = np.asarray(self.group)[chosen].tolist()
        return Scored(np.asarray(self.score)[..., chosen], measured, group, self.depth[chosen])


def quality(items: Scored) -> dict[str, float]:
    """`items`, `success` (mean rate), `bias` (mean score - mean rate), `brier`, its references `brier_class`,
    `brier_constant`, `brier_perfect`, `ece` and `spearman` (both against the measured rates); NaN without items."""
    p, measured = items.probability, items.measured
    if not items.size:
        names = ("success", "bias", "brier", "brier_class", "brier_constant", "brier_perfect", "ece", "spearman")
        return {"items": 0.0} | dict.fromkeys(names, float("nan"))
    return {
        "items": float(items.size),
        "success": float(measured.rate.mean()),
        "bias": float(np.mean(p - measured.rate)),
        "brier": regret.brier(p, measured),
        "brier_class": regret.brier(_class_rates(items), measured),
        "brier_constant": regret.brier(regret.class_rates(np.zeros(items.size), measured), measured),
        "brier_perfect": perfect_brier(measured),
        "ece": calibration.ece(p, measured.rate),
        "spearman": calibration.spearman(p, measured.rate),
    }


def perfect_brier(measured: Measured) -> float:
    """Unbiased for the Brier score of the true rates, sum_i R_i v_i (1 - v_i) / sum_i R_i; every R at least 2."""
    k, size = measured.successes, measured.rollouts
    return float(np.sum(k * (size - k) / (size - 1)) / np.sum(size))


def by_depth(roots: Scored, anchors: Scored) -> dict[str, float]:
    """`depth_D/items`, `bias`, `brier`, `brier_class`, `brier_perfect` of D = 0 (roots) to 4 (four turns or more).

    The class of an anchor is its prompt's class and its depth. Depths without items are left out.
    """
    kept, report = ("items", "bias", "brier", "brier_class", "brier_perfect"), {}
    pooled = np.minimum(anchors.depth, DEEPEST)
    for depth in range(DEEPEST + 1):
        part = roots if depth == 0 else anchors.part(pooled == depth)
        if part.size:
            found = quality(part)
            report |= {f"depth_{depth}/{name}": found[name] for name in kept}
    return report


def root_gains(
    roots: Scored,
    *,
    pool: int,
    root_budget: int,
    allocate: regret.Allocate | None,
    uniform_rollouts: int,
    rng: np.random.Generator,
) -> dict[str, float]:
    """What stage 1 buys in pools of `pool` prompts, in the order of the items; prompts beyond whole pools are left out.

    Args:
      roots: at least `pool` prompts, each of at least 2 rollouts.
      root_budget, allocate, uniform_rollouts: as in `regret.root_regret`.
      rng: halves of the rollouts, ties and permutations.

    Returns:
      For each of `ROOT_MEASURES` its mean over pools under each of `ALLOCATIONS` (`effective_ratio_oracle`, ...), and
      the learned predictor's as shares of the oracle's and of the shuffled one's (`effective_ratio_share_of_oracle`,
      `..._share_of_shuffled`); `active` prompts of a pool and `plugged_in`, as there, under the learned one; `pools`.

    Raises ValueError for less than a pool.
    """
    count = roots.size // pool
    if count < 1:
        raise ValueError(f"{roots.size} prompts are less than a pool of {pool}")
    reports = []
    for number in range(count):
        part = roots.part(np.arange(number * pool, (number + 1) * pool))
        chosen, judged = regret.split_half(part.measured, rng)
        reports.append(
            regret.root_regret(
                {LEARNED: part.score},
                chosen,
                judged,
                root_budget,
                rng,
                allocate=allocate,
                uniform_rollouts=uniform_rollouts,
            )
        )
    gains = {"pools": float(count)}
    for measure in ROOT_MEASURES:
        gains |= _compared(reports, measure)
    for name in ("active", "plugged_in"):
        gains[name] = float(np.mean([each[LEARNED][name] for each in reports]))
    return gains


def prefix_gains(
    anchors: Scored, outcome: np.ndarray, prompt: np.ndarray, total: int, rng: np.random.Generator
) -> dict[str, float]:
    """What stage 2 buys with `total` continuations of each prompt: `PREFIX_MEASURE` as in `root_gains`, `plugged_in`.

    Args:
      anchors: each of at least 2 continuations.
      outcome, prompt: as in `regret.prefix_regret`.
      total: at least 1.
      rng: halves, ties and permutations.
    """
    chosen, judged = regret.split_half(anchors.measured, rng)
    report = regret.prefix_regret({LEARNED: anchors.score}, chosen, judged, outcome, prompt, total, rng)
    return _compared([report], PREFIX_MEASURE) | {"plugged_in": report[LEARNED]["plugged_in"]}


def _class_rates(items: Scored) -> np.ndarray:
    return regret.class_rates(np.asarray(items.group), items.measured)


def _compared(reports: Sequence[dict[str, dict[str, float]]], measure: str) -> dict[str, float]:
    """Means of the reports' measure, and the shares of these means."""
    places = {name: (name, measure) for name in ALLOCATIONS} | {"shuffled": (LEARNED, f"shuffled_{measure}")}
    mean = {name: float(np.mean([each[who][what] for each in reports])) for name, (who, what) in places.items()}
    found = {f"{measure}_{name}": value for name, value in mean.items()}
    for control in ("oracle", "shuffled"):
        share = mean[LEARNED] / mean[control] if mean[control] else float("nan")
        found[f"{measure}_share_of_{control}"] = share
    return found
