"""The values of a row, checked: each function returns row[key] or raises RowError that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_jax.data.errors import RowError

Row = Mapping[str, Any]


def present(row: Row, key: str) -> Any:
    """Whatever stands there."""
    if not isinstance(row, Mapping):
        raise RowError(f"is {type(row).__name__}, not an object")
    if key not in row:
        raise RowError(f"has no key {key!r}")
    return row[key]


def text(row: Row, key: str) -> str:
    """A text."""
    return _typed(row, key, str, "text")


def whole(row: Row, key: str) -> int:
    """A whole number."""
    return _typed(row, key, int, "a whole number")


def items(row: Row, key: str) -> list[Any]:
    """A list of anything."""
    return _typed(row, key, list, "a list")


def mapping(row: Row, key: str) -> Row:
    """An object."""
    return _typed(row, key, dict, "an object")


def texts(row: Row, key: str) -> list[str]:
    """A list of texts."""
    found = items(row, key)
    if not all(isinstance(item, str) for item in found):
        raise RowError(f"has something other than texts in {key!r}")
    return found


def mappings(row: Row, key: str) -> list[Row]:
    """A list of objects."""
    found = items(row, key)
    if not all(isinstance(item, dict) for item in found):
        raise RowError(f"has something other than objects in {key!r}")
    return found


def _typed(row: Row, key: str, kind: type, words: str) -> Any:
    value = present(row, key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RowError(f"has {type(value).__name__} in {key!r}, not {words}")
    return value
