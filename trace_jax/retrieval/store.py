"""The folder of an index: a manifest, the passages (memory-mapped), and whatever its kind adds.

A folder appears whole or not at all: it is written under another name and renamed. The manifest lists the size of
every file, so a folder that was cut off while it was copied is recognised.
"""

from __future__ import annotations

import contextlib
import mmap
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from trace_jax.retrieval.base import IndexFolderError, Passage

MANIFEST = "index.json"
_FORMAT = "trace_jax passages 1"
_PASSAGES, _OFFSETS = "passages.jsonl", "offsets.npy"


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write an index into; it becomes `folder` at the end, or nothing remains of it after an exception.

    Raises IndexFolderError where `folder` has content already, at the start or at the end.
    """
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield part
        part.chmod(0o755)  # a temporary folder is its owner's alone
        try:
            part.rename(folder)
        except OSError:
            _check_free(folder)  # written by another process meanwhile
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise IndexFolderError(f"{folder} exists already; choose another folder or delete it")


def write_passages(folder: Path, passages: Iterable[Passage]) -> Iterator[Passage]:
    """Writes passages into a folder as they are drawn from what this returns; all of them must be drawn."""
    offsets = array("q", [0])
    with (folder / _PASSAGES).open("wb") as file:
        for passage in passages:
            row = [_clean(text) for text in (passage.id, passage.title, passage.text)]
            offsets.append(offsets[-1] + file.write(orjson.dumps(row) + b"\n"))
            yield passage
    np.save(folder / _OFFSETS, np.frombuffer(offsets, np.int64))


def _clean(text: str) -> str:
    """Without lone surrogates, which no file or message can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def write_manifest(folder: Path, kind: str, fields: Mapping[str, Any]) -> None:
    """Writes what the folder is; call it last. `fields` are the kind's own, JSON values."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "kind": kind, "files": files, **fields}
    (folder / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


def read_manifest(folder: Path, kind: str | None = None) -> dict[str, Any]:
    """The manifest, checked against the folder. Raises IndexFolderError for a folder that is not a whole index, and
    for one of another kind than `kind`, if given."""
    try:
        manifest = orjson.loads((folder / MANIFEST).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise IndexFolderError(f"{folder} holds no index ({error}); build one: {_BUILD}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise IndexFolderError(f"{folder}/{MANIFEST} is of another format than {_FORMAT!r}; build it again: {_BUILD}")
    if kind is not None and manifest.get("kind") != kind:
        raise IndexFolderError(f"{folder} holds an index of kind {manifest.get('kind')}, not {kind}")
    for name, size in manifest["files"].items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            problem = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise IndexFolderError(f"{path} {problem}: the index was cut off or changed; build it again: {_BUILD}")
    return manifest


_BUILD = "python -m trace_jax.retrieval build"


class PassageStore:
    """The passages of an index folder, read from a memory map. Safe to use from several threads."""

    def __init__(self, folder: Path):
        """Raises IndexFolderError for files that do not belong together."""
        try:
            self._offsets = np.load(folder / _OFFSETS, mmap_mode="r")
            with (folder / _PASSAGES).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise IndexFolderError(f"{folder}: its passages cannot be read ({error}); {_BUILD}") from error
        if self._offsets.ndim != 1 or self._offsets.size < 2 or self._offsets[-1] != len(self._map):
            raise IndexFolderError(f"{folder}: {_OFFSETS} and {_PASSAGES} do not belong together; {_BUILD}")

    def __len__(self) -> int:
        return self._offsets.shape[0] - 1

    def get(self, number: int, score: float) -> Passage:
        """Passage `number` with the score it was found with."""
        line = self._map[self._offsets[number] : self._offsets[number + 1]]
        name, title, text = orjson.loads(line)
        return Passage(title=title, text=text, score=score, id=name)
