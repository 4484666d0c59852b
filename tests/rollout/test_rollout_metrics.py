"""Metrics of a step. Oracles: counts by hand on a tree of three rollouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trace_jax.budget.account import BudgetCount
from trace_jax.rollout.collect import Collected
from trace_jax.rollout.metrics import rollout_metrics, staleness
from trace_jax.tree import grow
from trace_jax.types import Finish, Stage, Turn


def turn(size, version, *, success=None):
    finish = Finish.TURN if success is None else Finish.ANSWER
    seen = np.ones(2 if success is None else 0, np.int32)
    return Turn(np.ones(size, np.int32), np.full(size, -1.0, np.float32), seen, finish, version, success, success)


def grown(toy, uid, versions=(3, 3, 3)):
    """Rollouts of 2 + 1 and 4 tokens and a fork of 3 tokens: 10 sampled tokens, one success in three."""
    first, second, third = versions
    tree = grow.new_tree(toy.prompt(uid))
    tree = grow.add_rollouts(tree, [(0, Stage.ROOT_ROLLOUT, [turn(2, first), turn(1, first, success=1.0)])])
    tree = grow.add_rollouts(tree, [(0, Stage.ROOT_ROLLOUT, [turn(4, second, success=0.0)])])
    return grow.add_rollouts(tree, [(1, Stage.CONTINUATION, [turn(3, third, success=0.0)])])


def collected(tree, **counts):
    return Collected(tree, BudgetCount(**counts), 0, ("tool died",), 1.0, 0.0, 1.0)


def test_counts_and_shares(toy):
    trees = [grown(toy, "a"), grown(toy, "b")]
    counts = {"units": 2.5, "generated_tokens": 10, "prefilled_tokens": 5, "cached_tokens": 20, "tool_calls": 1}
    forks = {"prefix_tokens": 40, "prefix_cached_tokens": 39}, {"prefix_tokens": 60, "prefix_cached_tokens": 57}
    report = rollout_metrics([collected(t, **counts, **f) for t, f in zip(trees, forks, strict=True)], trees, pool=5)
    got = {name.removeprefix("rollout/"): value for name, value in report.items()}
    # groups of a tree: all three leaves (mixed), and the two below node 1 (mixed)
    want = {
        "effective_ratio": 1.0, "useful_groups": 4, "useful_groups_per_unit": 4 / 5, "active_prompts": 2,
        "skipped_prompts": 3, "budget_units": 5.0, "generated_tokens": 20, "prefilled_tokens": 10, "cached_tokens": 40,
        "prefix_hit_rate": 0.96, "tool_calls": 2, "success": 0.5, "root_rollouts": 4, "continuations": 2,
        "fallback_rollouts": 0, "mixed_version_trees": 0, "errors": 2, "finish_answer": 6, "finish_deadline": 0,
    }  # fmt: skip
    assert {name: got[name] for name in want} == pytest.approx(want)


def test_without_forks_nothing_was_missed(toy):
    tree = grow.add_rollouts(
        grow.new_tree(toy.prompt()), [(0, Stage.ROOT_ROLLOUT, [turn(1, 0, success=1.0)]) for _ in range(2)]
    )
    assert rollout_metrics([collected(tree)], [tree], pool=1)["rollout/prefix_hit_rate"] == 1.0


def test_versions_of_a_tree(toy):
    trees = [grown(toy, "a"), grown(toy, "b", (3, 3, 2))]
    report = rollout_metrics([collected(tree) for tree in trees], trees, pool=2)
    assert report["rollout/mixed_version_trees"] == 1
    # at version 4: 17 tokens of version 3 are one behind, 3 of version 2 are two behind
    assert staleness(trees, 4) == pytest.approx((17 * 1 + 3 * 2) / 20)
    assert staleness([grown(toy, "a")], 3) == 0.0 and staleness([], 3) == 0.0


def test_a_turn_without_tokens_has_no_version(toy):
    empty = dataclasses.replace(turn(0, -1, success=0.0), finish=Finish.ENGINE_ERROR)
    tree = grow.add_rollouts(grown(toy, "a"), [(0, Stage.ROOT_ROLLOUT, [empty])])
    assert rollout_metrics([collected(tree)], [tree], pool=1)["rollout/mixed_version_trees"] == 0
    assert staleness([tree], 4) == 1.0
