"""Calls in both syntaxes: what is read by hand, what is written comes back, and whatever is written is survived."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.tasks.chat import calls
from trace_jax.tasks.chat.family import BadCall, Reply, ToolCall

ADD = ToolCall("add", {"x": 1, "y": [2, {"z": "ü"}]})
ADD_TEXT = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": [2, {"z": "ü"}]}}\n</tool_call>'
BARE = '{"name": "add", "parameters": {"x": 1, "y": [2, {"z": "ü"}]}}'


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("", Reply("")),
        ("  The answer is 4. \n", Reply("The answer is 4.")),
        (ADD_TEXT, Reply("", (ADD,))),
        (f"Let me add.\n{ADD_TEXT}\n{ADD_TEXT} done", Reply("Let me add.\n\n done", (ADD, ADD))),
        ("<think>\n1 + 1\n</think>\n\n2", Reply("2", (), "1 + 1")),
        ("1 + 1\n</think>\n2", Reply("2", (), "1 + 1")),  # the template may have opened the thought
        (f"<think>I call <tool_call></think>{ADD_TEXT}", Reply("", (ADD,), "I call <tool_call>")),
        ("<think>\nand so on", Reply("", (), "and so on")),  # a thought that never ends says nothing
        ("a </tool_call> b", Reply("a </tool_call> b")),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", Reply("", (ToolCall("f", {}),))),
    ],
)
def test_tagged_by_hand(text, reply):
    assert calls.read_tagged(text) == reply


def one_bad(read, text):
    reply = read(text)
    (bad,) = [call for call in reply.calls if isinstance(call, BadCall)]
    assert "\n" not in bad.problem and len(bad.problem) < 200
    return bad.problem


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "no JSON"),
        ("add(1, 2)", "no JSON"),
        ('{"name": "add", "arguments": {"x": 1}', "no JSON"),
        ('{"name": "add", "arguments": {"x": NaN}}', "NaN is no JSON value"),
        ('{"name": "a", "name": "b", "arguments": {}}', "'name' stands twice in one object"),
        ('["add", {}]', "a call is a JSON object with name and arguments"),
        ('{"arguments": {}}', "the call has no name"),
        ('{"name": 3, "arguments": {}}', "the call has no name"),
        ('{"name": "add"}', "the call's arguments must be a JSON object"),
        ('{"name": "add", "arguments": "{}"}', "the call's arguments must be a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "add", "arguments": {"x": ' + "9" * 5000 + "}}", "no JSON"),  # more digits than Python reads
        ("x" * 100_001, "the call has 100001 characters; at most 100000 are read"),
    ],
    ids=lambda text: text[:30],
)
def test_malformed_calls_say_why(body, problem):
    assert problem in one_bad(calls.read_tagged, f"<tool_call>{body}</tool_call>")


def test_a_call_that_is_not_closed_ends_at_the_next():
    reply = calls.read_tagged(f'<tool_call>{{"name": "f", "arguments": {{}}}}\n{ADD_TEXT}')
    assert reply.calls == (BadCall("the call is not closed by </tool_call>"), ADD)
    assert calls.read_tagged('<tool_call>{"name": "f", "arguments": {}}').calls == reply.calls[:1]


def test_a_turn_has_so_many_calls_and_no_more():
    reply = calls.read_tagged(ADD_TEXT * 100)
    assert reply.calls[: calls.MOST_CALLS] == (ADD,) * calls.MOST_CALLS and len(reply.calls) == calls.MOST_CALLS + 1
    assert "at most 64 calls" in reply.calls[-1].problem


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("The answer is 4.", Reply("The answer is 4.")),
        (BARE, Reply("", (ADD,))),
        (f"  <|python_tag|>{BARE}; {BARE}\n{BARE} ", Reply("", (ADD, ADD, ADD))),
        ("{1, 2} is the set", Reply("{1, 2} is the set")),  # a text that begins with a brace and names no function
        (f"I call {BARE}", Reply(f"I call {BARE}")),  # a call is a whole turn
    ],
)
def test_bare_by_hand(text, reply):
    assert calls.read_bare(text) == reply


def test_a_bare_turn_has_so_many_calls_and_no_more():
    reply = calls.read_bare(f"{BARE}\n" * 100)
    assert reply.calls[: calls.MOST_CALLS] == (ADD,) * calls.MOST_CALLS and len(reply.calls) == calls.MOST_CALLS + 1
    assert "at most 64 calls" in reply.calls[-1].problem
    start = time.process_time()
    assert len(calls.read_bare('{"name": 1}' + "0 " * 49_000).calls) == calls.MOST_CALLS + 1
    assert time.process_time() - start < 0.1  # one copy of the rest for each of 49,000 values would take seconds


def test_malformed_bare_calls_say_why():
    assert "no JSON" in one_bad(calls.read_bare, '{"name": "add", "parameters": {"x": }}')
    assert "the call's parameters must be" in one_bad(calls.read_bare, '{"name": "add", "arguments": {}}')
    assert "at most 100000" in one_bad(calls.read_bare, '{"name": "' + "x" * 100_000)
    reply = calls.read_bare(f"{BARE} and then")
    assert reply.calls[0] == ADD and isinstance(reply.calls[1], BadCall)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALL = st.builds(ToolCall, st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=4), JSON, max_size=3))
WORDS = st.text(alphabet="abc {}[]\"'\\.\n", max_size=20).map(str.strip)


def _has_tag(call):
    return any(tag in json.dumps([call.name, call.arguments], ensure_ascii=False) for tag in ("<tool_call>", "</th"))


@settings(max_examples=60, deadline=None)
@given(WORDS, st.lists(CALL.filter(lambda call: not _has_tag(call)), max_size=3), WORDS)
def test_what_is_written_is_read_back(text, made, thought):
    reply = Reply(text, tuple(made), thought)
    assert calls.read_tagged(calls.write_tagged(reply)) == reply
    bare = Reply("" if made else text, tuple(made), thought)
    if not (bare.text.startswith("{") and '"name"' in bare.text):
        assert calls.read_bare(calls.write_bare(bare)) == bare


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"', "}", "{", '"', "x", "\n", "\x00", "\ud800"]), max_size=12).map("".join))  # fmt: skip
def test_anything_is_read(text):
    for read in (calls.read_tagged, calls.read_bare):
        reply = read(text)
        assert all(isinstance(call, (ToolCall, BadCall)) for call in reply.calls)


def test_what_cannot_be_written():
    with pytest.raises(ValueError, match="a call that is none cannot be written: broken"):
        calls.write_tagged(Reply("", (BadCall("broken"),)))
    with pytest.raises(ValueError, match="a call that is none cannot be written: broken"):
        calls.write_bare(Reply("", (BadCall("broken"),)))


def test_the_bare_syntax_has_no_text_beside_calls():
    assert calls.write_bare(Reply("Let me add.", (ADD, ADD))) == f"{BARE}\n{BARE}"
