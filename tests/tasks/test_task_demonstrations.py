import dataclasses

import numpy as np
import pytest

from trace_jax.tasks import base
from trace_jax.tasks.arithmetic.task import Arithmetic
from trace_jax.tasks.demonstrations import demonstrate
from trace_jax.tasks.lookup.task import Lookup


@dataclasses.dataclass(frozen=True)
class Counter:
    """A toy environment: "+" adds one, "." answers; three is right."""

    count: int = 0
    over: bool = False


class CountToThree:
    name, stop, word_level, max_turns, tool_timeout = "count", "\n", False, 6, None

    def symbols(self):
        return ("+", ".", "-", "\n")

    def instance(self, split, index):
        return base.Instance(f"count/{split}/{index}", "three\n", Counter(), "3")

    def step(self, state, action):
        if action == ".\n":
            return base.StepResult(dataclasses.replace(state, over=True), "", True, 0)
        state = Counter(state.count + (action == "+\n"))
        return base.StepResult(state, f"{state.count}\n", False, 1)

    def score(self, state):
        right = float(state.over and state.count == 3)
        return base.Outcome(right, right)

    def expert(self, state):
        return "+\n" if state.count < 3 else ".\n"

    def slip(self, state, rng):
        return "-\n"


def test_without_slips_the_expert_plays_alone():
    task = CountToThree()
    shown = demonstrate(task, task.instance("demo", 0), np.random.default_rng(0), 0.0)
    assert shown.prompt == "three\n"
    assert shown.turns == (("+\n", "1\n"), ("+\n", "2\n"), ("+\n", "3\n"), (".\n", ""))
    assert shown.outcome == base.Outcome(1.0, 1.0)


def test_with_nothing_but_slips_the_turn_limit_ends_it():
    task = CountToThree()
    shown = demonstrate(task, task.instance("demo", 0), np.random.default_rng(0), 1.0)
    assert shown.turns == (("-\n", "0\n"),) * 6
    assert shown.outcome == base.Outcome(0.0, 0.0)


def test_slips_come_at_their_rate_and_depend_on_the_generator_alone():
    task = CountToThree()

    def play(seed):
        rng = np.random.default_rng(seed)
        return [demonstrate(task, task.instance("demo", i), rng, 0.2) for i in range(500)]

    shown = play(0)
    assert shown == play(0) != play(1)
    actions = [action for demonstration in shown for action, _ in demonstration.turns]
    share = actions.count("-\n") / len(actions)
    assert share == pytest.approx(0.2, abs=5 * (0.2 * 0.8 / len(actions)) ** 0.5)


@pytest.mark.parametrize("task", [Arithmetic(0, {1: 1.0, 4: 1.0}), Lookup(0, {1: 1.0, 4: 1.0}, knowledge_bases=2)])
def test_transcripts_replay(task):
    rng = np.random.default_rng(0)
    for i in range(50):
        instance = task.instance("demo", i)
        shown = demonstrate(task, instance, rng, 0.3)
        state = instance.state
        for action, observation in shown.turns:
            result = task.step(state, action)
            assert result.observation == observation
            state = result.state
        assert task.score(state) == shown.outcome
        assert result.done  # one call an operation or hop, then the answer: slips never lengthen an episode


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_0_to_1_is_refused(rate):
    task = CountToThree()
    with pytest.raises(ValueError, match="slip_rate is"):
        demonstrate(task, task.instance("demo", 0), np.random.default_rng(0), rate)
