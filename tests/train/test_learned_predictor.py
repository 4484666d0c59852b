"""Concurrent scoring gives the bits of scoring one by one, shared rows the scores of single ones; metrics by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from trace_jax.models import predictor as predictor_models
from trace_jax.models.config import DecoderConfig
from trace_jax.objectives import value
from trace_jax.train import optimizer, replay, sharding
from trace_jax.train.history_view import HistoryView
from trace_jax.train.predictor import LearnedPredictor, allocation_metrics
from trace_jax.train.predictor_step import PredictorTrainer
from trace_jax.tree import grow, pack, query
from trace_jax.types import Finish, Prompt, Stage, Turn

LENGTH = 32
VIEW = HistoryView(max_tokens=LENGTH)
MODEL = DecoderConfig(
    vocab_size=13, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=32
)


@functools.cache
def _trained():
    """(trainer, parameters) after a few steps on noise, so that scores differ."""
    base = optimizer.adamw(optimizer.constant(0.02), b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0)
    trainer = PredictorTrainer(
        predictor_models.critic(MODEL),
        optimizer.build(base, clip_norm=1.0, max_update_norm=None),
        value.squared_error,
        replay.equal_weight,
        sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
        batch_rows=4,
        row_length=LENGTH,
    )
    rng = np.random.default_rng(0)
    noise = replay.Examples(
        tuple(rng.integers(0, 13, 9).astype(np.int32) for _ in range(24)),
        rng.integers(0, 2, 24).astype(np.float32),
        np.ones(24, np.int32),
        np.ones(24, bool),
    )
    state, _ = trainer.fit(trainer.init(jax.random.key(0)), None, noise, rng, epochs=3)
    return trainer, state.params


def _turns(rng, count, success):
    turns = []
    for t in range(count):
        last = t == count - 1
        turns.append(
            Turn(
                action=rng.integers(0, 13, 2).astype(np.int32),
                logprobs=np.full(2, -1, np.float32),
                observation=np.zeros(0, np.int32) if last else rng.integers(0, 13, 2).astype(np.int32),
                finish=Finish.ANSWER if last else Finish.TURN,
                weight_version=0,
                reward=success if last else None,
                success=success if last else None,
            )
        )
    return turns


def _tree(seed, successes=(1.0, 0.0)):
    rng = np.random.default_rng(seed)
    tree = grow.new_tree(Prompt(uid=f"p{seed}", tokens=rng.integers(0, 13, 5).astype(np.int32), state=None))
    return grow.add_rollouts(tree, [(0, Stage.ROOT_ROLLOUT, _turns(rng, 4, s)) for s in successes])


def _ready():
    trainer, params = _trained()
    scorer = LearnedPredictor(trainer, VIEW)
    scorer.set_params(params, None)
    return scorer


class _Counting:
    """A trainer that counts its calls, and the rows and tokens in them."""

    def __init__(self, trainer):
        self._trainer, self.row_length, self.calls, self.rows, self.tokens = trainer, trainer.row_length, 0, 0, 0

    def score(self, params, policy_params, rows):
        self.calls += 1
        self.rows += rows["token"].shape[0]
        self.tokens += int(np.sum(rows["end"] > 0))
        return self._trainer.score(params, policy_params, rows)


def test_coalesced_scores_are_bitwise_those_of_single_calls():
    trees = [_tree(seed, (1.0, 0.0, 1.0)[: 1 + seed % 3]) for seed in range(9)]
    prompts = [Prompt(uid=str(i), tokens=np.full(3 + i, i, np.int32), state=None) for i in range(6)]

    async def together(order):
        calls = [scorer.score_anchors(trees[i], query.anchors(trees[i])) for i in order]
        *anchors, roots = await asyncio.gather(*calls, scorer.score_prompts(prompts))
        return dict(zip(order, anchors, strict=True)), roots

    async def one_by_one():
        anchors = [await scorer.score_anchors(tree, query.anchors(tree)) for tree in trees]
        return dict(enumerate(anchors)), await scorer.score_prompts(prompts)

    trainer, params = _trained()
    counting = _Counting(trainer)
    scorer = LearnedPredictor(counting, VIEW)
    scorer.set_params(params, None)
    single, single_roots = asyncio.run(one_by_one())
    assert counting.calls == 10
    for order in (range(9), [4, 8, 0, 2, 6, 1, 7, 3, 5]):
        counting.calls = 0
        joined, roots = asyncio.run(together(order))
        assert counting.calls == 1  # ten calls of one moment, one look at the device
        np.testing.assert_array_equal(roots, single_roots)
        for i in range(9):
            np.testing.assert_array_equal(joined[i], single[i])
    assert np.ptp(single_roots) > 1e-3 and len({x for scores in single.values() for x in scores}) > 9


def _distinct(rollouts):
    """As `_tree`, but each turn repeats a token of its own, and no two turns start alike."""
    tree = _tree(3, (1.0,) * rollouts)
    own = np.full(tree.num_nodes, 12)
    own[query.anchors(tree)] = np.arange(3 * rollouts)
    return dataclasses.replace(tree, token=np.repeat(own, np.diff(tree.offset)).astype(np.int32))


def _alone(view, tree, nodes):
    """The scores of the histories with one segment for each."""
    trainer, params = _trained()
    nothing = np.zeros(len(nodes), np.float32)
    batch, row, col = pack.pack_prefixes(
        view.of_nodes(tree, nodes), nothing, nothing, row_length=LENGTH, rows_multiple=1
    )
    return trainer.score(params, None, {name: getattr(batch, name) for name in ("token", "pos", "end")})[row, col]


@pytest.mark.parametrize(
    "rollouts, limit, rows, tokens",
    [
        # a prompt of 5 and 3 anchors of 4 tokens in each rollout: 5 + 12 j tokens, in rows of 32
        (1, 32, 1, 17),
        (2, 32, 1, 29),
        # 2 rollouts fill a row, so the third starts with the prompt again
        (3, 32, 2, 29 + 17),
        (4, 32, 2, 29 + 29),
        # limit 9: the prompt keeps its 4 or all 5 tokens, the newest turn its 4: three sequences of 9 that share the 5
        (1, 9, 1, 5 + 3 * 4),
        (2, 9, 1, 5 + 6 * 4),
        # limit 7: 3 tokens of the prompt and 4 of the newest turn
        (2, 7, 1, 3 + 6 * 4),
        # limit 3: the prompt's first and the turn's last 2
        (2, 3, 1, 1 + 6 * 2),
    ],
)
def test_anchors_of_a_prompt_share_rows(rollouts, limit, rows, tokens):
    """The scores are those of one segment for each anchor; every distinct token of a row is computed once."""
    tree, (trainer, params), view = _distinct(rollouts), _trained(), HistoryView(max_tokens=limit)
    counting = _Counting(trainer)
    scorer = LearnedPredictor(counting, view)
    scorer.set_params(params, None)
    anchors = query.anchors(tree)
    got = asyncio.run(scorer.score_anchors(tree, anchors))
    assert got.shape == anchors.shape and got.dtype == np.float64 and np.ptp(got) > 1e-4
    np.testing.assert_allclose(got, _alone(view, tree, anchors), rtol=0, atol=1e-5)
    assert (counting.calls, counting.rows, counting.tokens) == (1, rows, tokens)


def test_prompts_that_start_alike_share_rows_too():
    trainer, params = _trained()
    counting = _Counting(trainer)
    scorer = LearnedPredictor(counting, VIEW)
    scorer.set_params(params, None)
    prompts = [Prompt(str(i), np.array([7] * 20 + [i, i + 1], np.int32), None) for i in range(6)]
    got = asyncio.run(scorer.score_prompts(prompts))
    assert (counting.rows, counting.tokens) == (1, 20 + 6 * 2)
    assert got.tolist() != [got[0]] * 6
    np.testing.assert_allclose(got, [asyncio.run(scorer.score_prompts([prompt]))[0] for prompt in prompts], atol=1e-5)


class _Members:
    """A trainer of two members: the tiny trainer's scores, and their squares."""

    def __init__(self, trainer):
        self._trainer, self.row_length = trainer, trainer.row_length

    def score(self, params, policy_params, rows):
        score = self._trainer.score(params, policy_params, rows)
        return np.stack([score, score**2])


def _two_calls(scorer, recalibrate=None):
    """The scores of a prompt and of a tree's anchors, asked for at one moment."""
    scorer.set_params(_trained()[1], None, recalibrate)
    tree, prompts = _tree(2), [Prompt(str(i), np.full(3 + i, i, np.int32), None) for i in range(4)]

    async def both():
        return await asyncio.gather(scorer.score_anchors(tree, query.anchors(tree)), scorer.score_prompts(prompts))

    return asyncio.run(asyncio.wait_for(both(), 30))


def test_members_are_averaged_or_returned_and_recalibrated_in_that_order():
    trainer = _trained()[0]
    members, cube = _Members(trainer), lambda p: p**3
    single = _two_calls(LearnedPredictor(trainer, VIEW))
    for got, p, count in zip(_two_calls(LearnedPredictor(members, VIEW)), single, (6, 4), strict=True):
        assert got.shape == (count,) and got.dtype == np.float64
        np.testing.assert_allclose(got, (p + p**2) / 2, rtol=1e-6)
    for got, p in zip(_two_calls(LearnedPredictor(members, VIEW, draws=True)), single, strict=True):
        np.testing.assert_allclose(got, [p, p**2], rtol=1e-6)
    for got, p in zip(_two_calls(LearnedPredictor(members, VIEW), cube), single, strict=True):
        np.testing.assert_allclose(got, ((p + p**2) / 2) ** 3, rtol=1e-6)
    for got, p in zip(_two_calls(LearnedPredictor(members, VIEW, draws=True), cube), single, strict=True):
        np.testing.assert_allclose(got, [p**3, p**6], rtol=1e-6)


def test_without_members_draws_are_one_and_recalibration_is_of_single_scores():
    trainer = _trained()[0]
    single = _two_calls(LearnedPredictor(trainer, VIEW))
    for got, p in zip(_two_calls(LearnedPredictor(trainer, VIEW, draws=True)), single, strict=True):
        np.testing.assert_array_equal(got, p[None])
    for got, p in zip(_two_calls(LearnedPredictor(trainer, VIEW), np.sqrt), single, strict=True):
        np.testing.assert_array_equal(got, np.sqrt(p))


def test_a_recalibration_that_fails_is_an_error_and_no_hang():
    def broken(_):
        raise ZeroDivisionError("broken map")

    with pytest.raises(RuntimeError, match="could not score.*broken map"):
        _two_calls(LearnedPredictor(_trained()[0], VIEW), broken)


def test_calls_that_arrive_while_a_pass_runs_are_served():
    scorer, trees = _ready(), [_tree(seed) for seed in range(4)]

    async def late(delay, tree):
        await asyncio.sleep(delay)
        return await scorer.score_anchors(tree, query.anchors(tree))

    async def all_of_them():
        return await asyncio.gather(*(late(0.001 * i, tree) for i, tree in enumerate(trees)))

    got = asyncio.run(asyncio.wait_for(all_of_them(), 30))
    assert [scores.size for scores in got] == [6, 6, 6, 6]


def test_raw_scores_are_those_of_prompts_before_the_recalibration():
    """Of any parameters, whatever was published; members are averaged; nothing asked for needs no pass."""
    trainer, params = _trained()
    prompts = [Prompt(str(i), np.full(3 + i, i, np.int32), None) for i in range(6)]
    histories = [prompt.tokens for prompt in prompts]
    for scorer in (LearnedPredictor(trainer, VIEW), LearnedPredictor(_Members(trainer), VIEW, draws=True)):
        scorer.set_params(params, None)
        want = np.atleast_2d(asyncio.run(scorer.score_prompts(prompts))).mean(axis=0)
        scorer.set_params(None, None, np.sqrt)
        got = scorer.raw(params, None, histories)
        assert got.shape == (6,) and got.dtype == np.float64 and np.ptp(got) > 1e-3
        np.testing.assert_array_equal(got, want)
    counting = _Counting(trainer)
    assert LearnedPredictor(counting, VIEW).raw(params, None, []).shape == (0,) and counting.calls == 0


def test_no_anchor_needs_no_pass():
    scorer = LearnedPredictor(_Counting(_trained()[0]), VIEW)  # without parameters: a pass would fail
    assert asyncio.run(scorer.score_anchors(_tree(0), np.zeros(0, np.int32))).shape == (0,)
    scorer = LearnedPredictor(_Counting(_trained()[0]), VIEW, draws=True)
    assert asyncio.run(scorer.score_prompts([])).shape == (1, 0)


def test_errors_reach_every_caller_and_the_next_call_works():
    trainer, params = _trained()
    scorer = LearnedPredictor(trainer, VIEW)

    async def fail():
        calls = [scorer.score_anchors(_tree(i), query.anchors(_tree(i))) for i in range(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(fail()):
        assert isinstance(error, RuntimeError) and "call set_params first" in str(error)
    scorer.set_params(params, None)
    assert asyncio.run(scorer.score_prompts([Prompt("u", np.ones(3, np.int32), None)])).shape == (1,)


def test_bad_histories_are_an_error_where_they_were_asked_for_and_nowhere_else():
    trainer, params = _trained()
    scorer = LearnedPredictor(trainer, HistoryView(max_tokens=LENGTH, skip=3))
    scorer.set_params(params, None)
    short, tree = Prompt("short", np.ones(3, np.int32), None), _tree(0)

    async def run():
        calls = [scorer.score_prompts([short]), scorer.score_anchors(tree, query.anchors(tree))]
        return await asyncio.gather(*calls, return_exceptions=True)

    error, scores = asyncio.run(asyncio.wait_for(run(), 30))
    assert isinstance(error, ValueError) and "prompt 'short' has 3 tokens, all among the first 3" in str(error)
    assert scores.shape == (6,)


def test_a_view_that_no_row_can_hold_is_refused():
    with pytest.raises(ValueError, match="view has up to 33 tokens, but its rows hold 32"):
        LearnedPredictor(_trained()[0], HistoryView(max_tokens=33))


def test_a_cancelled_call_does_not_disturb_the_others():
    scorer, tree = _ready(), _tree(1)

    async def run():
        first = asyncio.create_task(scorer.score_anchors(tree, query.anchors(tree)))
        second = asyncio.create_task(scorer.score_anchors(tree, query.anchors(tree)))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(asyncio.wait_for(run(), 30)).size == 6


def test_allocation_metrics_by_hand():
    """Three prompts with scores .2, .6, .9 and successes (0, 0), (1, 0), (1, 1): targets 0, .5, 1.

    Ranks agree: Spearman 1. Brier over the six bare rollouts: (2 * .04 + .16 + .36 + 2 * .01) / 6 = .62 / 6.
    ECE with ten bins, one per score: (2 * |.2 - 0| + 2 * |.6 - .5| + 2 * |.9 - 1|) / 6 = .8 / 6.
    """
    trees = []
    for seed, (score, successes) in enumerate([(0.2, (0.0, 0.0)), (0.6, (1.0, 0.0)), (0.9, (1.0, 1.0))]):
        tree = _tree(seed, successes)
        anchors = query.anchors(tree)
        # an anchor that was not forked has its rollout's success as target; scored 1 - target, the correlation is -1
        values = [1 - float(tree.success[leaf]) for leaf in query.factual_leaf(tree, anchors)]
        trees.append(grow.with_values(tree, np.array([0, *anchors]), np.array([score, *values])))
    got = allocation_metrics(trees)
    assert got["predictor/spearman_prompt"] == pytest.approx(1)
    assert got["predictor/spearman_prefix"] == pytest.approx(-1)
    assert got["predictor/brier"] == pytest.approx(0.62 / 6, abs=1e-6)
    assert got["predictor/ece"] == pytest.approx(0.8 / 6, abs=1e-6)


def test_continuations_count_for_the_targets_and_not_for_calibration():
    rng = np.random.default_rng(0)
    tree = _tree(0, (1.0, 1.0))
    tree = grow.add_rollouts(tree, [(1, Stage.CONTINUATION, _turns(rng, 1, 0.0))] * 2)
    tree = grow.with_values(tree, np.array([0]), np.array([1.0]))
    got = allocation_metrics([tree])
    assert got["predictor/brier"] == 0 and got["predictor/ece"] == 0  # both bare rollouts succeeded
    assert math.isnan(got["predictor/spearman_prompt"]) and math.isnan(got["predictor/spearman_prefix"])


def test_metrics_of_fresh_outcomes_by_hand():
    """Bare rollouts of 6 turns, successes 1 and 0, root scored .5. Continuations (turns, success), anchors by depth:

    depth 1, score .8: (1, 1), (3, 0)      bias .8 - .5 = .3     squares .04, .64           mean .34
    depth 2, score .4: none                NaN
    depth 3, not scored: (1, 1)            left out
    depth 4, score .1: (2, 1)              depth 4 and 5 are one: outcomes 1, 0, 0, scores .1, .6, .6
    depth 5, score .6: (1, 0), (1, 0)      bias 1.3/3 - 1/3 = .1 squares .81, .36, .36      mean .51
    and one at depth 5 that the engine gave up on.
    """
    rng = np.random.default_rng(0)
    tree = grow.new_tree(Prompt(uid="u", tokens=np.ones(3, np.int32), state=None))
    tree = grow.add_rollouts(tree, [(0, Stage.ROOT_ROLLOUT, _turns(rng, 6, s)) for s in (1.0, 0.0)])
    tree = grow.with_values(tree, np.array([0, 1, 2, 4, 5]), np.array([0.5, 0.8, 0.4, 0.1, 0.6]))
    forks = [(1, 1, 1.0), (5, 1, 0.0), (4, 2, 1.0), (1, 3, 0.0), (3, 1, 1.0), (5, 1, 0.0)]
    rollouts = [(node, Stage.CONTINUATION, _turns(rng, turns, success)) for node, turns, success in forks]
    failed = dataclasses.replace(_turns(rng, 1, 0.0)[0], finish=Finish.ENGINE_ERROR)
    got = allocation_metrics([grow.add_rollouts(tree, [*rollouts, (5, Stage.CONTINUATION, [failed])])])
    assert got["predictor/brier_prefix"] == pytest.approx((0.04 + 0.64 + 0.81 + 0.36 + 0.36) / 5, abs=1e-6)
    want = {"bias": [0.0, 0.3, math.nan, math.nan, 0.1], "mse": [0.25, 0.34, math.nan, math.nan, 0.51]}
    for kind, values in want.items():
        found = [got[f"predictor/{kind}_depth_{d}"] for d in range(5)]
        np.testing.assert_allclose(found, values, atol=1e-6)
    assert len(got) == 15


def test_a_rollout_that_the_engine_gave_up_on_is_no_outcome():
    """Scored .4, of which one rollout succeeds and one fails, and .8, which succeeds; each with another one given up."""
    trees = []
    for seed, (score, successes) in enumerate([(0.4, (1.0, 0.0, 0.0)), (0.8, (1.0, 0.0))]):
        tree = grow.with_values(_tree(seed, successes), np.array([0]), np.array([score]))
        finish = tree.finish.copy()
        finish[query.leaves(tree)[-1]] = Finish.ENGINE_ERROR
        trees.append(dataclasses.replace(tree, finish=finish))
    lost = dataclasses.replace(trees[0], finish=np.full_like(trees[0].finish, Finish.ENGINE_ERROR))
    got = allocation_metrics([*trees, lost])
    assert got["predictor/brier"] == pytest.approx((0.36 + 0.16 + 0.04) / 3, abs=1e-6)
    assert got["predictor/ece"] == pytest.approx((2 * abs(0.4 - 0.5) + abs(0.8 - 1)) / 3, abs=1e-6)
    assert got["predictor/bias_depth_0"] == pytest.approx((0.4 + 0.4 + 0.8 - 2) / 3, abs=1e-6)
    assert got["predictor/spearman_prompt"] == pytest.approx(1)


def test_nothing_scored_is_nan():
    assert all(math.isnan(x) for x in allocation_metrics([_tree(0)]).values())
    assert all(math.isnan(x) for x in allocation_metrics([]).values())
