"""Outcomes of prompts on scripted answers: lines of the file, what a kill leaves of them, figures by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math

import numpy as np
import pytest

from trace_jax.engines.base import EngineError
from trace_jax.engines.scripted import ScriptedEngine
from trace_jax.eval import session
from trace_jax.eval.outcomes import Outcomes, OutcomesFile, digest, summary
from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.keys import Stream
from trace_jax.rollout.runner import Sampling
from trace_jax.tasks.base import Outcome, StepResult
from trace_jax.types import Prompt


class Graded:
    """Up to 3 turns: "?" asks a tool that answers, "!" one that fails, anything else is the answer. The state is it."""

    name, stop, closings, preamble, max_turns, tool_timeout = "graded", "\n", ("\n",), "", 3, None

    def step(self, state, action):
        called, failed = action.startswith("?"), action.startswith("!")
        return StepResult(action, "ok\n" if called or failed else "", not (called or failed), int(called), int(failed))

    def score(self, state):
        return Outcome(reward={"y\n": 1.0, "h\n": 0.5}.get(state, 0.0), success=float(state in ("y\n", "h\n")))


def encode(text):
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)


ENVIRONMENT = Environment(Graded(), encode, lambda ids: bytes(np.asarray(ids, np.uint8)).decode("ascii"), (10,))
LIMITS = Limits(max_turns=3, max_turn_tokens=4, context_length=32, max_observation_tokens=8)
SAMPLING = Sampling(limits=LIMITS, temperature=1.0, seed=7, stream=Stream.EVAL, step=0, salt="0")
# What the policy writes, turn by turn, in sample 0 and 1 of each prompt.
WRITES = {
    "a": (("y\n",), ("?\n", "h\n")),
    "b": (("!\n", "?\n", "n\n"), ("?\n", "?\n", "?\n")),  # wrong; no answer within 3 turns
    "c": (("longer than it may be\n",), ("dead\n",)),  # cut off after 4 tokens; the engine gives up
}
PROMPTS = [Prompt(f"q/{name}", encode(f"{name}\n"), "", "easy" if name == "a" else "hard") for name in "abc"]


def script(request):
    sample, turn = request.key[4], request.key[5]
    text = WRITES[chr(request.tokens[0])][sample][turn]
    if text == "dead\n":
        raise EngineError("no reply")
    return encode(text)


def sampled(path, prompts=PROMPTS, delay=None):
    file, engine = OutcomesFile(path), ScriptedEngine(script, delay)
    work = session.sample(engine, ENVIRONMENT, prompts, 2, file, sampling=SAMPLING, concurrency=4)
    try:
        asyncio.run(work)
    finally:
        file.close()
    return file.outcomes


def test_lines_by_hand(tmp_path):
    found = sampled(tmp_path / "r.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {row["uid"]: dataclasses.asdict(found[row["uid"]]) for row in rows} == {
        row["uid"]: {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows
    }
    a, b, c = (found[f"q/{name}"] for name in "abc")
    assert (a.successes, a.rewards, a.turns, a.finish) == ((1, 1), (1.0, 0.5), (1, 2), ("answer", "answer"))
    assert (a.tool_calls, a.failed_calls, a.generated_tokens, a.group) == (1, 0, 6, "easy")
    assert (b.successes, b.turns, b.finish) == ((0, 0), (3, 3), ("answer", "turn_limit"))
    assert (b.tool_calls, b.failed_calls) == (4, 1)
    assert (c.finish, c.turns, c.generated_tokens) == (("length", "engine_error"), (1, 1), 4)
    assert c.errors == ("EngineError: no reply",) and c.prompt == digest(PROMPTS[2])


def test_figures_by_hand(tmp_path):
    found = sampled(tmp_path / "r.jsonl")
    figures = summary([found[f"q/{name}"] for name in "abc"], (1, 2))
    # Success of the prompts 1, 0, 0: mean 1/3, deviations 4/9 + 1/9 + 1/9 = 2/3, / 2 / 3 = 1/9, its root 1/3.
    assert figures["avg"] == pytest.approx(1 / 3) and figures["standard_error"] == pytest.approx(1 / 3)
    # Student's quantile of 97.5 % with 2 degrees of freedom is 4.30265; 1/3 + 1.434 is cut to 1, 1/3 - 1.434 to 0.
    assert figures["interval"] == [0.0, 1.0]
    # Scores of the prompts 3/4, 0, 0: mean 1/4, deviations (4 + 1 + 1) / 16, / 2 / 3 = 1/16.
    assert figures["mean_reward"] == pytest.approx(0.25) and figures["reward_standard_error"] == pytest.approx(0.25)
    assert figures["pass_at_k"] == {"1": pytest.approx(1 / 3), "2": pytest.approx(1 / 3)}
    assert (figures["prompts"], figures["samples"], figures["errors"]) == (3, 2, 1)
    assert figures["format_valid_share"] == 5 / 6 and figures["mean_tool_calls"] == 5 / 6
    shares = {"answer": 3 / 6, "turn_limit": 1 / 6, "length": 1 / 6, "engine_error": 1 / 6}
    assert figures["finish_shares"] == shares | {"deadline": 0.0, "environment_error": 0.0}
    assert figures["mean_turns"] == 11 / 6 and figures["by_group"] == {"easy": 1.0, "hard": 0.0}
    # a: 2 + 2 + 2, b: three turns of 2, twice, c: 4.
    assert figures["generated_tokens"] == 6 + 12 + 4 and figures["mean_generated_tokens"] == 22 / 6
    assert figures["seconds"] == max(o.elapsed for o in found.values())


def test_one_prompt_has_no_spread_and_no_call_no_wrong_format():
    one = Outcomes("q", "", "", (1, 0, 0, 1), (2.0, 0.0, 0.0, 0.0), ("answer",) * 4, (1,) * 4, 0, 0, 8, (), 1.0)
    figures = summary([one], (1, 2, 4))
    assert figures["standard_error"] is figures["interval"] is figures["reward_interval"] is None
    assert figures["format_valid_share"] == 1.0 and figures["mean_reward"] == 0.5
    # Two of four right: a pair misses both in 1 of 6 cases.
    assert figures["pass_at_k"] == {"1": pytest.approx(1 / 2), "2": pytest.approx(5 / 6), "4": 1.0}
    json.dumps(figures, allow_nan=False)
    two = summary([one, dataclasses.replace(one, uid="p", rewards=(8.0, 0.0, 0.0, 0.0))], (1,))
    assert two["mean_reward"] == 1.25 and two["reward_interval"] is None  # no score from 0 to 1
    assert math.isclose(two["avg"], 0.5) and two["interval"] == [0.5, 0.5]


def test_a_torn_line_is_cut_off_and_sampled_again(tmp_path):
    whole, path = sampled(tmp_path / "whole.jsonl"), tmp_path / "r.jsonl"
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    for size in range(1, len(lines[1])):  # a kill can end a write anywhere
        path.write_bytes(lines[0] + lines[1][:size])
        file = OutcomesFile(path)
        left = session.missing(PROMPTS, 2, file)
        file.close()
        assert len(left) == 2 and path.read_bytes() == lines[0]
    timeless = lambda found: {uid: dataclasses.replace(o, elapsed=0.0) for uid, o in found.items()}
    assert timeless(sampled(path, left)) == timeless(whole)
    assert len(path.read_bytes().splitlines()) == 3


def test_time_counts_on(tmp_path):
    path, slow = tmp_path / "r.jsonl", lambda request: 0.05
    first = sampled(path, PROMPTS[:1], slow)["q/a"].elapsed
    later = sampled(path, PROMPTS[1:2], slow)["q/b"].elapsed
    assert first >= 0.1 and later >= first + 0.15  # two turns, then three


@pytest.mark.parametrize("line", ["[]", "{}", "null", '{"uid": "q/a"}', "no json", "\x00"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "r.jsonl"
    sampled(path)
    good = path.read_text()
    path.write_text(f"{good}{line}\n{good}")
    with pytest.raises(ValueError, match="line 4 of .*r.jsonl is no result of a prompt .*; delete it") as error:
        OutcomesFile(path)
    assert "\n" not in str(error.value)


def test_outcomes_of_other_prompts_or_samples_are_refused(tmp_path):
    sampled(tmp_path / "r.jsonl")
    file = OutcomesFile(tmp_path / "r.jsonl")
    assert session.missing(PROMPTS, 2, file) == []
    with pytest.raises(ValueError, match="q/a was sampled 2 times in this folder, --samples is 3 now"):
        session.missing(PROMPTS, 3, file)
    other = dataclasses.replace(PROMPTS[1], tokens=encode("bb\n"))
    with pytest.raises(ValueError, match="prompt q/b had other tokens when it was sampled in this folder"):
        session.missing([other], 2, file)
    file.close()
