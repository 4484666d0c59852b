r"""Mathematics with a Python tool: the paper's first family.

An episode: the policy calls `python` as often as it likes within its turns and answers in a turn without a call, with
the answer in `\boxed{}`. Reward and success are 1 for a right answer, else 0 (paper 6.2: "final answer matches").

What is judged (our choice where nothing else is said): the last complete box of the last turn's text. Without a box,
a final answer is searched by math-verify's own rules, or for a letter where the question has options; a turn with
calls, the last of an episode that was cut off, counts only by a box, so that a number beside a call is no guess.
Questions, tool messages and thoughts are never searched.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import time
from typing import Any

from trace_jax.tasks.base import Outcome
from trace_jax.tasks.chat.family import BadCall, Message, Question, Reaction, Record, Reply, ToolCall
from trace_jax.tasks.math import answers, checker, examples, tool
from trace_jax.tasks.math.grading import MAX_TEXT, Grader

SYSTEM = (
    "You are a math assistant that can write python to solve math problems."  # the paper's, appendix F
    r" Put the final answer in \boxed{}; if the question has lettered options, put the letter there."  # ours
)
KINDS = ("math", "choice")
CALLS = 4  # of one turn that are carried out (our choice)
MAX_NAME = 60  # characters of an unknown tool's name that are shown
SLACK = 60.0  # seconds of a step beyond what its calls may take; a score waits for a free worker as well
TOLD_EVERY = 60.0  # seconds between two warnings that Python is not available


@dataclasses.dataclass(frozen=True)
class State:
    """An episode so far."""

    kind: str  # "math" or "choice"
    truths: tuple[str, ...]  # LaTeX, any of them is right; or one letter
    turns: int = 0  # of the policy
    answer: str | None = None  # of the last turn: a box's content, or the end of a final answer without a box
    boxed: bool = False  # which of the two


class Math:
    """The family.

    Args:
      python: runs the code of calls.
      grader: compares answers.
      max_turns: model turns of an episode; 5 in the paper.
      timeout: seconds of a call that names none; 12 in the paper. At most `tool.MAX_TIMEOUT`.
    """

    name = "math"
    examples = examples.EXAMPLES

    def __init__(self, python: tool.Python, grader: Grader, *, max_turns: int, timeout: float):
        if not 0 < timeout <= tool.MAX_TIMEOUT:
            raise ValueError(f"python's time limit is {timeout} s; it must be above 0 and at most {tool.MAX_TIMEOUT:g}")
        self.max_turns = max_turns
        self.tool_timeout = CALLS * (tool.MAX_TIMEOUT + tool.MAX_WAIT) + SLACK
        self._python, self._grader, self._timeout = python, grader, timeout
        self._tools = (tool.schema(timeout),)
        self._told = -math.inf  # when a warning was last given

    def ask(self, record: Record) -> Question:
        """The question of a record with "id", "problem", "answer" (a text, or a list of equivalent ones) and "kind"."""
        state = State(record.get("kind", "math"), _truths(record))
        if state.kind not in KINDS:
            raise ValueError(f"math record {record.get('id')}: kind is {state.kind!r}; it must be one of {KINDS}")
        if state.kind == "choice" and answers.letter(state.truths[0]) is None:
            raise ValueError(f"math record {record['id']}: the answer {state.truths[0]!r} is no letter of an option")
        if not isinstance(record.get("problem"), str) or not record["problem"].strip():
            raise ValueError(f"math record {record.get('id')} has no problem text")
        messages = (Message("system", SYSTEM), Message("user", record["problem"].strip()))
        return Question(messages, self._tools, state, str(record.get("group", "")))

    def react(self, state: State, reply: Reply) -> Reaction:
        """Runs the calls of a turn in order; a turn without one ends the episode."""
        answer = answers.boxed(reply.text)
        boxed = answer is not None
        if not boxed and not reply.calls:
            answer = reply.text[-MAX_TEXT:]
        state = dataclasses.replace(state, turns=state.turns + 1, answer=answer, boxed=boxed)
        ran = [self._call(call, number) for number, call in enumerate(reply.calls)]
        messages = tuple(Message("tool", text, tool.NAME) for text, _ in ran)
        return Reaction(state, messages, not reply.calls, sum(carried_out for _, carried_out in ran))

    def score(self, state: State) -> Outcome:
        """1 for the right answer, else 0."""
        right = float(state.answer is not None and self._is_right(state))
        return Outcome(right, right)

    def expert(self, state: State) -> Reply:
        """Prints the answer with the tool, then boxes it."""
        if state.turns == 0:
            code = f"print({ascii(state.truths[0])})"
            return Reply("Python may help.", (ToolCall(tool.NAME, {"code": code}),))
        return Reply(rf"The answer is \boxed{{{state.truths[0]}}}.")

    def _call(self, call: ToolCall | BadCall, number: int) -> tuple[str, bool]:
        """(what the policy reads, whether the call was carried out)."""
        if isinstance(call, BadCall):
            return f"Error: {call.problem}", False
        if number >= CALLS:
            return f"Error: not run; of the calls of one turn only the first {CALLS} are", False
        if call.name != tool.NAME:
            return f"Error: there is no tool {str(call.name)[:MAX_NAME]!r}; the only one is {tool.NAME}", False
        try:
            code, timeout = tool.arguments(call.arguments, self._timeout)
        except tool.ArgumentError as error:
            return f"Error: {error}", False
        execution = self._python.run(code, timeout)
        if execution.end == "unavailable" and time.monotonic() > self._told + TOLD_EVERY:
            self._told = time.monotonic()
            logging.warning("math: the policy was told that Python is not available: %s", execution.stderr.strip())
        return tool.observation(execution, timeout), execution.end != "unavailable"

    def _is_right(self, state: State) -> bool:
        if state.kind == "choice":
            found = answers.letter(state.answer) if state.boxed else answers.stated_letter(state.answer)
            return found == answers.letter(state.truths[0])
        judge = self._grader.equal if state.boxed else self._grader.stated
        return any(judge(state.answer, truth) for truth in state.truths)


def _truths(record: Record) -> tuple[str, ...]:
    """The answers that are right. Raises ValueError where there is none."""
    given: Any = record.get("answer")
    listed = given if isinstance(given, (list, tuple)) else [given]
    whole = [int(x) if isinstance(x, float) and x.is_integer() else x for x in listed if x is not None]
    texts = [str(x).strip() for x in whole]
    found = [alternative for text in texts if text for alternative in alternatives(text)]
    if not found:
        raise ValueError(f"math record {record.get('id')} has no answer")
    return tuple(dict.fromkeys(found))


def alternatives(truth: str) -> list[str]:
    r"""A truth, and each side of one that names a number twice: "0.56 = 56\%", "\frac{2}{3} \approx 0.67"."""
    sides = [side.strip() for side in truth.replace(r"\approx", "=").split("=")]
    if len(sides) < 2 or checker.words(truth) or not all(re.search(r"\d", side) for side in sides):
        return [truth]
    return [truth, *sides]
