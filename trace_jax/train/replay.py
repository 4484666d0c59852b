"""What the predictor is fitted to: histories with what came of them, of this step or of the last few.

The paper fits to the current step only: every root of an active prompt and a small stream of informative prefixes, with
backed-up success as the target (section 4.3). Other targets, older steps, weights by age and examples that are held
back are options of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trace_jax.train.history_view import HistoryView
from trace_jax.tree import targets as targets_lib
from trace_jax.types import RolloutTree

TargetKind = Callable[[RolloutTree], targets_lib.Targets]  # the functions of `tree.targets`

LEAST_WEIGHT = 1e-30  # of the oldest step; a batch of examples that weigh nothing would have no mean loss


@dataclasses.dataclass(frozen=True)
class Examples:
    """n histories with what came of them."""

    prefixes: tuple[np.ndarray, ...]  # n vectors int32 [length]; as the predictor reads them, see `HistoryView`
    target: np.ndarray  # float32 [n]; mean success of the outcomes that count (`tree.targets`), in [0, 1]
    count: np.ndarray  # int32 [n]; number of these outcomes
    is_root: np.ndarray  # bool [n]; the history is a bare prompt
    weight: np.ndarray = None  # float32 [n]; multiplies the weighting of counts. Not given: ones
    prompt: tuple[str, ...] = None  # n uids of the prompts that the histories begin with. Not given: empty, unknown

    def __post_init__(self):
        """Fills in what was not given."""
        if self.weight is None:
            object.__setattr__(self, "weight", np.ones(self.size, np.float32))
        if self.prompt is None:
            object.__setattr__(self, "prompt", ("",) * self.size)

    @property
    def size(self) -> int:
        """The number of examples n."""
        return len(self.prefixes)

    @property
    def prefix_share(self) -> float:
        """The share of examples that are no roots; 0 where there is none at all."""
        return float(np.sum(~self.is_root)) / max(self.size, 1)

    def take(self, index: np.ndarray) -> Examples:
        """The examples `index`, int [k], in that order."""
        return Examples(
            prefixes=tuple(self.prefixes[i] for i in index),
            target=self.target[index],
            count=self.count[index],
            is_root=self.is_root[index],
            weight=self.weight[index],
            prompt=tuple(self.prompt[i] for i in index),
        )


def examples_from_trees(
    trees: Sequence[RolloutTree],
    view: HistoryView,
    *,
    prefix_share: float,
    rng: np.random.Generator,
    targets: TargetKind = targets_lib.backed_up,
) -> Examples:
    """All roots, then a random sample of the targets' turns that makes up `prefix_share` of the whole.

    With R roots that is round(R * prefix_share / (1 - prefix_share)) of them, or all if there are fewer.

    Args:
      trees: of the active prompts, in an order that does not depend on arrival.
      view: what the predictor reads of a history.
      prefix_share: in [0, 1); the paper's is 0.06.
      rng: draws the sample, without replacement.
      targets: which nodes are examples, and of what; the default is the paper's.

    Raises ValueError for a share outside [0, 1) and for a tree without leaves.
    """
    if not 0 <= prefix_share < 1:
        raise ValueError(f"predictor: prefix_share is {prefix_share}, must be in [0, 1)")
    found = [targets(tree) for tree in trees]
    places = [(i, k) for i, one in enumerate(found) for k in range(one.node.size)]
    roots = [(i, k) for i, k in places if found[i].node[k] == 0]
    turns = [(i, k) for i, k in places if found[i].node[k] != 0]
    wanted = min(round(len(roots) * prefix_share / (1 - prefix_share)), len(turns))
    chosen = [turns[k] for k in sorted(rng.choice(len(turns), wanted, replace=False))] if wanted else []
    prefixes = _views(trees, view, [(i, int(found[i].node[k])) for i, k in roots + chosen])
    return Examples(
        prefixes=tuple(prefixes),
        target=np.array([found[i].mean[k] for i, k in roots + chosen], np.float32),
        count=np.array([found[i].count[k] for i, k in roots + chosen], np.int32),
        is_root=np.array([True] * len(roots) + [False] * len(chosen), bool),
        prompt=tuple(trees[i].prompt_uid for i, _ in roots + chosen),
    )


def _views(trees: Sequence[RolloutTree], view: HistoryView, nodes: list[tuple[int, int]]) -> list[np.ndarray]:
    """The views of (tree, node) pairs, in order; those of one tree are asked for at once."""
    asked: dict[int, list[int]] = {}
    for i, node in nodes:
        asked.setdefault(i, []).append(node)
    views = {i: iter(view.of_nodes(trees[i], of_tree)) for i, of_tree in asked.items()}
    return [next(views[i]) for i, _ in nodes]


def concatenate(parts: Sequence[Examples]) -> Examples:
    """The examples of all parts, in order."""
    return Examples(
        prefixes=tuple(prefix for part in parts for prefix in part.prefixes),
        target=np.concatenate([np.zeros(0, np.float32), *[part.target for part in parts]]),
        count=np.concatenate([np.zeros(0, np.int32), *[part.count for part in parts]]),
        is_root=np.concatenate([np.zeros(0, bool), *[part.is_root for part in parts]]),
        weight=np.concatenate([np.zeros(0, np.float32), *[part.weight for part in parts]]),
        prompt=tuple(uid for part in parts for uid in part.prompt),
    )


def split_roots(examples: Examples, share: float, rng: np.random.Generator) -> tuple[Examples, Examples]:
    """(fit, held): the roots of a random `share` of the prompts are held back, to calibrate on (our option).

    Of P prompts with a root, round(P * share) are drawn; `held` has all their roots. `fit` has every example of the
    other prompts. Longer histories of a prompt that is held back are in neither: they would tell what comes of it.

    Args:
      share: in [0, 1).
      rng: draws the prompts, without replacement.

    Raises ValueError for a share outside [0, 1) and for examples whose prompts are unknown.
    """
    if not 0 <= share < 1:
        raise ValueError(f"predictor: the share of roots that are held back is {share}, must be in [0, 1)")
    if "" in examples.prompt:
        raise ValueError(f"predictor: example {examples.prompt.index('')} has no prompt's uid; a split needs them all")
    prompts = sorted({uid for uid, is_root in zip(examples.prompt, examples.is_root, strict=True) if is_root})
    drawn = rng.choice(len(prompts), round(len(prompts) * share), replace=False) if prompts else ()
    held = {prompts[k] for k in drawn}
    is_held = np.array([uid in held for uid in examples.prompt], bool)
    return examples.take(np.flatnonzero(~is_held)), examples.take(np.flatnonzero(is_held & examples.is_root))


def equal_weight(count: np.ndarray) -> np.ndarray:
    """float32 [n]; every example weighs the same, as in the paper's Eq. 19."""
    return np.ones(count.shape, np.float32)


def count_weight(count: np.ndarray) -> np.ndarray:
    """float32 [n]; as many as the outcomes it summarises: with cross-entropy, their likelihood (our option)."""
    return count.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ReplayWindow:
    """The examples of the last `size` steps, oldest first. Size 1 is the paper's: the current step only."""

    size: int
    steps: tuple[Examples, ...] = ()
    decay: float = 1.0  # what was pushed k steps ago weighs decay^k (our option); 1: as much as the newest

    def push(self, examples: Examples) -> ReplayWindow:
        """The window after one more step, which may be without examples; what is older than `size` steps falls out."""
        if self.size < 1:
            raise ValueError(f"predictor: replay window of {self.size} steps, must hold at least 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"predictor: the replay window's decay is {self.decay}, must be in (0, 1]")
        if self.decay ** (self.size - 1) < LEAST_WEIGHT:
            raise ValueError(
                f"predictor: with decay {self.decay} the oldest of {self.size} steps would weigh next to nothing, less "
                f"than {LEAST_WEIGHT}; shorten the replay window"
            )
        return dataclasses.replace(self, steps=(*self.steps, examples)[-self.size :])

    def examples(self) -> Examples:
        """All examples in the window, weighted by age."""
        ages = range(len(self.steps) - 1, -1, -1)
        return concatenate([_scaled(step, self.decay**age) for step, age in zip(self.steps, ages, strict=True)])

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The window for a checkpoint, n examples in all: tokens and the bytes of uids padded with 0 to the longest.

        `size` and `decay` are settings and not in it, so weights are those without age.
        """
        merged = concatenate(self.steps)
        token, length = _padded(merged.prefixes, np.int32)
        uids = [np.frombuffer(uid.encode(), np.uint8) for uid in merged.prompt]
        prompt, prompt_length = _padded(uids, np.uint8)
        return {
            "token": token,  # int32 [n, longest]
            "length": length,  # int32 [n]
            "target": merged.target,
            "count": merged.count,
            "is_root": merged.is_root,
            "weight": merged.weight,
            "prompt": prompt,  # uint8 [n, longest]
            "prompt_length": prompt_length,  # int32 [n]
            "step_size": np.array([step.size for step in self.steps], np.int32),  # int32 [k]
        }


def window_from_arrays(arrays: Mapping[str, np.ndarray], *, size: int, decay: float = 1.0) -> ReplayWindow:
    """The window that `to_arrays` described; `size` and `decay` as in `ReplayWindow`."""
    uids = zip(arrays["prompt"], arrays["prompt_length"], strict=True)
    rows = zip(arrays["token"], arrays["length"], strict=True)
    merged = Examples(
        prefixes=tuple(row[:length].astype(np.int32) for row, length in rows),
        target=arrays["target"].astype(np.float32),
        count=arrays["count"].astype(np.int32),
        is_root=arrays["is_root"].astype(bool),
        weight=arrays["weight"].astype(np.float32),
        prompt=tuple(row[:length].astype(np.uint8).tobytes().decode() for row, length in uids),
    )
    window, start = ReplayWindow(size, decay=decay), 0
    for count in arrays["step_size"].tolist():
        window = window.push(merged.take(np.arange(start, start + count)))
        start += count
    return window


def _scaled(examples: Examples, factor: float) -> Examples:
    return dataclasses.replace(examples, weight=examples.weight * np.float32(factor))


def _padded(rows: Sequence[np.ndarray], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """(the rows with zeros after them, [n, longest]; their lengths, int32 [n])."""
    length = np.array([row.size for row in rows], np.int32)
    table = np.zeros((len(rows), int(length.max(initial=0))), dtype)
    for cells, row in zip(table, rows, strict=True):
        cells[: row.size] = row
    return table, length
