"""Path rows and prefix rows, read back segment by segment and compared with what the nested form says."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree.tree_oracle import Case, build, cases, chain, make_turn, worked_case
from trace_jax.tree import advantage, aggregate, pack, query
from trace_jax.tree.credit import Credit
from trace_jax.types import PackedBatch, RolloutTree

ROW = 64  # longer than any rollout that `cases` draws
ESTIMATORS = st.sampled_from(
    [advantage.grpo, advantage.dr_grpo, advantage.tree_rpo, advantage.tree_grpo, advantage.tree_rloo]
)
BATCHES = st.lists(cases(max_rollouts=3), min_size=1, max_size=3)


def credit_and_weights(trees: list[RolloutTree], estimate=advantage.grpo):
    credits = [estimate(tree) for tree in trees]
    weights = aggregate.token_weights(
        trees, credits, mode="sequence_mean_token_mean", prompt_weight="equal", max_tokens=1
    )
    return credits, weights


def pack_with(trees, credits, weights, *, row_length=ROW, rows_multiple=1, skip_untrained=False) -> PackedBatch:
    return pack.pack_paths(
        trees, credits, weights, row_length=row_length, rows_multiple=rows_multiple, skip_untrained=skip_untrained
    )


def segments(batch: PackedBatch) -> list[list[tuple]]:
    """Reads the rows back: one list of per-token tuples per segment, row by row."""
    found = []
    rows, row_length = batch.shape
    names = ["token", "is_action", "weight", "adv_pos", "adv_neg", "old_logprob", "behaviour_logprob"]
    for r in range(rows):
        c = 0
        while c < row_length and batch.end[r, c] > 0:
            end = int(batch.end[r, c])
            assert np.all(batch.end[r, c:end] == end)
            assert batch.pos[r, c:end].tolist() == list(range(end - c))
            assert batch.prev[r, c:end].tolist() == [-1, *range(c, end - 1)]
            found.append([tuple(getattr(batch, name)[r, i].item() for name in names) for i in range(c, end)])
            c = end
        for field in dataclasses.fields(PackedBatch):  # the rest of the row is padding
            assert np.all(getattr(batch, field.name)[r, c:] == (-1 if field.name == "prev" else 0))
    return found


def expected_segments(case: Case, credit: Credit, weight: np.ndarray) -> list[list[tuple]]:
    """The same from the nested form, one segment per route, in the order of the leaves."""
    trained = {}
    for leaf, node, a, w in zip(credit.leaf, credit.node, credit.advantage, weight, strict=True):
        assert (leaf, node) not in trained
        zero = np.float32(0)
        trained[int(leaf), int(node)] = (w.item(), (w * max(a, zero)).item(), (w * min(a, zero)).item())
    result = []
    for route in case.routes():
        segment = [(token, False, 0.0, 0.0, 0.0, 0.0, 0.0) for token in case.root.prompt]
        for node in route[1:]:
            weights = trained.get((route[-1].index, node.index), (0.0, 0.0, 0.0))
            for token, logprob in zip(node.turn.action.tolist(), node.turn.logprobs.tolist(), strict=True):
                segment.append((token, True, *weights, logprob, logprob))
            segment += [(token, False, 0.0, 0.0, 0.0, 0.0, 0.0) for token in node.turn.observation.tolist()]
        result.append(segment)
    return result


def multiset(found: list[list[tuple]]) -> Counter:
    return Counter(map(tuple, found))


@given(batch=BATCHES, estimate=ESTIMATORS)
def test_each_rollout_is_one_segment_with_its_credit(batch: list[Case], estimate):
    trees = [case.tree for case in batch]
    credits, weights = credit_and_weights(trees, estimate)
    expected = [s for case, c, w in zip(batch, credits, weights, strict=True) for s in expected_segments(case, c, w)]
    assert multiset(segments(pack_with(trees, credits, weights))) == multiset(expected)


@given(batch=BATCHES, estimate=ESTIMATORS)
def test_skipping_leaves_out_exactly_the_rollouts_that_train_nothing(batch: list[Case], estimate):
    trees = [case.tree for case in batch]
    credits, weights = credit_and_weights(trees, estimate)
    expected = [s for case, c, w in zip(batch, credits, weights, strict=True) for s in expected_segments(case, c, w)]
    kept = [s for s in expected if any(token[3] != 0 or token[4] != 0 for token in s)]
    found = segments(pack_with(trees, credits, weights, skip_untrained=True))
    assert multiset(found) == multiset(kept)


@given(batch=BATCHES, estimate=ESTIMATORS)
def test_total_weight_and_advantage_are_conserved(batch: list[Case], estimate):
    trees = [case.tree for case in batch]
    credits, weights = credit_and_weights(trees, estimate)
    counts = [tree.action_counts()[credit.node] for tree, credit in zip(trees, credits, strict=True)]
    full = pack_with(trees, credits, weights)
    short = pack_with(trees, credits, weights, skip_untrained=True)
    total = sum(float(np.sum(w * n)) for w, n in zip(weights, counts, strict=True))
    np.testing.assert_allclose(full.weight.sum(), total, rtol=1e-5)
    signed = sum(float(np.sum(w * c.advantage * n)) for w, c, n in zip(weights, credits, counts, strict=True))
    for packed in (full, short):
        np.testing.assert_allclose((packed.adv_pos + packed.adv_neg).sum(), signed, atol=1e-5)
        assert np.all(packed.adv_pos >= 0) and np.all(packed.adv_neg <= 0)


@settings(max_examples=25)
@given(case=cases(), estimate=ESTIMATORS)
def test_a_token_sees_its_own_path_and_no_more(case: Case, estimate):
    credits, weights = credit_and_weights([case.tree], estimate)
    batch = pack_with([case.tree], credits, weights)
    rows, row_length = batch.shape
    k = np.arange(row_length)
    histories = []
    for r in range(rows):
        for q in np.flatnonzero(batch.end[r] > 0):
            seen = (k <= q) & (q < batch.end[r])
            assert seen.sum() == batch.pos[r, q] + 1
            histories.append(tuple(batch.token[r, seen].tolist()))
    expected = []
    for route in case.routes():
        tokens = [token for node in route for token in node.tokens()]
        expected += [tuple(tokens[: i + 1]) for i in range(len(tokens))]
    assert Counter(histories) == Counter(expected)


@given(case=cases(min_last_action=1))
def test_tree_rpo_trains_each_token_once_and_tree_grpo_once_per_trajectory(case: Case):
    # Counting trained cells by the node they belong to: unique token ids per node make the node readable.
    tree = dataclasses.replace(case.tree, token=np.arange(case.tree.token.size, dtype=np.int32))
    times = {}
    for estimate in (advantage.tree_rpo, advantage.tree_grpo):
        credits, weights = credit_and_weights([tree], estimate)
        batch = pack_with([tree], credits, weights)
        times[estimate] = np.bincount(batch.token[batch.weight > 0], minlength=tree.token.size)
    owner = np.repeat(np.arange(tree.num_nodes), np.diff(tree.offset))
    trained = np.isin(owner, advantage.tree_rpo(tree).node) & tree.is_action
    assert times[advantage.tree_rpo].tolist() == trained.astype(int).tolist()
    leaves_below = np.array([len(node.leaves()) for node in case.by_index()])
    assert times[advantage.tree_grpo].tolist() == (leaves_below[owner] * tree.is_action).tolist()


@given(batch=BATCHES, row_length=st.integers(ROW, 3 * ROW), rows_multiple=st.integers(1, 5))
def test_padding_changes_nothing(batch: list[Case], row_length: int, rows_multiple: int):
    trees = [case.tree for case in batch]
    credits, weights = credit_and_weights(trees)
    plain = pack_with(trees, credits, weights)
    padded = pack_with(trees, credits, weights, row_length=row_length, rows_multiple=rows_multiple)
    assert padded.shape[0] % rows_multiple == 0 and padded.shape[1] == row_length
    assert multiset(segments(padded)) == multiset(segments(plain))


@given(batch=BATCHES, seed=st.integers(0, 99))
def test_packing_is_repeatable_and_sorting_undoes_the_order_of_arrival(batch: list[Case], seed: int):
    trees = [dataclasses.replace(case.tree, prompt_uid=f"uid{i}") for i, case in enumerate(batch)]
    credits, weights = credit_and_weights(trees)
    reference = pack_with(trees, credits, weights)
    arrived = [trees[i] for i in np.random.default_rng(seed).permutation(len(trees))]
    arrived.sort(key=lambda tree: tree.prompt_uid)
    again = pack_with(arrived, *credit_and_weights(arrived))
    for field in dataclasses.fields(PackedBatch):
        assert np.array_equal(getattr(reference, field.name), getattr(again, field.name))


def test_the_worked_tree_by_hand():
    # Rollouts have 3 prompt tokens, turns of 2 action tokens and 1 observation token, a last turn of 2 action tokens:
    # 3 + 3 + 3 + 2 = 11 tokens for leaf 3, 3 + 3 + 2 = 8 for the five others. Rows of 19 hold 11 + 8, 8 + 8, 8 + 8.
    tree = worked_case().tree
    credits, weights = credit_and_weights([tree], advantage.tree_rpo)
    batch = pack_with([tree], credits, weights, row_length=19, rows_multiple=4)
    assert batch.shape == (4, 19)
    assert batch.end[:, 0].tolist() == [11, 8, 8, 0]
    assert batch.end[:, 18].tolist() == [19, 0, 0, 0]
    assert pack.fill_ratio(batch) == (11 + 5 * 8) / (4 * 19)
    # 8 edges of token-mean 1 in one tree; the edge 2-3 has 4 tokens, all others 2.
    # Leaf 3 trains node 1 (+1), then nodes 2 and 3 (+0.7071), each token once.
    expected = np.zeros(19, np.float32)
    expected[[3, 4]] = 1 / 16
    expected[[6, 7, 9, 10]] = 1 / 32
    expected[[11 + 3, 11 + 4]] = 1 / 16  # leaf 5 stands beside it and trains node 4 ...
    expected[[11 + 6, 11 + 7]] = 1 / 16  # ... and itself
    np.testing.assert_allclose(batch.weight[0], expected, rtol=1e-6)
    signs = np.zeros(19)
    signs[[3, 4]], signs[[6, 7, 9, 10]], signs[[14, 15]], signs[[17, 18]] = 1, 0.5**0.5, -1, -(0.5**0.5)
    np.testing.assert_allclose((batch.adv_pos + batch.adv_neg)[0], expected * signs, rtol=1e-6)
    # Leaf 6 trains only itself: the shared turn 1 has its credit on leaf 3's path.
    assert np.flatnonzero(batch.weight[1, :8]).tolist() == [6, 7]


def test_nothing_to_train_is_padding():
    tree = build([chain(2, 1.0), chain(2, 1.0)]).tree
    batch = pack_with([tree], *credit_and_weights([tree]), rows_multiple=2, skip_untrained=True)
    assert batch.shape == (2, ROW) and pack.fill_ratio(batch) == 0 and not batch.weight.any()
    batch = pack_with([], [], [], rows_multiple=2)
    assert batch.shape == (2, ROW) and pack.fill_ratio(batch) == 0


def test_a_turn_without_tokens_trains_nothing():
    # The second rollout has an advantage but not a single token.
    tree = build([[make_turn(2, 0, 1.0)], [make_turn(0, 0, 0.0)]]).tree
    found = segments(pack_with([tree], *credit_and_weights([tree]), skip_untrained=True))
    assert len(found) == 1 and len(found[0]) == 5


def test_a_rollout_longer_than_a_row_is_named():
    trees = [build([chain(1, 1.0)], uid="short").tree, build([chain(1, 1.0), chain(3, 0.0)], uid="long").tree]
    with pytest.raises(ValueError, match="tree 'long': the rollout that ends in node 4 has 11 tokens, .* holds 10;"):
        pack_with(trees, *credit_and_weights(trees), row_length=10)


def test_credit_of_another_tree_is_refused():
    tree, other = worked_case().tree, build([chain(2, 1.0), chain(2, 0.0)]).tree
    credits, weights = credit_and_weights([tree, other])
    with pytest.raises(ValueError, match="a credit row names a node past the last"):
        pack_with([tree, other], credits[::-1], weights[::-1])
    with pytest.raises(ValueError, match="2 trees, 1 credits and 1 weights"):
        pack_with([tree, other], credits[:1], weights[:1])
    with pytest.raises(ValueError, match=r"\(3,\) weights for"):
        pack_with([tree], credits[:1], [np.zeros(3, np.float32)])


def one_row(leaf: int, node: int) -> Credit:
    return Credit(*(np.array([x], np.int32) for x in (leaf, node, 0)), np.ones(1, np.float32))


@pytest.mark.parametrize(("leaf", "node"), [(3, 4), (5, 3), (9, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("skip_untrained", [True, False])
def test_credit_off_the_path_is_refused(leaf, node, skip_untrained):
    # Node 4 is at the depth of node 1, node 3 deeper than leaf 5, node 2 as deep as leaf 9; node 2 is no leaf.
    with pytest.raises(ValueError, match="not on the path to its leaf"):
        pack_with([worked_case().tree], [one_row(leaf, node)], [np.ones(1)], skip_untrained=skip_untrained)


def test_credit_on_the_prompt_trains_nothing():
    # The prompt is on every path but holds no action tokens.
    assert not pack_with([worked_case().tree], [one_row(6, 0)], [np.ones(1)]).weight.any()


def test_both_signs_on_one_token_are_kept_apart():
    # Two rows on the same turn and path, as two sequences: +1 with weight 1/2 and -2 with weight 1/4.
    tree = build([chain(1, 1.0)]).tree
    credit = Credit(*(np.array(x, np.int32) for x in ([1, 1], [1, 1], [0, 1])), np.array([1, -2], np.float32))
    batch = pack_with([tree], [credit], [np.array([0.5, 0.25])])
    assert batch.weight[0, 3] == 0.75 and batch.adv_pos[0, 3] == 0.5 and batch.adv_neg[0, 3] == -0.5


@given(lengths=st.lists(st.integers(1, 12), max_size=12), rows_multiple=st.integers(1, 3))
def test_prefixes_carry_their_targets_on_their_last_token(lengths: list[int], rows_multiple: int):
    rng = np.random.default_rng(len(lengths))
    prefixes = [rng.integers(0, 9, n).astype(np.int32) for n in lengths]
    targets, weights = rng.random(len(lengths)), rng.random(len(lengths)) + 1
    batch, row, col = pack.pack_prefixes(prefixes, targets, weights, row_length=12, rows_multiple=rows_multiple)
    assert sorted(end - 1 for r in batch.end for end in set(r.tolist()) if end) == sorted(col.tolist())
    assert batch.shape[0] % rows_multiple == 0 and row.dtype == col.dtype == np.int32
    for prefix, target, weight, r, c in zip(prefixes, targets, weights, row, col, strict=True):
        assert batch.end[r, c] == c + 1 and batch.pos[r, c] == prefix.size - 1
        assert batch.token[r, c + 1 - prefix.size : c + 1].tolist() == prefix.tolist()
        assert batch.value_target[r, c] == np.float32(target) and batch.value_weight[r, c] == np.float32(weight)
    assert np.count_nonzero(batch.value_weight) == len(lengths)
    assert not batch.is_action.any() and not batch.weight.any()


def test_a_prefix_is_the_history_and_nothing_after_it():
    tree = worked_case().tree
    nodes = [0, *query.anchors(tree)]
    batch, row, col = pack.pack_prefixes(
        [query.prefix_tokens(tree, node) for node in nodes], np.zeros(4), np.ones(4), row_length=10, rows_multiple=1
    )
    assert batch.pos[row, col].tolist() == [2, 5, 8, 5]


def test_bad_prefixes_are_refused():
    prefix = np.ones(3, np.int32)
    with pytest.raises(ValueError, match="prefix 1 has 3 tokens, but a row holds 2"):
        pack.pack_prefixes([prefix[:2], prefix], np.zeros(2), np.ones(2), row_length=2, rows_multiple=1)
    with pytest.raises(ValueError, match="prefix 0 is empty"):
        pack.pack_prefixes([prefix[:0]], np.zeros(1), np.ones(1), row_length=2, rows_multiple=1)
    with pytest.raises(ValueError, match=r"1 prefixes, \(2,\) targets"):
        pack.pack_prefixes([prefix], np.zeros(2), np.ones(1), row_length=4, rows_multiple=1)


TRUNK = np.array([90, 91, 92], np.int32)


def with_trunk(tree: RolloutTree) -> RolloutTree:
    """The tree with the trunk before its prompt."""
    zeros = np.zeros(TRUNK.size)
    return dataclasses.replace(
        tree,
        offset=np.concatenate([tree.offset[:1], tree.offset[1:] + TRUNK.size]).astype(tree.offset.dtype),
        token=np.concatenate([TRUNK, tree.token]),
        is_action=np.concatenate([zeros, tree.is_action]).astype(bool),
        logprob=np.concatenate([zeros, tree.logprob]).astype(np.float32),
    )


@settings(max_examples=25)
@given(batch=BATCHES, estimate=ESTIMATORS)
def test_a_trunk_stands_once_in_a_row_and_changes_no_history(batch: list[Case], estimate):
    trees = [with_trunk(case.tree) for case in batch]
    credits, weights = credit_and_weights(trees, estimate)
    arguments = {"row_length": ROW, "rows_multiple": 2, "skip_untrained": False}
    plain = pack.pack_paths(trees, credits, weights, **arguments)
    packed = pack.pack_paths(trees, credits, weights, trunk=TRUNK, **arguments)
    read = []
    for rows in (plain, packed):
        tokens = []
        for r in range(rows.shape[0]):
            for q in np.flatnonzero(rows.end[r] > 0):
                at, history = q, []
                while at >= 0:  # backwards along `prev`
                    assert at <= q < rows.end[r, at]  # what predicts q, directly or not, is what q sees
                    history.append(int(rows.token[r, at]))
                    at = rows.prev[r, at]
                assert len(history) == rows.pos[r, q] + 1
                seen = (np.arange(ROW) <= q) & (q < rows.end[r])
                assert seen.sum() == len(history)
                numbers = tuple(rows_of[r, q].item() for rows_of in (rows.weight, rows.adv_pos, rows.old_logprob))
                if len(history) > TRUNK.size:
                    tokens.append((tuple(history), numbers))
        read.append(Counter(tokens))
    assert read[0] == read[1]
    used = int(np.any(packed.end > 0, axis=1).sum())
    assert np.sum(np.isin(packed.token, TRUNK) & (packed.end == ROW)) == used * TRUNK.size


def test_a_trunk_by_hand():
    # Two rollouts of one action behind prompt 5 with the trunk 90 91 92 before it: one row holds 3 + 2 * 2 tokens.
    tree = with_trunk(build([chain(1, 1.0, action=1)], prompt=[5]).tree)
    action = int(tree.token[-1])
    credits, weights = credit_and_weights([tree, tree])
    batch = pack.pack_paths(
        [tree, tree], credits, weights, row_length=8, rows_multiple=1, skip_untrained=False, trunk=TRUNK
    )
    assert batch.token.tolist() == [[90, 91, 92, 5, action, 5, action, 0]]
    assert batch.pos.tolist() == [[0, 1, 2, 3, 4, 3, 4, 0]]
    assert batch.prev.tolist() == [[-1, 0, 1, 2, 3, 2, 5, -1]]
    assert batch.end.tolist() == [[8, 8, 8, 5, 5, 7, 7, 0]]


def test_bad_trunks_are_named():
    tree = with_trunk(build([chain(1, 1.0, action=1)], prompt=[5]).tree)
    credits, weights = credit_and_weights([tree])
    arguments = {"rows_multiple": 1, "skip_untrained": False}
    with pytest.raises(ValueError, match="prompt does not begin with the trunk of 3 tokens"):
        pack.pack_paths([tree], credits, weights, row_length=8, trunk=TRUNK[::-1], **arguments)
    with pytest.raises(ValueError, match="has 5 tokens, but a row holds 4"):
        pack.pack_paths([tree], credits, weights, row_length=4, trunk=TRUNK, **arguments)
