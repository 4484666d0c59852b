"""Arithmetic with a calculator: the policy evaluates a random expression tree, one operation a turn.

An episode with two operations (a line is a turn, `<` marks the environment's lines):

    ((12+7)*3)        the question: a tree, fully parenthesised, modulo 100
    12+7              the policy asks for one operation
    < 19              the calculator answers modulo 100
    19*3
    < 57
    =57               the policy's answer ends the episode

Characters are tokens. A malformed call gets "?" and the episode goes on. Reward and success are 1 for the right value,
else 0. Nothing is ever evaluated by Python: calls are matched by one strict pattern with bounded length.

Splits are disjoint by question text (`base.owner`). The difficulty class is the number of operations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from trace_jax.tasks import base
from trace_jax.tasks.arithmetic import expression as expressions
from trace_jax.tasks.arithmetic.expression import Expression

MAX_OPERATIONS = 12
SPARE_TURNS = 2  # turns beyond those that the longest question needs
ERROR = "?"
_NUMBER_RANGE = (9, 99)  # a smaller largest number leaves a split without one-operation questions
_CALL = re.compile(r"([0-9]{1,2})([-+*])([0-9]{1,2})")
_ANSWER = re.compile(r"=([0-9]{1,2})")


@dataclasses.dataclass(frozen=True)
class ArithmeticState:
    """The question, what the calculator said so far, and the answer once there is one."""

    expression: Expression
    results: tuple[int, ...] = ()  # of the well-formed calls, in order
    answer: int | None = None


class Arithmetic:
    """The task. `difficulty` maps a number of operations (1..12) to its weight; leaves are drawn from 1..max_number.

    Raises ValueError for a negative seed, for bad difficulty weights, and for max_number outside 9..99.
    """

    name = "arithmetic"
    stop = "\n"
    closings = (stop,)
    word_level = False
    preamble = ""
    labels = base.Labels("Question: ", "Result: ", (("=", "Answer: "), ("", "Step: ")))
    tool_timeout = None

    def __init__(self, seed: int, difficulty: Mapping[int, float], max_number: int = 29):
        low, high = _NUMBER_RANGE
        if not low <= max_number <= high:
            raise ValueError(f"arithmetic: max_number is {max_number}, must be in {low}..{high}")
        self._seed = base.check_seed(seed, task=self.name)
        self._difficulty = base.difficulty_of(difficulty, task=self.name, unit="operations", highest=MAX_OPERATIONS)
        self._max_number = max_number
        self.max_turns = int(self._difficulty.levels[-1]) + 1 + SPARE_TURNS

    def symbols(self) -> tuple[str, ...]:
        """Digits, operators, parentheses, "=", "?" and the line end."""
        return (*"0123456789", *expressions.OPERATORS, *"()=", ERROR, self.stop)

    def size(self, split: str) -> None:
        """Without end."""

    def instance(self, split: str, index: int) -> base.Instance:
        """Draws a number of operations, then trees of that size until one belongs to the split."""
        rng = base.instance_rng(self._seed, split, index)
        operations = self._difficulty.draw(rng)
        while True:  # ends: every split owns at least a quarter of the texts of each size
            tree = expressions.draw_expression(rng, operations, self._max_number)
            text = expressions.write(tree) + self.stop
            if base.owner(text) == split:
                break
        return base.Instance(f"{self.name}/{split}/{index}", text, ArithmeticState(tree), str(operations))

    def step(self, state: ArithmeticState, action: str) -> base.StepResult:
        """Runs one call ("12+7") or takes the answer ("=19"). Raises ValueError after the answer."""
        if state.answer is not None:
            raise ValueError("arithmetic: the episode is over; step must not be called after the answer")
        text = action.removesuffix(self.stop)
        if answer := _ANSWER.fullmatch(text):
            return base.StepResult(dataclasses.replace(state, answer=int(answer[1])), "", True, 0)
        if call := _CALL.fullmatch(text):
            result = expressions.apply(int(call[1]), call[2], int(call[3]))
            state = dataclasses.replace(state, results=(*state.results, result))
            return base.StepResult(state, f"{result}{self.stop}", False, 1)
        return base.StepResult(state, ERROR + self.stop, False, 0, 1)

    def score(self, state: ArithmeticState) -> base.Outcome:
        """1 if the answer is the tree's value modulo 100, else 0; no answer scores 0."""
        right = float(state.answer == expressions.evaluate(state.expression))
        return base.Outcome(reward=right, success=right)

    def expert(self, state: ArithmeticState) -> str:
        """The next operation in postfix order with the results so far, then the last result as the answer."""
        operation = expressions.next_operation(state.expression, state.results)
        if operation is None:
            return f"={state.results[-1]}{self.stop}"
        left, operator, right = operation
        return f"{left}{operator}{right}{self.stop}"

    def slip(self, state: ArithmeticState, rng: np.random.Generator) -> str:
        """The expert's call with one operand or the operator mistaken, so that its result is wrong.

        Wrong operands are other numbers of the question or earlier results. The answer line has no slip: it only
        repeats the last result.
        """
        operation = expressions.next_operation(state.expression, state.results)
        if operation is None:
            return self.expert(state)
        left, operator, right = operation
        seen = (*expressions.leaves(state.expression), *state.results)
        calls = [(number, operator, right) for number in seen] + [(left, operator, number) for number in seen]
        calls += [(left, other, right) for other in expressions.OPERATORS]
        value = expressions.apply(*operation)
        wrong = [call for call in calls if expressions.apply(*call) != value]
        if not wrong:  # e.g. 0*0 with 50 as the only other number; then left + right gives `value`, so this does not
            wrong = [(left, "+", (right + 1) % expressions.MODULUS)]
        left, operator, right = wrong[rng.integers(len(wrong))]
        return f"{left}{operator}{right}{self.stop}"
