"""Reads passages: from a corpus file, or from the paragraphs of a data set.

A corpus file has one JSON object a line: {"id", "contents"} with the title in quotes on the first line of `contents`
(as the Wikipedia corpus of Search-R1 has it), or {"title", "text"}, each with or without "id". It may be gzipped.
Blank passages are left out, and so is a passage whose title and text an earlier one has.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from trace_jax.retrieval.base import CorpusError, Passage, split_contents

_GZIP = b"\x1f\x8b"


def read(path: Path, *, progress: bool = False) -> Iterator[Passage]:
    """The passages of a corpus file, in order, read line by line.

    `progress` shows a bar over the bytes of the file. Raises CorpusError for a file that is missing, cut off or in
    another format, and for one without passages.
    """
    return _distinct(_read(path, progress), f"{path}: there is no passage in it")


def from_paragraphs(paragraphs: Iterable[Mapping[str, str]]) -> Iterator[Passage]:
    """Passages of paragraphs {"title", "text"}, in order.

    Raises CorpusError for a paragraph that is none, and where there is none at all.
    """
    passages = (_passage(paragraph, f"paragraph {i}") for i, paragraph in enumerate(paragraphs))
    return _distinct(passages, "there are no paragraphs to search in")


def _distinct(passages: Iterator[Passage], nothing: str) -> Iterator[Passage]:
    seen = set()
    for passage in passages:
        if not passage.text.strip() and not passage.title:
            continue
        key = hashlib.blake2b(passage.contents.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key not in seen:
            seen.add(key)
            yield passage
    if not seen:
        raise CorpusError(nothing)


def _read(path: Path, progress: bool) -> Iterator[Passage]:
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP
            raw.seek(0)
            lines = gzip.GzipFile(fileobj=raw) if zipped else raw
            bar = tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc="passages", disable=not progress)
            with bar:
                number = 0
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _passage(_parse(line, path, number), f"{path}:{number}")
                    if number % 1000 == 0:
                        bar.update(raw.tell() - bar.n)
                bar.update(raw.tell() - bar.n)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{path}: cut off or damaged after line {number} ({error})") from error
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse(line: bytes, path: Path, number: int) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise CorpusError(f"{path}:{number}: is no JSON ({error}); a corpus has one JSON object a line") from error


def _passage(record: Any, where: str) -> Passage:
    """The passage of a record. A title's line breaks become blanks."""
    if not isinstance(record, Mapping):
        raise CorpusError(f"{where}: is a {type(record).__name__}; a passage is a JSON object")
    contents, title, text, name = (record.get(key) for key in ("contents", "title", "text", "id"))
    if isinstance(contents, str):
        title, text = split_contents(contents)
    if not isinstance(text, str) or not isinstance(title or "", str):
        keys = ", ".join(map(str, list(record)[:5])) or "none"
        raise CorpusError(f'{where}: has the keys {keys}; a passage has "contents", or "title" and "text", as strings')
    return Passage(title=" ".join((title or "").splitlines()), text=text, id="" if name is None else str(name))
