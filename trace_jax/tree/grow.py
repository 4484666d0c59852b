"""Growing a `RolloutTree`: a root, bare rollouts, continuations, predictor scores.

A tree is frozen, so every function returns a new one. New nodes are appended: rollout by rollout in the order given,
turn by turn within a rollout. Hence the ids of older nodes never change, `parent[i] < i` holds by construction, and
leaves in node order are the rollouts in the order in which they were added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trace_jax.tree import query
from trace_jax.types import Finish, NodeKind, Prompt, RolloutTree, Stage, Turn

Rollout = tuple[int, Stage, Sequence[Turn]]


def new_tree(prompt: Prompt) -> RolloutTree:
    """A tree of the root alone, which owns the prompt's tokens. Raises ValueError for an empty or mistyped prompt."""
    prompt.validate()
    size = prompt.tokens.size
    return RolloutTree(
        prompt_uid=prompt.uid,
        parent=np.array([-1], np.int32),
        kind=np.array([NodeKind.ROOT], np.int8),
        stage=np.array([Stage.PROMPT], np.int8),
        finish=np.array([Finish.TURN], np.int8),
        weight_version=np.array([-1], np.int32),
        offset=np.array([0, size], np.int32),
        token=prompt.tokens,
        is_action=np.zeros(size, bool),
        logprob=np.zeros(size, np.float32),
        reward=np.array([np.nan], np.float32),
        success=np.array([np.nan], np.float32),
        value=np.array([np.nan], np.float32),
    )


def add_rollouts(tree: RolloutTree, rollouts: Sequence[Rollout]) -> RolloutTree:
    """The tree with more rollouts hung on it.

    Each rollout is (node, stage, turns): a bare rollout hangs on node 0, a continuation on an anchor of `tree`
    (a turn of a bare rollout that is neither its root nor its last, 1 <= t < T). The last turn becomes the leaf and
    carries the reward and the success; the turns before it carry neither.

    Raises ValueError for a node that is no anchor, for turns that break the rules above, and for everything that
    `RolloutTree.validate` rejects.
    """
    anchors = set(query.anchors(tree).tolist())
    parent: list[int] = []
    turns: list[Turn] = []
    stage: list[Stage] = []
    is_leaf: list[bool] = []
    for node, rollout_stage, rollout_turns in rollouts:
        _check_place(tree, anchors, node, rollout_stage)
        _check_turns(tree, rollout_turns)
        for i, turn in enumerate(rollout_turns):
            parent.append(tree.num_nodes + len(parent) - 1 if i else int(node))
            is_leaf.append(i == len(rollout_turns) - 1)
        turns.extend(rollout_turns)
        stage.extend([rollout_stage] * len(rollout_turns))
    if not turns:
        return tree
    return _append(tree, parent, stage, is_leaf, turns).validate()


def with_values(tree: RolloutTree, nodes: np.ndarray, values: np.ndarray) -> RolloutTree:
    """The tree with the predictor's scores `values` [A], in [0, 1], written on `nodes` [A].

    Raises ValueError where the two differ in length or a score is not a number in [0, 1].
    """
    nodes, values = np.asarray(nodes), np.asarray(values, np.float32)
    if nodes.shape != values.shape or nodes.ndim != 1:
        raise ValueError(f"tree {tree.prompt_uid!r}: {values.shape} values for {nodes.shape} nodes; pass one per node")
    bad = ~((values >= 0) & (values <= 1))
    if np.any(bad):
        raise ValueError(f"tree {tree.prompt_uid!r}: predictor value {values[bad][0]}; values must lie in [0, 1]")
    value = tree.value.copy()
    value[nodes.astype(np.int64)] = values
    return dataclasses.replace(tree, value=value)


def _check_place(tree: RolloutTree, anchors: set[int], node: int, stage: Stage) -> None:
    if stage == Stage.ROOT_ROLLOUT and node != 0:
        raise ValueError(f"tree {tree.prompt_uid!r}: a root rollout at node {node}; it starts at node 0, the prompt")
    if stage == Stage.CONTINUATION and node not in anchors:
        raise ValueError(
            f"tree {tree.prompt_uid!r}: a continuation at node {node}; fork at an anchor, one of {sorted(anchors)}"
        )
    if stage not in (Stage.ROOT_ROLLOUT, Stage.CONTINUATION):
        raise ValueError(f"tree {tree.prompt_uid!r}: a rollout of stage {stage!r}; use ROOT_ROLLOUT or CONTINUATION")


def _check_turns(tree: RolloutTree, turns: Sequence[Turn]) -> None:
    if not turns:
        raise ValueError(f"tree {tree.prompt_uid!r}: a rollout without turns; it needs at least one, its leaf")
    for i, turn in enumerate(turns):
        where = f"tree {tree.prompt_uid!r}: turn {i + 1} of {len(turns)}"
        if turn.action.ndim != 1 or turn.action.shape != turn.logprobs.shape:
            raise ValueError(f"{where} has {turn.action.shape} tokens, {turn.logprobs.shape} log-probs; each needs one")
        dtypes = (turn.action.dtype, turn.logprobs.dtype, turn.observation.dtype)
        if dtypes != (np.int32, np.float32, np.int32):
            got = ", ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"{where} has action, log-probs, observation of {got}; expected int32, float32, int32")
        is_last = i == len(turns) - 1
        if is_last and (turn.reward is None or turn.success is None):
            raise ValueError(f"{where} ends the rollout without a reward and a success; score the episode first")
        if is_last and turn.observation.size:
            raise ValueError(f"{where} ends the rollout but has {turn.observation.size} observation tokens; drop them")
        if not is_last and (turn.reward is not None or turn.success is not None):
            raise ValueError(f"{where} carries a reward or a success; only the last turn does")


def _append(
    tree: RolloutTree, parent: list[int], stage: list[Stage], is_leaf: list[bool], turns: list[Turn]
) -> RolloutTree:
    """Joins one node per turn to the tree's arrays."""

    def join(old: np.ndarray, new: Sequence) -> np.ndarray:
        return np.concatenate((old, np.asarray(new, old.dtype)))

    token, is_action, logprob = [tree.token], [tree.is_action], [tree.logprob]
    for turn in turns:
        sampled, observed = turn.action.size, turn.observation.size
        token += [turn.action, turn.observation]
        is_action += [np.ones(sampled, bool), np.zeros(observed, bool)]
        logprob += [turn.logprobs, np.zeros(observed, np.float32)]
    size = np.cumsum([turn.action.size + turn.observation.size for turn in turns])
    return dataclasses.replace(
        tree,
        parent=join(tree.parent, parent),
        kind=join(tree.kind, [NodeKind.LEAF if leaf else NodeKind.TURN for leaf in is_leaf]),
        stage=join(tree.stage, stage),
        finish=join(tree.finish, [turn.finish for turn in turns]),
        weight_version=join(tree.weight_version, [turn.weight_version for turn in turns]),
        offset=join(tree.offset, tree.offset[-1] + size),
        token=np.concatenate(token),
        is_action=np.concatenate(is_action),
        logprob=np.concatenate(logprob),
        reward=join(tree.reward, [np.nan if turn.reward is None else turn.reward for turn in turns]),
        success=join(tree.success, [np.nan if turn.success is None else turn.success for turn in turns]),
        value=join(tree.value, [np.nan] * len(turns)),
    )
