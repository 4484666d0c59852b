"""Rollouts that say nothing about the policy."""

from __future__ import annotations

import dataclasses

import numpy as np

from trace_jax.types import Finish, NodeKind, RolloutTree


def neutral(tree: RolloutTree) -> RolloutTree:
    """The tree in which a leaf that the engine gave up on (ENGINE_ERROR) has the mean reward of the other leaves.

    So it makes no contrast, and its turns that were sampled before get an advantage of 0 in their group; the budget
    still counts it. Our choice: a server's fault is no failure of the policy. Unchanged where all leaves are such.
    """
    leaf = tree.kind == NodeKind.LEAF
    failed = leaf & (tree.finish == Finish.ENGINE_ERROR)
    if not failed.any() or failed[leaf].all():
        return tree
    reward = np.where(failed, tree.reward[leaf & ~failed].mean(), tree.reward)
    return dataclasses.replace(tree, reward=reward.astype(np.float32))
