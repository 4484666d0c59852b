"""Records of the multi-hop family, read from the samples in the data sets' own formats."""

from __future__ import annotations

import json

from tests import real_data


def _wiki_like(name: str) -> list[dict]:
    """HotpotQA's format, which 2WikiMultihopQA shares; some records of the latter bring no paragraphs."""
    rows = json.loads((real_data.folder() / name).read_text())
    return [
        {
            "id": row["_id"],
            "question": row["question"],
            "answers": [row["answer"]],
            "paragraphs": [{"title": t, "text": "".join(sentences)} for t, sentences in row.get("context", [])],
            "group": row["type"],
            "support": {title for title, _ in row["supporting_facts"]},
        }
        for row in rows
    ]


def hotpotqa() -> list[dict]:
    return _wiki_like("hotpotqa_distractor_sample.json")


def two_wiki() -> list[dict]:
    return _wiki_like("2wikimultihopqa_sample.json")


def musique() -> list[dict]:
    rows = [json.loads(line) for line in (real_data.folder() / "musique_sample.jsonl").read_text().splitlines()]
    return [
        {
            "id": row["id"],
            "question": row["question"],
            "answers": [row["answer"], *row["answer_aliases"]],
            "paragraphs": [{"title": p["title"], "text": p["paragraph_text"]} for p in row["paragraphs"]],
            "group": row["id"].split("_")[0],
        }
        for row in rows
    ]


def bamboogle() -> list[dict]:
    rows = json.loads((real_data.folder() / "bamboogle.json").read_text())
    return [{"id": r["id"], "question": r["Question"], "answers": r["answer"], "paragraphs": []} for r in rows]
