"""The real samples of public data sets that some tests read; they are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def folder() -> Path:
    """The folder of samples: TRACE_DATA, or shared/data beside the repository. Skips the test where there is none."""
    path = Path(os.environ.get("TRACE_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no samples of public data sets in {path}; set TRACE_DATA to a folder that holds them")
    return path
