"""What the predictor is fitted to: histories with their backed-up success, of this step or of the last few.

The paper fits to the current step only: every root of an active prompt and a small stream of informative prefixes
(section 4.3). It does not say which prefixes are informative; ours are the turns with at least two leaves below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from trace_jax.train.history_view import HistoryView
from trace_jax.tree import backup, query
from trace_jax.types import NodeKind, RolloutTree


@dataclasses.dataclass(frozen=True)
class Examples:
    """n histories with what came of them."""

    prefixes: tuple[np.ndarray, ...]  # n vectors int32 [length]; as the predictor reads them, see `HistoryView`
    target: np.ndarray  # float32 [n]; mean success of the leaves below (Eq. 18), in [0, 1]
    count: np.ndarray  # int32 [n]; number of leaves below, n_y
    is_root: np.ndarray  # bool [n]; the history is a bare prompt

    @property
    def size(self) -> int:
        """The number of examples n."""
        return len(self.prefixes)

    @property
    def prefix_share(self) -> float:
        """The share of examples that are no roots; 0 where there is none at all."""
        return float(np.sum(~self.is_root)) / max(self.size, 1)


def examples_from_trees(
    trees: Sequence[RolloutTree], view: HistoryView, *, prefix_share: float, rng: np.random.Generator
) -> Examples:
    """All roots, then a random sample of branch nodes (turns with n_y >= 2) that makes up `prefix_share` of the whole.

    With R roots that is round(R * prefix_share / (1 - prefix_share)) of them, or all if there are fewer.

    Args:
      trees: of the active prompts, in an order that does not depend on arrival.
      view: what the predictor reads of a history.
      prefix_share: in [0, 1); the paper's is 0.06.
      rng: draws the sample, without replacement.

    Raises ValueError for a share outside [0, 1).
    """
    if not 0 <= prefix_share < 1:
        raise ValueError(f"predictor: prefix_share is {prefix_share}, must be in [0, 1)")
    counts = [query.leaf_count(tree) for tree in trees]
    branch = [
        (i, int(node))
        for i, (tree, count) in enumerate(zip(trees, counts, strict=True))
        for node in np.flatnonzero((tree.kind == NodeKind.TURN) & (count >= 2))
    ]
    wanted = min(round(len(trees) * prefix_share / (1 - prefix_share)), len(branch))
    chosen = [branch[k] for k in sorted(rng.choice(len(branch), wanted, replace=False))] if wanted else []
    nodes = [(i, 0) for i in range(len(trees))] + chosen
    means = [backup.leaf_mean(tree, tree.success) for tree in trees]
    return Examples(
        prefixes=tuple(view.of_nodes(trees[i], [node])[0] for i, node in nodes),
        target=np.array([means[i][node] for i, node in nodes], np.float32),
        count=np.array([counts[i][node] for i, node in nodes], np.int32),
        is_root=np.array([node == 0 for _, node in nodes], bool),
    )


def concatenate(parts: Sequence[Examples]) -> Examples:
    """The examples of all parts, in order."""
    return Examples(
        prefixes=tuple(prefix for part in parts for prefix in part.prefixes),
        target=np.concatenate([np.zeros(0, np.float32), *[part.target for part in parts]]),
        count=np.concatenate([np.zeros(0, np.int32), *[part.count for part in parts]]),
        is_root=np.concatenate([np.zeros(0, bool), *[part.is_root for part in parts]]),
    )


def equal_weight(count: np.ndarray) -> np.ndarray:
    """float32 [n]; every example weighs the same, as in the paper's Eq. 19."""
    return np.ones(count.shape, np.float32)


def count_weight(count: np.ndarray) -> np.ndarray:
    """float32 [n]; as many as the leaves it summarises: with cross-entropy, their likelihood (our option)."""
    return count.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ReplayWindow:
    """The examples of the last `size` steps, oldest first. Size 1 is the paper's: the current step only."""

    size: int
    steps: tuple[Examples, ...] = ()

    def push(self, examples: Examples) -> ReplayWindow:
        """The window after one more step; what is older than `size` steps falls out."""
        if self.size < 1:
            raise ValueError(f"predictor: replay window of {self.size} steps, must hold at least 1")
        return dataclasses.replace(self, steps=(*self.steps, examples)[-self.size :])

    def examples(self) -> Examples:
        """All examples in the window."""
        return concatenate(self.steps)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The window for a checkpoint: tokens padded with 0 to the longest history, n examples in all."""
        merged = self.examples()
        length = np.array([prefix.size for prefix in merged.prefixes], np.int32)
        token = np.zeros((merged.size, int(length.max(initial=0))), np.int32)
        for row, prefix in zip(token, merged.prefixes, strict=True):
            row[: prefix.size] = prefix
        return {
            "token": token,  # int32 [n, longest]
            "length": length,  # int32 [n]
            "target": merged.target,
            "count": merged.count,
            "is_root": merged.is_root,
            "step_size": np.array([step.size for step in self.steps], np.int32),  # int32 [k]
        }


def window_from_arrays(arrays: Mapping[str, np.ndarray], *, size: int) -> ReplayWindow:
    """The window that `to_arrays` described; `size` as in `ReplayWindow`."""
    window, start = ReplayWindow(size), 0
    for count in arrays["step_size"].tolist():
        at = slice(start, start + count)
        rows = zip(arrays["token"][at], arrays["length"][at], strict=True)
        window = window.push(
            Examples(
                prefixes=tuple(row[:length].astype(np.int32) for row, length in rows),
                target=arrays["target"][at].astype(np.float32),
                count=arrays["count"][at].astype(np.int32),
                is_root=arrays["is_root"][at].astype(bool),
            )
        )
        start += count
    return window
