"""Real records: samples of the public sets, and the entries of the BFCL package."""

from __future__ import annotations

import json
import re

import pytest

from tests import real_data
from trace_jax.data import sources, store
from trace_jax.data.prepare import prepare


def load(name, split, tmp_path, file):
    prepare(name, tmp_path, data_dir=file, split=split, show_progress=False)
    return list(store.load(name, tmp_path, split=split))


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [("aime24", "aime24", 30), ("amc", "amc", 83), ("math500", "math500", 500), ("minerva", "minerva", 272)]
    + [("olympiadbench", "olympiadbench", 675), ("deepscaler", "math_train", 7470)],
)
def test_math(tmp_path, name, file, count):
    path = real_data.folder() / f"{file}.json"
    (split,) = sources.find(name).splits
    records, rows = load(name, split, tmp_path, path), json.loads(path.read_text())
    assert len(records) == count == len(rows) - sum(row["answer"] in (None, "") for row in rows)
    by_problem = {row["problem"]: row["answer"] for row in rows}
    several = 0
    for record in records:
        answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
        official = by_problem[record["problem"]]
        official = official if isinstance(official, list) else [official]
        assert record["kind"] == "math" and 0 < len(answers) <= len(official)
        assert all(answer and answer == answer.strip() for answer in answers)
        for given in official:
            if isinstance(given, float):
                assert [float(answer) for answer in answers] == [given] and "." not in answers[0]  # all are whole
            else:
                assert any(answer in given and len(given.strip()) - len(answer) in (0, 2) for answer in answers)
        assert not [answer for answer in answers if re.fullmatch(r"\$[^$]*\$", answer)]
        several += len(answers) > 1
    assert several == (40 if name == "minerva" else 0)


def test_hotpotqa(tmp_path):
    records = load("hotpotqa", "test", tmp_path, real_data.folder() / "hotpotqa_distractor_sample.json")
    assert len(records) == 200 and records[0]["answers"] == ["Rush"] and records[0]["group"] == "bridge hard"
    assert {record["group"] for record in records} == {"bridge hard", "comparison hard"}
    assert records[0]["paragraphs"][0]["title"] == "Jeff Porcaro"
    assert sum("  " in paragraph["text"] for record in records for paragraph in record["paragraphs"]) < 100
    assert all(paragraph["text"] for record in records for paragraph in record["paragraphs"])


def test_two_wiki_and_musique(tmp_path):
    folder = real_data.folder()
    records = load("2wikimultihopqa", "test", tmp_path, folder / "2wikimultihopqa_sample.json")
    assert len(records) == 200 and sum(not record["paragraphs"] for record in records) == 36
    records = load("musique", "test", tmp_path, folder / "musique_sample.jsonl")
    assert len(records) == 200 and records[0]["answers"] == ["Stanley"]
    assert sum(record["group"] == "2hop" for record in records) == 145
    rows = [json.loads(line) for line in (folder / "musique_sample.jsonl").read_text().splitlines()]
    assert sum(len(record["paragraphs"]) for record in records) == sum(len(row["paragraphs"]) for row in rows)


def test_bamboogle(tmp_path):
    records = load("bamboogle", "test", tmp_path, real_data.folder() / "bamboogle.json")
    assert len(records) == 125 and records[0]["answers"] == ["james madison"]


@pytest.mark.parametrize("category", ["base", "long_context", "miss_func", "miss_param"])
def test_bfcl(tmp_path, category):
    """Counts and documents against the package's own files, read here with the json module alone."""
    package = pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed: pip install --no-deps bfcl-eval")
    prepare(f"bfcl_{category}", tmp_path, show_progress=False)
    records = list(store.load(f"bfcl_{category}", tmp_path, split="test"))
    folder = package.__path__[0] + "/data/"
    entries = [json.loads(line) for line in open(f"{folder}BFCL_v4_multi_turn_{category}.json")]
    assert [record["id"] for record in records] == [entry["id"] for entry in entries] and len(records) == 200
    assert sum(len(record["turns"]) for record in records) == (734 + 200 * (category in ("miss_func", "miss_param")))
    for record, entry in zip(records, entries):
        assert record["initial_config"] == entry["initial_config"] and record["turns"] == entry["question"]
        assert record["missed_functions"] == entry.get("missed_function", {})
        names = {document["name"] for document in record["functions"]}
        withheld = {name for missed in record["missed_functions"].values() for name in missed}
        assert withheld <= names
        called = {call.split("(")[0] for turn in record["ground_truth"] for call in turn}
        assert called <= names
    expected = [
        json.loads(line)
        for name in ("posting_api", "gorilla_file_system")
        for line in open(f"{folder}multi_turn_func_doc/{name}.json")
    ]
    assert records[0]["involved_classes"] == ["TwitterAPI", "GorillaFileSystem"]
    assert records[0]["functions"] == expected
