"""Search over short documents with BM25 (Robertson and Zaragoza, 2009), on an index of the bm25s library."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

import numpy as np


def _import_bm25s() -> ModuleType:
    """Imports bm25s without letting it find JAX.

    At import it runs a top-k in JAX, if there is one. That starts JAX's backends, after which neither their number of
    devices nor a multi-process set-up can be changed any more. Nothing here uses that top-k.
    """
    missing = object()
    jax = sys.modules.get("jax", missing)
    sys.modules["jax"] = None  # what Python takes for "cannot be imported"
    try:
        module = importlib.import_module("bm25s")
    finally:
        if jax is missing:
            del sys.modules["jax"]
        else:
            sys.modules["jax"] = jax
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG, which a root handler would print
    return module


bm25s = _import_bm25s()


class SearchIndex:
    """A BM25 index (k1 = 1.5, b = 0.75, Lucene's idf) over documents given as lists of words.

    Raises ValueError for no documents. Not changed by searches.
    """

    def __init__(self, documents: Sequence[Sequence[str]]):
        if not documents:
            raise ValueError("search index: there are no documents; a knowledge base needs at least one")
        self._vocabulary = frozenset(word for document in documents for word in document)
        self._bm25 = bm25s.BM25(k1=1.5, b=0.75, method="lucene", backend="numpy")
        self._bm25.index([list(document) for document in documents], show_progress=False)

    def search(self, words: Sequence[str], limit: int) -> list[int]:
        """Numbers of the best documents, at most `limit`, best first; of equal scores the earlier document first.

        Documents that hold none of the words are never returned; words that no document holds change nothing.
        """
        known = [word for word in words if word in self._vocabulary]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:limit]
        return [int(i) for i in best if scores[i] > 0]
