"""The tool `local_search`: its schema, the reading of its arguments, and what its results look like."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.retrieval.base import Passage

NAME = "local_search"
DEFAULT_TOP_K, MOST_TOP_K = 10, 50  # [paper]
SHOWN_CHARACTERS = 300  # of a document, its title included [rLLM]
MOST_QUERY = 1000  # characters of a query, the rest is cut off (our choice)

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Searches an encyclopedia and returns the passages that fit the query best.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "top_k": {
                    "type": "integer",
                    "description": f"How many passages to return ({DEFAULT_TOP_K} if left out).",
                    "minimum": 1,
                    "maximum": MOST_TOP_K,
                },
            },
            "required": ["query"],
        },
    },
}


class BadArguments(Exception):
    """A search that cannot be carried out; the text is for the policy."""


@dataclasses.dataclass(frozen=True)
class Search:
    """A search that can be carried out."""

    query: str
    top_k: int


def read(arguments: Mapping[str, Any]) -> Search:
    """The search that a call asks for. Unknown arguments are passed over; a long query is cut, `top_k` clamped to
    1..50, and a whole number may be written as a float or in a string (our choice). Raises BadArguments."""
    query = arguments.get("query")
    if not isinstance(query, str) or not query.strip():
        raise BadArguments("query must be a text that is not empty")
    query = query.strip()[:MOST_QUERY].encode("utf-8", "replace").decode()
    return Search(query=query, top_k=_top_k(arguments.get("top_k")))


def _top_k(value: Any) -> int:
    if value is None:
        return DEFAULT_TOP_K
    if isinstance(value, str) and len(value) < 20:
        try:
            value = float(value)
        except ValueError:
            pass
    whole = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise BadArguments(f"top_k must be an integer from 1 to {MOST_TOP_K}")
    return int(min(max(value, 1), MOST_TOP_K))


def show(passages: Sequence[Passage], characters: int = SHOWN_CHARACTERS) -> str:
    """Search results as the policy reads them: numbered, each with its title on a line, cut to `characters`."""
    if not passages:
        return "No passage was found."
    return "\n\n".join(f"[{number}] {_cut(passage, characters)}" for number, passage in enumerate(passages, 1))


def _cut(passage: Passage, characters: int) -> str:
    text = f"{passage.title}\n{passage.text}".strip()
    return text if len(text) <= characters else text[:characters] + "..."
