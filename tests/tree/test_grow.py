"""Growing trees, against the nested form and by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from tests.tree.tree_oracle import Case, build, cases, chain, make_turn, worked_case
from trace_jax.tree import grow
from trace_jax.types import Finish, NodeKind, Prompt, RolloutTree, Stage

PROMPT = Prompt("p", np.array([1, 2], np.int32), state=None)


def same(a: RolloutTree, b: RolloutTree) -> bool:
    names = [field.name for field in dataclasses.fields(RolloutTree) if field.name != "prompt_uid"]
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    return a.prompt_uid == b.prompt_uid and all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs
    )


def test_a_new_tree_is_the_prompt():
    tree = grow.new_tree(PROMPT).validate()
    assert tree.num_nodes == 1 and tree.kind[0] == NodeKind.ROOT and tree.prompt_uid == "p"
    assert tree.token.tolist() == [1, 2] and not tree.is_action.any() and np.isnan(tree.reward[0])


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="'q'.*non-empty"):
        grow.new_tree(Prompt("q", np.zeros(0, np.int32), state=None))


def test_one_rollout_by_hand():
    turns = [make_turn([5, 6], [7]), make_turn([8], [], reward=0.25, success=1.0)]
    tree = grow.add_rollouts(grow.new_tree(PROMPT), [(0, Stage.ROOT_ROLLOUT, turns)])
    assert tree.parent.tolist() == [-1, 0, 1]
    assert tree.kind.tolist() == [NodeKind.ROOT, NodeKind.TURN, NodeKind.LEAF]
    assert tree.finish.tolist() == [Finish.TURN, Finish.TURN, Finish.ANSWER]
    assert tree.offset.tolist() == [0, 2, 5, 6]
    assert tree.token.tolist() == [1, 2, 5, 6, 7, 8]
    assert tree.is_action.tolist() == [False, False, True, True, False, True]
    expected = [0, 0, *turns[0].logprobs, 0, *turns[1].logprobs]
    assert tree.logprob.tolist() == [float(x) for x in expected]
    np.testing.assert_array_equal(tree.reward, np.float32([np.nan, np.nan, 0.25]))
    np.testing.assert_array_equal(tree.success, np.float32([np.nan, np.nan, 1.0]))
    assert tree.weight_version.tolist() == [-1, 3, 3] and np.isnan(tree.value).all()


@given(cases())
def test_nodes_stand_in_the_order_in_which_they_were_added(case: Case):
    tree = case.tree
    for node in case.by_index():
        span = slice(tree.offset[node.index], tree.offset[node.index + 1])
        assert tree.token[span].tolist() == node.tokens()
        assert tree.is_action[span].sum() == node.action_size()
        assert all(tree.parent[child.index] == node.index for child in node.children)
        if node.turn is not None:
            assert tree.stage[node.index] == (Stage.ROOT_ROLLOUT if node.bare else Stage.CONTINUATION)
            assert (tree.kind[node.index] == NodeKind.LEAF) == (not node.children)
            assert tree.logprob[span][: node.action_size()].tolist() == node.turn.logprobs.tolist()
            if not node.children:
                assert tree.reward[node.index] == np.float32(node.turn.reward)
                assert tree.success[node.index] == node.turn.success


def test_growing_leaves_the_old_tree_and_its_ids_alone():
    old = build([chain(3, 1.0)]).tree
    kept = dataclasses.replace(old, **{f.name: np.copy(getattr(old, f.name)) for f in dataclasses.fields(old)[1:]})
    new = grow.add_rollouts(old, [(1, Stage.CONTINUATION, chain(2, 0.0)), (0, Stage.ROOT_ROLLOUT, chain(1, 0.0))])
    assert same(old, kept)
    assert new.parent[: old.num_nodes].tolist() == old.parent.tolist()
    assert new.token[: old.token.size].tolist() == old.token.tolist()
    assert new.parent[old.num_nodes :].tolist() == [1, 4, 0]


def test_no_rollouts_change_nothing():
    tree = worked_case().tree
    assert grow.add_rollouts(tree, []) is tree


def test_a_rollout_whose_last_turn_sampled_nothing_is_kept():
    tree = build([[make_turn(2, 1), make_turn([], [], reward=0.0)]]).tree
    assert tree.action_counts().tolist() == [0, 2, 0] and tree.reward[2] == 0


@pytest.mark.parametrize(
    ("node", "stage", "message"),
    [
        (1, Stage.ROOT_ROLLOUT, "root rollout at node 1"),
        (0, Stage.CONTINUATION, r"continuation at node 0; fork at an anchor, one of \[1, 2, 4\]"),
        (3, Stage.CONTINUATION, "continuation at node 3"),  # a leaf: the last legal turn
        (6, Stage.CONTINUATION, "continuation at node 6"),  # on a continuation
        (99, Stage.CONTINUATION, "continuation at node 99"),
        (0, Stage.PROMPT, "stage"),
    ],
)
def test_forks_go_to_anchors_only(node, stage, message):
    with pytest.raises(ValueError, match=message):
        grow.add_rollouts(worked_case().tree, [(node, stage, chain(1, 0.0))])


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "without turns"),
        ([make_turn(2, 1)], "turn 1 of 1 ends the rollout without a reward"),
        ([make_turn(2, 0, 1.0), make_turn(2, 0, 1.0)], "turn 1 of 2 carries a reward"),
        ([make_turn(2, 1, 1.0)], "1 observation tokens"),
        ([dataclasses.replace(make_turn(2, 0, 1.0), logprobs=np.zeros(1, np.float32))], "each needs one"),
        ([dataclasses.replace(make_turn(2, 0, 1.0), action=np.zeros(2, np.int64))], "int64"),
        ([dataclasses.replace(make_turn(2, 0, 1.0), logprobs=np.full(2, np.nan, np.float32))], "log-prob"),
        ([make_turn(2, 0, 1.0, success=0.5)], "success of 0 or 1"),
        ([make_turn(2, 0, np.nan, success=0.0)], "finite reward"),
        ([make_turn(0, 1), make_turn(1, 0, 1.0)], "node 1 goes on without an action token"),
        ([dataclasses.replace(make_turn(2, 0, 1.0), finish=Finish.TURN)], "finish"),
    ],
)
def test_malformed_turns_are_refused(turns, message):
    with pytest.raises(ValueError, match=message):
        grow.add_rollouts(grow.new_tree(PROMPT), [(0, Stage.ROOT_ROLLOUT, turns)])


def test_values_are_written_on_their_nodes():
    tree = worked_case().tree
    scored = grow.with_values(tree, np.array([1, 2, 4]), np.array([0.6, 0.9, 0.3]))
    np.testing.assert_array_equal(np.flatnonzero(~np.isnan(scored.value)), [1, 2, 4])
    np.testing.assert_array_equal(scored.value[[1, 2, 4]], np.float32([0.6, 0.9, 0.3]))
    assert np.isnan(tree.value).all()
    assert same(dataclasses.replace(scored, value=tree.value), tree)
    assert same(grow.with_values(tree, np.zeros(0, int), np.zeros(0)), tree)


@pytest.mark.parametrize(
    ("nodes", "values", "message"),
    [([1, 2], [0.5], "pass one per node"), ([1], [1.5], "1.5"), ([1], [np.nan], "nan")],
)
def test_values_that_are_none_are_refused(nodes, values, message):
    with pytest.raises(ValueError, match=message):
        grow.with_values(worked_case().tree, np.array(nodes), np.array(values))
