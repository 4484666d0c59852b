"""Calls that try to get out of the function-calling task, or to hang it; each must end in an error for the model.

    python -m experiments.real_tasks_cpu.hostile_calls

TEXTS are call texts as the data set writes its right calls, JSON_CALLS are names and arguments as a model writes them.
All go to a state that has a file system and a calculator. A call is refused if the observation says so, the services
are as before, nothing dangerous was reached (`DOORS` are watched), and all of it took under a second.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from trace_jax.tasks.bfcl import literal_calls
from trace_jax.tasks.bfcl.family import ERROR, Bfcl, State
from trace_jax.tasks.chat.family import Reply, ToolCall

MAX_SECONDS = 1.0
DOORS = (
    (builtins, "eval"),
    (builtins, "exec"),
    (builtins, "open"),
    (os, "system"),
    (os, "getcwd"),
    (subprocess, "Popen"),
)
OBJECTS = "().__class__.__base__.__subclasses__()"
TEXTS = {
    "attribute chain": f"cd(folder={OBJECTS})",
    "method of a method": "cd.__globals__['os'].system('id')",
    "method of an instance": "self.cd(folder='document')",
    "import": "__import__('os').system('id')",
    "import as an argument": "cd(folder=__import__('os').getcwd())",
    "nested call": "cd(folder=pwd())",
    "getattr": "getattr(cd, '__globals__')",
    "eval": "eval('1')",
    "lambda": "cd(folder=(lambda: 'document')())",
    "list comprehension": "mean(numbers=[x for x in [1, 2]])",
    "generator": "mean(numbers=(x for x in [1, 2]))",
    "f-string": "cd(folder=f'{cd.__globals__}')",
    "walrus": "cd(folder=(x := 'document'))",
    "starred list": "cd(*['document'])",
    "starred dict": "cd(**{'folder': 'document'})",
    "dict inside of a dict display": "edit_ticket(updates={**{'title': 'x'}})",
    "condition": "cd(folder='document' if 1 else 'archive')",
    "operator": "cd(folder='document' + 'x')",
    "huge power": "power(base=9**9**9, exponent=1)",
    "index": "cd(folder=['document'][0])",
    "name": "cd(folder=__name__)",
    "bytes": "cd(folder=b'document')",
    "complex number": "add(a=1j, b=1)",
    "ellipsis": "cd(folder=...)",
    "set": "mean(numbers={1, 2})",
    "infinite number": "add(a=1e999, b=1)",
    "key that is no string": "edit_ticket(ticket_id=1, updates={1: 2})",
    "two statements": "ls(); rm(file_name='document')",
    "comment and line break": "ls() #\nrm(file_name='document')",
    "NUL": "cd(folder='document')\0",
    "lookalike name": "ｃｄ(folder='document')",
    "lookalike argument": "cd(ｆolder='document')",
    "argument given twice": "cd(folder='document', folder='archive')",
    "10,000 brackets": "mean(numbers=" + "[" * 5_000 + "]" * 5_000 + ")",
    "19,000 minus signs": "add(a=" + "-" * 19_000 + "1, b=1)",
    "nested 30 deep": "mean(numbers=" + "[" * 30 + "]" * 30 + ")",
    "a million characters": f"cd(folder='{'x' * 1_000_000}')",
    "5,000 digits": f"add(a={'9' * 5_000}, b=1)",
    "private method": "_load_scenario(scenario={}, long_context=True)",
    "constructor": "__init__()",
    "attribute that is no method": "root()",
    "method of another class": "ticket_login(username='a', password='b')",
    "no call": "cd",
    "nothing": "",
}


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class _Sly(str):
    """A string that says of itself that it is documented."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("cd")


JSON_CALLS: dict[str, tuple[Any, Any]] = {
    "JSON: dunder": ("__class__", {}),
    "JSON: dunder of a method": ("cd.__globals__", {}),
    "JSON: method with its class": ("GorillaFileSystem.cd", {"folder": "document"}),
    "JSON: private method": ("_load_scenario", {"scenario": {}}),
    "JSON: call text as a name": ("cd(folder='document') or rm", {"file_name": "document"}),
    "JSON: lookalike": ("ｃｄ", {"folder": "document"}),
    "JSON: name with blanks": (" cd", {"folder": "document"}),
    "JSON: empty name": ("", {}),
    "JSON: name that is a list": (["cd"], {"folder": "document"}),
    "JSON: name of a sly class": (_Sly("rm"), {"file_name": "document"}),
    "JSON: huge name": ("cd" * 1_000_000, {}),
    "JSON: arguments are a list": ("cd", ["document"]),
    "JSON: arguments are nothing": ("cd", None),
    "JSON: self": ("cd", {"self": {"root": None}, "folder": "document"}),
    "JSON: unknown argument": ("cd", {"folder": "document", "__class__": 1}),
    "JSON: argument that is code": ("cd", {"folder=().__class__, x": 1}),
    "JSON: missing argument": ("cd", {}),
    "JSON: object for a string": ("cd", {"folder": {"$ref": "document"}}),
    "JSON: null for a string": ("cd", {"folder": None}),
    "JSON: nested 100,000 deep": ("mean", {"numbers": _nested(100_000)}),
    "JSON: a list in itself": ("mean", {"numbers": _circle()}),
    "JSON: a million values": ("mean", {"numbers": [1] * 1_000_000}),
    "JSON: a million keys": ("cd", {str(i): i for i in range(1_000_000)}),
    "JSON: ten million characters": ("cd", {"folder": "x" * 10_000_000}),
    "JSON: integer of a million bits": ("add", {"a": 1 << 1_000_000, "b": 1}),
    "JSON: not a number": ("add", {"a": float("nan"), "b": 1}),
    "JSON: half a surrogate pair": ("cd", {"folder": "\ud800"}),
    "JSON: an object that is no JSON": ("cd", {"folder": object()}),
    "JSON: endless power": ("power", {"base": 7, "exponent": 10**18}),
    "JSON: endless logarithm": ("logarithm", {"value": 2, "base": 3, "precision": 10**9}),
    "JSON: endless logarithm of a text": ("logarithm", {"value": "1e999999999", "base": 3, "precision": 5}),
    "JSON: endless precision as a text": ("logarithm", {"value": 2, "base": 3, "precision": "999999999"}),
    "JSON: endless root": ("square_root", {"number": 2, "precision": 10**9}),
    "JSON: endless rounding": ("round_number", {"number": 2, "decimal_places": -(10**9)}),
}


def refused() -> list[tuple[str, bool, str]]:
    """(name, whether it was refused, the observation) of every call."""
    return [_try(name, *call) for name, call in _calls()]


def _calls() -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Texts become calls where they can be read at all."""
    for name, text in TEXTS.items():
        yield name, (None, text)
    yield from JSON_CALLS.items()


def _try(name: str, function: Any, arguments: Any) -> tuple[str, bool, str]:
    state = _state()
    before = _seen(state)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(mock.patch.object(*door, side_effect=_reached)) for door in DOORS]
        try:
            observation, after = _observe(state, function, arguments)
        except Exception as error:  # an exception is no observation: not refused
            observation, after = repr(error), state
        reached = [door.call_count for door in doors]
    seconds = time.perf_counter() - start
    unchanged = _seen(after) == before == _seen(state)
    fine = observation.startswith(ERROR.format("")) and unchanged and not any(reached) and seconds < MAX_SECONDS
    return name, fine, f"{observation[:100]} ({1000 * seconds:.1f} ms)"


def _observe(state: State, function: Any, arguments: Any) -> tuple[str, State]:
    if function is None:
        try:
            call = literal_calls.parse(arguments)
        except literal_calls.CallError as error:
            return ERROR.format(error), state
        function, arguments = call.name, {**dict(enumerate(call.positional)), **call.named}
    reaction = Bfcl().react(state, Reply("", (ToolCall(function, arguments),)))
    return reaction.messages[0].content, reaction.state


def _seen(state: State) -> str:
    return repr(vars(state.services["GorillaFileSystem"]))


def _reached(*_: Any, **__: Any) -> None:
    raise AssertionError("a call reached what it must not reach")


def _state() -> State:
    document = {"description": "", "parameters": {"type": "dict", "properties": {}}}
    names = ("cd", "pwd", "ls", "rm", "mkdir", "mean", "add", "power", "logarithm", "square_root", "round_number")
    files = {"root": {"work": {"type": "directory", "contents": {"document": {"type": "directory", "contents": {}}}}}}
    record = {
        "id": "hostile_0",
        "category": "multi_turn_base",
        "turns": [[{"role": "user", "content": "Go on."}]],
        "initial_config": {"GorillaFileSystem": files},
        "involved_classes": ["GorillaFileSystem", "MathAPI"],
        "missed_functions": {},
        "functions": [{"name": name, **document} for name in names],
        "ground_truth": [["ls()"]],
        "group": "hostile",
    }
    return Bfcl().ask(record).state


def main() -> None:
    """Prints every call with what came of it."""
    outcomes = refused()
    for name, fine, detail in outcomes:
        print(f"{'refused' if fine else 'NOT REFUSED'}  {name}: {detail}")
    print(f"{sum(fine for _, fine, _ in outcomes)} of {len(outcomes)} refused")


if __name__ == "__main__":
    main()
