"""One BFCL record, checked and prepared: what every state of its episodes shares and nothing changes."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from trace_jax.tasks.bfcl import literal_calls, schemas, services
from trace_jax.tasks.bfcl.literal_calls import CallError
from trace_jax.tasks.chat.family import Message, Record, ToolCall

ADDED = "From now on you can call these functions as well:\n{schemas}\nPlease go on with their help."
FIELDS = (
    "id",
    "category",
    "turns",
    "initial_config",
    "involved_classes",
    "missed_functions",
    "functions",
    "ground_truth",
    "group",
)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the right calls of one user turn lead to."""

    results: tuple[str, ...]
    services: services.Services  # after the turn


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A record of the data set."""

    id: str
    turns: tuple[tuple[Message, ...], ...]  # what the user says; functions that are told later are in it
    tools: tuple[Mapping[str, Any], ...]  # schemas of the functions that are told at the start
    methods: Mapping[str, str]  # every function that can be called -> its class
    truth: tuple[tuple[ToolCall, ...], ...]  # right calls of each user turn; none where the user's wish cannot be met
    services: services.Services  # in their first state
    group: str

    @functools.cached_property
    def outcomes(self) -> tuple[Truth, ...]:
        """Results and services of the right calls, turn by turn; worked out once."""
        current, outcomes = self.services, []
        for calls in self.truth:
            results = []
            for call in calls:
                arguments = literal_calls.as_run(call.name, literal_calls.checked_arguments(call.arguments))
                current, result = services.run(current, self.methods[call.name], call.name, arguments)
                results.append(result)
            outcomes.append(Truth(tuple(results), current))
        return tuple(outcomes)


def read(record: Record) -> Entry:
    """Raises ValueError, one line with the record's id, for a record that is none of BFCL's multi-turn categories."""
    missing = [name for name in FIELDS if name not in record]
    if missing:
        raise ValueError(f"bfcl: record {record.get('id', '?')!r} has no {', '.join(missing)}; is it a BFCL record?")
    turns, truth = record["turns"], record["ground_truth"]
    if len(turns) != len(truth) or not turns:
        raise ValueError(f"bfcl: record {record['id']} has {len(turns)} user turns and right calls for {len(truth)}")
    documents = {document["name"]: document for document in record["functions"]}
    told_later = {int(turn): tuple(names) for turn, names in record["missed_functions"].items()}
    unknown = {name for names in told_later.values() for name in names} - set(documents)
    if unknown or not set(told_later) < set(range(len(turns))):
        raise ValueError(f"bfcl: record {record['id']} tells functions later that it does not document, or never")
    hidden = {name for names in told_later.values() for name in names}
    found = services.methods(record["involved_classes"], list(documents))
    return Entry(
        id=record["id"],
        turns=tuple(_messages(turn, [documents[n] for n in told_later.get(i, ())]) for i, turn in enumerate(turns)),
        tools=tuple(schemas.tool_schema(document) for name, document in documents.items() if name not in hidden),
        methods=found,
        truth=tuple(tuple(_truth(record["id"], text, found) for text in calls) for calls in truth),
        services=services.load(
            record["involved_classes"], record["initial_config"], long_context="long_context" in record["category"]
        ),
        group=record["group"],
    )


def _messages(turn: list[Mapping[str, str]], added: list[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The user's messages of a turn, and before them the functions that are told with it."""
    messages = tuple(Message(message["role"], message["content"]) for message in turn)
    if not added:
        return messages
    lines = "\n".join(json.dumps(schemas.tool_schema(document)) for document in added)
    return (Message("user", ADDED.format(schemas=lines)), *messages)


def _truth(record_id: str, text: str, methods: Mapping[str, str]) -> ToolCall:
    """A right call from its text."""
    try:
        call = literal_calls.parse(text)
        if call.name not in methods:
            raise CallError("the function is not documented")
        named = services.named_arguments(methods[call.name], call.name, call.positional, call.named)
    except CallError as error:
        raise ValueError(f"bfcl: record {record_id}: right call {text[:80]!r}: {error}") from None
    return ToolCall(call.name, named)
