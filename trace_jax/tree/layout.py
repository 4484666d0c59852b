"""Where segments of different lengths go in rows of one length, and how a `PackedBatch` is filled from that.

Segments are placed by first fit in order of decreasing length, ties in the order given: the layout depends on the
lengths alone. Rows past the last used one are padding, up to a multiple of `rows_multiple`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from trace_jax.types import PackedBatch

_DTYPES = {"token": np.int32, "pos": np.int32, "prev": np.int32, "end": np.int32, "is_action": np.bool_}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The place of each token of the segments, laid end to end, S tokens in all."""

    shape: tuple[int, int]  # (rows B, row length T)
    cell: np.ndarray  # int64 [S]; row * T + column
    pos: np.ndarray  # int64 [S]; index of the token in trunk and segment
    prev: np.ndarray  # int64 [S]; column of the token before it; for a segment's first the trunk's last, or -1
    end: np.ndarray  # int64 [S]; column where its segment ends


def lay_out(
    length: np.ndarray, *, row_length: int, rows_multiple: int, name: Callable[[int], str], trunk: int = 0
) -> Layout:
    """Places one segment per entry of `length`, behind the first `trunk` cells of a row, which stay free.

    Args:
      length: int [n], tokens of each segment, >= 1, the trunk not counted.
      row_length: T, tokens per row, >= 1.
      rows_multiple: the number of rows is a multiple of this, and at least this, >= 1.
      name: what to call segment i in an error.
      trunk: tokens that all segments go on from, 0 or more.

    Raises:
      ValueError: for a segment longer than a row, or sizes below 1.
    """
    if row_length < 1 or rows_multiple < 1:
        raise ValueError(f"row_length is {row_length} and rows_multiple {rows_multiple}; both must be at least 1")
    too_long = np.flatnonzero(length + trunk > row_length)
    if too_long.size:
        i = int(too_long[0])
        limit = f"but a row holds {row_length}; lengthen the rows or shorten the rollouts"
        raise ValueError(f"{name(i)} has {length[i] + trunk} tokens, {limit}")
    row, col, used = _first_fit_decreasing(length, row_length - trunk)
    col += trunk
    rows = max(-(-used // rows_multiple), 1) * rows_multiple
    first = np.cumsum(length) - length
    token = np.arange(length.sum())
    pos = token - np.repeat(first, length)
    column = pos + np.repeat(col, length)
    return Layout(
        shape=(rows, row_length),
        cell=column + np.repeat(row * row_length, length),
        pos=pos + trunk,
        prev=np.where(pos > 0, column - 1, trunk - 1),
        end=np.repeat(col + length, length),
    )


def fill(layout: Layout, **fields: np.ndarray) -> PackedBatch:
    """The batch with `fields`, one value [S] per token, in their cells.

    `pos`, `prev` and `end` come from the layout. Fields that are not given, and padding, are 0; `prev` is -1 there.
    """
    fields |= {"pos": layout.pos, "prev": layout.prev, "end": layout.end}
    arrays = {}
    for field in dataclasses.fields(PackedBatch):
        empty = -1 if field.name == "prev" else 0
        array = np.full(layout.shape, empty, _DTYPES.get(field.name, np.float32))
        if field.name in fields:
            array.reshape(-1)[layout.cell] = fields[field.name]
        arrays[field.name] = array
    return PackedBatch(**arrays)


def _first_fit_decreasing(length: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(row, col) of each segment, int64 [n] each, and the number of rows used."""
    row, col = np.zeros(length.size, np.int64), np.zeros(length.size, np.int64)
    free = np.full(length.size, row_length, np.int64)  # one row per segment is always enough
    used = 0
    order = np.argsort(-length, kind="stable")
    for i, size in zip(order.tolist(), length[order].tolist(), strict=True):
        r = int(np.argmax(free[: used + 1] >= size))  # the row after the last used one is empty, so one always fits
        row[i], col[i] = r, row_length - free[r]
        free[r] -= size
        used = max(used, r + 1)
    return row, col, used
