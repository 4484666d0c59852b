"""Folders in the making, beside the places that they are renamed to, and the removal of those that nobody finishes."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

_SUFFIX = ".part"
_DAY = 86400.0  # seconds; nobody writes that long without a change to a file


def draft_of(folder: Path) -> Path:
    """Where this process makes `folder`: hidden, beside it, named after machine and process."""
    host = socket.gethostname().replace(".", "-")
    return folder.parent / f".{folder.name}.{host}.{os.getpid()}{_SUFFIX}"


def sweep(root: Path) -> None:
    """Removes drafts below `root` that a killed process left: one of this machine that is gone, or any after a day."""
    for draft in root.glob(f".*{_SUFFIX}"):
        if draft.is_dir() and _left_behind(draft):
            shutil.rmtree(draft, ignore_errors=True)  # what cannot be removed stays: it is in nobody's way


def _left_behind(draft: Path) -> bool:
    _, _, *parts = draft.name.removesuffix(_SUFFIX).split(".")
    host, process = parts[-2:] if len(parts) >= 2 else ("", "")
    if host == socket.gethostname().replace(".", "-") and process.isdecimal() and not _runs(int(process)):
        return True
    try:
        changed = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
    except OSError:  # it was renamed or removed while we looked
        return False
    return time.time() - changed > _DAY


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no process has such a number, so nothing is known
        return True
    return True
