"""From a row of an official file to a record: one function a format, each takes the row and the record's default id.

Records are plain dicts; the fields of each kind are in `fields.py`. A row that is not of the format raises RowError
with the first key that is missing or of the wrong type; a row without an answer raises Unanswered.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trace_jax.data import cells
from trace_jax.data.errors import RowError, Unanswered

Record = dict[str, Any]
Format = Callable[[Mapping[str, Any], str], Record]


def math_problem(row: Mapping[str, Any], default_id: str) -> Record:
    """{"problem" or "question", "answer", optionally "id" or "unique_id", "difficulty", "level", "type", "subject"}.

    The shape of DeepScaleR-Preview and of the AIME, AMC, MATH-500, Minerva and OlympiadBench files beside it, and of
    the JSON lines of the same benchmarks elsewhere. An answer is text, a number, or a list of them, any of which is
    right (Minerva: one value in several spellings or roundings); the record has the different ones of a list, or the
    text if that is one. Dollar signs around a whole answer are dropped: it is LaTeX inside them.
    """
    key = "problem" if "problem" in row or "question" not in row else "question"
    problem = cells.text(row, key)
    cells.present(row, "answer")
    given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    answers = list(dict.fromkeys(text for text in map(_latex, given) if text))
    if not answers:
        raise Unanswered
    name = row.get("unique_id", row.get("id"))
    return {
        "id": default_id if name is None else str(name),
        "problem": problem,
        "answer": answers[0] if len(answers) == 1 else answers,
        "group": _math_group(row),
        "kind": "math",
    }


def _latex(answer: Any) -> str:
    if answer is None:
        return ""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
        raise RowError(f"has {type(answer).__name__} in 'answer', not text, a number or a list of texts")
    text = str(answer).strip()
    if len(text) > 1 and text[0] == text[-1] == "$" and text.count("$") == 2:
        text = text[1:-1].strip()
    return text


def _math_group(row: Mapping[str, Any]) -> str:
    for key in ("difficulty", "level"):
        if isinstance(row.get(key), (int, float)):
            return f"{key} {row[key]:g}"
    return next((row[key] for key in ("type", "subject", "subfield") if isinstance(row.get(key), str)), "all")


def choices(question: str, options: Sequence[str]) -> str:
    """The text of a choice question: it ends with the options, a line each, lettered from A."""
    if not 2 <= len(options) <= len(string.ascii_uppercase):
        raise RowError(f"has {len(options)} options, not 2 to {len(string.ascii_uppercase)}")
    lines = [f"{letter}. {option.strip()}" for letter, option in zip(string.ascii_uppercase, options)]
    return "\n".join([question.strip(), "", *lines])


def _choice(name: str, question: str, options: Sequence[str], right: int, group: str) -> Record:
    problem = choices(question, options)
    return {
        "id": name,
        "problem": problem,
        "answer": string.ascii_uppercase[right],
        "group": group,
        "kind": "choice",
    }


def mmlu_pro(row: Mapping[str, Any], default_id: str) -> Record:
    """MMLU-Pro: {"question_id", "question", "options", "answer" (a letter), "answer_index", "category"}."""
    question, options, letter = cells.text(row, "question"), cells.texts(row, "options"), cells.text(row, "answer")
    right = cells.whole(row, "answer_index")
    if not 0 <= right < len(options) or string.ascii_uppercase[right] != letter:
        raise RowError(f"has answer {letter!r} and answer_index {right} of {len(options)} options, which disagree")
    name = str(cells.whole(row, "question_id")) if "question_id" in row else default_id
    return _choice(name, question, options, right, cells.text(row, "category"))


def arc(row: Mapping[str, Any], default_id: str) -> Record:
    """AI2 ARC: {"id", "question": {"stem", "choices": [{"text", "label"}]}, "answerKey"}.

    Labels are letters or figures; the record's options are always lettered from A, in the order of the file.
    """
    name, key = cells.text(row, "id"), cells.text(row, "answerKey")
    question = cells.mapping(row, "question")
    options = cells.mappings(question, "choices")
    labels = [cells.text(option, "label") for option in options]
    texts = [cells.text(option, "text") for option in options]
    if key not in labels:
        raise RowError(f"has answerKey {key!r}, which is none of its labels {', '.join(labels)}")
    return _choice(name, cells.text(question, "stem"), texts, labels.index(key), "all")


def gpqa(row: Mapping[str, Any], default_id: str) -> Record:
    """GPQA: {"Question", "Correct Answer", "Incorrect Answer 1".."3", optionally "Record ID", "High-level domain"}.

    The order of the options is a function of the record's id (sorted by a hash of id and option number): the same on
    every machine and in every version.
    """
    question = cells.text(row, "Question")
    options = [cells.text(row, key) for key in ("Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))]
    name = row.get("Record ID") or default_id
    order = sorted(range(4), key=lambda option: hashlib.sha256(f"{name}/{option}".encode()).digest())
    group = row.get("High-level domain") or "all"
    return _choice(name, question, [options[option] for option in order], order.index(0), group)


def hotpotqa(row: Mapping[str, Any], default_id: str) -> Record:
    """HotpotQA (distractor): {"_id", "question", "answer", "type", "level", "context": [[title, [sentence]]]}."""
    name, question, answer = cells.text(row, "_id"), cells.text(row, "question"), cells.text(row, "answer")
    group = f"{cells.text(row, 'type')} {cells.text(row, 'level')}"
    return _question(name, question, [answer], _context(row), group)


def two_wiki(row: Mapping[str, Any], default_id: str) -> Record:
    """2WikiMultihopQA: {"_id", "question", "answer", "type", "context" as in HotpotQA, absent in some releases}."""
    paragraphs = _context(row) if "context" in row else []
    name, question, answer = cells.text(row, "_id"), cells.text(row, "question"), cells.text(row, "answer")
    return _question(name, question, [answer], paragraphs, cells.text(row, "type"))


def musique(row: Mapping[str, Any], default_id: str) -> Record:
    """MuSiQue: {"id", "question", "answer", "answer_aliases", "paragraphs": [{"title", "paragraph_text"}]}.

    The group is the shape of the question's reasoning, which its id begins with ("2hop", "3hop1", ...).
    Rows that are marked as not answerable are left out.
    """
    name, question, answer = cells.text(row, "id"), cells.text(row, "question"), cells.text(row, "answer")
    aliases = cells.texts(row, "answer_aliases")
    paragraphs = [
        {"title": cells.text(item, "title"), "text": cells.text(item, "paragraph_text")}
        for item in cells.mappings(row, "paragraphs")
    ]
    if row.get("answerable") is False:
        raise Unanswered
    return _question(name, question, list(dict.fromkeys([answer, *aliases])), paragraphs, name.split("__")[0])


def bamboogle(row: Mapping[str, Any], default_id: str) -> Record:
    """Bamboogle: {"Question", "answer": [text], optionally "id"}."""
    question, answers = cells.text(row, "Question"), cells.texts(row, "answer")
    return _question(str(row.get("id", default_id)), question, answers, [], "all")


def or_flashrag(official: Format) -> Format:
    """The official format of a set, or FlashRAG's of any: {"id", "question", "golden_answers"}, without paragraphs."""

    def read(row: Mapping[str, Any], default_id: str) -> Record:
        if "golden_answers" not in row:
            return official(row, default_id)
        answers = cells.texts(row, "golden_answers")
        return _question(cells.text(row, "id"), cells.text(row, "question"), answers, [], "all")

    return read


def _question(name: str, question: str, answers: list[str], paragraphs: list[dict[str, str]], group: str) -> Record:
    answers = [answer for answer in answers if answer.strip()]
    if not answers:
        raise Unanswered
    return {"id": name, "question": question, "answers": answers, "paragraphs": paragraphs, "group": group}


def _context(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """[[title, [sentence]]] -> paragraphs; sentences are joined with one blank, whether or not they begin with it."""
    paragraphs = []
    for item in cells.items(row, "context"):
        pair = isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], list)
        if not pair or not all(isinstance(sentence, str) for sentence in item[1]):
            raise RowError("has something other than [title, [sentence, ...]] in 'context'")
        paragraphs.append({"title": item[0], "text": " ".join(sentence.strip() for sentence in item[1])})
    return paragraphs
