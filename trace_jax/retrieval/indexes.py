"""Opens an index folder of any kind."""

from __future__ import annotations

from pathlib import Path

from trace_jax.retrieval import bm25, dense, store
from trace_jax.retrieval.base import Index, IndexFolderError


def load(folder: Path, *, model: str = "", device: str = "cpu") -> Index:
    """The index in a folder.

    Args:
      model: folder or name of a dense index's encoder; "" for the one that the index was built with.
      device: of torch, for that encoder.
    Raises IndexFolderError for a folder without a whole index, DenseError where dense retrieval cannot run.
    """
    kind = store.read_manifest(folder).get("kind")
    if kind == bm25.KIND:
        return bm25.load(folder)
    if kind == dense.KIND:
        return dense.load(folder, dense.Encoder(model or dense.model_of(folder), device=device))
    raise IndexFolderError(f"{folder} holds an index of kind {kind!r}; known are {bm25.KIND} and {dense.KIND}")
