"""Metrics by hand on the worked tree, and against direct counting over the nested form."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tree.tree_oracle import SPEC_VECTORS, Case, build, cases, chain, make_turn, worked_case
from trace_jax.tree import metrics
from trace_jax.types import Finish, Stage

MIXED = worked_case().tree
SOLVED = build([chain(2, 1.0), chain(2, 1.0)], [(0, 1, chain(1, 1.0))]).tree


def test_the_worked_tree():
    assert metrics.is_effective(MIXED) is SPEC_VECTORS["worked_tree"]["effective"]
    # The root (1, 0, 0, 1, 1, 0), anchor 1 (1, 0, 1) and anchor 4 (0, 1, 0) all vary.
    assert metrics.useful_groups([MIXED]) == 3
    # Bare rollouts 1 and 0; the continuations do not count.
    assert metrics.success_rate([MIXED]) == 0.5
    assert metrics.num_rollouts([MIXED], Stage.ROOT_ROLLOUT) == 2
    assert metrics.num_rollouts([MIXED], Stage.CONTINUATION) == 4
    # Five bare turns and four continuations of one turn, two action tokens each.
    assert metrics.action_tokens([MIXED], Stage.ROOT_ROLLOUT) == 10
    assert metrics.action_tokens([MIXED], Stage.CONTINUATION) == 8


def test_effective_ratio_is_over_the_trees_given():
    assert metrics.effective_ratio([MIXED, SOLVED, SOLVED, SOLVED]) == 0.25
    assert metrics.effective_ratio([MIXED]) == 1.0


def test_success_rate_weighs_rollouts_not_trees():
    one_of_four = build([chain(1, r) for r in (1.0, 0.0, 0.0, 0.0)]).tree
    assert metrics.success_rate([SOLVED, one_of_four]) == 3 / 6


def test_continuations_alone_can_make_a_tree_effective():
    tree = build([chain(2, 1.0), chain(2, 1.0)], [(0, 1, chain(1, 0.0))]).tree
    assert metrics.is_effective(tree) and metrics.success_rate([tree]) == 1.0


def test_fractional_rewards_count_in_groups_and_not_in_the_effective_ratio():
    tree = build([[make_turn(1, 0, r, success=1.0)] for r in (1.0, 0.67)]).tree
    assert not metrics.is_effective(tree)
    assert metrics.useful_groups([tree]) == 1


@given(st.lists(cases(), max_size=3))
def test_against_direct_counting(batch: list[Case]):
    trees = [case.tree for case in batch]
    effective = [len({leaf.turn.success for leaf in case.root.leaves()}) > 1 for case in batch]
    assert metrics.effective_ratio(trees) == pytest.approx(sum(effective) / max(len(batch), 1))
    nodes = [node for case in batch for node in case.root.preorder()]
    varied = [n for n in nodes if len(n.children) >= 2 and len({leaf.turn.reward for leaf in n.leaves()}) > 1]
    # A lone bare rollout's root does not branch; it is a group all the same, that of all leaves.
    lone = [c.root for c in batch if len(c.root.children) == 1 and len({x.turn.reward for x in c.root.leaves()}) > 1]
    assert metrics.useful_groups(trees) == len(varied) + len(lone)
    counted = sum(metrics.action_tokens(trees, stage) for stage in (Stage.ROOT_ROLLOUT, Stage.CONTINUATION))
    assert counted == sum(node.action_size() for node in nodes)
    ends = [node for node in nodes if not node.children]
    bare = [leaf.turn.success for leaf in ends if leaf.bare]
    assert metrics.success_rate(trees) == pytest.approx(sum(bare) / max(len(bare), 1))
    assert metrics.num_rollouts(trees, Stage.ROOT_ROLLOUT) == len(bare)
    assert metrics.num_rollouts(trees, Stage.CONTINUATION) == len(ends) - len(bare)


def test_finish_counts_name_every_reason():
    def ended(finish: Finish):
        return [make_turn(1, 1), dataclasses.replace(make_turn(1, 0, 0.0), finish=finish)]

    tree = build([ended(Finish.ANSWER), ended(Finish.LENGTH)], [(0, 1, ended(Finish.LENGTH))]).tree
    assert metrics.finish_counts([tree, tree]) == {
        "answer": 2,
        "turn_limit": 0,
        "length": 4,
        "deadline": 0,
        "environment_error": 0,
        "engine_error": 0,
    }


def test_no_trees():
    assert metrics.effective_ratio([]) == 0 and metrics.success_rate([]) == 0
    assert metrics.useful_groups([]) == 0 and metrics.action_tokens([], Stage.ROOT_ROLLOUT) == 0
    assert set(metrics.finish_counts([]).values()) == {0}
