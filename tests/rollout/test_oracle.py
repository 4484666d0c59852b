"""The oracle's scores against counting and closed forms; its costs are kept apart."""

import asyncio

import numpy as np
import pytest

from trace_jax.budget.trace import Trace
from trace_jax.engines.base import EngineError
from trace_jax.engines.scripted import ScriptedEngine
from trace_jax.rollout.keys import Stream
from trace_jax.rollout.oracle import OraclePredictor
from trace_jax.rollout.scheduler import collect_batch
from trace_jax.tree import query


def oracle(toy, engine, environment=None, rollouts=8, continuations=4, **sampling):
    return OraclePredictor(
        engine,
        environment or toy.environment(),
        sampling=toy.sampling(**sampling),
        rollouts_per_prompt=rollouts,
        continuations_per_anchor=continuations,
        concurrency=3,
    )


def test_prompt_scores_by_counting(toy):
    # Leaf j adds j and ends: even totals succeed. Of leaves 0..4, 0 2 4 do.
    engine = ScriptedEngine(lambda r: toy.encode(f"+{r.key[-2]}\n" if r.key[-1] == 0 else "!\n"))
    predictor = oracle(toy, engine, rollouts=5)
    scores = asyncio.run(predictor.score_prompts([toy.prompt("a"), toy.prompt("b")]))
    assert scores.tolist() == [0.6, 0.6] and scores.dtype == np.float64
    assert predictor.counts.units == 10.0 and predictor.counts.tool_calls == 10
    assert {request.key[1] for request in engine.requests} == {Stream.ORACLE}


@pytest.mark.parametrize(("fails", "score"), [({1, 3}, 1.0), ({0}, 0.5), (set(range(5)), 0.5)])
def test_rollouts_that_the_engine_gave_up_on_do_not_count(toy, fails, score):
    # As above 0, 2 and 4 of five succeed; of what is left 3 of 3, 2 of 4, and where nothing is left, a half.
    def script(request):
        if request.key[-2] in fails:
            raise EngineError("down")
        return toy.encode(f"+{request.key[-2]}\n" if request.key[-1] == 0 else "!\n")

    predictor = oracle(toy, ScriptedEngine(script), rollouts=5)
    assert asyncio.run(predictor.score_prompts([toy.prompt()])).tolist() == [score]


def test_anchor_scores_start_from_the_replayed_state(toy):
    # Three of four continuations end at once and keep the anchor's total, the last one adds 1 first. So an even total
    # scores 3/4 and an odd one 1/4; the anchors' totals are 1, 3 and 4.
    tree = toy.hand_tree()
    anchors = query.anchors(tree)
    histories = {toy.decode(query.prefix_tokens(tree, node)) for node in anchors}

    def script(request):
        adds = request.key[-2] % 4 == 3 and toy.decode(request.tokens) in histories
        return toy.encode("+1\n" if adds else "!\n")

    predictor = oracle(toy, ScriptedEngine(script))
    asyncio.run(predictor.score_prompts([toy.prompt()]))
    before = predictor.counts.tool_calls
    assert asyncio.run(predictor.score_anchors(tree, anchors)).tolist() == [0.25, 0.25, 0.75]
    # 8 rollouts, 3 anchors of 4 continuations, of which one each calls the tool; replaying calls it three times
    assert predictor.counts.units == 8 + 12 / 2 and predictor.counts.tool_calls - before == 3 + 3


def test_the_response_limit_counts_from_the_prompt_also_for_anchors(toy):
    # 13 tokens behind the 3 of the prompt; the anchors stand at 9, 15 and 9 tokens
    engine = ScriptedEngine(toy.lines("!\n", "!\n", "!\n"))
    predictor = oracle(toy, engine, limits=toy.limits(max_response_tokens=13))
    asyncio.run(predictor.score_prompts([toy.prompt()]))
    tree = toy.hand_tree()
    asyncio.run(predictor.score_anchors(tree, query.anchors(tree)))
    assert {(r.tokens.size, r.max_new_tokens) for r in engine.requests} == {(3, 13), (9, 7), (15, 1)}


def test_anchor_scores_need_the_prompt(toy):
    tree = toy.hand_tree()
    with pytest.raises(ValueError, match="prompt 'p' was not scored in this step"):
        asyncio.run(oracle(toy, ScriptedEngine(toy.lines("!\n"))).score_anchors(tree, query.anchors(tree)))


def test_scores_converge_to_the_closed_form(toy):
    # random_script ends with chance e = 1/3 a turn, else adds a uniform digit, which flips parity with chance 1/2.
    # From an even total: 1/3 end at once, for the others parity is a fair coin (turn limit included): 1/3 + 2/3 / 2.
    predictor = oracle(toy, ScriptedEngine(toy.random_script), rollouts=1000)
    score = asyncio.run(predictor.score_prompts([toy.prompt()]))[0]
    assert score == pytest.approx(2 / 3, abs=4 * np.sqrt(2 / 9 / 1000))


def test_costs_stay_outside_the_budget_and_no_key_is_used_twice(toy):
    engine = ScriptedEngine(toy.random_script)
    predictor = oracle(toy, engine)
    prompts = [toy.prompt(uid) for uid in "abc"]

    async def step():
        value = await predictor.score_prompts(prompts)
        rollouts = Trace(9, 2).roots(value, 3, np.random.default_rng(0))
        return await collect_batch(
            engine,
            toy.environment(),
            Trace(9, 2),
            predictor,
            prompts,
            rollouts,
            sampling=toy.sampling(),
            concurrency=5,
        )

    results = asyncio.run(step())
    assert sum(result.counts.units for result in results) == 18.0
    anchors = sum(query.anchors(result.tree).size for result in results)
    assert predictor.counts.units == 3 * 8 + anchors * 4 / 2
    keys = [request.key for request in engine.requests]
    assert len(set(keys)) == len(keys)


def test_values_do_not_depend_on_which_anchors_are_asked(toy):
    tree = toy.hand_tree()
    predictor = oracle(toy, ScriptedEngine(toy.random_script), continuations=16)
    asyncio.run(predictor.score_prompts([toy.prompt()]))
    together = asyncio.run(predictor.score_anchors(tree, np.array([1, 2, 4])))
    assert asyncio.run(predictor.score_anchors(tree, np.array([4]))).tolist() == [together[2]]


@pytest.mark.parametrize("rollouts, continuations", [(0, 1), (1, 0)])
def test_empty_measurements_are_refused(toy, rollouts, continuations):
    with pytest.raises(ValueError, match="both must be at least 1"):
        oracle(toy, ScriptedEngine(toy.lines("!\n")), rollouts=rollouts, continuations=continuations)
