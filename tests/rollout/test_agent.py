"""Each rule of the table in rollout/agent.py, on episodes that are written out by hand."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest

from trace_jax.engines.base import EngineError
from trace_jax.engines.scripted import ScriptedEngine
from trace_jax.rollout.agent import Limits, run_episode
from trace_jax.rollout.environment import Environment
from trace_jax.tasks.base import Outcome, StepResult
from trace_jax.types import Finish, Generation


def run(toy, engine, environment=None, *, text="go\n", state=None, turn=0, **limits):
    return asyncio.run(
        run_episode(
            engine,
            environment or toy.environment(),
            history=toy.encode(text),
            state=state or toy.Total(),
            turn=turn,
            limits=toy.limits(**limits),
            temperature=0.7,
            key=(1, 2, 3),
            salt="v4",
        )
    )


def summary(toy, episode):
    """(finish, action, observation) of each turn as text."""
    return [(turn.finish, toy.decode(turn.action), toy.decode(turn.observation)) for turn in episode.turns]


def test_an_answered_episode_token_by_token(toy):
    engine = ScriptedEngine(toy.lines("+3\n", "+4\n", "!\n"))
    episode = run(toy, engine)
    assert summary(toy, episode) == [
        (Finish.TURN, "+3\n", "=3\n"),
        (Finish.TURN, "+4\n", "=7\n"),
        (Finish.ANSWER, "!\n", ""),
    ]
    assert [state.value for state in episode.states] == [3, 7, 7]
    assert [(turn.reward, turn.success) for turn in episode.turns] == [(None, None), (None, None), (0.7, 0.0)]
    # histories: "go\n", + "+3\n=3\n", + "+4\n=7\n"
    assert [toy.decode(r.tokens) for r in engine.requests] == ["go\n", "go\n+3\n=3\n", "go\n+3\n=3\n+4\n=7\n"]
    assert [r.key for r in engine.requests] == [(1, 2, 3, 0), (1, 2, 3, 1), (1, 2, 3, 2)]
    assert {(r.temperature, r.salt, r.stop_ids, r.timeout) for r in engine.requests} == {(0.7, "v4", (10,), None)}
    # generated 3 + 3 + 2; histories 3 + 9 + 15 = 27, of which the engine knew 0, 5 (all but the sampled "\n" and what
    # follows it) and 11 tokens
    counts = episode.counts
    assert (counts.generated_tokens, counts.cached_tokens, counts.prefilled_tokens) == (8, 16, 11)
    assert (counts.tool_calls, counts.units, counts.prefix_tokens) == (2, 0.0, 0)


def test_sampled_ids_are_never_retokenised(toy):
    # Token 256 + x reads as the character x, so decoding and encoding again would change it.
    environment = Environment(toy.Adder(), toy.encode, lambda ids: toy.decode(ids % 256), (10,))
    script = [[256 + 43, 51, 10], [256 + 33, 10]]
    engine = ScriptedEngine(lambda request: script[request.key[-1]])
    episode = run(toy, engine, environment)
    assert episode.turns[0].action.tolist() == [299, 51, 10] and episode.turns[1].finish == Finish.ANSWER
    assert engine.requests[1].tokens.tolist() == [103, 111, 10, 299, 51, 10, 61, 51, 10]


def test_each_history_extends_the_last_one_and_is_read_only(toy):
    engine = ScriptedEngine(toy.random_script)
    for _ in range(3):
        run(toy, engine, state=toy.Total(1))
    for before, after in zip(engine.requests, engine.requests[1:]):
        if after.key[-1]:
            assert np.array_equal(after.tokens[: before.tokens.size], before.tokens)
        with pytest.raises(ValueError, match="read-only"):
            before.tokens[0] = 0


def test_a_continuation_counts_turns_from_its_anchor(toy):
    engine = ScriptedEngine(toy.lines("-", "-", "+1\n", "+1\n"))
    episode = run(toy, engine, text="go\n+2\n=2\n+2\n=4\n", state=toy.Total(4), turn=2, max_turns=4)
    assert summary(toy, episode) == [(Finish.TURN, "+1\n", "=5\n"), (Finish.TURN_LIMIT, "+1\n", "")]
    assert [r.key[-1] for r in engine.requests] == [2, 3]
    assert (episode.turns[-1].reward, episode.turns[-1].success) == (0.6, 1.0)
    # the prefix is the 15 tokens that it was given; a new engine knew none of them. What came after is no prefix.
    assert (episode.counts.prefix_tokens, episode.counts.prefix_cached_tokens) == (15, 0)


def test_what_all_prompts_share_is_no_merit_of_a_fork(toy):
    """3 of the 15 tokens are held whoever asks: the prefix counts 12, of which a new engine knew none."""
    engine = ScriptedEngine(toy.lines("-", "-", "!\n"))
    asyncio.run(engine.preload(toy.encode("go\n")))
    environment = dataclasses.replace(toy.environment(), trunk=toy.encode("go\n"))
    episode = run(toy, engine, environment, text="go\n+2\n=2\n+2\n=4\n", state=toy.Total(4), turn=2)
    assert episode.counts.cached_tokens == 3
    assert (episode.counts.prefix_tokens, episode.counts.prefix_cached_tokens) == (12, 0)


def test_what_a_request_carries_beside_its_tokens(toy):
    engine = ScriptedEngine(toy.lines("!\n"))
    environment = dataclasses.replace(toy.environment(), stop_texts=("</call>",))
    asyncio.run(
        run_episode(
            engine, environment, history=toy.encode("go\n"), state=toy.Total(), turn=0, limits=toy.limits(),
            temperature=0.7, key=(1,), salt="v4", group="prompt 7", top_p=0.9, top_k=5,
        )
    )  # fmt: skip
    (request,) = engine.requests
    assert (request.group, request.stop_texts, request.top_p, request.top_k) == ("prompt 7", ("</call>",), 0.9, 5)


def test_turn_limit_scores_the_state_after_the_last_step(toy):
    episode = run(toy, ScriptedEngine(toy.lines("+3\n", "+3\n", "+3\n")), max_turns=2)
    assert summary(toy, episode) == [(Finish.TURN, "+3\n", "=3\n"), (Finish.TURN_LIMIT, "+3\n", "")]
    assert (episode.turns[-1].reward, episode.turns[-1].success, episode.counts.tool_calls) == (0.6, 1.0, 2)


def test_an_answer_in_the_last_turn_is_an_answer(toy):
    assert run(toy, ScriptedEngine(toy.lines("!\n")), max_turns=1).turns[-1].finish == Finish.ANSWER


def test_a_generation_without_a_stop_is_scored_on_the_state_before_it(toy):
    episode = run(toy, ScriptedEngine(toy.lines("+2\n", "+345678\n")), max_turn_tokens=4)
    assert summary(toy, episode) == [(Finish.TURN, "+2\n", "=2\n"), (Finish.LENGTH, "+345", "")]
    assert (episode.turns[-1].reward, episode.turns[-1].success) == (0.2, 1.0)
    assert episode.counts.generated_tokens == 7


def test_the_context_ends_a_generation(toy):
    engine = ScriptedEngine(toy.lines("+2\n", "+345678\n"))
    episode = run(toy, engine, context_length=12)  # 3 + 3 + 3 = 9 tokens leave 3
    assert engine.requests[1].max_new_tokens == 3
    assert summary(toy, episode) == [(Finish.TURN, "+2\n", "=2\n"), (Finish.LENGTH, "+34", "")]


def test_an_observation_that_fills_the_context_ends_the_episode_at_its_turn(toy):
    # 3 + 3 + 3 = 9 tokens: no tenth fits into 9, one does into 10. So no anchor is without room for a token.
    full = run(toy, ScriptedEngine(toy.lines("+2\n", "!\n")), context_length=9)
    assert summary(toy, full) == [(Finish.LENGTH, "+2\n", "")]
    assert (full.turns[-1].reward, full.turns[-1].success, full.states[-1].value) == (0.2, 1.0, 2)
    one = run(toy, ScriptedEngine(toy.lines("+2\n", "!\n")), context_length=10)
    assert summary(toy, one) == [(Finish.TURN, "+2\n", "=2\n"), (Finish.LENGTH, "!", "")]


def test_a_full_history_gives_a_scored_turn_without_action(toy):
    engine = ScriptedEngine(toy.lines("!\n"))
    episode = run(toy, engine, context_length=3, state=toy.Total(6))
    assert summary(toy, episode) == [(Finish.LENGTH, "", "")] and engine.requests == []
    turn = episode.turns[0]
    assert (turn.reward, turn.success, turn.weight_version) == (0.6, 1.0, -1)
    assert (turn.action.dtype, turn.logprobs.dtype, turn.observation.dtype) == (np.int32, np.float32, np.int32)


@pytest.mark.parametrize(
    "word, error",
    [("boom", "KeyError: 'boom'"), ("exit", "SystemExit: the tool called exit"), ("number", "TypeError")],
)
@pytest.mark.parametrize("tool_timeout", [None, 5.0])
def test_an_environment_that_raises_or_answers_nonsense(toy, word, error, tool_timeout):
    engine = ScriptedEngine(toy.lines("+2\n", word + "\n"))
    episode = run(toy, engine, toy.environment(tool_timeout=tool_timeout))
    assert summary(toy, episode)[1:] == [(Finish.ENVIRONMENT_ERROR, word + "\n", "")]
    assert (episode.turns[-1].reward, episode.turns[-1].success) == (0.0, 0.0)
    assert episode.error.startswith(error)
    assert episode.states[-1].value == 2  # the last good state


def test_a_score_that_raises_is_an_environment_error(toy):
    def score(state):
        raise RuntimeError("y" * 10_000)

    episode = run(toy, ScriptedEngine(toy.lines("!\n")), toy.environment(score=score))
    assert summary(toy, episode) == [(Finish.ENVIRONMENT_ERROR, "!\n", "")]
    assert (episode.turns[-1].reward, episode.turns[-1].success, len(episode.error)) == (0.0, 0.0, 300)


def test_megabytes_from_a_tool_are_cut_and_end_with_the_stop(toy):
    seen = []

    def encode(text):
        seen.append(len(text))
        return toy.encode(text)

    environment = Environment(toy.Adder(), encode, toy.decode, (10,))
    episode = run(toy, ScriptedEngine(toy.lines("flood\n", "!\n")), environment, max_observation_tokens=8)
    assert summary(toy, episode)[0] == (Finish.TURN, "flood\n", "xxxxxxx\n")
    assert max(seen) == 8 * 16


def test_a_tool_that_hangs_is_an_environment_error(toy):
    begin = time.monotonic()
    episode = run(toy, ScriptedEngine(toy.lines("hang\n")), toy.environment(tool_timeout=0.05))
    assert time.monotonic() - begin < 0.9
    assert summary(toy, episode) == [(Finish.ENVIRONMENT_ERROR, "hang\n", "")]
    assert "did not return within 0.05 s" in episode.error and episode.turns[-1].reward == 0.0


def test_a_score_that_hangs_is_an_environment_error(toy):
    environment = toy.environment(tool_timeout=0.05, score=lambda state: time.sleep(1.0))
    episode = run(toy, ScriptedEngine(toy.lines("!\n")), environment)
    assert episode.turns[-1].finish == Finish.ENVIRONMENT_ERROR


def test_the_deadline_interrupts_the_engine(toy):
    engine = ScriptedEngine(toy.lines("+2\n", "!\n"), delay=lambda request: 0.0 if request.key[-1] == 0 else 10.0)
    begin = time.monotonic()
    episode = run(toy, engine, deadline=0.1)
    assert time.monotonic() - begin < 2.0
    assert summary(toy, episode) == [(Finish.TURN, "+2\n", "=2\n"), (Finish.DEADLINE, "", "")]
    assert (episode.turns[-1].reward, episode.turns[-1].success) == (0.2, 1.0)
    assert 0 < engine.requests[1].timeout <= engine.requests[0].timeout <= 0.1


def test_the_deadline_interrupts_a_tool(toy):
    episode = run(toy, ScriptedEngine(toy.lines("hang\n")), toy.environment(tool_timeout=30.0), deadline=0.1)
    assert summary(toy, episode) == [(Finish.DEADLINE, "hang\n", "")]
    assert (episode.turns[-1].reward, episode.turns[-1].success) == (0.0, 1.0)  # the empty total is even


def test_the_deadline_is_looked_at_after_an_inline_tool(toy):
    class Slow(toy.Adder):
        def step(self, state, action):
            time.sleep(0.1)
            return super().step(state, action)

    environment = Environment(Slow(), toy.encode, toy.decode, (10,))
    engine = ScriptedEngine(toy.lines("+2\n", "!\n"))
    episode = run(toy, engine, environment, deadline=0.05)
    assert summary(toy, episode) == [(Finish.TURN, "+2\n", "=2\n"), (Finish.DEADLINE, "", "")]
    assert len(engine.requests) == 1


def test_the_engine_gives_up(toy):
    def script(request):
        if request.key[-1] == 1:
            raise EngineError("three tries failed")
        return toy.encode("+2\n")

    episode = run(toy, ScriptedEngine(script))
    assert summary(toy, episode) == [(Finish.TURN, "+2\n", "=2\n"), (Finish.ENGINE_ERROR, "", "")]
    assert (episode.turns[-1].reward, episode.turns[-1].success) == (0.0, 0.0)
    assert episode.error == "EngineError: three tries failed"


def test_unexpected_engine_exceptions_and_timeouts_of_its_own_come_out(toy):
    for error in (RuntimeError("bug"), TimeoutError("not the deadline")):

        def script(request, error=error):
            raise error

        for deadline in (None, 30.0):
            with pytest.raises(type(error), match=str(error)):
                run(toy, ScriptedEngine(script), deadline=deadline)


@pytest.mark.parametrize(
    "tokens, logprobs, message",
    [
        ([33, 10], [-0.5, np.nan], "finite"),
        ([33, 10], [-0.5], "log-probs"),
        ([], [], "log-probs"),
        ([33] * 17, [-0.5] * 17, "17 tokens where 16 were allowed"),
    ],
)
def test_generations_that_must_not_be_trained_on_raise(toy, tokens, logprobs, message):
    reply = Generation(np.array(tokens, np.int32), np.array(logprobs, np.float32), True, 0, 3, 0)
    with pytest.raises(ValueError, match=message):
        run(toy, ScriptedEngine(lambda request: reply))


def test_behaviour_logprobs_and_versions_are_kept(toy):
    engine = ScriptedEngine(toy.lines("+2\n", "!\n"))
    asyncio.run(engine.set_weights(None, 9))
    episode = run(toy, engine)
    assert [turn.logprobs.tolist() for turn in episode.turns] == [[-0.5] * 3, [-0.5] * 2]
    assert [turn.weight_version for turn in episode.turns] == [9, 9]


def test_step_sees_the_states_it_made(toy):
    seen = []

    class Watched(toy.Adder):
        def step(self, state, action):
            seen.append((state, action))
            return StepResult((state, action), "ok\n", len(seen) == 3, 0)

        def score(self, state):
            return Outcome(1.0, 1.0)

    environment = Environment(Watched(), toy.encode, toy.decode, (10,))
    start = toy.Total()
    episode = run(toy, ScriptedEngine(toy.lines("a\n", "b\n", "c\n")), environment, state=start)
    assert seen[0][0] is start and seen[1][0] is episode.states[0] and seen[2][0] is episode.states[1]
    assert [action for _, action in seen] == ["a\n", "b\n", "c\n"]


@pytest.mark.parametrize("turn", [-1, 8])
def test_a_start_outside_the_turn_limit_is_refused(toy, turn):
    with pytest.raises(ValueError, match=f"start at turn {turn}"):
        run(toy, ScriptedEngine(toy.lines("!\n")), turn=turn)


@pytest.mark.parametrize(
    "field, value",
    [("max_turns", 0), ("max_turn_tokens", 0), ("context_length", 0), ("max_observation_tokens", 0), ("deadline", 0.0),
     ("max_response_tokens", 0)],
)  # fmt: skip
def test_limits_are_checked(field, value):
    good = dict(max_turns=1, max_turn_tokens=1, context_length=1, max_observation_tokens=1, deadline=None)
    with pytest.raises(ValueError, match=f"limits: {field} is {value}"):
        Limits(**{**good, field: value})


@pytest.mark.parametrize("response, context", [(None, 20), (1, 8), (12, 19), (13, 20), (14, 20)])
def test_a_response_limit_is_a_shorter_context(toy, response, context):
    limits = toy.limits(context_length=20, max_response_tokens=response)
    assert limits.of_prompt(7) == dataclasses.replace(limits, context_length=context)
    assert limits.of_prompt(7).of_prompt(7) == limits.of_prompt(7)
