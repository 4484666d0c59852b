"""Call texts and arguments: what is read, what is refused."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.tasks.bfcl import literal_calls
from trace_jax.tasks.bfcl.literal_calls import CallError

PLAIN = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    PLAIN | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "folder", "x_1"]), VALUES, max_size=3)


@given(ARGUMENTS)
def test_a_written_call_is_read_back(arguments):
    call = literal_calls.parse(literal_calls.call_text("cd", arguments))
    assert (call.name, call.positional, call.named) == ("cd", (), arguments)


def test_a_call_of_every_kind_of_value():
    call = literal_calls.parse("f('x', -1, a=[1.5, None], b={'k': True})")
    assert call.name == "f" and call.positional == ("x", -1) and call.named == {"a": [1.5, None], "b": {"k": True}}


@given(ARGUMENTS)
def test_checked_arguments_are_equal_and_share_nothing(arguments):
    checked = literal_calls.checked_arguments(arguments)
    assert checked == arguments and ast.literal_eval(repr(checked)) == arguments
    ids = lambda value: {id(value)} | set().union(*map(ids, value.values() if isinstance(value, dict) else value)) if (
        isinstance(value, (dict, list))
    ) else set()
    assert not ids(checked) & ids(arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "a JSON object"),
        ({"a": (1,)}, "values are"),
        ({"a": {1: 2}}, "keys"),
        ({"a": float("inf")}, "finite"),
        ({"a": 1 << 1024}, "bits"),
        ({"a": "x" * 20_000}, "characters"),  # and one more for the key
        ({"a": [0] * 2_000}, "values"),
        ({"a": [[[[[[[[[0]]]]]]]]]}, "nested"),
        ({"a": "\udfff"}, "surrogate"),
    ],
)
def test_arguments_that_are_refused(arguments, problem):
    with pytest.raises(CallError, match=problem):
        literal_calls.checked_arguments(arguments)


def test_the_largest_arguments_that_are_not():
    literal_calls.checked_arguments({"a": "x" * 19_999})
    literal_calls.checked_arguments({"a": [0] * 1_998})  # a key and a list are values as well
    literal_calls.checked_arguments({"a": [[[[[[[[0]]]]]]]]})
    literal_calls.checked_arguments({"a": (1 << 1024) - 1})


@pytest.mark.parametrize("text", ["about (this)", "a  (b) (c", "\n (x", "é (x", "x1\t(", "(", "9 (", "_ ("])
def test_strings_are_passed_on_as_the_official_runner_does(text):
    """Its own rewriting of the call text, read back by Python's literal reader."""
    runner = pytest.importorskip("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
    rewritten = runner._process_method_calls(f"echo(content={text!r})", {})
    expected = ast.literal_eval(rewritten.removeprefix("echo(content=").removesuffix(")"))
    assert literal_calls.as_run("echo", {"content": text}) == {"content": expected}


def test_only_blanks_before_brackets_are_dropped():
    assert literal_calls.as_run("echo", {"content": "about (a)"}) == {"content": "about(a)"}
    other = {"content": "about [a]", "x": [" b "]}
    assert literal_calls.as_run("echo", other) == other
