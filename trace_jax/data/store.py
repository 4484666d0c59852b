"""Prepared data sets: which there are, and random access to their records."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from trace_jax.data import sources
from trace_jax.data.errors import DataError
from trace_jax.data.fields import VERSION, Fields
from trace_jax.data.formats import Record


def default_folder() -> Path:
    """$XDG_CACHE_HOME/trace_jax/data; ~/.cache where the variable is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trace_jax" / "data"


class Records(Sequence[Record]):
    """The records of one split, decoded when they are asked for; order and numbers never change."""

    def __init__(self, stored: Sequence[dict[str, bytes]], fields: Fields, remedy: str):
        """`stored` is random access to the encoded records; `remedy` is said of records that can't be read."""
        self._stored = stored
        self._fields = fields
        self._remedy = remedy

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = operator.index(index)
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        try:
            return self._fields.decode(self._stored[at])
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise DataError(f"record {at} can't be read: {self._remedy}") from error

    def __iter__(self) -> Iterator[Record]:
        return (self[at] for at in range(len(self)))


def load(name: str, folder: Path | None = None, *, split: str) -> Records:
    """The records of a split of a prepared set; plain dicts, the fields of each kind are in `fields.py`.

    Args:
      name: a name of `sources.SOURCES`.
      folder: where sets are prepared; None: `default_folder()`.
      split: "train" or "test".

    Raises DataError, with the command to run, where the set or the split was not prepared.
    """
    source = sources.find(name)
    folder = default_folder() if folder is None else Path(folder)
    if split not in source.splits:
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(source.splits)}")
    counts = prepared(name, folder)
    path = set_folder(name, folder)
    if counts is None:
        raise DataError(f"{name} is not prepared in {folder}: run {command(name, folder)}")
    if split not in counts:
        raise DataError(
            f"{name} was prepared in {folder} without its {split} split: remove {path.parent}, run "
            f"{command(name, folder)}"
        )
    remedy = _damaged(name, folder)
    try:
        return Records(import_builders().records_of(path, split), source.fields, remedy)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(remedy) from error


def set_folder(name: str, folder: Path) -> Path:
    """Where a set of that name is prepared."""
    return folder / name / VERSION


def prepared(name: str, folder: Path) -> dict[str, int] | None:
    """Number of records of each prepared split; None where the set is not prepared."""
    try:
        info = json.loads((set_folder(name, folder) / "dataset_info.json").read_text())
        return {split["name"]: sum(int(length) for length in split["shardLengths"]) for split in info["splits"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(_damaged(name, folder)) from error


def _damaged(name: str, folder: Path) -> str:
    return f"{name} in {set_folder(name, folder)} is damaged: remove the folder, run {command(name, folder)}"


def command(name: str, folder: Path) -> str:
    """The command that prepares a set."""
    where = "" if folder == default_folder() else f" --folder={folder}"
    return f"`python -m trace_jax.data prepare {name}{where}`"


def import_builders():  # noqa: ANN201 (a module)
    """The module that needs tensorflow-datasets. Raises DataError where that is not installed."""
    try:
        from trace_jax.data import builders
    except ImportError as error:
        raise DataError(f"tensorflow-datasets is not installed ({error}): pip install 'trace_jax[tasks]'") from error
    return builders
