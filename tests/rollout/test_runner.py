"""What is refused before a unit is spent, and how starts become episodes."""

import asyncio

import numpy as np
import pytest

from trace_jax.engines.scripted import ScriptedEngine
from trace_jax.rollout.runner import Runner, Start, bare_starts
from trace_jax.rollout.slots import EpisodeSlots
from trace_jax.types import Stage


def runner(toy, engine, seen=None, **limits):
    return Runner(engine, toy.environment(), toy.sampling(limits=toy.limits(**limits)), EpisodeSlots(8), seen)


def test_bare_starts(toy):
    prompt = toy.prompt()
    starts = bare_starts(prompt, range(2, 4))
    assert [(s.node, s.stage, s.turn, s.leaf) for s in starts] == [(0, Stage.ROOT_ROLLOUT, 0, leaf) for leaf in (2, 3)]
    assert [s.prompt_tokens for s in starts] == [3, 3]
    assert all(s.history is prompt.tokens and s.state is prompt.state for s in starts)


def test_run_returns_episodes_in_order_with_their_units(toy):
    seen = []
    engine = ScriptedEngine(
        lambda request: toy.encode(f"+{request.key[-2]}\n" if request.key[-1] == 0 else "!\n"),
        delay=lambda request: 0.02 if request.key[-2] == 0 else 0.0,
    )
    prompt = toy.prompt()
    fork = Start(1, Stage.CONTINUATION, 2, toy.encode("go\n+1\n=1\n"), toy.Total(1), 1, 3)
    episodes = asyncio.run(runner(toy, engine, seen.append).run("p", [*bare_starts(prompt, range(2)), fork]))
    assert [episode.states[-1].value for episode in episodes] == [0, 1, 1]
    assert [episode.counts.units for episode in episodes] == [1.0, 1.0, 0.5]
    assert len(seen) == 3 and seen[-1] is episodes[0]


def test_check_prompts_names_the_prompt_the_length_and_the_limit(toy):
    ready = runner(toy, ScriptedEngine(toy.lines()), context_length=10)
    ready.check_prompts([toy.prompt("a", "12345678\n")])  # 9 tokens and one to sample
    with pytest.raises(ValueError, match="prompt 'b' has 10 tokens, but context_length 10 leaves room for 9; raise"):
        ready.check_prompts([toy.prompt("a"), toy.prompt("b", "123456789\n")])
    with pytest.raises(ValueError, match="prompt 'a' appears twice"):
        ready.check_prompts([toy.prompt("a"), toy.prompt("a")])


def test_check_prompts_compares_limits_with_engine_and_tokenizer(toy):
    with pytest.raises(ValueError, match="limits.context_length is 512, but the engine holds 100"):
        runner(toy, ScriptedEngine(toy.lines(), context_length=100)).check_prompts([])
    ready = runner(toy, ScriptedEngine(toy.lines()), max_observation_tokens=1)
    ready.check_prompts([])
    ready.environment.task.closings = ("\n\n", "\n")
    del ready.environment.__dict__["closings"]
    with pytest.raises(ValueError, match="max_observation_tokens is 1, but what ends one has 2 tokens alone"):
        ready.check_prompts([])


def test_sampling_refuses_a_temperature_of_zero(toy):
    for temperature in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="temperature is"):
            toy.sampling(temperature=temperature)
