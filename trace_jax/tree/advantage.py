"""Advantages of the policy optimisers: GRPO, Dr. GRPO, TreeRPO, Tree-GRPO, and RLOO on trees.

All read `tree.reward`. A group of one, or one whose rewards do not differ, has advantage exactly 0: no epsilon stands
in for a missing standard deviation. Only `tree_rloo` with a predictor has something to compare such a group with.
`ddof` is that of the standard deviation, 0 (population, the default) or 1 (sample); the paper does not say which it
uses.
"""

from __future__ import annotations

import numpy as np

from trace_jax.tree import backup, query
from trace_jax.tree.credit import Credit, whole_paths
from trace_jax.types import RolloutTree

# Equal rewards can differ by rounding after float64 averaging; distinct float32 rewards differ by far more than this
# share of the tree's largest reward. Below it a group counts as having no variance.
_ROUNDING = 1e-9


def grpo(tree: RolloutTree, *, ddof: int = 0) -> Credit:
    """A_i = (r_i - mean(r)) / std(r) over all leaves of the prompt; a sequence is a trajectory (paper Eq. 43)."""
    reward = _leaf_rewards(tree)
    return whole_paths(tree, _standardise(reward, np.zeros(reward.size, np.int64), _scale(reward), ddof))


def dr_grpo(tree: RolloutTree) -> Credit:
    """A_i = r_i - mean(r) over all leaves of the prompt: GRPO without the division (Dr. GRPO, arXiv 2503.20783)."""
    reward = _leaf_rewards(tree)
    return whole_paths(tree, _centre(reward, np.zeros(reward.size, np.int64), _scale(reward)))


def tree_rpo(tree: RolloutTree, *, ddof: int = 0) -> Credit:
    """TreeRPO: each branching node p is a group of its children, factual branch included (paper Eq. 45-47).

        R(y) = mean_c R(c),   A_c = (R(c) - mean_p) / std_p

    Our reading, where the paper is silent: a chain of only children is one edge, so o_c holds the action tokens from
    the branching node p down to the next branching node or leaf. Each node stands in one row, with the first leaf
    below it; its advantage is that of its nearest branching ancestor. Edges without a sibling, and groups without
    variance, are left out of E_T and so of the result.
    """
    value = backup.child_mean(tree, tree.reward)
    parent = tree.parent[1:]
    advantage = np.zeros(tree.num_nodes)
    advantage[1:] = _standardise(value[1:], parent, _scale(_leaf_rewards(tree)), ddof)
    branches = np.bincount(parent, minlength=tree.num_nodes) >= 2
    trains = np.zeros(tree.num_nodes, bool)
    trains[parent[advantage[1:] != 0]] = True  # branching nodes whose children differ
    first_turn = _first_turns(tree, branches)
    on_edge = first_turn > 0  # else the node lies above the first branch and belongs to no group
    node = np.flatnonzero(on_edge & trains[tree.parent[first_turn]]).astype(np.int32)
    _, sequence = np.unique(first_turn[node], return_inverse=True)
    return Credit(
        leaf=query.first_leaf(tree)[node],
        node=node,
        sequence=sequence.astype(np.int32),
        advantage=advantage[first_turn[node]].astype(np.float32),
    )


def tree_grpo(tree: RolloutTree, *, ddof: int = 0) -> Credit:
    """Tree-GRPO: A_i = A_intra + A_inter on whole trajectories (paper Eq. 48-49).

    Both terms are (r_i - mean) / std over a group of leaves. Inter: all leaves of the prompt. Intra: one bare rollout
    and its continuations, our reading of "sibling branches sharing the same parent prefix", so the leaves below one
    child of the root.
    """
    reward = _leaf_rewards(tree)
    scale = _scale(reward)
    _, node = query.paths(tree.parent, query.leaves(tree))
    bare = node[np.flatnonzero(node == 0) + 1]  # the first turn of each path
    inter = _standardise(reward, np.zeros_like(bare), scale, ddof)
    intra = _standardise(reward, bare, scale, ddof)
    return whole_paths(tree, intra + inter)


def tree_rloo(tree: RolloutTree, *, prior: float = 0.0) -> Credit:
    """RLOO (arXiv 2402.14740) in every group of a tree, the predictor's score among the outcomes (ours).

        A_c = r_c - b_c,   b_c = (sum_{c' != c} R(c') + prior V(p)) / (n_p - 1 + prior)

    for the n_p children c of a branching node p. r_c is the reward of the rollout that sampled c, R(c') the mean reward
    below a sibling and V(p) the predictor's score of p (`tree.value`), which counts as `prior` outcomes; where p has
    none, `prior` is 0 there. The turns of a chain have the advantage of its first turn, and each turn is trained once:
    a rollout's sequence is what it sampled itself.

    The mean of a term is the policy gradient where b_c depends on nothing that c samples: without forks, for the first
    turns of bare rollouts (but for how often siblings are forked, which all share), and for continuations, given their
    anchor. On a bare rollout below an anchor that only some outcomes fork, the baseline depends on the outcome; for
    rewards of 0 and 1 the mean keeps its direction and is scaled by 1 - (b given success - b given failure) >= 0.

    The score is a chance of success, so a prior is for rewards in [0, 1]. Raises ValueError for a negative `prior`, and
    for a tree without leaves.
    """
    if not prior >= 0:
        raise ValueError(f"prior is {prior}; the predictor's score counts as at least 0 outcomes")
    parent, num_nodes = tree.parent[1:], tree.num_nodes
    mean = backup.leaf_mean(tree, tree.reward)
    scored = ~np.isnan(tree.value)
    weight = np.where(scored, prior, 0.0)
    total = np.bincount(parent, mean[1:], num_nodes) + weight * np.where(scored, tree.value, 0.0)
    children = np.bincount(parent, minlength=num_nodes)
    leaf = query.first_leaf(tree)[1:]
    others = (children + weight)[parent] - 1
    advantage = np.zeros(num_nodes)
    np.divide(tree.reward[leaf] * others - (total[parent] - mean[1:]), others, out=advantage[1:], where=others > 0)
    advantage[np.abs(advantage) <= _ROUNDING * _scale(_leaf_rewards(tree))] = 0.0
    branches = children >= 2
    branches[0] = True  # a single rollout has its prompt's score to be compared with
    _, sequence = np.unique(leaf, return_inverse=True)
    return Credit(
        leaf=leaf,
        node=np.arange(1, num_nodes, dtype=np.int32),
        sequence=sequence.astype(np.int32),
        advantage=advantage[_first_turns(tree, branches)[1:]].astype(np.float32),
    )


def _leaf_rewards(tree: RolloutTree) -> np.ndarray:
    return tree.reward[query.leaves(tree)].astype(np.float64)


def _scale(reward: np.ndarray) -> float:
    return float(np.max(np.abs(reward), initial=0.0))


def _first_turns(tree: RolloutTree, branches: np.ndarray) -> np.ndarray:
    """int64 [N]; the first node of the edge (chain of only children) that each node is on, 0 above the first branch."""
    parents, branching = tree.parent.tolist(), branches.tolist()
    first = [0] * tree.num_nodes
    for node in range(1, tree.num_nodes):
        first[node] = node if branching[parents[node]] else first[parents[node]]
    return np.array(first)


def _centre(value: np.ndarray, group: np.ndarray, scale: float) -> np.ndarray:
    """value - mean of its group; exactly 0 in groups whose values differ by no more than rounding.

    `group` [n] holds small ints >= 0, equal for values of one group; `scale` is the size of the largest reward.
    """
    mean = np.bincount(group, value) / np.maximum(np.bincount(group), 1)
    low, high = np.full(mean.shape, np.inf), np.full(mean.shape, -np.inf)
    np.minimum.at(low, group, value)
    np.maximum.at(high, group, value)
    differs = high - low > _ROUNDING * scale
    return np.where(differs[group], value - mean[group], 0.0)


def _standardise(value: np.ndarray, group: np.ndarray, scale: float, ddof: int) -> np.ndarray:
    """(value - mean) / std of its group; exactly 0 in groups whose values differ by no more than rounding."""
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}; use 0 (population) or 1 (sample standard deviation)")
    centred = _centre(value, group, scale)
    variance = np.bincount(group, centred**2) / np.maximum(np.bincount(group) - ddof, 1)
    std = np.sqrt(variance)[group]
    return np.divide(centred, std, out=np.zeros_like(centred), where=centred != 0)
