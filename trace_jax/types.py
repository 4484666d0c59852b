"""The values that cross the boundaries between layers.

Every class is frozen and holds numpy arrays or plain Python values; none holds text that was once tokens,
a model, or a config. `validate()` checks values on the host and returns `self`, so that it can be chained.
This module imports numpy only and stands below every other layer.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NoReturn

import numpy as np

_MAX_LOGPROB = 1e-4  # log-probs are <= 0; float32 log-softmax can round a certain token to slightly more


class NodeKind(enum.IntEnum):
    """What a node of a `RolloutTree` is."""

    ROOT = 0  # the prompt; always node 0
    TURN = 1  # an intermediate turn: action tokens, then the observation's tokens
    LEAF = 2  # the last turn of a rollout: it carries the reward


class Stage(enum.IntEnum):
    """Which part of the budget paid for a node."""

    PROMPT = 0
    ROOT_ROLLOUT = 1  # stage 1: a complete "bare" rollout from the prompt
    CONTINUATION = 2  # stage 2: a rollout forked from an anchor


class Finish(enum.IntEnum):
    """Why a turn ended. Everything from TURN_LIMIT on ends the episode without the policy saying so."""

    TURN = 0  # the policy closed the turn and the environment answered: the episode goes on
    ANSWER = 1  # the environment declared the episode over (a final answer)
    TURN_LIMIT = 2  # the turn limit was reached
    LENGTH = 3  # the per-turn token limit or the context was reached
    DEADLINE = 4  # the wall-clock deadline of the episode passed
    ENVIRONMENT_ERROR = 5  # the environment or a tool raised
    ENGINE_ERROR = 6  # the engine gave up on the request


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One task instance, ready to be rolled out."""

    uid: str  # unique within the run's data; trees are sorted by it
    tokens: np.ndarray  # int32 [P], P >= 1
    state: Any  # the environment's value before the first turn; treated as immutable
    group: str = ""  # the task's difficulty class, for reports only (never seen by the allocator)

    def validate(self) -> Prompt:
        """Raises ValueError for an empty or wrongly typed prompt."""
        if self.tokens.dtype != np.int32 or self.tokens.ndim != 1 or self.tokens.size == 0:
            got = f"{self.tokens.dtype} {self.tokens.shape}"
            raise ValueError(f"prompt {self.uid!r}: tokens must be a non-empty int32 vector, got {got}")
        return self


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One turn to sample: token ids in, token ids out."""

    tokens: np.ndarray  # int32 [n], the whole history H_t
    max_new_tokens: int  # >= 1
    temperature: float  # > 0; log-probs are of softmax(logits / temperature)
    stop_ids: tuple[int, ...]  # generation ends with the first of these, which is kept
    key: tuple[int, ...]  # the sampling key, e.g. (seed, step, prompt, leaf, turn); equal keys draw equal noise
    timeout: float | None = None  # seconds the caller is willing to wait
    salt: str = ""  # name space of the prefix cache (the weight version)
    group: str = ""  # requests of one group share prefixes (a prompt's uid): they belong on one server
    stop_texts: tuple[str, ...] = ()  # texts that end the generation too, for stops that are several tokens
    top_p: float = 1.0  # in (0, 1]; below 1 the draw is from the nucleus, the log-prob still of the full softmax
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the engine sampled for one request."""

    tokens: np.ndarray  # int32 [k], k >= 1
    logprobs: np.ndarray  # float32 [k], of the tempered distribution that was sampled from
    stopped: bool  # True if the last token is a stop id, False if max_new_tokens or the context ended it
    cached_tokens: int  # tokens of the request that came from the prefix cache
    prefilled_tokens: int  # tokens of the request that were computed
    weight_version: int

    def validate(self) -> Generation:
        """Raises ValueError where a log-prob is missing, positive or not finite; no such token may be trained on."""
        if self.tokens.shape != self.logprobs.shape or self.tokens.ndim != 1 or self.tokens.size == 0:
            got = f"{self.tokens.shape} tokens and {self.logprobs.shape} log-probs"
            raise ValueError(f"generation: got {got}; at least one token, and one log-prob for each, is needed")
        bad = np.flatnonzero(~np.isfinite(self.logprobs) | (self.logprobs > _MAX_LOGPROB))
        if bad.size:
            raise ValueError(
                f"generation: log-prob {self.logprobs[bad[0]]} of token {bad[0]}; log-probs must be finite and <= 0"
            )
        return self


@dataclasses.dataclass(frozen=True)
class Turn:
    """One finished turn of an episode, before it becomes a node."""

    action: np.ndarray  # int32 [a], a >= 0 (0 only where the episode ended before a token was sampled)
    logprobs: np.ndarray  # float32 [a]
    observation: np.ndarray  # int32 [o], empty on the last turn
    finish: Finish
    weight_version: int
    reward: float | None = None  # on the last turn of an episode
    success: float | None = None  # 0.0 or 1.0, on the last turn of an episode


@dataclasses.dataclass(frozen=True)
class RolloutTree:
    """All rollouts of one prompt. Flat arrays, ragged spans in CSR form, `parent[i] < i`.

    Node 0 is the prompt; every other node is one turn: its sampled action tokens followed by the tokens of the
    observation that answered it. A path from the root to a leaf is a rollout. Two rollouts that happen to sample the
    same turn have two nodes (anchors are prefix occurrences, paper section 2).
    """

    prompt_uid: str
    parent: np.ndarray  # int32 [N]; -1 for the root
    kind: np.ndarray  # int8 [N], NodeKind
    stage: np.ndarray  # int8 [N], Stage
    finish: np.ndarray  # int8 [N], Finish
    weight_version: np.ndarray  # int32 [N]; -1 for the root
    offset: np.ndarray  # int32 [N + 1]; node i owns tokens offset[i]:offset[i + 1]
    token: np.ndarray  # int32 [S]
    is_action: np.ndarray  # bool [S]; False on the prompt and on observations
    logprob: np.ndarray  # float32 [S]; behaviour log-prob of action tokens, 0 elsewhere
    reward: np.ndarray  # float32 [N]; NaN except on leaves
    success: np.ndarray  # float32 [N]; 0 or 1 on leaves, NaN elsewhere
    value: np.ndarray  # float32 [N]; the predictor's score that the allocator saw, NaN where none was asked for

    @property
    def num_nodes(self) -> int:
        """Number of nodes N, the root included."""
        return int(self.parent.shape[0])

    def action_counts(self) -> np.ndarray:
        """int64 [N]; the number of sampled (action) tokens of each node."""
        total = np.concatenate(([0], np.cumsum(self.is_action)))
        return np.diff(total[self.offset])

    def validate(self) -> RolloutTree:
        """Raises ValueError that names the node and the rule which it breaks."""
        _validate_layout(self)
        _validate_structure(self)
        _validate_stages(self)
        _validate_tokens(self)
        _validate_turns(self)
        _validate_leaves(self)
        return self


_NODE_DTYPES = {
    "parent": np.int32,
    "kind": np.int8,
    "stage": np.int8,
    "finish": np.int8,
    "weight_version": np.int32,
    "reward": np.float32,
    "success": np.float32,
    "value": np.float32,
}
_TOKEN_DTYPES = {"token": np.int32, "is_action": np.bool_, "logprob": np.float32}


def _fail(tree: RolloutTree, message: str) -> NoReturn:
    raise ValueError(f"tree {tree.prompt_uid!r}: {message}")


def _validate_layout(tree: RolloutTree) -> None:
    """Shapes, dtypes and the CSR offsets: everything that later rules index with."""
    n = tree.num_nodes
    for name, dtype in _NODE_DTYPES.items():
        array = getattr(tree, name)
        if array.shape != (n,) or array.dtype != dtype:
            _fail(tree, f"{name} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} ({n},)")
    size = tree.token.shape[0]
    for name, dtype in _TOKEN_DTYPES.items():
        array = getattr(tree, name)
        if array.shape != (size,) or array.dtype != dtype:
            _fail(tree, f"{name} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} ({size},)")
    offset = tree.offset
    if offset.shape != (n + 1,) or offset.dtype != np.int32:
        _fail(tree, f"offset is {offset.dtype} {offset.shape}, expected int32 ({n + 1},)")
    if offset[0] != 0 or offset[-1] != size or np.any(np.diff(offset) < 0):
        _fail(tree, f"offset must rise from 0 to {size} in {n + 1} steps")


def _validate_structure(tree: RolloutTree) -> None:
    """Parents before children, one root, leaves exactly where the tree ends."""
    n = tree.num_nodes
    if n == 0 or tree.parent[0] != -1 or tree.kind[0] != NodeKind.ROOT:
        _fail(tree, "node 0 must be the root with parent -1")
    bad = np.flatnonzero((tree.parent[1:] < 0) | (tree.parent[1:] >= np.arange(1, n))) + 1
    if bad.size:
        _fail(tree, f"node {bad[0]} has parent {tree.parent[bad[0]]}; a parent must be an earlier node")
    bad = np.flatnonzero((tree.kind[1:] != NodeKind.TURN) & (tree.kind[1:] != NodeKind.LEAF)) + 1
    if bad.size:
        _fail(tree, f"node {bad[0]} has kind {tree.kind[bad[0]]}; node 0 is the root, others are turns or leaves")
    children = np.bincount(tree.parent[1:], minlength=n)
    bad = np.flatnonzero((tree.kind[1:] == NodeKind.LEAF) != (children[1:] == 0)) + 1
    if bad.size:
        what = "a leaf with children" if children[bad[0]] else "a turn without a continuation"
        _fail(tree, f"node {bad[0]} is {what}")


def _validate_stages(tree: RolloutTree) -> None:
    """Bare rollouts are unbroken chains from the prompt; continuations start at their turns, never at the prompt."""
    stage, parent = tree.stage, tree.parent
    rollout = (stage == Stage.ROOT_ROLLOUT) | (stage == Stage.CONTINUATION)
    bad = np.flatnonzero(np.where(parent < 0, stage != Stage.PROMPT, ~rollout))
    if bad.size:
        rule = "node 0 is the prompt, every other node part of a root rollout or of a continuation"
        _fail(tree, f"node {bad[0]} has stage {stage[bad[0]]}; {rule}")
    bare = np.flatnonzero(stage == Stage.ROOT_ROLLOUT)
    bad = bare[stage[parent[bare]] == Stage.CONTINUATION]
    if bad.size:
        _fail(tree, f"node {bad[0]} is a root rollout below a continuation")
    bad = np.flatnonzero((stage == Stage.CONTINUATION) & (parent == 0))
    if bad.size:
        _fail(tree, f"node {bad[0]} is a continuation of the prompt; anchors exclude the root, so it is a root rollout")
    suffixes = np.bincount(parent[bare], minlength=tree.num_nodes)
    bad = bare[(tree.kind[bare] == NodeKind.TURN) & (suffixes[bare] != 1)]
    if bad.size:
        _fail(tree, f"node {bad[0]} has {suffixes[bad[0]]} root-rollout children; a bare rollout is one chain")


def _validate_turns(tree: RolloutTree) -> None:
    """Finish reasons, weight versions and predictor scores of nodes."""
    known = (tree.finish >= Finish.TURN) & (tree.finish <= Finish.ENGINE_ERROR)
    bad = np.flatnonzero(~known | ((tree.kind == NodeKind.LEAF) == (tree.finish == Finish.TURN)))
    if bad.size:
        rule = f"a turn that goes on has {int(Finish.TURN)}, a leaf one of the others"
        _fail(tree, f"node {bad[0]} has finish {tree.finish[bad[0]]}; {rule}")
    if tree.weight_version[0] != -1:
        _fail(tree, f"the root has weight version {tree.weight_version[0]}, expected -1")
    bad = np.flatnonzero((tree.action_counts() > 0) & (tree.weight_version < 0))
    if bad.size:
        _fail(tree, f"node {bad[0]} holds sampled tokens but has weight version {tree.weight_version[bad[0]]}")
    scored = tree.value[~np.isnan(tree.value)]
    if np.any((scored < 0) | (scored > 1)):
        _fail(tree, f"a predictor value is {scored[(scored < 0) | (scored > 1)][0]}; values lie in [0, 1]")


def _validate_tokens(tree: RolloutTree) -> None:
    """Which tokens were sampled, and that each of those has its log-prob."""
    if tree.offset[1] == 0:
        _fail(tree, "the prompt has no tokens")
    if np.any(tree.is_action[: tree.offset[1]]):
        _fail(tree, "the prompt holds action tokens")
    starts = np.zeros(tree.token.shape[0] + 1, bool)
    starts[tree.offset] = True
    if np.any(tree.is_action[1:] & ~tree.is_action[:-1] & ~starts[1:-1]):
        _fail(tree, "an action token follows an observation token within one turn")
    bad = np.flatnonzero((tree.kind == NodeKind.TURN) & (tree.action_counts() == 0))
    if bad.size:
        _fail(tree, f"node {bad[0]} goes on without an action token")
    action = tree.logprob[tree.is_action]
    if not np.all(np.isfinite(action)) or np.any(action > _MAX_LOGPROB):
        _fail(tree, "an action token has a missing or positive log-prob")
    if np.any(tree.logprob[~tree.is_action] != 0):
        _fail(tree, "a token that was not sampled carries a log-prob")


def _validate_leaves(tree: RolloutTree) -> None:
    """Reward and success on leaves and only there."""
    leaf = tree.kind == NodeKind.LEAF
    scored = np.isfinite(tree.reward) & ((tree.success == 0) | (tree.success == 1))
    bad = np.flatnonzero(leaf & ~scored)
    if bad.size:
        got = f"reward {tree.reward[bad[0]]} and success {tree.success[bad[0]]}"
        _fail(tree, f"leaf {bad[0]} has {got}; every leaf needs a finite reward and a success of 0 or 1")
    bad = np.flatnonzero(~leaf & ~(np.isnan(tree.reward) & np.isnan(tree.success)))
    if bad.size:
        _fail(tree, f"node {bad[0]} carries a reward or a success; only leaves do, all others have NaN")


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Rows of a static shape [B, T] for the jitted steps.

    `visible(q, k) = (k <= q) & (q < end[k])` within a row; padding has `end == 0`, so nobody sees it.
    `prev[i]` is the row index of the token whose hidden state predicts token i (-1 where nothing does).
    """

    token: np.ndarray  # int32 [B, T]
    pos: np.ndarray  # int32 [B, T]; depth of the token along its own path, from 0
    prev: np.ndarray  # int32 [B, T]; -1 on padding and on the first token of a path
    end: np.ndarray  # int32 [B, T]; row index where the segment (or subtree) of the token ends, 0 on padding
    is_action: np.ndarray  # bool [B, T]
    weight: np.ndarray  # float32 [B, T]; aggregation weight of the token in the step's loss, 0 where not trained
    adv_pos: np.ndarray  # float32 [B, T]; weighted positive part of the advantage, >= 0
    adv_neg: np.ndarray  # float32 [B, T]; weighted negative part of the advantage, <= 0
    old_logprob: np.ndarray  # float32 [B, T]; log-prob under the policy that the ratio is taken against
    behaviour_logprob: np.ndarray  # float32 [B, T]; log-prob that the engine recorded
    value_target: np.ndarray  # float32 [B, T]; the predictor's target at prefix ends
    value_weight: np.ndarray  # float32 [B, T]; its weight in the predictor's loss, 0 elsewhere

    @property
    def shape(self) -> tuple[int, int]:
        """(rows B, row length T)."""
        return self.token.shape
