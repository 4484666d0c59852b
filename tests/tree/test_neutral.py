"""Leaves that the engine gave up on. Oracle: the advantages of a tree in which they had the others' mean, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trace_jax.tree import advantage, grow, metrics
from trace_jax.tree.neutral import neutral
from trace_jax.types import Finish, Prompt, Stage, Turn


def tree(*rewards: float | None):
    """Bare rollouts of two turns; None: the engine gave up in the second one."""

    def rollout(reward):
        first = Turn(np.ones(2, np.int32), np.full(2, -1.0, np.float32), np.ones(1, np.int32), Finish.TURN, 0)
        size, finish = (0, Finish.ENGINE_ERROR) if reward is None else (2, Finish.ANSWER)
        last = Turn(np.ones(size, np.int32), np.full(size, -1.0, np.float32), np.zeros(0, np.int32), finish, 0)
        return [first, dataclasses.replace(last, reward=reward or 0.0, success=float(bool(reward)))]

    start = grow.new_tree(Prompt("p", np.ones(3, np.int32), None))
    return grow.add_rollouts(start, [(0, Stage.ROOT_ROLLOUT, rollout(reward)) for reward in rewards]).validate()


def by_leaf(credit):
    """{leaf: its advantages}"""
    return {leaf: set(credit.advantage[credit.leaf == leaf].tolist()) for leaf in np.unique(credit.leaf).tolist()}


def test_a_failed_leaf_has_the_mean_of_the_others():
    # leaves 2, 4, 6, 8 with rewards 1, 0.5, (failed), 0; the others' mean is 0.5
    found = neutral(tree(1.0, 0.5, None, 0.0)).validate()
    assert found.reward[[2, 4, 6, 8]].tolist() == [1.0, 0.5, 0.5, 0.0]
    assert np.isnan(found.reward[[0, 1, 3, 5, 7]]).all()


def test_its_turns_are_not_trained_and_the_others_keep_their_baseline():
    """Dr. GRPO: reward minus the group's mean, 0.5 with and without the failed leaf."""
    found = by_leaf(advantage.dr_grpo(neutral(tree(1.0, 0.5, None, 0.0))))
    assert found.get(6, {0.0}) == {0.0}
    assert [found[leaf] for leaf in (2, 8)] == [{0.5}, {-0.5}]
    assert by_leaf(advantage.dr_grpo(tree(1.0, 0.5, None, 0.0)))[6] == {-0.375}  # what it would be


def test_it_makes_no_contrast():
    one = tree(1.0, 1.0, None)
    assert not metrics.is_effective(one) and metrics.useful_groups([one]) == 0
    assert not np.any(advantage.grpo(neutral(one)).advantage)
    assert metrics.is_effective(tree(1.0, 0.0, None)) and metrics.useful_groups([tree(1.0, 0.0, None)]) == 1


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (None, None)])
def test_where_there_is_nothing_to_mend_the_tree_is_the_same(rewards):
    one = tree(*rewards)
    assert neutral(one) is one and not metrics.is_effective(tree(None, None))
