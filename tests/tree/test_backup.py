"""Both backups, against the paper's recursions and the golden tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.tree.tree_oracle import SPEC_VECTORS, Branch, Case, build, cases, chain, worked_case
from trace_jax.tree import backup, grow
from trace_jax.types import Prompt


def weighted(node: Branch) -> float:
    """Eq. 18 as written: children weighted by their number of leaves."""
    if not node.children:
        return node.turn.reward
    return sum(len(c.leaves()) * weighted(c) for c in node.children) / len(node.leaves())


def unweighted(node: Branch) -> float:
    """Eq. 45 as written."""
    if not node.children:
        return node.turn.reward
    return sum(map(unweighted, node.children)) / len(node.children)


@given(cases())
def test_leaf_mean_is_the_recursion_of_eq_18(case: Case):
    expected = [weighted(node) for node in case.by_index()]
    np.testing.assert_allclose(backup.leaf_mean(case.tree, case.tree.reward), expected, rtol=0, atol=1e-7)


@given(cases())
def test_child_mean_is_the_recursion_of_eq_45(case: Case):
    expected = [unweighted(node) for node in case.by_index()]
    np.testing.assert_allclose(backup.child_mean(case.tree, case.tree.reward), expected, rtol=0, atol=1e-7)


@given(cases())
def test_leaf_range_is_the_least_and_greatest_leaf_below(case: Case):
    low, high = backup.leaf_range(case.tree, case.tree.success)
    for node in case.by_index():
        below = [leaf.turn.success for leaf in node.leaves()]
        assert (low[node.index], high[node.index]) == (min(below), max(below))


def test_the_worked_tree():
    golden = SPEC_VECTORS["worked_tree"]["backup_leaf_mean"]
    tree = worked_case().tree
    value = backup.leaf_mean(tree, tree.success)
    np.testing.assert_allclose(
        value[[1, 2, 4, 0]], [golden["H_11"], golden["H_12"], golden["H_21"], golden["root"]], atol=1e-9
    )


def test_eq_18_and_eq_45_differ_where_a_branch_was_forked():
    # The first child of the root is a leaf of reward 1, the second a turn with three leaves of reward 0.
    golden = SPEC_VECTORS["worked_tree"]["weighted_vs_unweighted_backup"]
    tree = build([chain(1, 1.0), chain(2, 0.0)], [(1, 1, chain(1, 0.0)), (1, 1, chain(1, 0.0))]).tree
    assert backup.leaf_mean(tree, tree.reward)[0] == golden["eq18_leaf_weighted"]
    assert backup.child_mean(tree, tree.reward)[0] == golden["eq45_child_mean"]


@pytest.mark.parametrize("function", [backup.leaf_mean, backup.child_mean, backup.leaf_range])
def test_malformed_leaf_values_are_refused(function):
    tree = worked_case().tree
    with pytest.raises(ValueError, match=r"\(3,\), expected \(10,\)"):
        function(tree, np.zeros(3))
    with pytest.raises(ValueError, match="finite on leaves"):
        function(tree, np.full(10, np.nan))
    with pytest.raises(ValueError, match="NaN on all other nodes"):
        function(tree, np.zeros(10))
    with pytest.raises(ValueError, match="no leaves"):
        function(grow.new_tree(Prompt("p", np.ones(1, np.int32), state=None)), np.array([np.nan]))
