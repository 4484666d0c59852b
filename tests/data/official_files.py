"""Tiny files in the official format of every data set, written by hand, and the records they must become."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"

DEEPSCALER = [
    {"problem": "What is $1+1$?", "answer": "2", "solution": "Count."},
    {"problem": "No answer known.", "answer": None, "solution": ""},
    {"problem": "Half of one?", "answer": "\\frac{1}{2}", "difficulty": 2.0, "type": "Algebra"},
]
HOTPOTQA = [
    {
        "_id": "5a",
        "answer": "Rush",
        "question": "Which band?",
        "supporting_facts": [["Neil", 0]],
        "context": [["Neil", ["A drummer.", " He was in Rush."]], ["Toto", ["A band."]]],
        "type": "bridge",
        "level": "hard",
    }
]
TWO_WIKI = [
    {
        "_id": "w1",
        "type": "comparison",
        "question": "Who is older?",
        "context": [["Ann", ["Born 1900.", "She sang."]]],
        "supporting_facts": [["Ann", 0]],
        "evidences": [],
        "answer": "Ann",
    },
    {"_id": "w2", "type": "inference", "question": "Who?", "answer": "Bob"},  # a release without paragraphs
]
MUSIQUE = [
    {
        "id": "2hop__1_2",
        "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "Text.", "is_supporting": True}],
        "question": "Where?",
        "question_decomposition": [],
        "answer": "Stanley",
        "answer_aliases": ["Stanley, ND", "Stanley"],
        "answerable": True,
    },
    {
        "id": "3hop1__1_2_3",
        "paragraphs": [],
        "question": "Unanswerable?",
        "question_decomposition": [],
        "answer": "x",
        "answer_aliases": [],
        "answerable": False,
    },
]
FLASHRAG = [{"id": "dev_0", "question": "Who?", "golden_answers": ["Ann", "Anne"], "metadata": {}}]
BAMBOOGLE = [{"Question": "Who was president?", "source": "bamboogle", "id": "bamboogle_1", "answer": ["madison"]}]
MMLU_PRO = [
    {
        "question_id": 70,
        "question": "Pick the third.",
        "options": ["one", "two", "three", "four", "five"],
        "answer": "C",
        "answer_index": 2,
        "cot_content": "",
        "category": "law",
        "src": "x",
    }
]
ARC = [
    {
        "id": "Mercury_1",
        "question": {"stem": "Which?", "choices": [{"text": "ice", "label": "1"}, {"text": "steam", "label": "2"}]},
        "answerKey": "2",
    }
]
BFCL_ENTRY = {
    "id": "multi_turn_miss_func_0",
    "question": [[{"role": "user", "content": "Sort it."}], []],
    "initial_config": {"MathAPI": {"depth": {"deeper": [1, 2.5, None]}}},
    "path": ["MathAPI.mean"],
    "involved_classes": ["MathAPI"],
    "missed_function": {"1": ["mean"]},
    "excluded_function": ["cp"],
}
BFCL_TRUTH = {"id": "multi_turn_miss_func_0", "ground_truth": [["mean(numbers=[1])"], []]}
BFCL_DOCUMENT = {"name": "mean", "description": "Mean.", "parameters": {"type": "dict", "properties": {}}}


def lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder: Path) -> None:
    """All official files, in one folder, under their official names."""
    import pyarrow
    from pyarrow import parquet

    for name, rows in {
        "deepscaler.json": DEEPSCALER,
        "aime.json": [{"problem": "P", "solution": "S", "answer": "025", "year": 2024, "difficulty": 4.5}],
        "amc.json": [{"problem": "P", "answer": 142.0, "url": "u", "difficulty": 2.0}],
        "math.json": [{"problem": "P", "answer": "\\pi", "difficulty": 2, "unique_id": "test/algebra/1.json"}],
        "minerva.json": [{"problem": "P", "type": "Physics", "idx": 0, "answer": ["6630.65\n", "6630\n"]}],
        "olympiad_bench.json": [{"id": 1606, "subfield": "Algebra", "problem": "P", "answer": ["$2^{9}$"]}],
        "hotpot_train_v1.1.json": HOTPOTQA * 1 + [HOTPOTQA[0] | {"_id": "5b"}],
        "hotpot_dev_distractor_v1.json": HOTPOTQA,
        "dev.json": TWO_WIKI,
        "bamboogle.json": BAMBOOGLE,
    }.items():
        (folder / name).write_text(json.dumps(rows, indent=1))
    (folder / "aime25.jsonl").write_text(lines([{"problem": "P", "answer": "70", "id": "0"}]))
    (folder / "amc23.jsonl").write_text(lines([{"id": 0, "question": "Q", "answer": 27.0, "url": "u"}]))
    (folder / "musique_ans_v1.0_dev.jsonl").write_text(lines(MUSIQUE))
    (folder / "ARC-Challenge-Test.jsonl").write_text(lines(ARC))
    with zipfile.ZipFile(FIXTURES / "gpqa_encrypted.zip") as archive:
        plain = archive.read("dataset/gpqa_diamond.csv", pwd=b"deserted-untie-orchid")
    (folder / "gpqa_diamond.csv").write_bytes(plain)
    parquet.write_table(pyarrow.Table.from_pylist(MMLU_PRO), folder / "mmlu_pro.parquet")
    for category in ("base", "long_context", "miss_func", "miss_param"):
        write_bfcl(folder, category)


def write_bfcl(folder: Path, category: str) -> None:
    """A BFCL category: its entries, ground truths and function documents."""
    (folder / "possible_answer").mkdir(exist_ok=True)
    (folder / "multi_turn_func_doc").mkdir(exist_ok=True)
    (folder / f"BFCL_v4_multi_turn_{category}.json").write_text(lines([BFCL_ENTRY]))
    (folder / "possible_answer" / f"BFCL_v4_multi_turn_{category}.json").write_text(lines([BFCL_TRUTH]))
    (folder / "multi_turn_func_doc" / "math_api.json").write_text(lines([BFCL_DOCUMENT]))


def math(name: str, problem: str, answer: str | list[str], group: str) -> dict:
    return {"id": name, "problem": problem, "answer": answer, "group": group, "kind": "math"}


def choice(name: str, problem: str, answer: str, group: str) -> dict:
    return math(name, problem, answer, group) | {"kind": "choice"}


def question(name: str, text: str, answers: list, paragraphs: list, group: str) -> dict:
    return {"id": name, "question": text, "answers": answers, "paragraphs": paragraphs, "group": group}


_PARAGRAPHS = [{"title": "Neil", "text": "A drummer. He was in Rush."}, {"title": "Toto", "text": "A band."}]
# (set, split) -> its records, by hand
RECORDS = {
    ("deepscaler", "train"): [
        math("deepscaler/0", "What is $1+1$?", "2", "all"),
        math("deepscaler/2", "Half of one?", "\\frac{1}{2}", "difficulty 2"),
    ],
    ("aime24", "test"): [math("aime24/0", "P", "025", "difficulty 4.5")],
    ("aime25", "test"): [math("0", "P", "70", "all")],
    ("amc", "test"): [math("amc/0", "P", "142", "difficulty 2")],
    ("amc23", "test"): [math("0", "Q", "27", "all")],
    ("math500", "test"): [math("test/algebra/1.json", "P", "\\pi", "difficulty 2")],
    ("minerva", "test"): [math("minerva/0", "P", ["6630.65", "6630"], "Physics")],
    ("olympiadbench", "test"): [math("1606", "P", "2^{9}", "Algebra")],
    ("mmlu_pro", "test"): [
        choice("70", "Pick the third.\n\nA. one\nB. two\nC. three\nD. four\nE. five", "C", "law"),
    ],
    ("arc_challenge", "test"): [choice("Mercury_1", "Which?\n\nA. ice\nB. steam", "B", "all")],
    ("hotpotqa", "train"): [
        question("5a", "Which band?", ["Rush"], _PARAGRAPHS, "bridge hard"),
        question("5b", "Which band?", ["Rush"], _PARAGRAPHS, "bridge hard"),
    ],
    ("hotpotqa", "test"): [question("5a", "Which band?", ["Rush"], _PARAGRAPHS, "bridge hard")],
    ("2wikimultihopqa", "test"): [
        question("w1", "Who is older?", ["Ann"], [{"title": "Ann", "text": "Born 1900. She sang."}], "comparison"),
        question("w2", "Who?", ["Bob"], [], "inference"),
    ],
    ("musique", "test"): [
        question("2hop__1_2", "Where?", ["Stanley", "Stanley, ND"], [{"title": "T", "text": "Text."}], "2hop"),
    ],
    ("bamboogle", "test"): [question("bamboogle_1", "Who was president?", ["madison"], [], "all")],
    **{
        (f"bfcl_{category}", "test"): [
            {
                "id": "multi_turn_miss_func_0",
                "category": f"multi_turn_{category}",
                "turns": [[{"role": "user", "content": "Sort it."}], []],
                "initial_config": {"MathAPI": {"depth": {"deeper": [1, 2.5, None]}}},
                "involved_classes": ["MathAPI"],
                "excluded_functions": ["cp"],
                "missed_functions": {"1": ["mean"]},
                "functions": [BFCL_DOCUMENT],
                "ground_truth": [["mean(numbers=[1])"], []],
                "group": category,
            }
        ]
        for category in ("base", "long_context", "miss_func", "miss_param")
    },
}
