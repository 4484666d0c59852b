"""Recorded states: looked up by tokens, scored without a forward pass, refused where nothing was recorded."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from trace_jax.train.history_view import HistoryView
from trace_jax.train.state_record import RecordedPredictor, StateRecord
from trace_jax.tree import grow, query
from trace_jax.types import Finish, Prompt, Stage, Turn

VIEW = HistoryView(max_tokens=32)


def history(*tokens):
    return np.array(tokens, np.int32)


def features(tokens):
    """What the stand-in keeps of a history: its length and its last token."""
    return np.array([tokens.size, tokens[-1]], np.float32)


class Engine:
    """Keeps what it is asked for; writes down the salts."""

    weight_version = 7

    def __init__(self):
        self.state_record, self.salts = {}, set()

    async def states(self, histories, salt=""):
        self.salts.add(salt)
        self.state_record |= {one.tobytes(): features(one) for one in histories}
        return np.stack([features(one) for one in histories])


def probability(params, x_n2):
    """params / (length + last token), so that scores tell histories apart."""
    return params / x_n2.sum(axis=1).astype(np.float64)


def tree():
    turn = lambda action, last: Turn(
        history(action), np.full(1, -1, np.float32), history() if last else history(9),
        Finish.ANSWER if last else Finish.TURN, 0, **({"reward": 1.0, "success": 1.0} if last else {}),
    )  # fmt: skip
    start = grow.new_tree(Prompt("p", history(4, 5), None))
    return grow.add_rollouts(start, [(0, Stage.ROOT_ROLLOUT, [turn(1, False), turn(2, False), turn(3, True)])])


def test_a_record_is_read_by_tokens():
    record = StateRecord({history(1, 2).tobytes(): features(history(1, 2)), history(3).tobytes(): features(history(3))})
    assert record.of([history(3), history(1, 2), history(3)]).tolist() == [[1, 3], [2, 2], [1, 3]]
    assert record.known([history(3), history(2, 1), history(1, 2)]).tolist() == [True, False, True]
    assert record.known([]).tolist() == []
    with pytest.raises(ValueError, match=r"history 1 of 2 \(2 tokens\) has no recorded state"):
        record.of([history(3), history(2, 1)])


def test_scores_come_from_the_engine_under_its_weights():
    engine = Engine()
    predictor = RecordedPredictor(engine, VIEW, probability)
    predictor.set_params(6.0, None)
    prompts = [Prompt("a", history(4, 5), None), Prompt("b", history(8), None)]
    assert asyncio.run(predictor.score_prompts(prompts)).tolist() == [6 / 7, 6 / 9]
    grown = tree()
    # the histories behind the two turns: 4 5 1 9 and 4 5 1 9 2 9
    assert asyncio.run(predictor.score_anchors(grown, query.anchors(grown))).tolist() == [6 / 13, 6 / 15]
    assert engine.salts == {"7"}  # the rollouts of these weights find the prompts' keys and values
    record = StateRecord(engine.state_record)
    assert predictor.raw(3.0, record, VIEW.of_nodes(grown, [0, 1])).tolist() == [3 / 7, 3 / 13]
    assert predictor.raw(3.0, record, []).size == 0


def test_scores_are_recalibrated_and_draws_averaged_where_raw():
    two = lambda params, x: np.stack([x[:, 0] / 4, x[:, 0] / 8])
    prompts = [Prompt("a", history(4, 5), None)]
    for draws, expected in ((True, [[0.5], [0.75]]), (False, [0.625])):
        predictor = RecordedPredictor(Engine(), VIEW, two, draws=draws)
        predictor.set_params(0.0, None, lambda p: 1 - p)
        assert asyncio.run(predictor.score_prompts(prompts)).tolist() == expected
    record = StateRecord({history(4, 5).tobytes(): features(history(4, 5))})
    assert predictor.raw(None, record, [history(4, 5)]).tolist() == [0.375]


def test_nothing_is_scored_without_parameters():
    with pytest.raises(RuntimeError, match="call set_params first"):
        asyncio.run(RecordedPredictor(Engine(), VIEW, probability).score_prompts([Prompt("a", history(4), None)]))
