"""Function documents as tool schemas."""

from __future__ import annotations

import json

import pytest

from tests.tasks import bfcl_records
from trace_jax.tasks.bfcl.schemas import KEPT, tool_schema


def test_a_document_by_hand():
    document = {
        "name": "f",
        "description": "Does it.",
        "parameters": {
            "type": "dict",
            "properties": {
                "x": {"type": "float", "description": "How far."},
                "pairs": {"type": "array", "items": {"type": "tuple", "items": {"type": "integer"}}, "default": []},
                "more": {"type": "dict", "properties": {"y": {"type": "any"}}},
            },
            "required": ["x"],
        },
        "response": {"type": "dict", "properties": {}},
    }
    assert tool_schema(document) == {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "number", "description": "How far."},
                    "pairs": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "default": []},
                    "more": {"type": "object", "properties": {"y": {"type": "string"}}},
                },
                "required": ["x"],
            },
        },
    }
    assert document["parameters"]["type"] == "dict"  # unchanged


def test_an_unknown_type():
    parameters = {"type": "dict", "properties": {"x": {"type": "complex"}}}
    with pytest.raises(ValueError, match="function f has a parameter of type 'complex'"):
        tool_schema({"name": "f", "description": "", "parameters": parameters})


def test_every_document_of_the_data_set():
    """Same JSON but for the names of types and the part on results, by replacing text."""
    seen = {document["name"]: document for record in bfcl_records.records("base") for document in record["functions"]}
    assert len(seen) == 128
    for document in seen.values():
        text = json.dumps(document["parameters"]).replace('"type": "dict"', '"type": "object"')
        text = text.replace('"type": "float"', '"type": "number"')
        function = tool_schema(document)["function"]
        assert json.dumps(function["parameters"]) == text and set(function) == {"name", "description", "parameters"}
        assert all(kind["type"] in KEPT for kind in function["parameters"]["properties"].values())
