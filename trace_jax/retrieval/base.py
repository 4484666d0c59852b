"""What every search returns and raises, and the text form of a passage that servers exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


class RetrievalError(Exception):
    """A search service gave no usable answer, after all its tries."""


class CorpusError(Exception):
    """A corpus cannot be used; one line, with the file and the number of the line where there are any."""


class IndexFolderError(Exception):
    """A folder holds no index that can be used, or one that is in the way."""


@dataclasses.dataclass(frozen=True)
class Passage:
    """A short text with a title, as found or as read from a corpus."""

    title: str  # "" where there is none; one line
    text: str
    score: float = 0.0  # how well it fits the query: higher is better, the unit is the index's
    id: str = ""  # its corpus' name for it; "" where there is none

    @property
    def contents(self) -> str:
        """The passage as one text: the title in quotes, a newline, the text. `split_contents` is its inverse."""
        if not self.title and split_contents(self.text) == ("", self.text):
            return self.text
        return f'"{self.title}"\n{self.text}'


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of a passage's `contents`; the title is "" where the first line is not in quotes."""
    head, newline, text = contents.partition("\n")
    if newline and len(head) >= 2 and head[0] == head[-1] == '"':
        return head[1:-1], text
    return "", contents


class Searcher(Protocol):
    """Anything that finds passages. Safe to call from several threads at once."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        """The passages that fit best, best first, at most `top_k` >= 1. A service raises RetrievalError."""
        ...


class Index(Searcher, Protocol):
    """A searcher in this process."""

    kind: str

    def __len__(self) -> int:
        """Number of passages."""
        ...

    def search_many(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """`search` of each query."""
        ...
