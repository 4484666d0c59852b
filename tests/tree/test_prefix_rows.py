"""Shared-prefix rows by hand, and against sets of prefixes and a recursive definition of what a token sees."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.tree import prefix_rows
from trace_jax.types import PackedBatch

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=12)


def pack(sequences, row_length):
    return prefix_rows.pack_shared([np.array(s, np.int32) for s in sequences], row_length=row_length)


def path(batch: PackedBatch, row: int, column: int) -> list[int]:
    """The columns from the first token of a path down to `column`: recursion over `prev`."""
    above = int(batch.prev[row, column])
    return [*(path(batch, row, above) if above >= 0 else []), column]


def filled(batch: PackedBatch) -> int:
    return int(np.sum(batch.end > 0))


def test_a_tree_by_hand():
    """Prompt 1 2 with rollouts 3 4 and 5 6 7, anchors inside both, and a stranger 9 that shares nothing.

    Preorder:  column 0 1 2 3 4 5 6     The tree of the first five is one segment of 7 tokens, the stranger another.
               token  1 2 3 4 5 6 7     1 and 2 are seen until 7; 3 and 4 until 4, where the other rollout starts.
    """
    batch, row, col = pack([[1, 2, 5, 6, 7], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [9], [1, 2]], 8)
    assert batch.token.tolist() == [[1, 2, 3, 4, 5, 6, 7, 9]]
    assert batch.pos.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0]]
    assert batch.prev.tolist() == [[-1, 0, 1, 2, 1, 4, 5, -1]]
    assert batch.end.tolist() == [[7, 7, 4, 4, 7, 7, 7, 8]]
    assert row.tolist() == [0] * 7 and col.tolist() == [6, 1, 2, 3, 4, 7, 1]


def test_what_does_not_fit_starts_again_by_hand():
    """Rows of 6: 1 2 3 4 and 1 2 5 are 5 tokens together; 1 2 6 7 would make 7, so it starts a segment of 4."""
    batch, row, col = pack([[1, 2, 6, 7], [1, 2, 6], [1, 2, 5], [1, 2, 3, 4]], 6)
    assert batch.token.tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 6, 7, 0, 0]]
    assert batch.end.tolist() == [[5, 5, 4, 4, 5, 0], [4, 4, 4, 4, 0, 0]]
    assert batch.prev.tolist() == [[-1, 0, 1, 2, 1, -1], [-1, 0, 1, 2, -1, -1]]
    assert list(zip(row.tolist(), col.tolist(), strict=True)) == [(1, 3), (1, 2), (0, 4), (0, 3)]


@given(SEQUENCES, st.integers(7, 20))
def test_each_sequence_is_a_path(sequences, row_length):
    batch, row, col = pack(sequences, row_length)
    for sequence, r, c in zip(sequences, row, col, strict=True):
        columns = path(batch, r, c)
        assert batch.token[r, columns].tolist() == sequence
        assert batch.pos[r, columns].tolist() == list(range(len(sequence)))


@given(SEQUENCES, st.integers(7, 20))
def test_a_token_sees_its_path_and_nothing_else(sequences, row_length):
    batch, *_ = pack(sequences, row_length)
    rows, length = batch.shape
    for r in range(rows):
        for q in range(length):
            sees = [k for k in range(length) if k <= q and q < batch.end[r, k]]
            assert sees == (path(batch, r, q) if batch.end[r, q] > 0 else [])


@given(SEQUENCES)
def test_a_row_that_holds_all_holds_every_prefix_once(sequences):
    batch, row, _ = pack(sequences, 200)
    prefixes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    assert batch.shape == (1, 200) and filled(batch) == len(prefixes) and not np.any(row)


@given(SEQUENCES, st.integers(7, 20), st.randoms(use_true_random=False))
def test_rows_depend_on_the_set_of_sequences(sequences, row_length, random):
    batch, row, col = pack(sequences, row_length)
    order = list(range(len(sequences)))
    random.shuffle(order)
    again, row2, col2 = pack([sequences[i] for i in order] + sequences[:1], row_length)
    for name in ("token", "pos", "prev", "end"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(again, name))
    assert row2[: len(order)].tolist() == row[order].tolist() and col2[: len(order)].tolist() == col[order].tolist()


@given(SEQUENCES, st.integers(7, 20))
def test_sharing_never_costs_more_than_a_segment_for_each_sequence(sequences, row_length):
    batch, *_ = pack(sequences, row_length)
    assert filled(batch) <= sum(map(len, sequences))


def test_nothing_is_one_empty_row():
    batch, row, col = pack([], 5)
    assert batch.shape == (1, 5) and filled(batch) == 0 and row.shape == col.shape == (0,)


@pytest.mark.parametrize("sequence, size", [([], 0), ([1] * 6, 6)])
def test_a_sequence_that_fits_no_row_is_named(sequence, size):
    with pytest.raises(ValueError, match=f"sequence 1 has {size} tokens, but a row holds 1 to 5"):
        pack([[1], sequence], 5)


def test_a_tree_of_real_size_is_packed_in_milliseconds():
    """8 rollouts of 5 turns of 256 tokens on a prompt of 512: the median of nine runs, with room for a busy machine."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, 512).astype(np.int32)
    rollouts = [np.concatenate([prompt, rng.integers(0, 150_000, 5 * 256).astype(np.int32)]) for _ in range(8)]
    anchors = [rollout[: 512 + 256 * t] for rollout in rollouts for t in range(1, 5)]
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        batch, *_ = prefix_rows.pack_shared(anchors, row_length=16384)
        seconds.append(time.perf_counter() - begin)
    assert filled(batch) == 512 + 8 * 4 * 256 and np.median(seconds) < 0.02


@given(SEQUENCES, st.integers(7, 20), st.integers(0, 2**32))
def test_a_drawn_order_gives_the_same_paths(sequences, row_length, seed):
    arrays = [np.array(s, np.int32) for s in sequences]
    draw = lambda: prefix_rows.pack_shared(arrays, row_length=row_length, rng=np.random.default_rng(seed))
    batch, row, col = draw()
    assert [batch.token[r, path(batch, r, c)].tolist() for r, c in zip(row, col, strict=True)] == sequences
    for r, q in zip(*np.nonzero(batch.end), strict=True):
        assert [k for k in range(row_length) if k <= q and q < batch.end[r, k]] == path(batch, r, q)
    again, *cells = draw()
    np.testing.assert_array_equal(again.token, batch.token)
    np.testing.assert_array_equal(cells, [row, col])


def test_every_order_of_three_chains_can_be_drawn():
    """Rows of 3 hold two of the chains 0 1, 0 2 and 0 3: which two, and in which order, is the generator's choice."""
    arrays = [np.array([0, i], np.int32) for i in (1, 2, 3)]
    packs = [prefix_rows.pack_shared(arrays, row_length=3, rng=np.random.default_rng(seed))[0] for seed in range(60)]
    rows = [tuple(batch.token[0].tolist()) for batch in packs]
    assert set(rows) == {(0, i, j) for i in (1, 2, 3) for j in (1, 2, 3) if i != j}


def test_negative_ids_are_tokens_like_others():
    batch, row, col = pack([[-1, 2], [-1, -3]], 3)
    assert [batch.token[r, path(batch, r, c)].tolist() for r, c in zip(row, col, strict=True)] == [[-1, 2], [-1, -3]]


def test_equal_sequences_are_merged_by_hand():
    """1 2 twice, with weights 1 and 3: (1 * 1 + 3 * 0.2) / 4 = 0.4. The others keep what is theirs, to the last bit."""
    sequences, third = [[1, 2], [1], [1, 2], [1, 3]], np.float32(1 / 3)
    packed = pack(sequences, 4)
    _, row, col = packed
    batch = prefix_rows.with_targets(*packed, np.array([1, third, 0.2, np.nan]), np.array([1, third, 3, 0]))
    assert batch.value_target[row, col].tolist() == [np.float32(0.4), third, np.float32(0.4), 0]
    assert batch.value_weight[row, col].tolist() == [4, third, 4, 0]
    assert batch.value_weight.sum() == np.float32(4) + third and batch.value_target.dtype == np.float32
    assert batch.token.tolist() == packed[0].token.tolist()
    with pytest.raises(ValueError, match=r"4 sequences, \(3,\) targets, \(4,\) weights"):
        prefix_rows.with_targets(*packed, np.zeros(3), np.ones(4))


@given(SEQUENCES, st.integers(0, 2**32))
def test_merged_losses_differ_from_single_ones_by_a_constant(sequences, seed):
    """Both losses, written out example by example, minus the merged ones: the same for any two predictions."""
    rng = np.random.default_rng(seed)
    y, w = rng.random(len(sequences)), rng.random(len(sequences)) + 0.1
    packed = pack(sequences, 20)
    _, row, col = packed
    batch = prefix_rows.with_targets(*packed, y, w)
    square, gap = [], []
    for _ in range(2):
        z = rng.normal(size=batch.shape)
        s = 1 / (1 + np.exp(-z))
        single, merged = s[row, col], (batch.value_weight * (s - batch.value_target) ** 2).sum()
        square.append((w * (single - y) ** 2).sum() - merged)
        entropy = lambda s, y: -y * np.log(s) - (1 - y) * np.log(1 - s)
        gap.append((w * entropy(single, y)).sum() - (batch.value_weight * entropy(s, batch.value_target)).sum())
    np.testing.assert_allclose(square, square[0], rtol=0, atol=1e-5)
    assert square[0] > -1e-5
    np.testing.assert_allclose(gap, 0, rtol=0, atol=1e-5)
