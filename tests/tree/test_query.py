"""Reading trees, against recursion over the nested form and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.tree.tree_oracle import Branch, Case, build, cases, chain, make_turn, worked_case
from trace_jax.tree import grow, query
from trace_jax.types import Finish, Prompt


@given(cases())
def test_children(case: Case):
    below = query.children(case.tree)
    assert [ids.tolist() for ids in below] == [[c.index for c in node.children] for node in case.by_index()]
    assert all(ids.dtype == np.int32 for ids in below)


@given(cases())
def test_preorder(case: Case):
    assert query.preorder(case.tree).tolist() == [node.index for node in case.root.preorder()]


@given(cases())
def test_leaves_and_leaf_count(case: Case):
    assert query.leaves(case.tree).tolist() == sorted(leaf.index for leaf in case.root.leaves())
    assert query.leaf_count(case.tree).tolist() == [len(node.leaves()) for node in case.by_index()]


@given(cases())
def test_depth_path_and_history(case: Case):
    depth = query.depth(case.tree)

    def check(node: Branch, above: list[Branch]) -> None:
        route = [*above, node]
        assert depth[node.index] == len(above)
        assert query.path(case.tree, node.index).tolist() == [n.index for n in route]
        history = query.prefix_tokens(case.tree, node.index)
        assert history.dtype == np.int32
        assert history.tolist() == [token for n in route for token in n.tokens()]
        for child in node.children:
            check(child, route)

    check(case.root, [])


@given(cases())
def test_paths_lie_end_to_end(case: Case):
    which, node = query.paths(case.tree.parent, query.leaves(case.tree))
    expected = [(i, n.index) for i, route in enumerate(case.routes()) for n in route]
    assert list(zip(which.tolist(), node.tolist(), strict=True)) == expected


def test_paths_of_a_forest_and_of_nothing():
    # Two trees side by side: 0 -> 1 -> 2 and 3 -> 4; the ends may come in any order and need not be leaves.
    which, node = query.paths(np.array([-1, 0, 1, -1, 3]), np.array([4, 1, 2]))
    assert which.tolist() == [0, 0, 1, 1, 2, 2, 2] and node.tolist() == [3, 4, 0, 1, 0, 1, 2]
    which, node = query.paths(np.array([-1]), np.zeros(0, np.int64))
    assert which.size == 0 and node.size == 0


@given(cases())
def test_anchors_are_the_inner_turns_of_bare_rollouts(case: Case):
    expected = [n.index for n in case.root.preorder() if n.turn is not None and n.bare and n.children]
    assert query.anchors(case.tree).tolist() == sorted(expected)


@given(cases())
def test_factual_leaf_is_the_end_of_the_bare_rollout(case: Case):
    def end(node: Branch) -> Branch:
        bare = [child for child in node.children if child.bare]
        assert len(bare) <= 1
        return end(bare[0]) if bare else node

    nodes = [n for n in case.root.preorder() if n.turn is not None and n.bare]
    found = query.factual_leaf(case.tree, np.array([n.index for n in nodes]))
    assert found.tolist() == [end(n).index for n in nodes]


@given(cases())
def test_first_leaf_follows_first_children(case: Case):
    def first(node: Branch) -> Branch:
        return first(node.children[0]) if node.children else node

    assert query.first_leaf(case.tree).tolist() == [first(node).index for node in case.by_index()]


def test_the_worked_tree_by_hand():
    # 0 -> 1 -> 2 -> 3 and 0 -> 4 -> 5 are bare; 6, 7 hang on 1 and 8, 9 on 4.
    tree = worked_case().tree
    assert query.anchors(tree).tolist() == [1, 2, 4]
    assert query.factual_leaf(tree, np.array([1, 2, 4])).tolist() == [3, 3, 5]
    assert query.leaves(tree).tolist() == [3, 5, 6, 7, 8, 9]
    assert query.depth(tree).tolist() == [0, 1, 2, 3, 1, 2, 2, 2, 2, 2]
    assert query.preorder(tree).tolist() == [0, 1, 2, 3, 6, 7, 4, 5, 8, 9]
    assert query.leaf_count(tree).tolist() == [6, 3, 1, 1, 3, 1, 1, 1, 1, 1]


def test_a_rollout_of_one_turn_has_no_anchor():
    assert query.anchors(build([chain(1, 1.0), chain(1, 0.0)]).tree).size == 0


def test_a_turn_that_ended_at_the_turn_limit_is_no_anchor():
    last = make_turn(2, 0, 0.0)
    last = type(last)(**{**vars(last), "finish": Finish.TURN_LIMIT})
    assert query.anchors(build([[make_turn(2, 1), last]]).tree).tolist() == [1]


def test_equal_turns_of_two_rollouts_are_two_anchors():
    assert query.anchors(build([chain(2, 1.0), chain(2, 1.0)]).tree).tolist() == [1, 3]


@pytest.mark.parametrize("node", [0, 6])
def test_nodes_off_the_bare_rollouts_have_no_factual_leaf(node):
    with pytest.raises(ValueError, match=f"node {node} does not lie on one bare rollout"):
        query.factual_leaf(worked_case().tree, np.array([1, node]))


def test_a_tree_that_has_not_grown():
    tree = grow.new_tree(Prompt("p", np.array([4, 5], np.int32), state=None))
    assert query.leaves(tree).size == 0 and query.anchors(tree).size == 0
    assert query.leaf_count(tree).tolist() == [0] and query.preorder(tree).tolist() == [0]
    assert [ids.tolist() for ids in query.children(tree)] == [[]]
    assert query.prefix_tokens(tree, 0).tolist() == [4, 5]
