"""BM25 (Robertson and Zaragoza, 2009) over passages, on an index of the bm25s library.

k1 = 1.5, b = 0.75, Lucene's idf = ln(1 + (N - n + 0.5) / (n + 0.5)). Words (our choice): runs of letters and digits of
the title and the text, case and accents folded, without the 33 stop words of Lucene's English analyser, without
stemming. A script that puts no blanks between words is searched by whole runs.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from trace_jax.retrieval import store
from trace_jax.retrieval.base import CorpusError, IndexFolderError, Passage


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

KIND = "bm25"
_WORDS_VERSION = 1  # of `words`: an index and its queries must agree on them
_WORD = re.compile(r"\w+")
_STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)


def new_model() -> bm25s.BM25:
    """An empty model of bm25s with the parameters that this project uses."""
    return bm25s.BM25(k1=1.5, b=0.75, method="lucene", backend="numpy")


def words(text: str) -> list[str]:
    """The words by which a text is found, in order, repeated ones repeated."""
    text = text.casefold()
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return [word for word in _WORD.findall(text) if word not in _STOP_WORDS]


def build(passages: Iterable[Passage], folder: Path, *, progress: bool = False, source: str = "") -> Bm25:
    """Writes an index over the passages into a new folder and opens it.

    Args:
      passages: at least one; read once, one at a time. The words of all of them are held in memory, 4 bytes each.
      folder: must not exist, or be empty.
      progress: shows the bars of the library while it scores.
      source: what the passages are, kept in the manifest.
    Raises IndexFolderError for a folder that has content, CorpusError for passages without a word, and what `passages`
    raises.
    """
    with store.new_folder(folder) as part:
        vocabulary: dict[str, int] = {}
        ids = []
        for passage in store.write_passages(part, passages):
            found = words(f"{passage.title} {passage.text}")
            ids.append(array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in found]))
        if not vocabulary:
            raise CorpusError(f"none of the {len(ids)} passages holds a word to search for")
        model = new_model()
        model.index(bm25s.tokenization.Tokenized(ids, vocabulary), create_empty_token=False, show_progress=progress)
        model.save(part, show_progress=False)
        store.write_manifest(part, KIND, {"passages": len(ids), "words": _WORDS_VERSION, "source": source})
    return load(folder)


def load(folder: Path) -> Bm25:
    """Opens an index; its arrays stay on disk and are memory-mapped.

    Raises IndexFolderError for a folder that is not a whole index of this kind and version.
    """
    manifest = store.read_manifest(folder, KIND)
    if manifest["words"] != _WORDS_VERSION:
        raise IndexFolderError(f"{folder} was built by another version of this program; build it again")
    try:
        model = bm25s.BM25.load(folder, mmap=True, show_progress=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IndexFolderError(f"{folder}: the BM25 index cannot be read ({error}); build it again") from error
    return Bm25(model, store.PassageStore(folder))


class Bm25:
    """`retrieval.base.Index` by BM25. Of equal scores the earlier passage comes first."""

    kind = KIND

    def __init__(self, model: bm25s.BM25, passages: store.PassageStore):
        if model.scores["num_docs"] != len(passages):
            raise IndexFolderError(f"an index of {model.scores['num_docs']} passages beside {len(passages)} passages")
        self._model, self._passages = model, passages

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, top_k: int) -> list[Passage]:
        """See `retrieval.base.Searcher`. Passages that hold no word of the query are never returned."""
        ids = [self._model.vocab_dict[word] for word in words(query) if word in self._model.vocab_dict]
        if not ids:
            return []
        scores = self._model.get_scores_from_ids(ids)
        return [self._passages.get(int(i), float(scores[i])) for i in best(scores, top_k)]

    def search_many(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """`search` of each query."""
        return [self.search(query, top_k) for query in queries]


def best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Indices of the `top_k` highest of the positive scores, best first; of equal ones the lower index first.

    Raises ValueError for a `top_k` below 1.
    """
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}, must be at least 1")
    found = np.flatnonzero(scores > 0)
    if found.size > top_k:
        least = np.partition(scores[found], found.size - top_k)[found.size - top_k]
        found = found[scores[found] >= least]
    return found[np.argsort(-scores[found], kind="stable")][:top_k]
