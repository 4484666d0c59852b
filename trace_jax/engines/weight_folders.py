"""The policy's weights on disk for servers to read: one folder a version, whole or not there, the last two kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
)  # fields of config.json that decide which tensors there are
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


def difference(served: Path, ours: Path) -> str:
    """How the tensors of two model folders differ, by their config.json; "" if they do not, or it cannot be told.

    A field that one of them leaves out is not compared.
    """
    first, second = _settings(served), _settings(ours)
    both = [name for name in SHAPE if first.get(name) is not None and second.get(name) is not None]
    return ", ".join(f"{name} {first[name]} against {second[name]}" for name in both if first[name] != second[name])


def _settings(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # a server on another machine sees another disk
        return {}
    return document if isinstance(document, dict) else {}
