"""Rows of the containers that public data sets come in: a JSON array, JSON lines, Parquet, CSV, any of them in a ZIP.

Everything is streamed: a file of hundreds of megabytes needs the memory of one record and one block.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trace_jax.data.errors import DataError

Row = Mapping[str, Any]
Tick = Callable[[int], None]  # told how many bytes of the file have been read, now and then

BLOCK = 1 << 20  # bytes read at a time
MAX_RECORD = 64 << 20  # characters; a longer "record" is a missing bracket
_SNIFF = 512
_CUT = re.compile(r"[\w.+\\-]*\s*")  # what may stand between an error and the end if only the end is missing


def rows(path: Path, member: str, password: str, tick: Tick) -> Iterator[Row]:
    """The rows of a file, or of a member of a ZIP file, whatever container they are in.

    Raises DataError for a file that is missing, is none of the containers, ends too early or is damaged.
    """
    with open_bytes(path, member, password) as file:
        try:
            yield from _container(file, Path(member or path), tick)
        except DataError as error:
            raise DataError(f"{_label(path, member)} {error}") from error.__cause__
        except UnicodeDecodeError as error:
            raise DataError(f"{_label(path, member)} is no UTF-8 text (byte {error.start})") from error
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"{_label(path, member)} is damaged or truncated ({error}); get it again") from error


@contextlib.contextmanager
def open_bytes(path: Path, member: str, password: str) -> Iterator[BinaryIO]:
    """Opens a file, or a member of a ZIP file; the password is used where the member needs one."""
    try:
        archive = zipfile.ZipFile(path) if member else None
        file = archive.open(member, pwd=password.encode() or None) if archive else open(path, "rb")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except zipfile.BadZipFile as error:
        raise DataError(f"{path} is no ZIP file, or a truncated one ({error}); get it again") from error
    except KeyError as error:
        raise DataError(f"{path} holds no {member}") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a wrong password
        raise DataError(f"{path} can't be read ({error})") from error
    with contextlib.ExitStack() as stack:
        if archive:
            stack.enter_context(archive)
        yield stack.enter_context(file)


def size(path: Path, member: str) -> int:
    """Bytes to read: of the file, or of the unpacked member of a ZIP file."""
    if not member:
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return archive.getinfo(member).file_size


def members(path: Path) -> set[str]:
    """Names in a ZIP file; empty for any other file."""
    if not zipfile.is_zipfile(path):
        return set()
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def _label(path: Path, member: str) -> str:
    return f"{path}:{member}" if member else str(path)


def _container(file: BinaryIO, name: Path, tick: Tick) -> Iterator[Row]:
    head = file.read(_SNIFF)
    file.seek(0)
    if not head:
        raise DataError("is empty")
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"PAR1"):
        yield from _parquet(file, tick)
    elif text.startswith(b"["):
        yield from _json_array(file, tick)
    elif text.startswith(b"{"):
        yield from _json_lines(file, tick)
    elif name.suffix == ".csv":
        yield from _csv(file, tick)
    elif text.startswith(b"version https://git-lfs"):
        raise DataError("is a Git LFS pointer, not the file itself; get the file with `git lfs pull`")
    else:
        raise DataError(f"is neither JSON, JSON lines nor Parquet (it begins with {head[:20]!r})")


def _json_array(file: BinaryIO, tick: Tick) -> Iterator[Row]:
    """Elements of a top-level array, decoded one by one from a window that slides over the text."""
    text, decoder = io.TextIOWrapper(file, encoding="utf-8-sig"), json.JSONDecoder()
    window, at, number, want = "", 0, 0, BLOCK

    def more() -> bool:
        nonlocal window, at
        block = text.read(want)
        window, at = window[at:] + block, 0
        tick(file.tell())
        return bool(block)

    def next_sign() -> str:
        nonlocal at
        while True:
            while at < len(window) and window[at] in " \t\r\n":
                at += 1
            if at < len(window):
                return window[at]
            if not more():
                raise DataError(f"ends after record {number}, without a closing bracket: truncated; get it again")

    more()
    next_sign()
    at += 1  # the opening bracket
    if next_sign() == "]":
        return
    while True:
        next_sign()
        try:
            row, end = decoder.raw_decode(window, at)
        except (json.JSONDecodeError, RecursionError) as error:
            if not _may_go_on(error, window) or len(window) - at > MAX_RECORD:
                raise DataError(f"is no JSON at record {number} ({error})") from error
            want *= 2  # a long record is decoded again and again: fewer and fewer times
            if not more():
                raise DataError(f"ends within record {number}: truncated; get it again") from error
            continue
        yield row
        at, number, want = end, number + 1, BLOCK
        sign = next_sign()
        at += 1
        if sign == "]":
            return
        if sign != ",":
            raise DataError(f"is no JSON after record {number - 1} ({sign!r} where a comma or bracket should be)")


def _may_go_on(error: json.JSONDecodeError | RecursionError, window: str) -> bool:
    """Whether the decoder failed because the window ends, not because the text is wrong."""
    if isinstance(error, RecursionError):
        return False
    return error.msg.startswith("Unterminated string") or _CUT.fullmatch(window, error.pos) is not None


def _json_lines(file: BinaryIO, tick: Tick) -> Iterator[Row]:
    for number, line in enumerate(file):
        tick(file.tell())
        line = line.removeprefix(codecs.BOM_UTF8) if number == 0 else line
        if not line.strip():
            continue
        try:
            yield json.loads(line.decode())
        except (json.JSONDecodeError, RecursionError) as error:
            if not line.endswith(b"\n"):
                raise DataError(f"ends within line {number + 1}: truncated; get it again") from error
            raise DataError(f"is no JSON on line {number + 1} ({error})") from error


def _parquet(file: BinaryIO, tick: Tick) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        for batch in table.iter_batches(batch_size=256):
            tick(file.tell())
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        problem = str(error).splitlines()[0]
        raise DataError(f"is no Parquet file, or a truncated one ({problem}); get it again") from error


def _csv(file: BinaryIO, tick: Tick) -> Iterator[Row]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    limit = csv.field_size_limit(MAX_RECORD)  # of the whole process: put back below
    try:
        for row in csv.DictReader(text, strict=True):
            tick(file.tell())
            yield {key: value for key, value in row.items() if key is not None and value is not None}
    except csv.Error as error:
        raise DataError(f"is no CSV file, or a truncated one ({error}); get it again") from error
    finally:
        csv.field_size_limit(limit)
