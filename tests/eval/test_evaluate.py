"""Held-out evaluation on scripted answers: means, spread and costs by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import numpy as np
import pytest

from trace_jax.budget.account import BudgetCount
from trace_jax.engines.scripted import ScriptedEngine
from trace_jax.eval.evaluate import evaluate
from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.keys import Stream
from trace_jax.rollout.runner import Sampling
from trace_jax.tasks.base import Outcome, StepResult
from trace_jax.types import Prompt


class OneLine:
    """One turn an episode; an answer is right if it is "y"."""

    name, stop, closings, preamble, max_turns, tool_timeout = "one", "\n", ("\n",), "", 2, None

    def step(self, state, action):
        return StepResult(action, "", True, 0)

    def score(self, state):
        return Outcome(reward=0.5, success=float(state == "y\n"))


def encode(text):
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)


ENVIRONMENT = Environment(OneLine(), encode, lambda ids: bytes(np.asarray(ids, np.uint8)).decode("ascii"), (10,))
LIMITS = Limits(max_turns=2, max_turn_tokens=8, context_length=32, max_observation_tokens=8)
SAMPLING = Sampling(limits=LIMITS, temperature=1.0, seed=7, stream=Stream.EVAL, step=0, salt="3")
# Prompts by name, difficulty class, and how many of their samples are right (the first ones).
RIGHT = {"a": ("easy", 4), "b": ("easy", 2), "c": ("hard", 0), "d": ("hard", 1), "e": ("hard", 0)}


def prompts(names="abcde"):
    return [Prompt(f"q/{name}", encode(f"{name}\n"), "", RIGHT[name][0]) for name in names]


def script(request):
    """The answer to sample j of a prompt: the sampling key is (seed, stream, step, prompt, j, turn)."""
    right = RIGHT[chr(request.tokens[0])][1]
    return encode("y\n" if request.key[4] < right else "no\n")


def run(names="abcde", samples=4, sampling=SAMPLING, concurrency=3, delay=None, **options):
    engine = ScriptedEngine(script, delay)
    work = evaluate(
        engine, ENVIRONMENT, prompts(names), samples, sampling=sampling, concurrency=concurrency, **options
    )
    return asyncio.run(work), engine


def test_means_by_hand():
    result, _ = run()
    # Success rates 4/4, 2/4, 0/4, 1/4, 0/4.
    assert result.success == pytest.approx((1 + 0.5 + 0 + 0.25 + 0) / 5)
    # Mean 0.35; squared deviations 0.4225 + 0.0225 + 0.1225 + 0.01 + 0.1225 = 0.7; / (5 - 1) / 5, and the root of it.
    assert result.standard_error == pytest.approx(math.sqrt(0.7 / 4 / 5))
    assert result.mixed == pytest.approx(2 / 5)  # b and d
    assert result.by_group == {"easy": pytest.approx(0.75), "hard": pytest.approx(0.25 / 3)}
    # 20 episodes: 7 answers of 2 tokens, 13 of 3; every history is 2 tokens long.
    assert result.counts.units == 20 and result.counts.generated_tokens == 7 * 2 + 13 * 3
    assert result.counts.prefilled_tokens + result.counts.cached_tokens == 40 and result.counts.tool_calls == 0


def test_one_prompt_has_no_spread():
    result, _ = run("b")
    assert result.success == 0.5 and math.isnan(result.standard_error)


def test_one_sample_each():
    result, _ = run(samples=1)
    assert result.success == pytest.approx(3 / 5) and result.mixed == 0  # a, b and d are right in their first sample


def test_the_order_of_prompts_and_of_arrival_changes_nothing():
    want, _ = run()
    slow_first = lambda request: 0.003 if request.key[4] == 0 else 0.0
    for names, delay in (("edcba", None), ("abcde", slow_first)):
        got, _ = run(names, concurrency=20, delay=delay)
        blank = lambda result: dataclasses.replace(result, counts=BudgetCount())
        assert blank(got) == blank(want)


def test_noise_comes_from_the_sampling_alone():
    """Two evaluations ask with the same keys; another seed asks with others."""
    keys = lambda **change: {r.key for r in run(sampling=dataclasses.replace(SAMPLING, **change))[1].requests}
    assert keys() == keys() and len(keys()) == 20
    assert not keys() & keys(seed=8)
    assert {(key[0], key[1], key[2]) for key in keys()} == {(7, Stream.EVAL, 0)}


def test_progress_reaches_the_total():
    seen = []
    run(on_progress=lambda progress: seen.append((progress.units_done, progress.units)))
    assert seen[-1] == (20, 20) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_sampled():
    sampling = dataclasses.replace(SAMPLING, limits=dataclasses.replace(LIMITS, context_length=2))
    with pytest.raises(ValueError, match="prompt 'q/a' has 2 tokens, but context_length 2"):
        run(sampling=sampling)
