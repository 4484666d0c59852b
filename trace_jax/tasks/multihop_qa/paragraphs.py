"""The default knowledge base of multi-hop questions: a BM25 index of the paragraphs that their own records bring."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trace_jax.retrieval import bm25, corpus
from trace_jax.retrieval.base import IndexFolderError

_SAMPLED = 64  # records that go into the name of an index


class Joined(Sequence):
    """Several sets of records as one, without reading any of them before it is asked for."""

    def __init__(self, sets: Sequence[Sequence[Mapping[str, Any]]]):
        self._sets = tuple(sets)
        self._ends = list(itertools.accumulate(map(len, self._sets)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        return self._sets[number][index - self._ends[number] + len(self._sets[number])]


def index(records: Sequence[Mapping[str, Any]], folder: Path, *, name: str, progress: bool = False) -> bm25.Bm25:
    """An index of all paragraphs of the records, each once: opened if `folder` holds it, else built and kept there.

    Its own folder below `folder` is named after `name`, the number of records, and a hash of 64 of them that stand
    evenly apart, so an index of other records is not taken for it, and to open a kept one reads no more than those.
    Several processes may call this at once. Raises CorpusError where no record has a paragraph, IndexFolderError for a
    kept index that is damaged.
    """
    place = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{len(records)}-{_fingerprint(records)}"
    if not place.exists():
        passages = corpus.from_paragraphs(_paragraphs(records, progress))
        try:
            return bm25.build(passages, place, progress=progress, source=name)
        except IndexFolderError:
            if not place.exists():
                raise
            # another process was faster
    return bm25.load(place)


def _fingerprint(records: Sequence[Mapping[str, Any]]) -> str:
    number = min(_SAMPLED, len(records))
    sample = [records[i * len(records) // number]["paragraphs"] for i in range(number)]
    return hashlib.blake2b(json.dumps(sample, sort_keys=True).encode(), digest_size=6).hexdigest()


def _paragraphs(records: Sequence[Mapping[str, Any]], progress: bool) -> Iterator[Mapping[str, str]]:
    for i in tqdm(range(len(records)), desc="paragraphs", unit=" records", disable=not progress):
        yield from records[i]["paragraphs"]
