"""Search over short documents with BM25 (Robertson and Zaragoza, 2009), on an index of the bm25s library."""

from __future__ import annotations

from collections.abc import Sequence

from trace_jax.retrieval import bm25


class SearchIndex:
    """A BM25 index (k1 = 1.5, b = 0.75, Lucene's idf) over documents given as lists of words.

    Raises ValueError for no documents. Not changed by searches.
    """

    def __init__(self, documents: Sequence[Sequence[str]]):
        if not documents:
            raise ValueError("search index: there are no documents; a knowledge base needs at least one")
        self._vocabulary = frozenset(word for document in documents for word in document)
        self._bm25 = bm25.new_model()
        self._bm25.index([list(document) for document in documents], show_progress=False)

    def search(self, words: Sequence[str], limit: int) -> list[int]:
        """Numbers of the best documents, at most `limit`, best first; of equal scores the earlier document first.

        Documents that hold none of the words are never returned; words that no document holds change nothing.
        """
        known = [word for word in words if word in self._vocabulary]
        if not known:
            return []
        return [int(i) for i in bm25.best(self._bm25.get_scores(known), limit)]
