"""Function calling through tokens: the expert's turns, written as text, tokenised, sampled, read and carried out."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest

from tests.tasks import bfcl_records
from tests.tasks.chat_tokenizer import SPECIAL, chat_tokenizer
from trace_jax.rollout.agent import Limits, run_episode
from trace_jax.rollout.environment import make_environment
from trace_jax.tasks.bfcl.family import Bfcl
from trace_jax.tasks.chat.formats import load_format
from trace_jax.tasks.chat.records import Records, data_set
from trace_jax.tasks.chat.render import Renderer
from trace_jax.tasks.chat.task import Chat
from trace_jax.types import Finish, Generation

LIMITS = Limits(max_turns=40, max_turn_tokens=20_000, context_length=200_000, max_observation_tokens=50_000)
SAMPLE = (3, 142)  # numbers of entries


class Expert:
    """An engine that samples what the expert writes in the state that the environment is in."""

    context_length = LIMITS.context_length

    def __init__(self, environment, states):
        self.environment, self.states = environment, states

    async def generate(self, request):
        tokens = self.environment.encode(self.environment.task.expert(self.states[-1]))
        return Generation(tokens, np.zeros(tokens.shape, np.float32), True, 0, 0, 0)


class Watched(Chat):
    """The task, which remembers the last state of the one episode that it is in."""

    states: list

    def step(self, state, action):
        result = super().step(state, action)
        self.states.append(result.state)
        return result


@functools.cache
def environment(category, form):
    records = data_set(category, [bfcl_records.records(category)[number] for number in SAMPLE])
    renderer = Renderer(load_format(form), thinking=form == "qwen3", markers=SPECIAL)
    task = Watched(Bfcl(), renderer, Records(records, (records,), range(len(records))), shots=0, preamble="")
    return make_environment(task, chat_tokenizer())


def play(environment, history, state, turn):
    environment.task.states = [state]
    engine = Expert(environment, environment.task.states)
    key = {"temperature": 1.0, "key": (0,), "salt": ""}
    episode = run_episode(engine, environment, history=history, state=state, turn=turn, limits=LIMITS, **key)
    return asyncio.run(episode)


def ended(episode):
    last = episode.turns[-1]
    return last.finish, last.success, last.reward, episode.counts.failed_calls, episode.error


@pytest.mark.parametrize("form", ["qwen3", "llama3"])
@pytest.mark.parametrize("category", bfcl_records.CATEGORIES)
def test_right_calls_succeed_through_tokens_and_so_does_a_fork(category, form):
    """The fork starts behind the first turn, in the state of the finished episode there, which has not changed."""
    played = environment(category, form)
    for index in range(len(SAMPLE)):
        prompt = played.prompt(played.task.instance("eval", index))
        episode = play(played, prompt.tokens, prompt.state, 0)
        assert ended(episode) == (Finish.ANSWER, 1.0, 1.0, 0, ""), prompt.uid
        right = sum(map(len, prompt.state.entry.truth))
        assert episode.counts.tool_calls == right > 0
        first = episode.turns[0]
        history = np.concatenate([prompt.tokens, first.action, first.observation])
        fork = play(played, history, episode.states[0], 1)
        assert ended(fork)[:3] == (Finish.ANSWER, 1.0, 1.0)
        for one, other in zip(fork.turns, episode.turns[1:], strict=True):
            assert np.array_equal(one.action, other.action) and np.array_equal(one.observation, other.observation)
