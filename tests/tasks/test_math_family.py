r"""The math family: what a turn leads to and what is scored, on a recorded Python and an exact grader."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests import real_data
from trace_jax.sandbox.result import Execution, Limits
from trace_jax.tasks.chat.family import BadCall, Message, Reply, ToolCall
from trace_jax.tasks.math import answers, family, tool

RECORD = {"id": "m1", "problem": " What is 6 * 7? ", "answer": "42", "group": "easy", "kind": "math"}
CHOICE = {"id": "c1", "problem": "Which?\n(A) cell\n(B) gene", "answer": "B", "group": "", "kind": "choice"}


class RecordedPython:
    """Prints what it was asked; ends as it is told."""

    def __init__(self):
        self.calls = []
        self.result = None

    def run(self, code: str, timeout: float) -> Execution:
        self.calls.append((code, timeout))
        return self.result or Execution(f"ran {code}\n", "", "ok")


class ExactGrader:
    """Right is what is spelled alike; of a text, what its last word is."""

    def equal(self, answer: str, truth: str) -> bool:
        return answers.key(answer) == answers.key(truth)

    def stated(self, text: str, truth: str) -> bool:
        return text.split()[-1:] == [truth]


@pytest.fixture
def python():
    return RecordedPython()


@pytest.fixture
def math(python):
    return family.Math(python, ExactGrader(), max_turns=5, timeout=12.0)


def call(code="print(1)", **more):
    return ToolCall("python", {"code": code, **more})


def test_the_question(math):
    question = math.ask(RECORD)
    system, user = question.messages
    assert system.role == "system"
    assert system.content.startswith("You are a math assistant that can write python to solve math problems.")
    assert r"\boxed{}" in system.content
    assert user == Message("user", "What is 6 * 7?")
    assert question.group == "easy"
    parameters = question.tools[0]["function"]["parameters"]
    assert question.tools[0]["function"]["name"] == "python" and parameters["required"] == ["code"]
    assert set(parameters["properties"]) == {"code", "timeout"}
    json.dumps(question.tools)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"answer": None}, "no answer"),
        ({"answer": "  "}, "no answer"),
        ({"answer": []}, "no answer"),
        ({"problem": ""}, "no problem"),
        ({"problem": None}, "no problem"),
        ({"kind": "essay"}, "kind is 'essay'"),
        ({"kind": "choice"}, "no letter"),
    ],
)
def test_records_that_are_no_questions(math, change, problem):
    with pytest.raises(ValueError, match=problem):
        math.ask({**RECORD, **change})


@pytest.mark.parametrize(
    "answer, truths",
    [
        ("42", ("42",)),
        (142.0, ("142",)),
        (["0.01\n", "0.02\n"], ("0.01", "0.02")),
        (["4", "4\n"], ("4",)),
        (r"0.56 = 56\%", (r"0.56 = 56\%", "0.56", r"56\%")),
        (r"\$\dfrac23 \approx \$0.67", (r"\$\dfrac23 \approx \$0.67", r"\$\dfrac23", r"\$0.67")),
        ("SRAC=LRAC", ("SRAC=LRAC",)),  # either side alone says nothing
        ("x = 5", ("x = 5",)),
        (r"\theta = 30", (r"\theta = 30",)),
    ],
)
def test_truths(math, answer, truths):
    assert math.ask({**RECORD, "answer": answer}).state.truths == truths


def test_calls_run_in_order_and_the_state_is_a_new_value(math, python):
    state = math.ask(RECORD).state
    reaction = math.react(state, Reply("Let me see.", (call("a = 1"), call("b", timeout=3), call("c", timeout=1000))))
    assert python.calls == [("a = 1", 12.0), ("b", 3.0), ("c", tool.MAX_TIMEOUT)]
    assert [m.content for m in reaction.messages] == ["ran a = 1", "ran b", "ran c"]
    assert {(m.role, m.name) for m in reaction.messages} == {("tool", "python")}
    assert not reaction.done and reaction.tool_calls == 3
    assert state == math.ask(RECORD).state and reaction.state.turns == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        reaction.state.turns = 7


@pytest.mark.parametrize(
    "bad, problem",
    [
        (BadCall("the call is no JSON"), "the call is no JSON"),
        (ToolCall("pyhton", {"code": "1"}), "no tool 'pyhton'; the only one is python"),
        (ToolCall("x" * 10**6, {}), "no tool 'xxx"),
        (ToolCall("python", {}), '"code" is missing'),
        (ToolCall("python", {"Code": "1"}), '"code" is missing'),
        (call(None), "must be a string, not null"),
        (call(7), "must be a string, not a number"),
        (call(True), "must be a string, not a boolean"),
        (call(["print(1)"]), "must be a string, not a list"),
        (call({"a": 1}), "must be a string, not an object"),
        (call(""), "is empty"),
        (call(" \n"), "is empty"),
        (call("1" * 10**6), "has 1000000 characters; at most 20000"),
        (call("print('\ud83d')"), "surrogate"),
        (call(timeout="12"), "number of seconds above 0, not '12'"),
        (call(timeout="1" * 10**6), "number of seconds above 0, not '111"),
        (call(timeout=0), "above 0, not 0"),
        (call(timeout=-1.5), "above 0, not -1.5"),
        (call(timeout=float("nan")), "above 0, not nan"),
        (call(timeout=True), "not true"),
        (call(timeout=[1]), "not a list"),
        (call(timeout=-(10**5000)), "not a number"),
    ],
)
def test_a_wrong_call_is_told_and_not_run(math, python, bad, problem):
    reaction = math.react(math.ask(RECORD).state, Reply("", (bad,)))
    (message,) = reaction.messages
    assert message.content.startswith("Error: ") and problem in message.content
    assert len(message.content) < 300 and "\n" not in message.content
    assert python.calls == [] and reaction.tool_calls == 0 and not reaction.done


def test_odd_calls_that_run(math, python):
    odd = (call("print('東京 🙂')"), call("1", timeout=10**5000), call("2", timeout=None), call("3", why="because"))
    reaction = math.react(math.ask(RECORD).state, Reply("", odd))
    assert python.calls == [("print('東京 🙂')", 12.0), ("1", 30.0), ("2", 12.0), ("3", 12.0)]
    assert reaction.messages[0].content == "ran print('東京 🙂')" and reaction.tool_calls == 4


def test_many_calls_of_one_turn(math, python):
    """Bad ones take their place; each call has its message."""
    reaction = math.react(math.ask(RECORD).state, Reply("", (BadCall("no JSON"), *[call()] * 999)))
    assert len(reaction.messages) == 1000 and len(python.calls) == family.CALLS - 1 == reaction.tool_calls
    assert "only the first 4" in reaction.messages[-1].content
    assert family.CALLS * (tool.MAX_TIMEOUT + tool.MAX_WAIT) < math.tool_timeout


@pytest.mark.parametrize(
    "execution, text",
    [
        (Execution("3\n", "", "ok"), "3"),
        (Execution("", "", "ok"), "[no output]"),
        (Execution("", "", "error"), "[ended with an error]"),
        (Execution("3\n", "ValueError: x\n", "error"), "3\nValueError: x"),
        (Execution("", "", "timeout"), "[stopped: the time limit of 12 s was reached]"),
        (Execution("a\n\nb\n", "", "timeout"), "a\n\nb\n[stopped: the time limit of 12 s was reached]"),
        (Execution("", "MemoryError", "memory"), "MemoryError\n[stopped: out of memory]"),
        (Execution("x", "", "output"), "x\n[stopped: too much output]"),
        (Execution("", "SIGSEGV", "killed"), "SIGSEGV\n[stopped: the Python process died]"),
        (Execution("", "no worker", "unavailable"), "no worker\n[Python is not available at the moment]"),
        (Execution("a\ud800b", "", "ok"), "a?b"),
    ],
)
def test_observations(math, python, execution, text):
    python.result = execution
    reaction = math.react(math.ask(RECORD).state, Reply("", (call(),)))
    assert reaction.messages[0].content == text
    assert reaction.tool_calls == (execution.end != "unavailable")


def test_python_that_is_not_available_is_said_to_who_runs_the_training_too(math, python, caplog, monkeypatch):
    python.result, state = Execution("", "no worker\n", "unavailable"), math.ask(RECORD).state
    for _ in range(9):
        math.react(state, Reply("", (call(),)))
    assert [record.getMessage() for record in caplog.records] == [
        "math: the policy was told that Python is not available: no worker"
    ]
    monkeypatch.setattr(family, "TOLD_EVERY", 0.0)
    math.react(state, Reply("", (call(),)))
    assert len(caplog.records) == 2


def test_a_call_may_use_the_processor_for_all_of_its_time():
    """Else a call would be told that it was stopped at a limit that it had not reached."""
    assert Limits().cpu_seconds >= tool.MAX_TIMEOUT


def test_a_flood_keeps_its_head_and_its_tail(math, python):
    python.result = Execution("a" * 10**6, "KeyError: 'b'\n", "error")
    content = math.react(math.ask(RECORD).state, Reply("", (call(),))).messages[0].content
    assert content.startswith("aaa") and content.endswith("\nKeyError: 'b'")
    assert f"[{10**6 + 1 + 13 - tool.MAX_OBSERVATION} characters left out]" in content
    assert len(content) < tool.MAX_OBSERVATION + 50
    python.result = Execution("a" * tool.MAX_OBSERVATION, "", "ok")
    assert math.react(math.ask(RECORD).state, Reply("", (call(),))).messages[0].content == "a" * tool.MAX_OBSERVATION


def play(math, record, *replies):
    """(outcome, done) after some turns."""
    state, done = math.ask(record).state, False
    for reply in replies:
        assert not done
        reaction = math.react(state, reply)
        state, done = reaction.state, reaction.done
    return math.score(state), done


@pytest.mark.parametrize(
    "record, replies, success, done",
    [
        (RECORD, (), 0, False),
        (RECORD, (Reply(r"It is \boxed{42}."),), 1, True),
        (RECORD, (Reply(r"\boxed{42}, no: \boxed{43}"),), 0, True),
        (RECORD, (Reply(r"\boxed{43}, no: \boxed{42}"),), 1, True),
        (RECORD, (Reply("The answer is 42"),), 1, True),  # without a box by the grader's rules
        (RECORD, (Reply("The answer is 43"),), 0, True),
        (RECORD, (Reply(r"so \boxed{42"),), 0, True),
        (RECORD, (Reply(""),), 0, True),
        (RECORD, (Reply("", thought=r"\boxed{42}"),), 0, True),  # a thought is no answer
        (RECORD, (Reply(r"\boxed{42}", (call(),)),), 1, False),  # cut off: the box beside a call counts,
        (RECORD, (Reply("I guess 42", (call(),)),), 0, False),  # a number does not,
        (RECORD, (Reply(r"\boxed{42}", (call(),)), Reply("", (call(),))), 0, False),  # and only the last turn's
        (RECORD, (Reply("", (call(),)), Reply(r"\boxed{42}")), 1, True),
        (RECORD, (Reply(r"\boxed{42}" + " " * 10**6),), 1, True),
        ({**RECORD, "answer": ["x", "42"]}, (Reply(r"\boxed{42}"),), 1, True),
        (CHOICE, (Reply(r"\boxed{B}"),), 1, True),
        (CHOICE, (Reply(r"\boxed{\text{(b)}}"),), 1, True),
        (CHOICE, (Reply(r"\boxed{B. gene}"),), 1, True),
        (CHOICE, (Reply(r"\boxed{A}"),), 0, True),
        (CHOICE, (Reply(r"\boxed{gene}"),), 0, True),
        (CHOICE, (Reply("The answer is (B)."),), 1, True),
        (CHOICE, (Reply("The answer is (A)."),), 0, True),
        (CHOICE, (Reply("I do not know"),), 0, True),
        (CHOICE, (Reply("Looking at (B)", (call(),)),), 0, False),
    ],
)
def test_what_is_scored(math, record, replies, success, done):
    outcome, ended = play(math, record, *replies)
    assert (outcome.reward, outcome.success, ended) == (success, success, done)


def test_the_expert_succeeds_and_its_code_prints_the_answer(math, python):
    odd = ("'); \\text{\"\"\"} \n 東京 {", "\\frac{1}{2}")
    for record in (RECORD, CHOICE, *({**RECORD, "answer": answer} for answer in odd)):
        state = math.ask(record).state
        first = math.expert(state)
        printed = []
        exec(first.calls[0].arguments["code"], {"print": printed.append})
        assert printed == [record["answer"].strip()]
        assert set(first.calls[0].arguments["code"]) <= set(map(chr, range(32, 127)))
        second = math.expert(math.react(state, first).state)
        assert second.calls == ()
        if "{" not in record["answer"].replace("{1}{2}", ""):  # an open brace cannot be boxed
            assert play(math, record, first, second)[0].success == 1.0


def test_the_examples_are_right(math):
    for user, first, observed, last in math.examples:
        printed = []
        exec(first.calls[0].arguments["code"], {"print": lambda value: printed.append(str(value))})
        assert observed == Message("tool", printed[0], "python")
        assert user.role == "user" and last.calls == () and answers.boxed(last.text)


@pytest.mark.parametrize("timeout", [0.0, -1.0, 31.0, float("nan")])
def test_the_default_time_limit_is_checked(timeout):
    with pytest.raises(ValueError, match="time limit"):
        family.Math(RecordedPython(), ExactGrader(), max_turns=5, timeout=timeout)


@pytest.mark.parametrize("name", ["aime24", "amc", "math500", "minerva", "olympiadbench"])
def test_the_expert_succeeds_on_every_real_record(math, name):
    for number, record in enumerate(json.loads((real_data.folder() / f"{name}.json").read_text())):
        record = {**record, "id": str(number)}
        state = math.ask(record).state
        state = math.react(state, math.expert(state)).state
        reaction = math.react(state, math.expert(state))
        assert reaction.done and math.score(reaction.state).success == 1.0, record["answer"]
