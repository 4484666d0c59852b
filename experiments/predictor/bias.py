"""Do the predictor's targets say what the policy's chance of success is? Trees whose true values are known.

    python -m experiments.predictor.bias

writes bias.json beside this file and prints a table. An episode has at most 5 turns, each is good with the prompt's
chance p, and it succeeds, and ends, with the third good one. So a history is worth
V = P(Binomial(turns left, p) >= good turns missing). Half of the prompts have p = 0.35 and half p = 0.65, so the values
are symmetric about 1/2. Each tree has 4 bare rollouts and 8 continuations, placed by one of `FORKS`; `TARGETS` are the
targets of `trace_jax.tree.targets` with an example's weight. The bias of a state (p, turns done, good ones) is
sum w (mean - V) / sum w over all its examples.

What to expect. TRACE forks at y where the outcome r of the rollout surprises: at a low V after a success, at a high V
after a failure. Three things follow.

* At y itself the surprise is diluted: r counts 1 of 1 + K and K is larger where r is rare, so the mean of a node's
  outcomes is off by V (1 - V) (1 / (1 + K_1) - 1 / (1 + K_0)), which is negative for V < 1/2 and positive for V > 1/2:
  away from one half. That is `direct_equal`. Weights as the counts take it back (`direct_count`; see `tree.targets`).
* Above y, Eq. 18 also counts y's continuations, with the mean V(y). Surprise is likeliest where V(y) is near one half,
  from both sides: an anchor with K_1 = 1 below and K_0 = 1 above one half has min(V, 1 - V) continuations on average.
  So the states that lend their leaves lie nearer to one half than those that the policy visits, and the mean at an
  ancestor moves towards one half. At the root this is all there is: too high for V < 1/2, too low for V > 1/2.
* Examples with two leaves or more are those that were forked, so where r was a surprise: towards one half again, and
  alone with dilution at the last anchors, which have no fork below.

`backed_up` has all three and the last two win: it is drawn towards one half, with either weighting. `bare` and
`direct_count` have none. Random forks know no outcome, but successes end early, so their anchors are fewer and earlier:
each is forked more often (successes are diluted) and late, failing states lend more leaves. Both pull targets down,
whatever V.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from tabulate import tabulate

from experiments import results as results_lib
from trace_jax.budget.prefix import agreement, allocate_prefixes
from trace_jax.budget.treepo import TreePo
from trace_jax.tree import grow, query, targets
from trace_jax.types import Finish, Prompt, RolloutTree, Stage, Turn

MAX_TURNS, NEEDED = 5, 3  # turns of an episode, good ones for success
CHANCES = (0.35, 0.65)  # of a good turn, by prompt
ROLLOUTS, CONTINUATIONS = 4, 2  # m and N of each tree
BLUR = 1.0  # nats: standard deviation of the error in the blurred critic's log-odds
TREES = 4000

Estimate = tuple[float, float] | None  # (bias, standard error); None where there is no example
Forks = Callable[[np.ndarray, np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


def value(chance: float, turns: int, good: int) -> float:
    """V: the chance of success after `turns` turns of which `good` were good; a binomial tail."""
    left, missing = MAX_TURNS - turns, max(NEEDED - good, 0)
    return sum(math.comb(left, k) * chance**k * (1 - chance) ** (left - k) for k in range(missing, left + 1))


# Every history that can be met and does not yet know how it ends: (prompt's chance, turns, good turns).
STATES = tuple(
    (chance, turns, good)
    for chance in CHANCES
    for turns in range(MAX_TURNS)
    for good in range(turns + 1)
    if good < NEEDED and 0 < value(chance, turns, good) < 1
)
_INDEX = {state: i for i, state in enumerate(STATES)}
VALUES = np.array([value(*state) for state in STATES])
DEPTHS = np.array([turns for _, turns, _ in STATES])


def _trace(success: np.ndarray, score: np.ndarray, rollout: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return allocate_prefixes(agreement(success, score), ROLLOUTS * CONTINUATIONS, rng=rng)


def _blurred(success: np.ndarray, score: np.ndarray, rollout: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    clipped = np.clip(score, 0.01, 0.99)
    odds = np.log(clipped / (1 - clipped)) + BLUR * rng.normal(size=score.size)
    return _trace(success, 1 / (1 + np.exp(-odds)), rollout, rng)


def _random(success: np.ndarray, score: np.ndarray, rollout: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    treepo = TreePo(ROLLOUTS, ROLLOUTS, CONTINUATIONS)
    return treepo.forks(success, None, rollout, ROLLOUTS * CONTINUATIONS, rng)


# (success of the anchor's rollout [A], true value [A], leaf of its rollout [A], rng) -> continuations [A]
FORKS: Mapping[str, Forks] = {
    "none": lambda success, score, rollout, rng: np.zeros(success.size, np.int64),
    "random": _random,  # TreePO
    "trace": _trace,  # knows the true values
    "trace_blurred": _blurred,
}
# (targets, whether an example weighs as many as its outcomes)
TARGETS = {
    "backed_up": (targets.backed_up, False),
    "backed_up_count": (targets.backed_up, True),
    "bare": (targets.bare, False),
    "direct_equal": (targets.direct, False),
    "direct_count": (targets.direct, True),
}

_NOTHING = np.zeros(0, np.int32)


def _turn(good: int, success: float | None) -> Turn:
    return Turn(
        action=np.array([good], np.int32),
        logprobs=np.zeros(1, np.float32),
        observation=_NOTHING,
        finish=Finish.TURN if success is None else Finish.ANSWER,
        weight_version=0,
        reward=success,
        success=success,
    )


_TURNS = {(good, success): _turn(good, success) for good in (0, 1) for success in (None, 0.0, 1.0)}


def _rollout(chance: float, turns: int, good: int, rng: np.random.Generator) -> list[Turn]:
    """From a history to the end: at least one turn."""
    result = []
    for draw in (rng.random(MAX_TURNS - turns) < chance).tolist():
        turns, good = turns + 1, good + draw
        success = 1.0 if good == NEEDED else 0.0 if turns == MAX_TURNS else None
        result.append(_TURNS[int(draw), success])
        if success is not None:
            break
    return result


def _good_turns(tree: RolloutTree) -> np.ndarray:
    """int [N]; how many turns on the path to each node were good."""
    good = tree.token[tree.offset[:-1]].tolist()  # each node's one token says it, the prompt's is 0
    for node, parent in enumerate(tree.parent.tolist()):
        good[node] += good[parent] if node else 0
    return np.array(good)


def grown(chance: float, forks: Forks, rng: np.random.Generator) -> RolloutTree:
    """One tree: bare rollouts, then the continuations that `forks` asks for."""
    tree = grow.new_tree(Prompt("p", np.zeros(1, np.int32), state=None))
    tree = grow.add_rollouts(
        tree, [(0, Stage.ROOT_ROLLOUT, _rollout(chance, 0, 0, rng)) for _ in range(ROLLOUTS)]
    )
    anchors, depth, good = query.anchors(tree), query.depth(tree), _good_turns(tree)
    leaf = query.factual_leaf(tree, anchors)
    score = np.array([value(chance, depth[a], good[a]) for a in anchors])
    copies = forks(tree.success[leaf], score, leaf, rng)
    starts = [(int(a), int(depth[a]), int(good[a])) for a in np.repeat(anchors, copies)]
    return grow.add_rollouts(tree, [(a, Stage.CONTINUATION, _rollout(chance, d, g, rng)) for a, d, g in starts])


@dataclasses.dataclass(frozen=True)
class Errors:
    """Weighted errors of one kind of targets, summed over each of n trees: float64 [n, states] both."""

    error: np.ndarray  # sum w (mean - V)
    weight: np.ndarray  # sum w

    def halves(self) -> tuple[Errors, Errors]:
        """The first half of the trees, and the second."""
        half = self.error.shape[0] // 2
        return Errors(self.error[:half], self.weight[:half]), Errors(self.error[half:], self.weight[half:])

    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """(bias [states], influence [n, states]): the share of each tree in the deviation of the bias from its mean.

        The ratio of sums over trees, linearised: the variance of a sum over states, weighted with a, is that of n
        independent terms, sum_i (sum_s a_s influence_is)^2. NaN where a state has no example.
        """
        total = self.weight.sum(axis=0)
        total = np.where(total > 0, total, np.nan)
        bias = self.error.sum(axis=0) / total
        return bias, (self.error - bias * self.weight) / total


def simulate(forks: Forks, trees: int, rng: np.random.Generator) -> dict[str, Errors]:
    """The errors of all `TARGETS` in `trees` trees, which alternate between the prompts."""
    found = {name: Errors(np.zeros((trees, len(STATES))), np.zeros((trees, len(STATES)))) for name in TARGETS}
    for i in range(trees):
        chance = CHANCES[i % len(CHANCES)]
        tree = grown(chance, forks, rng)
        keys = zip(query.depth(tree).tolist(), _good_turns(tree).tolist(), strict=True)
        state = np.array([_INDEX.get((chance, turns, good), -1) for turns, good in keys])
        for name, (kind, by_count) in TARGETS.items():
            one = kind(tree)
            at = state[one.node]
            known = at >= 0
            weight = (one.count if by_count else np.ones(one.node.size))[known]
            error = weight * (one.mean[known] - VALUES[at[known]])
            np.add.at(found[name].error[i], at[known], error)
            np.add.at(found[name].weight[i], at[known], weight)
    return found


def signed(errors: Errors, states: np.ndarray) -> Estimate:
    """(mean bias over `states` [bool], its standard error), None where none of them has an example."""
    bias, influence = errors.bias()
    met = np.flatnonzero(states & np.isfinite(bias))
    if not met.size:
        return None
    return bias[met].mean(), np.sqrt(np.sum(influence[:, met].mean(axis=1) ** 2))


def absolute(errors: Errors, states: np.ndarray) -> Estimate:
    """(mean absolute bias over `states` [bool], its standard error), None where none of them has an example.

    The sign of a state's bias is taken from one half of the trees and its size from the other, and the two ways are
    averaged: noise has no sign that lasts, so 0 is what comes of no bias, and a value below 0 can come of it too.
    """
    a, b = (half.bias() for half in errors.halves())
    met = np.flatnonzero(states & np.isfinite(a[0]) & np.isfinite(b[0]))
    if not met.size:
        return None
    mean, variance = 0.0, 0.0
    for (one, _), (other, influence) in ((a, b), (b, a)):
        sign = np.sign(one[met])
        mean += np.mean(sign * other[met]) / 2
        variance += np.sum((influence[:, met] @ sign / met.size / 2) ** 2)
    return mean, np.sqrt(variance)


def measure(trees: int, seed: int) -> dict[str, Estimate]:
    """`TARGETS/FORKS[/PART]` -> (bias, standard error). PART: `depth=D`; `low`, `high`: signed, V below, above 1/2."""
    found = {}
    for number, (forks, place) in enumerate(FORKS.items()):
        for name, errors in simulate(place, trees, np.random.default_rng((seed, number))).items():
            found[f"{name}/{forks}"] = absolute(errors, VALUES > 0)
            found[f"{name}/{forks}/low"] = signed(errors, VALUES < 0.5)
            found[f"{name}/{forks}/high"] = signed(errors, VALUES > 0.5)
            for depth in range(MAX_TURNS):
                found[f"{name}/{forks}/depth={depth}"] = absolute(errors, depth == DEPTHS)
    return found


def summaries(found: Mapping[str, Estimate], trees: int) -> dict[str, results_lib.Summary]:
    """As in results.json, names under `bias/`: estimate and 95 % interval over `trees` trees.

    `bias/TARGETS` alone is under TRACE's own forks with the true values.
    """
    found = {**found, **{name: found[f"{name}/trace"] for name in TARGETS}}
    return {
        f"bias/{name}": results_lib.summarise([])
        if one is None
        else {"mean": one[0], "low": one[0] - 1.96 * one[1], "high": one[0] + 1.96 * one[1], "n": trees}
        for name, one in found.items()
    }


def table(found: Mapping[str, Estimate]) -> str:
    """One row per kind of forks and of targets: bias and standard error, in percentage points of success."""
    parts = ["", "/low", "/high", *(f"/depth={depth}" for depth in range(MAX_TURNS))]
    show = lambda one: "-" if one is None else f"{100 * one[0]:.2f} ± {100 * one[1]:.2f}"
    lines = [
        [forks, name, *(show(found[f"{name}/{forks}{part}"]) for part in parts)] for forks in FORKS for name in TARGETS
    ]
    headers = ["forks", "targets", "|bias|", "bias, V < 1/2", "bias, V > 1/2"]
    headers += [f"|bias|, depth {depth}" for depth in range(MAX_TURNS)]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Measures, writes bias.json, prints the table."""
    found = measure(TREES, seed=0)
    results_lib.write(Path(__file__).with_name("bias.json"), summaries(found, TREES))
    print(table(found))


if __name__ == "__main__":
    main()
