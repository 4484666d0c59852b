"""Reading a turn's text as a `Reply` and writing a `Reply` as text, in the two call syntaxes of the models.

Whatever a policy writes is read: what was meant as a call and is none becomes a `BadCall` that says why. Nothing is
evaluated; arguments are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trace_jax.tasks.chat.family import BadCall, Reply, ToolCall

MOST_CHARACTERS = 100_000  # of one call; longer ones are refused unread
MOST_CALLS = 64  # of one turn; the rest is refused unread
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_PYTHON_TAG = "<|python_tag|>"
_CALL = re.compile(rf"{_OPEN}(.*?)({_CLOSE}|(?={_OPEN})|\Z)", re.DOTALL)


def read_tagged(text: str) -> Reply:
    """Qwen3's syntax: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, among text.

    A thought is what stands before `</think>`; one that never ends is all there is.
    """
    thought, text = _split_thought(text)
    calls = [_tagged(match) for match in _CALL.finditer(text)]
    return Reply(_CALL.sub("", text).strip(), _limited(calls), thought)


def write_tagged(reply: Reply) -> str:
    """The text that `read_tagged` reads as this reply. Raises ValueError for a call that is none."""
    blocks = [f"{_THINK}\n{reply.thought}\n{_THOUGHT}\n"] if reply.thought else []
    blocks += [reply.text] if reply.text else []
    blocks += [f"{_OPEN}\n{_document(call, 'arguments')}\n{_CLOSE}" for call in reply.calls]
    return "\n".join(blocks)


def read_bare(text: str) -> Reply:
    """Llama 3's syntax: a turn that begins with `{` and names a function is calls,
    `{"name": ..., "parameters": {...}}`, with blanks, line ends or semicolons between them; any other is text."""
    thought, text = _split_thought(text)
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not (body.startswith("{") and '"name"' in body):
        return Reply(text.strip(), (), thought)
    if len(body) > MOST_CHARACTERS:
        return Reply("", (_too_long(body),), thought)
    calls, position = [], 0
    while position < len(body) and len(calls) <= MOST_CALLS:
        try:
            document, position = _DECODER.raw_decode(body, position)
        except (ValueError, RecursionError) as error:
            calls.append(BadCall(f"the call is no JSON ({_reason(error)})"))
            break
        calls.append(_call(document, "parameters"))
        position += len(body[position:]) - len(body[position:].lstrip("; \n\t\r"))
    return Reply("", _limited(calls), thought)


def write_bare(reply: Reply) -> str:
    """The text that `read_bare` reads as this reply; beside calls there is no text, so it is left out then.

    Raises ValueError for a call that is none.
    """
    thought = f"{_THINK}\n{reply.thought}\n{_THOUGHT}\n" if reply.thought else ""
    return thought + ("\n".join(_document(call, "parameters") for call in reply.calls) or reply.text)


def _split_thought(text: str) -> tuple[str, str]:
    if _THOUGHT in text:
        thought, _, rest = text.partition(_THOUGHT)
        return thought.strip().removeprefix(_THINK).strip(), rest
    if text.lstrip().startswith(_THINK):
        return text.strip().removeprefix(_THINK).strip(), ""
    return "", text


def _tagged(match: re.Match[str]) -> ToolCall | BadCall:
    body, end = match.groups()
    if end != _CLOSE:
        return BadCall(f"the call is not closed by {_CLOSE}")
    if len(body) > MOST_CHARACTERS:
        return _too_long(body)
    try:
        document = _DECODER.decode(body.strip())
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is no JSON ({_reason(error)})")
    return _call(document, "arguments")


def _call(document: Any, key: str) -> ToolCall | BadCall:
    if not isinstance(document, dict):
        return BadCall(f"a call is a JSON object with name and {key}")
    name, arguments = document.get("name"), document.get(key)
    if not isinstance(name, str) or not name:
        return BadCall("the call has no name")
    if not isinstance(arguments, dict):
        return BadCall(f"the call's {key} must be a JSON object")
    return ToolCall(name, arguments)


def _limited(calls: list[ToolCall | BadCall]) -> tuple[ToolCall | BadCall, ...]:
    if len(calls) <= MOST_CALLS:
        return tuple(calls)
    return (*calls[:MOST_CALLS], BadCall(f"a turn has at most {MOST_CALLS} calls; the others were not carried out"))


def _document(call: ToolCall | BadCall, key: str) -> str:
    if isinstance(call, BadCall):
        raise ValueError(f"a call that is none cannot be written: {call.problem}")
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def _too_long(body: str) -> BadCall:
    return BadCall(f"the call has {len(body)} characters; at most {MOST_CHARACTERS} are read")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:100].splitlines()[0]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _unique(pairs: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """An object of which no name stands twice: which of them counts would be a guess."""
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"{name[:40]!r} stands twice in one object")
        document[name] = value
    return document


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)
