"""BFCL's function documents as OpenAI-style tool schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = {  # BFCL's names of types that JSON Schema calls otherwise
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "list": "array",
    "bool": "boolean",
    "any": "string",
}
KEPT = ("object", "number", "array", "boolean", "string", "integer")


def tool_schema(document: Mapping[str, Any]) -> dict[str, Any]:
    """{"type": "function", "function": {name, description, parameters}} of one function document.

    What a document says of the function's result ("response") has no place in the format and is left out.
    Raises ValueError for a type that is not known.
    """
    function = {
        "name": document["name"],
        "description": document["description"],
        "parameters": _converted(document["parameters"], document["name"]),
    }
    return {"type": "function", "function": function}


def _converted(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One schema and those inside of it, with JSON Schema's types."""
    converted = dict(schema)
    kind = schema.get("type", "string")
    converted["type"] = TYPES.get(kind, kind)
    if converted["type"] not in KEPT:
        raise ValueError(f"bfcl: function {name} has a parameter of type {kind!r}, which no JSON type is known for")
    if "properties" in schema:
        converted["properties"] = {key: _converted(value, name) for key, value in schema["properties"].items()}
    if "items" in schema:
        converted["items"] = _converted(schema["items"], name)
    return converted
