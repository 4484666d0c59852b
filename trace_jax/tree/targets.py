"""What the nodes of a finished tree teach the predictor: a mean success for each example, and of how many outcomes.

An example's node is the root or a turn, H its history, V = V(H) the policy's chance of success from there. Leaves that
the engine gave up on (ENGINE_ERROR) are no outcomes of the policy and are left out everywhere; a node that no outcome
is left for has no example. Every function raises ValueError for a tree without leaves.

**Why the choice matters.** Continuations go where the bare rollout's outcome r surprises the allocator, so the number K
of continuations from an anchor depends on r. Their outcomes s_1 .. s_K are fresh draws: given H, r and K each has the
mean V. Hence, given H,

    E[(r - V) + sum_k (s_k - V)] = 0 + E[K E[s_k - V | r, K]] = 0                                         (counts)
    E[(r + sum_k s_k) / (1 + K)] - V = E[(r - V) / (1 + K)] = V (1 - V) (1 / (1 + K_1) - 1 / (1 + K_0))    (means)

where K_1 and K_0 stand for K after a success and after a failure (with a random K, for the means of 1 / (1 + K)). So a
fit whose examples weigh as many as their outcomes (`train.replay.count_weight`) solves an unbiased estimating equation
for squared error and cross-entropy alike, although K depends on r. With equal weights it does not: TRACE forks a
success where V is low and a failure where V is high, which dilutes what is rare, and targets move away from one half.
The counts must be all of an anchor's: to use only anchors with K >= 1 brings E[(r - V) 1{K >= 1}] back.

Leaves from deeper forks (Eq. 18 counts them) break the first equation too: a leaf forked at a later node z has the mean
V(z), which over the z that were chosen is not V. `experiments/predictor/bias.py` measures all this.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from trace_jax.tree import query
from trace_jax.types import Finish, NodeKind, RolloutTree, Stage


@dataclasses.dataclass(frozen=True)
class Targets:
    """The n examples of one tree."""

    node: np.ndarray  # int32 [n]; ids in rising order: the root first, then turns
    mean: np.ndarray  # float64 [n]; mean 0/1 success of the outcomes that count for the node
    count: np.ndarray  # int32 [n]; how many these are, >= 1


def backed_up(tree: RolloutTree) -> Targets:
    """The mean over all leaves below a node (paper Eq. 18), for the root and the turns with at least two leaves.

    The paper has "informative internal nodes"; that these are the turns with n_y >= 2 is our reading. Biased where
    forks depend on what happened, see above.
    """
    outcome, known = _outcomes(tree)
    total, count = outcome.tolist(), known.astype(int).tolist()
    parent = tree.parent.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):
        total[parent[node]] += total[node]
        count[parent[node]] += count[node]
    is_informative = np.array(count) >= 2
    is_informative[0] = True
    return _targets(tree, np.array(total), np.array(count), is_informative)


def bare(tree: RolloutTree) -> Targets:
    """Bare rollouts alone (ours): at the root their mean, at each of their turns the outcome of that one rollout.

    Unbiased with either weighting as long as the number of bare rollouts is fixed beforehand. Where a prompt without
    anchors gets more of them (appendix E.5), that number depends on the length of the first ones, and it takes counts.
    """
    return _of_children(tree, tree.stage[1:] == Stage.ROOT_ROLLOUT)


def direct(tree: RolloutTree) -> Targets:
    """What was sampled from the node itself (ours): no leaf of a fork further down counts.

    The root: its bare rollouts. A turn of a bare rollout: that rollout and the K continuations that start right there,
    1 + K outcomes. A turn of a continuation: that continuation. Unbiased with `count_weight`, see above, and every
    continuation is used.
    """
    return _of_children(tree, np.ones(tree.num_nodes - 1, bool))


def _of_children(tree: RolloutTree, counts: np.ndarray) -> Targets:
    """One outcome for each child that `counts` [N - 1] says: of the rollout that it belongs to.

    A child is a step of one rollout: the one that leads to the child's first leaf, because a rollout is laid down
    before what is forked from it.
    """
    outcome, known = _outcomes(tree)
    leaf = query.first_leaf(tree)[1:]
    counts = counts & known[leaf]
    total = np.bincount(tree.parent[1:], outcome[leaf] * counts, minlength=tree.num_nodes)
    count = np.bincount(tree.parent[1:], counts, minlength=tree.num_nodes)
    return _targets(tree, total, count, np.ones(tree.num_nodes, bool))


def _outcomes(tree: RolloutTree) -> tuple[np.ndarray, np.ndarray]:
    """(success float64 [N], 0 where there is none; known bool [N]: leaves that are outcomes of the policy)."""
    is_leaf = tree.kind == NodeKind.LEAF
    if not np.any(is_leaf):
        raise ValueError(f"tree {tree.prompt_uid!r} has no leaves; add rollouts before taking examples from it")
    known = is_leaf & (tree.finish != Finish.ENGINE_ERROR)
    return np.where(known, tree.success, 0.0).astype(np.float64), known


def _targets(tree: RolloutTree, total: np.ndarray, count: np.ndarray, is_example: np.ndarray) -> Targets:
    node = np.flatnonzero(is_example & (count > 0) & (tree.kind != NodeKind.LEAF))
    return Targets(node.astype(np.int32), total[node] / count[node], count[node].astype(np.int32))
