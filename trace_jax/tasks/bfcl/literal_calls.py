"""Calls of plain values: what may be called with, and call texts such as `cd(folder='x')` read without running them.

A call text is parsed to a syntax tree and only literals are taken out of it; nothing here evaluates anything.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_CHARACTERS = 20_000  # of a call text, and of all strings in a call; the data set's own calls have up to 6,839
MAX_VALUES = 2_000  # values in a call, containers and keys included
MAX_DEPTH = 8  # lists and dicts in each other
MAX_INTEGER_BITS = 1_024  # as large as a float gets
_WORD_BEFORE_BRACKET = re.compile(r"\b([a-zA-Z_]\w*)\s*(?=\()")
_PARSER_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


class CallError(ValueError):
    """A call that is not carried out; the message is one line that the policy may be shown."""


@dataclasses.dataclass(frozen=True)
class LiteralCall:
    """A call whose arguments are plain values."""

    name: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]


def parse(text: str) -> LiteralCall:
    """Reads `name(value, ..., key=value, ...)` with literal values, of which no tuple, bytes, set or complex number.

    Outside of strings the text is printable ASCII, because Python's parser maps lookalikes of letters to letters.
    Raises CallError for anything else.
    """
    if len(text) > MAX_CHARACTERS:
        raise CallError(f"the call has {len(text)} characters, at most {MAX_CHARACTERS} are read")
    try:
        node = ast.parse(text, mode="eval").body
    except _PARSER_ERRORS:
        raise CallError("the call cannot be parsed") from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise CallError("a call has the form name(key=value, ...)")
    named = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in named:
            raise CallError("each argument of a call is given once, by its name")
        named[keyword.arg] = _literal(keyword.value, 0)
    positional = tuple(_literal(value, 0) for value in node.args)
    _check_ascii(text, node)
    checked_arguments({"": list(positional), **named})
    return LiteralCall(node.func.id, positional, named)


def checked_arguments(arguments: Any) -> dict[str, Any]:
    """A copy of a JSON object that shares nothing with it. Raises CallError for what is none, or is too large."""
    if type(arguments) is not dict:
        raise CallError("the arguments of a call are a JSON object")
    return _copy(arguments, MAX_DEPTH, _Room())


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """The call as Python text: `name(key=value, ...)`."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def as_run(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the official runner passes them on.

    It drops blanks between a word and an opening bracket in the call's text, inside of strings too: "about (a)" becomes
    "about(a)". What it puts before a string's words that are names of functions is left out here: no ground truth has
    such a string, so it can only turn a wrong call into another wrong one.
    """
    text = call_text(name, arguments)
    if text.find("(", len(name) + 1) < 0:
        return dict(arguments)
    return dict(parse(_WORD_BEFORE_BRACKET.sub(r"\1", text)).named)


@dataclasses.dataclass
class _Room:
    """What a call may still hold."""

    values: int = MAX_VALUES
    characters: int = MAX_CHARACTERS

    def take(self, values: int, characters: int) -> None:
        self.values -= values
        self.characters -= characters
        if self.values < 0:
            raise CallError(f"a call holds at most {MAX_VALUES} values")
        if self.characters < 0:
            raise CallError(f"a call holds at most {MAX_CHARACTERS} characters")


def _copy(value: Any, depth: int, room: _Room) -> Any:
    kind = type(value)
    if kind is dict or kind is list:
        if depth < 0:
            raise CallError(f"values are nested deeper than {MAX_DEPTH} lists and objects")
        room.take(len(value), 0)
        if kind is list:
            return [_copy(item, depth - 1, room) for item in value]
        if not all(type(key) is str for key in value):
            raise CallError("the keys of an object are strings")
        return {_copy(key, depth, room): _copy(item, depth - 1, room) for key, item in value.items()}
    if kind is str:
        room.take(1, len(value))
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise CallError("a string holds half of a surrogate pair")
    elif kind is int:
        if value.bit_length() > MAX_INTEGER_BITS:
            raise CallError(f"an integer has more than {MAX_INTEGER_BITS} bits")
    elif kind is float:
        if not math.isfinite(value):
            raise CallError("a number is not finite")
    elif kind is not bool and value is not None:
        raise CallError("values are strings, numbers, true, false, null, lists and objects")
    return value


def _literal(node: ast.expr, depth: int) -> Any:
    """The value of a literal; its size is checked by the caller."""
    if depth > MAX_DEPTH:
        raise CallError(f"values are nested deeper than {MAX_DEPTH} lists and objects")
    match node:
        case ast.Constant(value=value) if isinstance(value, (str, int, float)) or value is None:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (int, float):
            return -value
        case ast.List(elts=items):
            return [_literal(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=items):
            names = [None if key is None else _literal(key, depth + 1) for key in keys]
            if not all(type(name) is str for name in names):
                raise CallError("the keys of an object are strings")
            return {name: _literal(item, depth + 1) for name, item in zip(names, items)}
    raise CallError("the arguments of a call are literals: strings, numbers, True, False, None, lists and dicts")


def _check_ascii(text: str, call: ast.Call) -> None:
    """Raises CallError for a character outside of strings that is not printable ASCII."""
    raw = text.encode("utf-8", "surrogatepass")
    if b"\n" in raw or b"\r" in raw or b"\f" in raw:
        raise CallError("a call stands on one line")
    outside = bytearray(raw)
    for node in ast.walk(call):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            outside[node.col_offset : node.end_col_offset] = b" " * (node.end_col_offset - node.col_offset)
    if not all(32 <= byte < 127 for byte in outside):
        raise CallError("a call is printable ASCII outside of its strings")
