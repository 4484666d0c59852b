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
