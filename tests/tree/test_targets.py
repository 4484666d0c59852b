"""Each kind of target against nested trees and recursion, and by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tree.tree_oracle import Branch, Case, build, cases, chain, worked_case
from trace_jax.tree import backup, grow, query, targets
from trace_jax.types import Finish, Prompt, RolloutTree

KINDS = (targets.backed_up, targets.bare, targets.direct)


def as_dict(found: targets.Targets) -> dict[int, tuple[float, int]]:
    assert (found.node.dtype, found.mean.dtype, found.count.dtype) == (np.int32, np.float64, np.int32)
    assert np.all(np.diff(found.node) > 0)
    rows = zip(found.node.tolist(), found.mean.tolist(), found.count.tolist(), strict=True)
    return {node: (mean, count) for node, mean, count in rows}


def end_of(node: Branch) -> Branch:
    """The last turn of the rollout that a turn belongs to."""
    own = [child for child in node.children if child.bare == node.bare]
    return end_of(own[0]) if own else node


def expected(case: Case, kind, failed: set[int]) -> dict[int, tuple[float, int]]:
    """The definitions word for word, over the nested tree; `failed` are the leaves that the engine gave up on."""
    result = {}
    for node in case.root.preorder():
        if not node.children:
            continue
        continuations = [end_of(child) for child in node.children if not child.bare]
        if kind is targets.backed_up:
            ends = node.leaves()
        elif node.turn is None:
            ends = [leaf for leaf in node.leaves() if leaf.bare]
        elif kind is targets.bare:
            ends = [end_of(node)] if node.bare else []
        else:
            ends = [end_of(node), *continuations] if node.bare else [end_of(node)]
        outcomes = [end.turn.success for end in ends if end.index not in failed]
        if len(outcomes) >= (2 if kind is targets.backed_up and node.turn is not None else 1):
            result[node.index] = (sum(outcomes) / len(outcomes), len(outcomes))
    return result


def give_up(tree: RolloutTree, leaves: set[int]) -> RolloutTree:
    finish = tree.finish.copy()
    finish[list(leaves)] = Finish.ENGINE_ERROR
    return dataclasses.replace(tree, finish=finish)


@pytest.mark.parametrize("kind", KINDS)
@given(case=cases(), data=st.data())
def test_definitions(kind, case: Case, data):
    failed = data.draw(st.sets(st.sampled_from(query.leaves(case.tree).tolist())))
    assert as_dict(kind(give_up(case.tree, failed))) == expected(case, kind, failed)


def test_the_worked_tree_by_hand():
    """Bare leaves 3 (success 1) on turns 1, 2 and 5 (0) over 4; forked 6 (0), 7 (1) from 1 and 8 (1), 9 (0) from 4."""
    tree = worked_case().tree
    third, half = 1 / 3, 1 / 2
    assert as_dict(targets.backed_up(tree)) == {0: (half, 6), 1: (2 / 3, 3), 4: (third, 3)}
    assert as_dict(targets.bare(tree)) == {0: (half, 2), 1: (1, 1), 2: (1, 1), 4: (0, 1)}
    assert as_dict(targets.direct(tree)) == {0: (half, 2), 1: (2 / 3, 3), 2: (1, 1), 4: (third, 3)}
    # Without the second bare rollout's outcome: turn 4 keeps its two continuations.
    failed = give_up(tree, {5})
    assert as_dict(targets.direct(failed)) == {0: (1, 1), 1: (2 / 3, 3), 2: (1, 1), 4: (half, 2)}
    assert as_dict(targets.bare(failed)) == {0: (1, 1), 1: (1, 1), 2: (1, 1)}


def test_a_deeper_fork_counts_only_for_eq_18():
    """A bare rollout of 4 turns (1-4, success 1), a continuation of 2 turns (5, 6, success 0) from its second."""
    tree = build([chain(4, 1.0)], [(0, 2, chain(2, 0.0))]).tree
    assert as_dict(targets.direct(tree)) == {0: (1, 1), 1: (1, 1), 2: (0.5, 2), 3: (1, 1), 5: (0, 1)}
    assert as_dict(targets.backed_up(tree)) == {0: (0.5, 2), 1: (0.5, 2), 2: (0.5, 2)}


@given(cases())
def test_backed_up_is_leaf_mean_to_the_last_bit(case: Case):
    found, mean = targets.backed_up(case.tree), backup.leaf_mean(case.tree, case.tree.success)
    np.testing.assert_array_equal(found.mean, mean[found.node])
    np.testing.assert_array_equal(found.count, query.leaf_count(case.tree)[found.node])


@pytest.mark.parametrize("kind", KINDS)
def test_no_outcome_no_example(kind):
    tree = worked_case().tree
    found = kind(give_up(tree, set(query.leaves(tree).tolist())))
    assert found.node.size == found.mean.size == found.count.size == 0
    with pytest.raises(ValueError, match="'lonely' has no leaves"):
        kind(grow.new_tree(Prompt("lonely", np.ones(1, np.int32), state=None)))
