"""Packing token paths into rows of a static shape (`PackedBatch`).

A row holds several segments side by side: whole rollouts for the policy step, histories for the predictor. A segment
sees only itself (`end` is where it stops), counts its positions from 0, and its first token is predicted by nothing.
Where a segment goes depends on the input alone (`layout`); a caller whose trees arrive in any order sorts them by uid.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from trace_jax.tree import query
from trace_jax.tree.credit import Credit
from trace_jax.tree.layout import fill, lay_out
from trace_jax.types import NodeKind, PackedBatch, RolloutTree

NO_TRUNK = np.zeros(0, np.int32)


def pack_paths(
    trees: Sequence[RolloutTree],
    credits: Sequence[Credit],
    weights: Sequence[np.ndarray],
    *,
    row_length: int,
    rows_multiple: int,
    skip_untrained: bool,
    trunk: np.ndarray = NO_TRUNK,
) -> PackedBatch:
    """Path rows: each rollout of each tree is one segment, shared prefixes repeated.

    A `trunk`, tokens that every prompt begins with (few-shot examples), stands once at the start of each row that is
    used; every segment of the row sees it and goes on from it, so a row costs the trunk once and not once a rollout.

    With w the weight and A the advantage of the credit row of a token, `weight` = w, `adv_pos` = w max(A, 0) and
    `adv_neg` = w min(A, 0). All three are 0 on prompt and observation tokens and on turns that the credit does not
    train on this path. `old_logprob` equals `behaviour_logprob`; a trainer that scores the batch again replaces it.

    Args:
      trees: the step's trees, in an order that does not depend on arrival.
      credits: one `Credit` per tree.
      weights: one float [P] per tree, the weight of each action token of each credit row (`aggregate.token_weights`).
      row_length: T, tokens per row.
      rows_multiple: the number of rows is a multiple of this, and at least this.
      skip_untrained: leave out rollouts in which no token has a non-zero weighted advantage. Their gradient is zero
        only where the loss has no other term: not valid with a KL or entropy term.
      trunk: int32 [n0], n0 < T.

    Raises:
      ValueError: for a rollout longer than a row, a prompt that does not begin with the trunk, or credit and weights
        that do not fit the trees.
    """
    forest = _join(trees, trunk)
    rows = _credit_rows(forest, trees, credits, weights)
    end = _trained_leaves(forest, rows) if skip_untrained else forest.leaf
    spans = _Spans(end, *query.paths(forest.parent, end))
    size = forest.size[spans.node]
    length = np.bincount(spans.path, size, minlength=end.size).astype(np.int64)
    name = functools.partial(_rollout_name, forest, trees, end)
    layout = lay_out(length, row_length=row_length, rows_multiple=rows_multiple, name=name, trunk=trunk.size)
    source = np.repeat(forest.start[spans.node] - (np.cumsum(size) - size), size) + np.arange(size.sum())
    is_action, logprob = forest.is_action[source], forest.logprob[source]
    weight, adv_pos, adv_neg = (
        np.repeat(per_span, size) * is_action for per_span in _credit_per_span(rows, forest, spans)
    )
    batch = fill(
        layout,
        token=forest.token[source],
        is_action=is_action,
        weight=weight,
        adv_pos=adv_pos,
        adv_neg=adv_neg,
        old_logprob=logprob,
        behaviour_logprob=logprob,
    )
    return _with_trunk(batch, trunk)


def pack_prefixes(
    prefixes: Sequence[np.ndarray],
    targets: np.ndarray,
    weights: np.ndarray,
    *,
    row_length: int,
    rows_multiple: int,
) -> tuple[PackedBatch, np.ndarray, np.ndarray]:
    """Histories for the predictor: each is one segment, with its target on its last token.

    Args:
      prefixes: int32 [n_i] each, n_i >= 1 (`query.prefix_tokens`).
      targets: float [n], in [0, 1] where they train the predictor, anything finite where it only scores.
      weights: float [n], their weights in the predictor's loss.
      row_length: T, tokens per row.
      rows_multiple: the number of rows is a multiple of this, and at least this.

    Returns:
      (batch, row, col): `value_target` and `value_weight` at [row[i], col[i]], int32 [n] each, are those of prefix i.

    Raises:
      ValueError: for an empty prefix, one longer than a row, or lengths that do not match.
    """
    count = len(prefixes)
    targets, weights = np.asarray(targets, np.float32), np.asarray(weights, np.float32)
    if targets.shape != (count,) or weights.shape != (count,):
        raise ValueError(f"{count} prefixes, {targets.shape} targets, {weights.shape} weights; pass one of each")
    length = np.array([prefix.size for prefix in prefixes], np.int64)
    if np.any(length == 0):
        raise ValueError(f"prefix {np.flatnonzero(length == 0)[0]} is empty; a history holds at least the prompt")
    layout = lay_out(length, row_length=row_length, rows_multiple=rows_multiple, name=lambda i: f"prefix {i}")
    last = np.cumsum(length) - 1
    value_target, value_weight = np.zeros(length.sum(), np.float32), np.zeros(length.sum(), np.float32)
    value_target[last], value_weight[last] = targets, weights
    batch = fill(
        layout,
        token=np.concatenate([np.zeros(0, np.int32), *prefixes]),
        value_target=value_target,
        value_weight=value_weight,
    )
    row, col = np.divmod(layout.cell[last], row_length)
    return batch, row.astype(np.int32), col.astype(np.int32)


def _with_trunk(batch: PackedBatch, trunk: np.ndarray) -> PackedBatch:
    """The batch with the trunk in the first cells of each row that holds a token, visible to the whole row."""
    used, columns = np.any(batch.end > 0, axis=1), slice(0, trunk.size)
    batch.token[used, columns] = trunk
    batch.pos[used, columns] = np.arange(trunk.size)
    batch.prev[used, columns] = np.arange(trunk.size) - 1
    batch.end[used, columns] = batch.end.shape[1]
    return batch


def fill_ratio(batch: PackedBatch) -> float:
    """The share of the batch's cells that hold a token rather than padding."""
    return float(np.mean(batch.end > 0))


@dataclasses.dataclass(frozen=True)
class _Forest:
    """All trees as one set of flat arrays, F nodes and S tokens; node ids are shifted by the nodes before."""

    base: np.ndarray  # int64 [trees]; id of each tree's root
    parent: np.ndarray  # int64 [F]; -1 at roots
    leaf: np.ndarray  # int64 [L]; ids of the leaves
    start: np.ndarray  # int64 [F]; first token of each node
    size: np.ndarray  # int64 [F]; number of tokens of each node
    action_count: np.ndarray  # int64 [F]; number of action tokens of each node
    token: np.ndarray  # int32 [S]
    is_action: np.ndarray  # bool [S]
    logprob: np.ndarray  # float32 [S]


def _concatenate(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """The parts end to end; an empty array of the right dtype where there is none."""
    return np.concatenate([np.zeros(0, dtype), *parts])


def _join(trees: Sequence[RolloutTree], trunk: np.ndarray) -> _Forest:
    """The trees without the trunk that their roots begin with."""
    for tree in trees:
        if not np.array_equal(tree.token[: tree.offset[1]][: trunk.size], trunk):
            raise ValueError(f"tree {tree.prompt_uid!r}: prompt does not begin with the trunk of {trunk.size} tokens")
    num_nodes = np.array([tree.num_nodes for tree in trees], np.int64)
    base = np.cumsum(num_nodes) - num_nodes
    parent = _concatenate([tree.parent for tree in trees], np.int64)
    size = _concatenate([np.diff(tree.offset) for tree in trees], np.int64)
    start = np.cumsum(size) - size
    start[base] += trunk.size
    size[base] -= trunk.size
    return _Forest(
        base=base,
        parent=np.where(parent >= 0, parent + np.repeat(base, num_nodes), -1),
        leaf=np.flatnonzero(_concatenate([tree.kind for tree in trees], np.int8) == NodeKind.LEAF),
        start=start,
        size=size,
        action_count=_concatenate([tree.action_counts() for tree in trees], np.int64),
        token=_concatenate([tree.token for tree in trees], np.int32),
        is_action=_concatenate([tree.is_action for tree in trees], np.bool_),
        logprob=_concatenate([tree.logprob for tree in trees], np.float32),
    )


@dataclasses.dataclass(frozen=True)
class _CreditRows:
    """The credit rows of all trees, R of them, with node ids of the forest."""

    leaf: np.ndarray  # int64 [R]
    node: np.ndarray  # int64 [R]
    weight: np.ndarray  # float32 [R]
    pos: np.ndarray  # float32 [R]; weight * max(advantage, 0)
    neg: np.ndarray  # float32 [R]; weight * min(advantage, 0)


def _credit_rows(
    forest: _Forest, trees: Sequence[RolloutTree], credits: Sequence[Credit], weights: Sequence[np.ndarray]
) -> _CreditRows:
    if not len(trees) == len(credits) == len(weights):
        got = f"{len(trees)} trees, {len(credits)} credits and {len(weights)} weights"
        raise ValueError(f"got {got}; pass one credit and one array of weights per tree")
    for tree, credit, weight in zip(trees, credits, weights, strict=True):
        if weight.shape != credit.advantage.shape:
            got = f"{weight.shape} weights for {credit.advantage.shape} credit rows"
            raise ValueError(f"tree {tree.prompt_uid!r}: {got}; pass one weight per row")
        if max(credit.leaf.max(initial=0), credit.node.max(initial=0)) >= tree.num_nodes:
            got = f"a credit row names a node past the last, {tree.num_nodes - 1}"
            raise ValueError(f"tree {tree.prompt_uid!r}: {got}; is it of another tree?")
    shift = np.repeat(forest.base, np.array([credit.leaf.size for credit in credits], np.int64))
    weight = _concatenate(weights, np.float32).astype(np.float32)
    advantage = _concatenate([credit.advantage for credit in credits], np.float32)
    return _CreditRows(
        leaf=_concatenate([credit.leaf for credit in credits], np.int64) + shift,
        node=_concatenate([credit.node for credit in credits], np.int64) + shift,
        weight=weight,
        pos=weight * np.maximum(advantage, 0),
        neg=weight * np.minimum(advantage, 0),
    )


def _trained_leaves(forest: _Forest, rows: _CreditRows) -> np.ndarray:
    """The leaves on whose path a token has a non-zero weighted advantage, in node order."""
    trains = ((rows.pos != 0) | (rows.neg != 0)) & (forest.action_count[rows.node] > 0)
    trained = np.zeros(forest.parent.size, bool)
    trained[rows.leaf[trains]] = True
    return np.flatnonzero(trained)


@dataclasses.dataclass(frozen=True)
class _Spans:
    """The turns of the packed rollouts, root first within a rollout, P of them."""

    end: np.ndarray  # int64 [E]; the leaf of each packed rollout
    path: np.ndarray  # int64 [P]; which rollout
    node: np.ndarray  # int64 [P]; node id in the forest


def _credit_per_span(
    rows: _CreditRows, forest: _Forest, spans: _Spans
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weight, pos, neg), float64 [P] each: the sum of the credit rows that train each span, 0 where none does.

    Raises ValueError for a row whose leaf is none, or whose node is not on the path of its leaf.
    """
    path_of_leaf = np.full(forest.parent.size, -1)
    path_of_leaf[spans.end] = np.arange(spans.end.size)
    first = np.searchsorted(spans.path, np.arange(spans.end.size))
    depth = np.zeros(forest.parent.size, np.int64)
    depth[spans.node] = np.arange(spans.path.size) - first[spans.path]
    path = path_of_leaf[rows.leaf]
    packed = path >= 0  # the others belong to rollouts that are left out
    # A node of another path has another depth, or another node stands at its depth here.
    span = np.minimum(first[path[packed]] + depth[rows.node[packed]], spans.node.size - 1)
    wrong = spans.node[span] != rows.node[packed]
    if np.any(wrong) or not np.all(np.isin(rows.leaf, forest.leaf)):
        raise ValueError("a credit row names a node that is not on the path to its leaf; is it of another tree?")

    def total(per_row: np.ndarray) -> np.ndarray:
        return np.bincount(span, per_row[packed], minlength=spans.node.size)

    return total(rows.weight), total(rows.pos), total(rows.neg)


def _rollout_name(forest: _Forest, trees: Sequence[RolloutTree], end: np.ndarray, i: int) -> str:
    tree = int(np.searchsorted(forest.base, end[i], side="right")) - 1
    return f"tree {trees[tree].prompt_uid!r}: the rollout that ends in node {end[i] - forest.base[tree]}"
