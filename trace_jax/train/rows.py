"""Rows of a packed batch on the host: mini-batches for optimiser steps, micro-batches of one static shape."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trace_jax.types import PackedBatch

Rows = dict[str, np.ndarray]  # fields of a PackedBatch, each [B, T]


def filled_rows(batch: PackedBatch, fields: tuple[str, ...]) -> Rows:
    """The named fields of the rows that hold a token; rows of padding alone are left out."""
    real = np.flatnonzero(np.any(batch.end > 0, axis=1))
    return {name: getattr(batch, name)[real] for name in fields}


def take(rows: Rows, index: np.ndarray) -> Rows:
    """The rows `index`, in that order."""
    return {name: value[index] for name, value in rows.items()}


def pad_rows(rows: Rows, multiple: int) -> Rows:
    """Adds rows of padding until their number is a multiple of `multiple`, and at least that."""
    count = next(iter(rows.values())).shape[0]
    missing = max(-(-count // multiple), 1) * multiple - count
    padded = {}
    for name, value in rows.items():
        padding = np.full((missing, *value.shape[1:]), -1 if name == "prev" else 0, value.dtype)
        padded[name] = np.concatenate([value, padding])
    return padded


def micro_batches(rows: Rows, size: int) -> Iterator[Rows]:
    """Consecutive groups of `size` rows; the last is filled up with padding, so that every group has one shape."""
    padded = pad_rows(rows, size)
    for start in range(0, next(iter(padded.values())).shape[0], size):
        yield {name: value[start : start + size] for name, value in padded.items()}


def mini_batches(count: int, parts: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Splits rows 0..count-1 into `parts` random sets whose sizes differ by at most one.

    With one part the rows keep their order and `rng` is not touched. With fewer rows than parts every row is a part.
    """
    if parts == 1:
        return [np.arange(count)]
    return np.array_split(rng.permutation(count), min(parts, count))
