"""Carrying leaf values up a tree: Eq. 18 (the predictor's targets), Eq. 45 (TreeRPO), and the range below a node.

Every function takes `leaf_value`, float [N]: a finite number on each leaf and NaN elsewhere, as `tree.reward` and
`tree.success` are. They raise ValueError for a tree without leaves or a `leaf_value` of another form.
"""

from __future__ import annotations

import numpy as np

from trace_jax.tree import query
from trace_jax.types import NodeKind, RolloutTree


def leaf_mean(tree: RolloutTree, leaf_value: np.ndarray) -> np.ndarray:
    """float64 [N]; the mean over the leaves at or below each node (paper Eq. 18).

        V(leaf) = leaf_value,   V(y) = (1 / n_y) sum_c n_c V(c),   n_y = number of leaves below y

    This is the plain mean of the leaves below y. Once forks are placed by what happened (an allocator that prefers
    surprising prefixes), it is no longer an unbiased estimate of the policy's value at y: a much-forked prefix lends
    its outcome more leaves than the policy would. It is the paper's target all the same. `child_mean` weighs the
    factual branch and each continuation of a fork alike whatever was forked below them.
    """
    value = _checked(tree, leaf_value)
    count = query.leaf_count(tree)
    total = np.where(tree.kind == NodeKind.LEAF, value, 0.0).tolist()
    parent = tree.parent.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):
        total[parent[node]] += total[node]
    return np.array(total) / count


def child_mean(tree: RolloutTree, leaf_value: np.ndarray) -> np.ndarray:
    """float64 [N]; the unweighted mean over children (paper Eq. 45): R(leaf) = leaf_value, R(y) = mean_c R(c)."""
    result = _checked(tree, leaf_value).tolist()
    parent = tree.parent.tolist()
    total, count = [0.0] * tree.num_nodes, [0] * tree.num_nodes
    for node in range(tree.num_nodes - 1, -1, -1):
        if count[node]:
            result[node] = total[node] / count[node]
        if node:
            total[parent[node]] += result[node]
            count[parent[node]] += 1
    return np.array(result)


def leaf_range(tree: RolloutTree, leaf_value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), float64 [N] each: the least and the greatest leaf value at or below each node."""
    value = _checked(tree, leaf_value)
    is_leaf = tree.kind == NodeKind.LEAF
    low = np.where(is_leaf, value, np.inf).tolist()
    high = np.where(is_leaf, value, -np.inf).tolist()
    parent = tree.parent.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):
        above = parent[node]
        low[above] = min(low[above], low[node])
        high[above] = max(high[above], high[node])
    return np.array(low), np.array(high)


def _checked(tree: RolloutTree, leaf_value: np.ndarray) -> np.ndarray:
    value = np.asarray(leaf_value, np.float64)
    if value.shape != (tree.num_nodes,):
        raise ValueError(f"tree {tree.prompt_uid!r}: leaf values are {value.shape}, expected ({tree.num_nodes},)")
    is_leaf = tree.kind == NodeKind.LEAF
    if not np.any(is_leaf):
        raise ValueError(f"tree {tree.prompt_uid!r} has no leaves; add rollouts before backing values up")
    if not np.all(np.isfinite(value[is_leaf])) or not np.all(np.isnan(value[~is_leaf])):
        raise ValueError(f"tree {tree.prompt_uid!r}: leaf values must be finite on leaves and NaN on all other nodes")
    return value
