"""What a step's trees say about the rollouts: contrast, success, counts (paper appendix C.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_jax.tree import backup
from trace_jax.tree.failed import without_failed
from trace_jax.types import Finish, NodeKind, RolloutTree, Stage


def is_effective(tree: RolloutTree) -> bool:
    """Whether the 0/1 success varies over all leaves of the tree, bare rollouts and continuations alike.

    Leaves that the engine gave up on do not count.
    """
    success = tree.success[(tree.kind == NodeKind.LEAF) & (tree.finish != Finish.ENGINE_ERROR)]
    return bool(np.any(success != success[:1]))


def effective_ratio(trees: Sequence[RolloutTree]) -> float:
    """The share of effective trees among `trees`, the step's active prompts; 0 where there is none.

    The paper writes Var(R_i) > 0 over rewards (appendix C.2). We take the 0/1 success, with which the two agree for
    0/1 rewards; with fractional rewards, (1, 0.67) would count as contrast. The mean runs over active prompts.
    """
    return sum(map(is_effective, trees)) / max(len(trees), 1)


def useful_groups(trees: Sequence[RolloutTree]) -> int:
    """The number of groups whose leaves differ in reward.

    Groups of a tree: all of its leaves (the root), and the leaves below each other node that branches. Our measure,
    to stand beside the effective ratio, which favours trees with many leaves; divide it by the budget units spent.
    Leaves that the engine gave up on do not count.
    """
    total = 0
    for tree in map(without_failed, trees):
        if tree.num_nodes == 1:
            continue
        low, high = backup.leaf_range(tree, tree.reward)
        is_group = np.bincount(tree.parent[1:], minlength=tree.num_nodes) >= 2
        is_group[0] = True
        total += int(np.count_nonzero(is_group & (low < high)))
    return total


def success_rate(trees: Sequence[RolloutTree]) -> float:
    """Mean 0/1 success of the bare rollouts of all trees together; 0 where there is none.

    Continuations are left out: they start from prefixes that were chosen for their outcome. So are rollouts that the
    engine gave up on.
    """
    success = [tree.success[_rollout_leaves(tree, Stage.ROOT_ROLLOUT)] for tree in map(without_failed, trees)]
    count = sum(s.size for s in success)
    return float(sum(s.sum() for s in success)) / max(count, 1)


def num_rollouts(trees: Sequence[RolloutTree], stage: Stage) -> int:
    """The number of rollouts that `stage` paid for: bare rollouts, or continuations."""
    return sum(int(np.count_nonzero(_rollout_leaves(tree, stage))) for tree in trees)


def action_tokens(trees: Sequence[RolloutTree], stage: Stage) -> int:
    """The number of tokens that `stage` sampled; a token that several rollouts share is one."""
    return sum(
        int(np.count_nonzero(tree.is_action & np.repeat(tree.stage == stage, np.diff(tree.offset)))) for tree in trees
    )


def finish_counts(trees: Sequence[RolloutTree]) -> dict[str, int]:
    """How many rollouts ended for each reason: every `Finish` but TURN, in lower case, zeros included."""
    reasons = [reason for reason in Finish if reason != Finish.TURN]
    finish = [tree.finish[tree.kind == NodeKind.LEAF] for tree in trees]
    counts = np.bincount(np.concatenate([np.zeros(0, np.int8), *finish]), minlength=len(Finish))
    return {reason.name.lower(): int(counts[reason]) for reason in reasons}


def _rollout_leaves(tree: RolloutTree, stage: Stage) -> np.ndarray:
    return (tree.kind == NodeKind.LEAF) & (tree.stage == stage)
