"""Containers are streamed: any block size gives what the json module gives, any cut is called a cut."""

from __future__ import annotations

import codecs
import json

import pytest

from trace_jax.data import readers
from trace_jax.data.errors import DataError

VALUES = [
    {"text": 'a "quoted" \\ back\nslash ü 😀 [{,}]', "number": -1.5e-7, "flags": [True, False, None]},
    {"nested": {"deep": [[], {}, [{"x": [1, 2, 3]}]]}},
    {"long": "x" * 500},
    {},
]
TEXTS = [json.dumps(VALUES), json.dumps(VALUES, indent=2, ensure_ascii=False), " \n[ {} ,\t{\"a\":1} ]\n "]


def read(path, ticks=None):
    return list(readers.rows(path, "", "", (ticks if ticks is not None else []).append))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_arrays_in_blocks_of_any_size(tmp_path, monkeypatch, text, block):
    monkeypatch.setattr(readers, "BLOCK", block)
    path, ticks = tmp_path / "x.json", []
    path.write_text(text, encoding="utf-8")
    assert read(path, ticks) == json.loads(text)
    assert ticks == sorted(ticks) and ticks[-1] == path.stat().st_size == readers.size(path, "")
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read(path) == json.loads(text)


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_every_cut_of_an_array_is_called_truncated(tmp_path, monkeypatch, block):
    """Brute force: the file is cut after each of its characters, within keys, escapes, numbers and literals."""
    monkeypatch.setattr(readers, "BLOCK", block)
    text = json.dumps([VALUES[0], {"a": [12, {"b": "ü\\u"}]}])
    path = tmp_path / "x.json"
    for end in range(1, len(text)):
        path.write_text(text[:end])
        with pytest.raises(DataError, match="truncated; get it again|without a closing bracket: truncated"):
            read(path)


def test_what_is_wrong_in_the_middle_is_told_without_reading_on(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", 64)
    path, ticks = tmp_path / "x.json", []
    path.write_text('[{"a": 1}, {"b" 2}, ' + json.dumps(VALUES * 50)[1:])
    with pytest.raises(DataError, match="is no JSON at record 1"):
        read(path, ticks)
    assert ticks[-1] <= 8192  # of 30,000: what the text layer reads ahead


def test_a_record_without_end_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", 64)
    monkeypatch.setattr(readers, "MAX_RECORD", 1000)
    path = tmp_path / "x.json"
    path.write_text('[{"a": "' + "x" * 100_000)
    with pytest.raises(DataError, match="is no JSON at record 0"):
        read(path)


def test_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"a": 1}\r\n\n{"a": 2}')
    assert read(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a": ')
    with pytest.raises(DataError, match="ends within line 2: truncated"):
        read(path)
    path.write_text('{"a": ' + "[" * 100_000 + "\n")
    with pytest.raises(DataError, match="is no JSON on line 1"):
        read(path)


def test_many_rows_of_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"n": n, "texts": ["a"] * (n % 3)} for n in range(700)]
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read(path) == rows
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="truncated one"):
        read(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="gone.json does not exist"):
        read(tmp_path / "gone.json")
    with pytest.raises(DataError, match="can't be read"):
        read(tmp_path)
