"""Files of a model folder: blocks of tensors in, whole tensors out, one at a time.

A folder holds `model.safetensors`, or shards named by `model.safetensors.index.json`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours -> safetensors'
_PART = ".part"  # of names that are not yet complete
Entry = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]  # name, shape, content


class Reader:
    """The tensors of a folder by name. Only the blocks that are asked for are read.

    Raises ValueError that names the file: none there, a shard that the index names and that is absent, a damaged file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._opened = contextlib.ExitStack()
        try:
            names = {SINGLE: None} if (folder / SINGLE).is_file() else self._index()
            self._where = self._locate(names)
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._opened.close()

    def names(self) -> set[str]:
        """All tensors of all files."""
        return set(self._where)

    def files(self) -> set[str]:
        """Names of the files that hold them."""
        return set(self._files)

    def form(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Element type (safetensors' name) and shape."""
        view = self._slice(name)
        return view.get_dtype(), tuple(view.get_shape())

    def read(self, name: str, block: tuple[slice, ...]) -> np.ndarray:
        """A block of a tensor in its stored type. Raises ValueError for a number in it that is not finite."""
        array = self._slice(name)[block]
        if not np.isfinite(array).all():
            raise ValueError(
                f"model folder {self.folder}: tensor {name} holds NaN or infinite numbers; use another checkpoint"
            )
        return array

    def _slice(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)

    def _index(self) -> dict[str, list[str]]:
        """File -> tensors that the index says are in it."""
        path = self.folder / INDEX
        if not path.is_file():
            if not self.folder.is_dir():
                raise ValueError(f"model folder {self.folder} does not exist")
            raise ValueError(
                f"model folder {self.folder}: {SINGLE} cannot be read (neither it nor {INDEX} is there); give a folder "
                "with weights in safetensors form"
            )
        try:
            weight_map = json.loads(path.read_text())["weight_map"]
            files: dict[str, list[str]] = {}
            for tensor, file in weight_map.items():
                files.setdefault(Path(file).name, []).append(tensor)
            if not files:
                raise ValueError("it names no file")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"model folder {self.folder}: {INDEX} cannot be read ({type(error).__name__}: {error}); "
                "copy the file again"
            ) from error
        absent = sorted(file for file in files if not (self.folder / file).is_file())
        if absent:
            raise ValueError(
                f"model folder {self.folder}: {len(absent)} of the {len(files)} files that {INDEX} names are absent "
                f"({shortened(absent)}); copy them there"
            )
        return files

    def _locate(self, files: dict[str, list[str] | None]) -> dict[str, str]:
        """Tensor -> file, from the files themselves, which must hold what the index says."""
        where = {}
        for file, promised in files.items():
            try:
                handle = self._opened.enter_context(safe_open(self.folder / file, framework="numpy"))
                held = list(handle.keys())
            except (OSError, SafetensorError) as error:
                raise self._damaged(file, error) from error
            self._files[file] = handle
            where |= dict.fromkeys(held, file)
            lacking = sorted(set(promised or ()) - set(held))
            if lacking:
                raise ValueError(
                    f"model folder {self.folder}: {file} lacks {shortened(lacking)}, which {INDEX} says is in it; "
                    "copy both again"
                )
        return where

    def _damaged(self, file: str, error: Exception) -> ValueError:
        return ValueError(f"model folder {self.folder}: {file} cannot be read ({error}); copy the file again")


def write(
    folder: Path, document: Mapping[str, Any], entries: Sequence[Entry], dtype: str, max_shard_bytes: int
) -> None:
    """Writes tensors and `config.json` into a folder, which is made if need be; one tensor is in memory at a time.

    Files are named as Hugging Face does: one alone is `model.safetensors`, several have an index. A tensor larger than
    `max_shard_bytes` gets a file of its own. All is written under temporary names first; then the old config goes, the
    new one comes last. So a crash leaves the old model, or a folder without a config, and never a mixture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(entries, numpy_dtype(dtype).itemsize, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for stale in folder.glob(f"model*{_PART}"):  # of a writer that was killed
        stale.unlink()
    parts: list[Path] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            parts.append(folder / (name + _PART))
            _write_file(parts[-1], shard, dtype)
        texts = {INDEX: _index_of(names, shards, dtype)} if len(shards) > 1 else {}
        for name, content in (texts | {CONFIG: document}).items():
            parts.append(folder / (name + _PART))
            parts[-1].write_text(json.dumps(content, indent=2) + "\n")
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    for old in (CONFIG, SINGLE, INDEX):
        (folder / old).unlink(missing_ok=True)
    for shard in folder.glob("model-*-of-*.safetensors"):
        shard.unlink()
    for part in parts:
        os.replace(part, part.with_name(part.name.removesuffix(_PART)))


def numpy_dtype(name: str) -> np.dtype:
    """The numpy type of an element type's name. Raises ValueError for one that is not stored."""
    if name not in DTYPES:
        raise ValueError(f"weights: dtype {name!r} is not one of {', '.join(DTYPES)}")
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def shortened(names: Sequence[str], most: int = 3) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _shards(entries: Sequence[Entry], size: int, max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        nbytes = math.prod(entry[1]) * size
        if shards[-1] and used + nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += nbytes
    return shards


def _index_of(names: Sequence[str], shards: Sequence[Sequence[Entry]], dtype: str) -> dict[str, Any]:
    total = sum(math.prod(shape) for shard in shards for _, shape, _ in shard) * numpy_dtype(dtype).itemsize
    weight_map = {entry[0]: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write_file(path: Path, entries: Sequence[Entry], dtype: str) -> None:
    """The safetensors format: u64 length of the header, JSON header padded to 8 bytes, then the data in order."""
    kind, offset = numpy_dtype(dtype), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers wants to know
    for name, shape, _ in entries:
        end = offset + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape, content in entries:
            array = content()
            if array.shape != shape:
                raise ValueError(f"weights: tensor {name} has shape {array.shape}, the model says {shape}")
            file.write(np.ascontiguousarray(array, dtype=kind).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
