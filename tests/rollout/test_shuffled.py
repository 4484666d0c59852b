"""Shuffled scores: the same numbers, elsewhere; functions of seed, step and prompt."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from trace_jax.rollout.shuffled import ShuffledPredictor
from trace_jax.tree import grow
from trace_jax.types import Prompt

PROMPTS = [Prompt(f"task/train/{i}", np.arange(1, 3, dtype=np.int32), None) for i in range(64)]


class Numbered:
    """Scores that name their own place; `draws` rows of them."""

    def __init__(self, draws=None):
        self._rows = () if draws is None else (draws,)

    def _scores(self, count):
        return np.broadcast_to(np.arange(count) / count, (*self._rows, count))

    async def score_prompts(self, prompts):
        return self._scores(len(prompts))

    async def score_anchors(self, tree, anchors):
        return self._scores(len(anchors))


def prompt_scores(seed=0, step=0, draws=None):
    return asyncio.run(ShuffledPredictor(Numbered(draws), seed, step).score_prompts(PROMPTS))


def anchor_scores(uid, count=32):
    tree = grow.new_tree(Prompt(uid, np.array([1], np.int32), None))
    return asyncio.run(ShuffledPredictor(Numbered(), 0, 0).score_anchors(tree, np.arange(count)))


def test_the_same_numbers_elsewhere():
    scores = prompt_scores()
    assert sorted(scores) == (np.arange(64) / 64).tolist()
    assert np.mean(scores == np.arange(64) / 64) < 0.1  # a random permutation of 64 has one fixed point on average


def test_a_permutation_belongs_to_seed_step_and_prompt():
    assert np.array_equal(prompt_scores(1, 2), prompt_scores(1, 2))
    for other in (prompt_scores(1, 3), prompt_scores(2, 2)):
        assert not np.array_equal(prompt_scores(1, 2), other)
    assert np.array_equal(anchor_scores("a"), anchor_scores("a"))
    assert not np.array_equal(anchor_scores("a"), anchor_scores("b"))
    assert sorted(anchor_scores("a")) == (np.arange(32) / 32).tolist()


def test_draws_stay_together():
    scores = prompt_scores(draws=3)
    assert scores.shape == (3, 64) and np.array_equal(scores[0], scores[2])


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_shuffle(count):
    assert anchor_scores("a", count).tolist() == [0.0] * count
