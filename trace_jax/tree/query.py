"""Reading a `RolloutTree`: shape, paths, anchors, histories. Nothing here looks at rewards.

"Node order" is the order of ids; `parent[i] < i`, so one pass over ids, upwards or downwards, visits parents before
children or the other way round.
"""

from __future__ import annotations

import numpy as np

from trace_jax.types import NodeKind, RolloutTree, Stage


def children(tree: RolloutTree) -> list[np.ndarray]:
    """For each node, the int32 ids of its children in node order."""
    order = np.argsort(tree.parent[1:], kind="stable").astype(np.int32) + np.int32(1)
    stop = np.cumsum(np.bincount(tree.parent[1:], minlength=tree.num_nodes)).tolist()
    return [order[a:b] for a, b in zip([0, *stop[:-1]], stop, strict=True)]


def leaves(tree: RolloutTree) -> np.ndarray:
    """int32 [L]; the leaves in node order, so the rollouts in the order in which they were added."""
    return np.flatnonzero(tree.kind == NodeKind.LEAF).astype(np.int32)


def depth(tree: RolloutTree) -> np.ndarray:
    """int32 [N]; the number of turns from the root down to each node, 0 for the root."""
    result = [0]
    for parent in tree.parent[1:].tolist():
        result.append(result[parent] + 1)
    return np.array(result, np.int32)


def path(tree: RolloutTree, node: int) -> np.ndarray:
    """int32 [depth + 1]; the nodes from the root to `node`, both included."""
    nodes = [int(node)]
    while nodes[-1] != 0:
        nodes.append(int(tree.parent[nodes[-1]]))
    return np.array(nodes[::-1], np.int32)


def paths(parent: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The paths from a root to each of `ends`, laid end to end.

    Args:
      parent: int [N], -1 at roots. Several trees side by side (a forest) are fine.
      ends: int [E], the nodes in which the paths end.

    Returns:
      (which, node), both [P]: path `which[p]`, which ends in `ends[which[p]]`, runs through `node[p]`.
      Paths in the order of `ends`, within a path from the root downwards.
    """
    which, node = np.arange(ends.size), ends
    steps = []
    while node.size:
        steps.append((which, node))
        above = parent[node]
        which, node = which[above >= 0], above[above >= 0]
    if not steps:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    which = np.concatenate([step[0] for step in reversed(steps)])
    node = np.concatenate([step[1] for step in reversed(steps)])
    order = np.argsort(which, kind="stable")
    return which[order], node[order]


def preorder(tree: RolloutTree) -> np.ndarray:
    """int32 [N]; the nodes in depth-first preorder, children in node order."""
    below = [ids.tolist() for ids in children(tree)]
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(below[node]))
    return np.array(order, np.int32)


def anchors(tree: RolloutTree) -> np.ndarray:
    """int32 [A]; the anchor set of the prompt (section 2): the turns 1 <= t < T of the bare rollouts, in node order.

    Neither the root (t = 0) nor a rollout's last turn (t = T, for whatever reason it ended) is an anchor; a rollout of
    one turn has none. Anchors are occurrences: equal histories in two rollouts are two anchors.
    """
    is_anchor = (tree.kind == NodeKind.TURN) & (tree.stage == Stage.ROOT_ROLLOUT)
    return np.flatnonzero(is_anchor).astype(np.int32)


def factual_leaf(tree: RolloutTree, nodes: np.ndarray) -> np.ndarray:
    """int32 [A]; for each of `nodes` [A] on a bare rollout, the leaf in which that rollout ended.

    Raises ValueError for a node that lies on no single bare rollout: the root, or a node of a continuation.
    """
    current = np.asarray(nodes, np.int32)
    wrong = tree.stage[current] != Stage.ROOT_ROLLOUT
    if np.any(wrong):
        raise ValueError(f"tree {tree.prompt_uid!r}: node {current[wrong][0]} does not lie on one bare rollout")
    bare = np.flatnonzero(tree.stage == Stage.ROOT_ROLLOUT)
    suffix = np.arange(tree.num_nodes, dtype=np.int32)  # the bare child; a leaf keeps itself
    below_root = tree.parent[bare] > 0
    suffix[tree.parent[bare[below_root]]] = bare[below_root]
    while np.any(tree.kind[current] != NodeKind.LEAF):
        current = suffix[current]
    return current


def prefix_tokens(tree: RolloutTree, node: int) -> np.ndarray:
    """int32 [n]; the history H_t that ends with `node`: every token of the path from the root to it, it included."""
    return np.concatenate([tree.token[tree.offset[i] : tree.offset[i + 1]] for i in path(tree, node)])


def first_leaf(tree: RolloutTree) -> np.ndarray:
    """int32 [N]; the leaf that is reached by always taking the first child, the node itself if it has none.

    Bare rollouts are added before continuations, so on a bare rollout this is the factual leaf.
    """
    result = list(range(tree.num_nodes))
    parent = tree.parent.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):
        result[parent[node]] = result[node]  # the smallest child writes last
    return np.array(result, np.int32)


def leaf_count(tree: RolloutTree) -> np.ndarray:
    """int32 [N]; n_y, the number of leaves at or below each node."""
    count = (tree.kind == NodeKind.LEAF).astype(np.int32).tolist()
    parent = tree.parent.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):
        count[parent[node]] += count[node]
    return np.array(count, np.int32)
