"""BFCL's multi-turn records, read from the package bfcl-eval."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from trace_jax.data import bfcl

CATEGORIES = ("base", "long_context", "miss_func", "miss_param")


@functools.cache
def records(category: str) -> tuple[dict[str, Any], ...]:
    """All 200 records of a category in the order of their numbers. Skips the test without the package."""
    pytest.importorskip("bfcl_eval", reason="pip install --no-deps bfcl-eval==2026.3.23, and mpmath and filelock")
    path = bfcl.installed_folder() / bfcl.file_name(category)
    return tuple(bfcl.records(path, category, lambda _: None))
