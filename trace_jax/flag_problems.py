"""What is wrong with `--config` flags, in one line, for every command that takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from absl import flags

# What parsing them raises: AttributeError for a field that is not there, the others for files and values.
FLAG_ERRORS = (AttributeError, flags.Error, KeyError, TypeError, ValueError, OSError, SyntaxError)


def problem(error: Exception, argv: Sequence[str]) -> str:
    """The line for an error that parsing `argv` raised."""
    return _unknown_field(str(error), argv) if isinstance(error, AttributeError) else last_line(error)


def last_line(error: Exception) -> str:
    """The last line of an error's text, or its type where it has none.

    That of an error that a config file raised is the end of its traceback; of our own errors no type is told.
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return line.removeprefix("trace_jax.config.ConfigError: ")


def _unknown_field(text: str, argv: Sequence[str]) -> str:
    """One line for `'NAME'`, or `Key "NAME" does not exist ...`, with the flag that gave the name."""
    found = re.match(r"\W*(?:Key \W)?(\w+)\\?['\"]", text)
    if found is None:
        return f"config file: {text}"
    name = found[1]
    given = next((arg for arg in argv if name in arg.split("=")[0].split(".")), name)
    similar = re.search(r'Did you mean "(\w+)"', text)
    hint = f"did you mean {similar[1]}?" if similar else "trace_jax/config.py lists them all"
    return f"{given.split('=')[0]} is not a setting; {hint}"
