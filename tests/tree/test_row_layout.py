"""First fit decreasing by hand and against a plain list of rows; what fills the cells."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.tree.layout import fill, lay_out
from trace_jax.types import PackedBatch

LENGTHS = st.lists(st.integers(1, 9), max_size=20)


def place(lengths, row_length=9, rows_multiple=1):
    return lay_out(
        np.array(lengths, np.int64), row_length=row_length, rows_multiple=rows_multiple, name=lambda i: f"segment {i}"
    )


def places_by_lists(lengths: list[int], row_length: int) -> tuple[list[tuple[int, int]], int]:
    """(row, column) of each segment, and the number of rows: longest first, each into the first row with room."""
    used: list[int] = []
    places = {}
    for size, i in sorted(((size, i) for i, size in enumerate(lengths)), key=lambda pair: (-pair[0], pair[1])):
        for r, taken in enumerate(used):
            if taken + size <= row_length:
                break
        else:
            r, taken = len(used), 0
            used.append(0)
        places[i] = (r, taken)
        used[r] += size
    return [places[i] for i in range(len(lengths))], len(used)


def test_by_hand():
    # Longest first into rows of 6: 5 -> row 0; 4 -> row 1; the first 2 -> row 1; the second -> row 2; 1 -> row 0.
    layout = place([2, 4, 1, 5, 2], row_length=6, rows_multiple=2)
    assert layout.shape == (4, 6)  # three rows, padded to a multiple of two
    assert layout.cell.tolist() == [10, 11, 6, 7, 8, 9, 5, 0, 1, 2, 3, 4, 12, 13]
    assert layout.pos.tolist() == [0, 1, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1]
    assert layout.prev.tolist() == [-1, 4, -1, 0, 1, 2, -1, -1, 0, 1, 2, 3, -1, 0]
    assert layout.end.tolist() == [6, 6, 4, 4, 4, 4, 6, 5, 5, 5, 5, 5, 2, 2]


@given(lengths=LENGTHS, rows_multiple=st.integers(1, 4))
def test_first_fit_decreasing_by_lists(lengths, rows_multiple):
    layout = place(lengths, rows_multiple=rows_multiple)
    places, rows = places_by_lists(lengths, 9)
    assert layout.cell.tolist() == [r * 9 + c + i for (r, c), n in zip(places, lengths, strict=True) for i in range(n)]
    assert layout.shape[0] % rows_multiple == 0
    assert max(rows, 1) <= layout.shape[0] < max(rows, 1) + rows_multiple


def test_nothing_to_place_is_one_multiple_of_padding():
    assert place([], row_length=5, rows_multiple=3).shape == (3, 5)


def test_a_segment_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match="segment 1 has 10 tokens, but a row holds 9; lengthen"):
        place([3, 10])


@pytest.mark.parametrize(("row_length", "rows_multiple"), [(0, 1), (9, 0)])
def test_sizes_below_one_are_refused(row_length, rows_multiple):
    with pytest.raises(ValueError, match="both must be at least 1"):
        place([], row_length=row_length, rows_multiple=rows_multiple)


def test_filling_leaves_padding_and_absent_fields_empty():
    layout = place([2, 1], row_length=4)
    batch = fill(layout, token=np.array([7, 8, 9], np.int32), weight=np.array([0.5, 1.5, 2.5]))
    assert batch.token.tolist() == [[7, 8, 9, 0]]
    assert batch.weight.tolist() == [[0.5, 1.5, 2.5, 0.0]]
    assert batch.pos.tolist() == [[0, 1, 0, 0]]
    assert batch.prev.tolist() == [[-1, 0, -1, -1]]
    assert batch.end.tolist() == [[2, 2, 3, 0]]
    empty = {f.name for f in dataclasses.fields(PackedBatch)} - {"token", "weight", "pos", "prev", "end"}
    assert all(not getattr(batch, name).any() for name in empty)
    dtypes = {f.name: getattr(batch, f.name).dtype for f in dataclasses.fields(PackedBatch)}
    assert {name for name, dtype in dtypes.items() if dtype == np.int32} == {"token", "pos", "prev", "end"}
    assert dtypes.pop("is_action") == np.bool_
    assert {str(dtype) for dtype in dtypes.values()} == {"int32", "float32"}
