"""`Credit`: the common result of all advantage estimators."""

from __future__ import annotations

import dataclasses

import numpy as np

from trace_jax.tree import query
from trace_jax.types import RolloutTree


@dataclasses.dataclass(frozen=True)
class Credit:
    """Which tokens of a tree are trained, with what advantage, and as part of which sequence.

    Row p says: on the path that ends in `leaf[p]`, the action tokens of `node[p]` are trained with `advantage[p]`, as
    part of `sequence[p]`. A node may stand in several rows, one for each path that trains it. Rows of one (leaf, node)
    pair add up, positive and negative advantages apart. Rows with advantage 0 are kept where the sequence still counts
    in the loss's average.
    """

    leaf: np.ndarray  # int32 [P], node ids
    node: np.ndarray  # int32 [P], node ids, on the path of `leaf`
    sequence: np.ndarray  # int32 [P], in 0..num_sequences - 1, numbered within the tree
    advantage: np.ndarray  # float32 [P], finite

    @property
    def num_sequences(self) -> int:
        """The number of sequences S."""
        return int(self.sequence.max()) + 1 if self.sequence.size else 0


def whole_paths(tree: RolloutTree, advantage: np.ndarray) -> Credit:
    """Credit that gives every turn of a trajectory the advantage of its leaf; a sequence is a trajectory.

    Args:
      tree: the tree, with L leaves.
      advantage: float [L], in the order of `query.leaves(tree)`.
    """
    leaf = query.leaves(tree)
    which, node = query.paths(tree.parent, leaf)
    which, node = which[node > 0], node[node > 0]  # the prompt is not trained
    return Credit(
        leaf=leaf[which],
        node=node.astype(np.int32),
        sequence=which.astype(np.int32),
        advantage=np.asarray(advantage, np.float32)[which],
    )
