"""A toy task over ASCII tokens that stands below all rollout tests: small enough to follow every episode by hand."""

from __future__ import annotations

import dataclasses
import time
import types

import numpy as np
import pytest

from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.keys import Stream
from trace_jax.rollout.runner import Sampling
from trace_jax.tasks.base import Outcome, StepResult
from trace_jax.tree import grow
from trace_jax.types import Finish, Prompt, Stage, Turn


@dataclasses.dataclass(frozen=True)
class Total:
    """The toy environment's state: the sum so far and the actions that made it."""

    value: int = 0
    actions: tuple[str, ...] = ()


class Adder:
    """Adds: "+3" is answered by "=TOTAL", "!" ends, others misbehave. Reward TOTAL/10; success if TOTAL is even."""

    name = "adder"
    stop = "\n"
    closings = ("\n",)
    preamble = ""
    max_turns = 8

    def __init__(self, tool_timeout=None, score=None):
        self.tool_timeout = tool_timeout
        self._score = score

    def step(self, state, action):
        word = action.removesuffix("\n")
        after = Total(state.value, (*state.actions, word))
        if word.startswith("+"):
            after = dataclasses.replace(after, value=state.value + int(word[1:]))
            return StepResult(after, f"={after.value}\n", False, 1)
        if word == "!":
            return StepResult(after, "", True, 0)
        if word == "flood":
            return StepResult(after, "x" * 5_000_000 + "\n", False, 1)
        if word == "number":
            return StepResult(after, 7, False, 1)
        if word == "hang":
            time.sleep(1.0)
        if word == "exit":
            raise SystemExit("the tool called exit")
        raise KeyError(word)

    def score(self, state):
        if self._score is not None:
            return self._score(state)
        return Outcome(state.value / 10, float(state.value % 2 == 0))


def encode(text):
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)


def decode(ids):
    return bytes(np.asarray(ids, np.uint8)).decode("ascii")


def environment(**kwargs):
    return Environment(Adder(**kwargs), encode, decode, (10,))


def prompt(uid="p", text="go\n"):
    return Prompt(uid, encode(text), Total())


def limits(**kwargs):
    defaults = dict(max_turns=8, max_turn_tokens=16, context_length=512, max_observation_tokens=32)
    return Limits(**{**defaults, **kwargs})


def sampling(**kwargs):
    defaults = dict(limits=limits(), temperature=1.0, seed=3, stream=Stream.TRAIN, step=5, salt="v0")
    return Sampling(**{**defaults, **kwargs})


def lines(*turns):
    """A script that says `turns[i]` in turn i, whoever asks."""
    return lambda request: encode(turns[request.key[-1]])


def random_script(request):
    """Adds a random digit, or ends with chance 1/3; a function of the request's key and tokens alone."""
    rng = np.random.default_rng([*request.key, int(request.tokens.sum())])
    return encode("!\n") if rng.random() < 1 / 3 else encode(f"+{rng.integers(10)}\n")


def hand_tree():
    """Node 1 "+1", 2 "+2", 3 "!" (leaf); node 4 "+4", 5 "!" (leaf)."""

    def turn(action, observation, finish=Finish.TURN, **outcome):
        action = encode(action)
        return Turn(action, np.zeros(action.size, np.float32), encode(observation), finish, 0, **outcome)

    first = [turn("+1\n", "=1\n"), turn("+2\n", "=3\n"), turn("!\n", "", Finish.ANSWER, reward=0.3, success=0.0)]
    second = [turn("+4\n", "=4\n"), turn("!\n", "", Finish.ANSWER, reward=0.4, success=1.0)]
    return grow.add_rollouts(
        grow.new_tree(prompt()), [(0, Stage.ROOT_ROLLOUT, first), (0, Stage.ROOT_ROLLOUT, second)]
    )


@pytest.fixture(scope="session")
def toy():
    """The helpers of this file as one namespace."""
    return types.SimpleNamespace(
        Total=Total,
        Adder=Adder,
        encode=encode,
        decode=decode,
        environment=environment,
        prompt=prompt,
        limits=limits,
        sampling=sampling,
        lines=lines,
        random_script=random_script,
        hand_tree=hand_tree,
    )
