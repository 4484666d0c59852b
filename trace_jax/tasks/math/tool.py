"""The tool `python` as the policy sees it: its schema, the check of a call's arguments, and what a run looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trace_jax.sandbox.result import Execution

NAME = "python"
MAX_TIMEOUT = 30.0  # seconds that a call may ask for; more is cut to it (our choice)
MAX_WAIT = 70.0  # seconds beyond its own time that a call may take: patience and grace of what runs it
MAX_CODE = 20_000  # characters of a call's code (our choice)
MAX_OBSERVATION = 4_000  # characters that a call shows of what was printed (our choice)
SHOWN = 60  # characters of a wrong argument that are shown

_ENDS = {  # how a run ended -> the observation's last line
    "timeout": "[stopped: the time limit of {timeout:g} s was reached]",
    "memory": "[stopped: out of memory]",
    "output": "[stopped: too much output]",
    "killed": "[stopped: the Python process died]",
    "unavailable": "[Python is not available at the moment]",
}
_KINDS = {  # JSON's words
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class Python(Protocol):
    """What runs code: `sandbox.pool.PythonPool`, `sandbox.service.PythonService`. Thread-safe; raises for no code."""

    def run(self, code: str, timeout: float) -> Execution:
        """Runs `code` for at most `timeout` seconds in an interpreter of its own, `MAX_WAIT` later at the latest."""
        ...


class ArgumentError(Exception):
    """A call's arguments are wrong; the message is one line for the policy."""


def schema(default_timeout: float) -> Mapping[str, Any]:
    """The tool in the form that chat templates show."""
    return {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Runs Python code and returns what it printed. Nothing is kept from one call to the next.",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "Python code; print() what you want to see."},
                    "timeout": {
                        "type": "number",
                        "description": f"Seconds the code may run, {default_timeout:g} if not given, "
                        f"at most {MAX_TIMEOUT:g}.",
                    },
                },
                "required": ["code"],
            },
        },
    }


def arguments(given: Mapping[str, Any], default_timeout: float) -> tuple[str, float]:
    """(code, seconds) of a call. Raises ArgumentError for what cannot be run; arguments beside these are ignored."""
    if "code" not in given:
        raise ArgumentError(f'the argument "code" is missing; call {NAME} with {{"code": "print(1 + 1)"}}')
    code, timeout = given["code"], given.get("timeout")
    if not isinstance(code, str):
        raise ArgumentError(f'the argument "code" must be a string, not {_kind(code)}')
    if not code.strip():
        raise ArgumentError('the argument "code" is empty')
    if len(code) > MAX_CODE:
        raise ArgumentError(f'the argument "code" has {len(code)} characters; at most {MAX_CODE} are run')
    if not _is_text(code):
        raise ArgumentError('the argument "code" holds half of a surrogate pair, which is no character')
    if timeout is None:
        return code, default_timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError(f'the argument "timeout" must be a number of seconds above 0, not {_show(timeout)}')
    return code, float(min(timeout, MAX_TIMEOUT))


def observation(execution: Execution, timeout: float) -> str:
    """What the policy reads of a run: stdout, then stderr, then how it ended if not by itself.

    Of more than `MAX_OBSERVATION` characters the first and the last are kept: the beginning says what was printed,
    the end what went wrong.
    """
    parts = [part.strip("\n") for part in (execution.stdout, execution.stderr)]
    body = _cut("\n".join(part for part in parts if part))
    end = _ENDS.get(execution.end, "").format(timeout=timeout)
    if not body and not end:
        end = "[no output]" if execution.end == "ok" else "[ended with an error]"
    return "\n".join(part for part in (body, end) if part)


def _cut(text: str) -> str:
    half = MAX_OBSERVATION // 2
    if len(text) > 2 * half:
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return text if _is_text(text) else text.encode("utf-8", "replace").decode()


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**9):
        return str(value)
    return repr(value[:SHOWN]) if isinstance(value, str) else _kind(value)
