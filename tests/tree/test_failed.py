"""Leaves that the engine gave up on. Oracle: the tree that was grown without them, and advantages by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trace_jax.tree import advantage, grow, metrics
from trace_jax.tree.failed import without_failed
from trace_jax.types import Finish, Prompt, RolloutTree, Stage, Turn

ESTIMATORS = [advantage.grpo, advantage.dr_grpo, advantage.tree_rpo, advantage.tree_grpo, advantage.tree_rloo]


def rollout(reward: float | None, token: int = 1) -> list[Turn]:
    """Two turns of `token`; None: the engine gave up in the second one."""
    first = Turn(np.full(2, token, np.int32), np.full(2, -token, np.float32), np.ones(1, np.int32), Finish.TURN, 0)
    size, finish = (0, Finish.ENGINE_ERROR) if reward is None else (2, Finish.ANSWER)
    last = Turn(np.full(size, token, np.int32), np.full(size, -1.0, np.float32), np.zeros(0, np.int32), finish, 0)
    return [first, dataclasses.replace(last, reward=reward or 0.0, success=float(bool(reward)))]


def tree(*rewards: float | None, forks: tuple[tuple[int, float | None], ...] = ()) -> RolloutTree:
    """Bare rollouts, rollout i at the nodes 2i + 1 and 2i + 2, then one-turn continuations at nodes."""
    start = grow.new_tree(Prompt("p", np.ones(3, np.int32), None))
    grown = grow.add_rollouts(start, [(0, Stage.ROOT_ROLLOUT, rollout(r, i + 1)) for i, r in enumerate(rewards)])
    return grow.add_rollouts(grown, [(node, Stage.CONTINUATION, rollout(r)[1:]) for node, r in forks]).validate()


def assert_same(one: RolloutTree, other: RolloutTree) -> None:
    for field in dataclasses.fields(RolloutTree):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


def by_leaf(tree, credit):
    """{(reward, own token) of a leaf: its advantages}"""
    name = lambda leaf: (float(tree.reward[leaf]), int(tree.token[tree.offset[leaf]]))
    leaves = np.unique(credit.leaf).tolist()
    return {name(leaf): set(credit.advantage[credit.leaf == leaf].tolist()) for leaf in leaves}


def test_what_is_left_is_the_tree_of_the_others():
    assert_same(without_failed(tree(1.0, None, forks=())), tree(1.0))
    found = without_failed(tree(1.0, 0.5, None, 0.0, forks=((1, 0.0), (3, None))))
    expected = tree(1.0, 0.5, 0.25, 0.0, forks=((1, 0.0),))
    kept = np.flatnonzero(~np.isin(np.arange(expected.num_nodes), [5, 6]))
    np.testing.assert_array_equal(found.reward, expected.reward[kept])
    np.testing.assert_array_equal(found.parent, [-1, 0, 1, 0, 3, 0, 5, 1])
    # prompt 1 1 1, then per rollout two own tokens and an observation, two of the leaf; the fork's two tokens
    np.testing.assert_array_equal(found.token, [1, 1, 1] + [1, 1, 1, 1, 1] + [2, 2, 1, 2, 2] + [4, 4, 1, 4, 4] + [1, 1])
    np.testing.assert_array_equal(found.logprob[8:13], [-2, -2, 0, -1, -1])


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_the_others_are_trained_as_if_it_had_never_been(estimate):
    with_failed = without_failed(tree(1.0, 0.5, 0.0, None, forks=((1, 0.0), (3, None))))
    alone = tree(1.0, 0.5, 0.0, forks=((1, 0.0),))
    assert_same(with_failed, alone)
    assert by_leaf(with_failed, estimate(with_failed)) == by_leaf(alone, estimate(alone))


def test_the_predictors_score_is_not_compared_with_it():
    """RLOO with a score: of 1 and a failed one, V = 0.25 for two outcomes: 1 - 0.25, and nothing else is trained."""
    scored = grow.with_values(tree(1.0, None), np.array([0]), np.array([0.25]))
    left = without_failed(scored)
    credit = advantage.tree_rloo(left, prior=2.0)
    assert credit.advantage.tolist() == [0.75, 0.75] and credit.node.tolist() == [1, 2]


def test_a_continuation_takes_the_place_of_its_failed_factual_branch():
    left = without_failed(tree(None, 0.0, forks=((1, 1.0),)))
    assert left.parent.tolist() == [-1, 0, 0, 2, 1] and left.reward[[3, 4]].tolist() == [0.0, 1.0]
    # Two rollouts, 1 and 0, one group: A = 1 - 0 and 0 - 1, the turn above the continuation with it.
    credit = advantage.tree_rloo(left)
    assert dict(zip(credit.node.tolist(), credit.advantage.tolist(), strict=True)) == {1: 1.0, 4: 1.0, 2: -1.0, 3: -1.0}


def test_it_makes_no_contrast():
    one = tree(1.0, 1.0, None)
    assert not metrics.is_effective(one) and metrics.useful_groups([one]) == 0
    assert not np.any(advantage.grpo(without_failed(one)).advantage)
    # Below node 1 two right ones and a failed one, a wrong one elsewhere: the tree has contrast, the fork has none.
    forked = tree(1.0, 0.0, forks=((1, 1.0), (1, None)))
    assert metrics.is_effective(forked) and metrics.useful_groups([forked]) == 1
    assert metrics.useful_groups([tree(None, None)]) == 0 and not metrics.is_effective(tree(None, None))


def test_it_is_no_failure_of_the_policy():
    assert metrics.success_rate([tree(1.0, None, 0.0), tree(None, None), tree(1.0, None)]) == pytest.approx(2 / 3)


def test_without_any_other_leaf_the_prompt_is_left():
    left = without_failed(tree(None, None))
    assert left.num_nodes == 1 and left.token.tolist() == [1, 1, 1] and left.offset.tolist() == [0, 3]


def test_where_there_is_nothing_to_leave_out_the_tree_is_the_same():
    one = tree(1.0, 0.0)
    assert without_failed(one) is one
