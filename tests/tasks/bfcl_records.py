"""BFCL's multi-turn records, read from the package bfcl-eval."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from trace_jax.data import bfcl, readers

CATEGORIES = ("base", "long_context", "miss_func", "miss_param")


@functools.cache
def records(category: str) -> tuple[dict[str, Any], ...]:
    """All 200 records of a category in the order of their numbers. Skips the test without the package."""
    pytest.importorskip("bfcl_eval", reason="pip install --no-deps bfcl-eval==2026.3.23, and mpmath and filelock")
    path = bfcl.installed_folder() / bfcl.file_name(category)
    return tuple(bfcl.records(path, category, lambda _: None))


def handmade(*turns: tuple[str, list[str]], classes: tuple[str, ...] = ("GorillaFileSystem",), **changes: Any) -> dict:
    """A record of one's own: pairs of what the user says ("" for nothing) and the right calls.

    The file system is work/{a.txt: "one", deep/{b.txt: "two"}}; nobody is logged in anywhere.
    """
    files = {
        "a.txt": {"type": "file", "content": "one"},
        "deep": {"type": "directory", "contents": {"b.txt": {"type": "file", "content": "two"}}},
    }
    record = {
        "id": "multi_turn_base_7",
        "category": "multi_turn_base",
        "turns": [[{"role": "user", "content": text}] if text else [] for text, _ in turns],
        "initial_config": {"GorillaFileSystem": {"root": {"desk": {"type": "directory", "contents": files}}}},
        "involved_classes": list(classes),
        "excluded_functions": [],
        "missed_functions": {},
        "functions": [document for name in classes for document in documents(name)],
        "ground_truth": [calls for _, calls in turns],
        "group": "base",
    }
    return {**record, **changes}


@functools.cache
def documents(class_name: str) -> list[Any]:
    """The function documents of a class."""
    path = bfcl.installed_folder() / "multi_turn_func_doc" / bfcl.DOCUMENTS[class_name]
    return list(readers.rows(path, "", "", lambda _: None))
