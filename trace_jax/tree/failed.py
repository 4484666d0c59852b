"""Rollouts that say nothing about the policy."""

from __future__ import annotations

import dataclasses

import numpy as np

from trace_jax.types import Finish, NodeKind, RolloutTree

_OF_NODES = ("kind", "stage", "finish", "weight_version", "reward", "success", "value")
_OF_TOKENS = ("token", "is_action", "logprob")


def without_failed(tree: RolloutTree) -> RolloutTree:
    """The tree without the leaves that the engine gave up on (ENGINE_ERROR), and without turns that led to these only.

    Our choice: a server's fault is no failure of the policy, so it is no outcome in any group; the budget still counts
    it. Where a rollout failed below an anchor that was forked, the turns above are those of its continuation now.
    Without any other leaf the root alone is left. Nodes keep their order and their stages, so a continuation may hang
    on an anchor whose own rollout is gone, which `RolloutTree.validate` does not know.
    """
    leaf = tree.kind == NodeKind.LEAF
    kept = leaf & (tree.finish != Finish.ENGINE_ERROR)
    if kept.sum() == leaf.sum():
        return tree
    parent, alive = tree.parent.tolist(), kept.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):
        alive[parent[node]] |= alive[node]
    alive[0] = True
    kept = np.array(alive)
    number, size = np.cumsum(kept) - 1, np.diff(tree.offset)
    above = np.where(tree.parent[kept] < 0, -1, number[tree.parent[kept]])
    tokens = np.repeat(kept, size)
    return dataclasses.replace(
        tree,
        parent=above.astype(np.int32),
        offset=np.concatenate([[0], np.cumsum(size[kept])]).astype(np.int32),
        **{name: getattr(tree, name)[kept] for name in _OF_NODES},
        **{name: getattr(tree, name)[tokens] for name in _OF_TOKENS},
    )
