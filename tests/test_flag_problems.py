"""One line for each way a --config flag can be wrong; the errors are those that ml_collections and absl raise."""

from __future__ import annotations

import pytest

from trace_jax import flag_problems

ARGV = ["main", "--config=c.py", "--config.loss.cliplow=1"]


@pytest.mark.parametrize(
    "error, line",
    [
        (
            AttributeError("'\\'cliplow\\'\\nDid you mean \"clip_low\" instead of \"cliplow\"?'"),
            "--config.loss.cliplow is not a setting; did you mean clip_low?",
        ),
        (
            AttributeError("'Key \"zz\" does not exist and cannot be added since the config is locked.'"),
            "zz is not a setting; trace_jax/config.py lists them all",
        ),
        (AttributeError("no quotes"), "config file: no quotes"),
        (
            AttributeError("module 'config_config' has no attribute 'get_config'"),
            "config file: module 'config_config' has no attribute 'get_config'",
        ),
        (OSError("could not load\n  tried:\n    [Errno 2] No such file: 'c.py'"), "[Errno 2] No such file: 'c.py'"),
        (ValueError(""), "ValueError"),
        (ValueError("Traceback:\n  x\ntrace_jax.config.ConfigError: c.py:a is none"), "c.py:a is none"),
        (ValueError("Traceback:\n  x\nKeyError: 'a'"), "KeyError: 'a'"),
    ],
)
def test_problem(error, line):
    assert isinstance(error, flag_problems.FLAG_ERRORS)
    assert flag_problems.problem(error, ARGV) == line
