"""The policy's weights on disk for servers to read: one folder a version, whole or not there, the last two kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT = 2  # versions: a server may still be reading the one before the newest
_PREFIX, _UNFINISHED = "version-", ".unfinished-"


class WeightFolders:
    """Writes versions under `home`, which belongs to this run alone."""

    def __init__(self, home: str | os.PathLike[str], save: Callable[[Path, Any], None]):
        """
        Args:
          home: made where it is missing; a place that trainer and servers see under the same path, e.g. on tmpfs.
          save: writes a model folder: (folder, params).
        """
        self.home = Path(home).absolute()
        self._save = save

    def clear(self) -> None:
        """Removes all versions, also those of a process that was killed, and the folder if nothing else is in it."""
        for folder in self._folders(_PREFIX) + self._folders(_UNFINISHED):
            shutil.rmtree(folder, ignore_errors=True)
        if self.home.is_dir() and not any(self.home.iterdir()):
            self.home.rmdir()

    def write(self, params: Any, version: int) -> Path:
        """The folder of a new version; older ones are removed but for the last. Returns its absolute path.

        Written beside its place and renamed, so that no server ever reads half of it. Raises OSError where it cannot
        be written; what was there before is untouched then.
        """
        folder, fresh = self.home / f"{_PREFIX}{version}", self.home / f"{_UNFINISHED}{version}"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            fresh.mkdir(parents=True)
            self._save(fresh, params)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(fresh, folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        for old in sorted(self._folders(_PREFIX), key=_age)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def _folders(self, prefix: str) -> list[Path]:
        return [path for path in self.home.glob(f"{prefix}*") if path.is_dir()] if self.home.is_dir() else []


def _age(folder: Path) -> tuple[int, str]:
    """By time of writing, then by name: a run that goes back to an older version keeps what it wrote last."""
    return folder.stat().st_mtime_ns, folder.name
