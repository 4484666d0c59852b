"""Advantages: golden values, the paper's formulas by recursion with `statistics`, and groups without contrast."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tree.tree_oracle import SPEC_VECTORS, Branch, Case, build, cases, chain, make_turn, worked_case
from trace_jax.tree import advantage, backup, grow
from trace_jax.tree.credit import Credit
from trace_jax.types import Prompt

GOLDEN = SPEC_VECTORS["worked_tree"]
ESTIMATORS = {
    "grpo": advantage.grpo,
    "grpo_sample": functools.partial(advantage.grpo, ddof=1),
    "dr_grpo": advantage.dr_grpo,
    "tree_rpo": advantage.tree_rpo,
    "tree_rpo_sample": functools.partial(advantage.tree_rpo, ddof=1),
    "tree_grpo": advantage.tree_grpo,
    "tree_grpo_sample": functools.partial(advantage.tree_grpo, ddof=1),
    "tree_rloo": advantage.tree_rloo,
}
every_estimator = pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS.keys())


def standardised(values: list[float], ddof: int) -> list[float]:
    """(x - mean) / std with the standard library; zeros for equal values (up to 1e-12) or a single one."""
    if len(values) < 2 or max(values) - min(values) < 1e-12:
        return [0.0] * len(values)
    std = statistics.stdev(values) if ddof else statistics.pstdev(values)
    return [(x - statistics.fmean(values)) / std for x in values]


def reward(node: Branch) -> float:
    return float(np.float32(node.turn.reward))


def of_leaf(credit: Credit) -> dict[int, float]:
    """The advantage of each trajectory; all of its turns must agree."""
    found = defaultdict(set)
    for leaf, value in zip(credit.leaf.tolist(), credit.advantage.tolist(), strict=True):
        found[leaf].add(value)
    assert all(len(values) == 1 for values in found.values())
    return {leaf: values.pop() for leaf, values in found.items()}


@pytest.mark.parametrize("ddof", [0, 1])
@given(case=cases())
def test_grpo_is_the_formula(ddof: int, case: Case):
    leaves = [route[-1] for route in case.routes()]
    expected = standardised([reward(leaf) for leaf in leaves], ddof)
    found = of_leaf(advantage.grpo(case.tree, ddof=ddof))
    np.testing.assert_allclose([found[leaf.index] for leaf in leaves], expected, atol=1e-5)


@given(cases())
def test_dr_grpo_is_the_formula(case: Case):
    leaves = [route[-1] for route in case.routes()]
    mean = statistics.fmean(reward(leaf) for leaf in leaves)
    found = of_leaf(advantage.dr_grpo(case.tree))
    np.testing.assert_allclose([found[leaf.index] for leaf in leaves], [reward(x) - mean for x in leaves], atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@given(case=cases())
def test_tree_grpo_is_the_formula(ddof: int, case: Case):
    inter = standardised([reward(leaf) for leaf in case.root.leaves()], ddof)
    intra = [a for child in case.root.children for a in standardised([reward(x) for x in child.leaves()], ddof)]
    expected = {leaf.index: a + b for leaf, a, b in zip(case.root.leaves(), intra, inter, strict=True)}
    found = of_leaf(advantage.tree_grpo(case.tree, ddof=ddof))
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[i] for i in expected], list(expected.values()), atol=1e-5)


def tree_rpo_by_recursion(root: Branch, ddof: int) -> list[tuple[list[int], int, float]]:
    """Eq. 45-47 on nested nodes: (nodes of the edge, a leaf, advantage) for each edge that has contrast."""

    def value(node: Branch) -> float:
        return statistics.fmean(map(value, node.children)) if node.children else reward(node)

    def edge(node: Branch) -> list[Branch]:
        return [node, *edge(node.children[0])] if len(node.children) == 1 else [node]

    edges = []
    for parent in root.preorder():
        advantages = standardised([value(child) for child in parent.children], ddof)
        if any(advantages):
            for child, a in zip(parent.children, advantages, strict=True):
                edges.append(([node.index for node in edge(child)], child.routes()[0][-1].index, a))
    return edges


@pytest.mark.parametrize("ddof", [0, 1])
@given(case=cases())
def test_tree_rpo_is_the_formula(ddof: int, case: Case):
    credit = advantage.tree_rpo(case.tree, ddof=ddof)
    found = {}
    for s in range(credit.num_sequences):
        rows = credit.sequence == s
        assert len(set(credit.advantage[rows].tolist())) == 1 and len(set(credit.leaf[rows].tolist())) == 1
        found[tuple(credit.node[rows].tolist())] = (credit.leaf[rows][0], credit.advantage[rows][0])
    expected = {tuple(nodes): (leaf, a) for nodes, leaf, a in tree_rpo_by_recursion(case.root, ddof)}
    assert found.keys() == expected.keys()
    for nodes, (leaf, a) in expected.items():
        assert found[nodes][0] == leaf
        np.testing.assert_allclose(found[nodes][1], a, atol=1e-5)


@given(cases())
def test_tree_rpo_trains_each_turn_at_most_once(case: Case):
    node = advantage.tree_rpo(case.tree).node
    assert np.unique(node).size == node.size


def test_tree_rpo_on_the_worked_tree():
    # Edges: 1 | 4 below the root; 2-3 (a chain) | 6 | 7 below 1; 5 | 8 | 9 below 4, with rewards (0, 1, 0).
    golden = GOLDEN["treerpo_population_std"]
    credit = advantage.tree_rpo(worked_case().tree)
    found = dict(zip(credit.node.tolist(), credit.advantage.tolist(), strict=True))
    # R(1) = R(2/3, ...): children of 1 have R = 1, 0, 1, of 4 have R = 0, 1, 0; so R(1) = 2/3, R(4) = 1/3.
    np.testing.assert_allclose([found[1], found[4]], golden["root_group"], atol=1e-6)
    np.testing.assert_allclose([found[2], found[6], found[7]], golden["H_11_group"], atol=1e-6)
    assert found[3] == found[2]
    np.testing.assert_allclose([found[5], found[8], found[9]], -np.array(golden["H_11_group"]), atol=1e-6)
    assert credit.sequence.tolist() == [0, 1, 1, 2, 3, 4, 5, 6, 7]  # first turns 1, 2, 4, 5, 6, 7, 8, 9 in node order
    assert credit.leaf.tolist() == [3, 3, 3, 5, 5, 6, 7, 8, 9]


    assert credit.num_sequences == 8


@pytest.mark.parametrize(
    ("ddof", "golden"),
    [(1, "treegrpo_sample_std_leaves_1_0_1_0_1_0"), (0, "treegrpo_population_std_leaves_1_0_1_0_1_0")],
)
def test_tree_grpo_on_the_worked_tree(ddof, golden):
    # The golden order is by bare rollout: rollout 1 with its continuations (3, 6, 7), then rollout 2 (5, 8, 9).
    found = of_leaf(advantage.tree_grpo(worked_case().tree, ddof=ddof))
    np.testing.assert_allclose([found[i] for i in (3, 6, 7, 5, 8, 9)], GOLDEN[golden], atol=1e-4)


def tree_rloo_by_recursion(case: Case, score: dict[int, float], prior: float) -> dict[int, tuple[int, float]]:
    """(leaf of its own rollout, advantage) of each turn, from the docstring's formula on nested nodes."""
    found = {}

    def visit(node: Branch, above: float) -> None:
        for child in node.children:
            others = [statistics.fmean(map(reward, x.leaves())) for x in node.children if x is not child]
            if node.turn is None or others:
                weight = prior if node.index in score else 0.0
                count = len(others) + weight
                baseline = (sum(others) + weight * score.get(node.index, 0.0)) / count if count else None
                own = 0.0 if baseline is None else reward(child.routes()[0][-1]) - baseline
            else:
                own = above
            found[child.index] = (child.routes()[0][-1].index, own)
            visit(child, own)

    visit(case.root, 0.0)
    return found


@pytest.mark.parametrize("prior", [0.0, 0.5, 2.0])
@given(case=cases(), numbers=st.lists(st.integers(0, 8), min_size=1))
def test_tree_rloo_is_the_formula(prior: float, case: Case, numbers: list[int]):
    score = {i: numbers[i % len(numbers)] / 8 for i in range(0, case.tree.num_nodes, 1 + numbers[0] % 3)}
    tree = grow.with_values(case.tree, np.array(list(score)), np.array(list(score.values())))
    credit = advantage.tree_rloo(tree, prior=prior)
    expected = tree_rloo_by_recursion(case, score, prior)
    assert credit.node.tolist() == sorted(expected)  # each turn once
    assert credit.leaf.tolist() == [expected[i][0] for i in sorted(expected)]
    np.testing.assert_allclose(credit.advantage, [expected[i][1] for i in sorted(expected)], atol=1e-5)
    first = {leaf: s for leaf, s in zip(credit.leaf.tolist(), credit.sequence.tolist(), strict=True)}
    assert sorted(first.values()) == list(range(len(case.root.leaves())))  # a sequence for each rollout


def test_tree_rloo_on_the_worked_tree():
    # Rewards below turn 1: 1, 0, 1 (its mean 2/3), below turn 4: 0, 1, 0 (mean 1/3).
    credit = advantage.tree_rloo(worked_case().tree)
    by_hand = {1: 1 - 1 / 3, 2: 1 - 1 / 2, 3: 1 / 2, 4: -2 / 3, 5: -1 / 2, 6: -1.0, 7: 1 / 2, 8: 1.0, 9: -1 / 2}
    np.testing.assert_allclose(credit.advantage, list(by_hand.values()), atol=1e-6)
    assert credit.sequence.tolist() == [0, 0, 0, 1, 1, 2, 3, 4, 5]
    # A score of 3/4 for the prompt that counts as two outcomes: (1/3 + 3/2) / 3 in the place of 1/3.
    tree = grow.with_values(worked_case().tree, np.array([0]), np.array([0.75]))
    np.testing.assert_allclose(advantage.tree_rloo(tree, prior=2.0).advantage[0], 1 - 11 / 18, atol=1e-6)


def test_tree_rloo_of_flat_groups_is_leave_one_out():
    # The closed form: n / (n - 1) times the distance from the group's mean.
    rewards = np.array([1.0, 0.0, 0.5, 1.0])
    credit = advantage.tree_rloo(build([chain(1, r) for r in rewards]).tree)
    np.testing.assert_allclose(credit.advantage, 4 / 3 * (rewards - rewards.mean()), atol=1e-6)


def test_tree_rloo_compares_with_the_score_where_nothing_else_is_left():
    single, unscored = build([chain(2, 1.0)]).tree, build([chain(2, 1.0), chain(1, 1.0)]).tree
    scored = grow.with_values(single, np.array([0]), np.array([0.25]))
    assert advantage.tree_rloo(single, prior=2.0).advantage.tolist() == [0, 0]
    assert advantage.tree_rloo(scored, prior=2.0).advantage.tolist() == [0.75, 0.75]
    assert advantage.tree_rloo(unscored, prior=2.0).advantage.tolist() == [0, 0, 0]
    all_right = grow.with_values(unscored, np.array([0]), np.array([0.25]))
    # Two successes where one in four was expected: 1 - (1 + 2 / 4) / 3.
    assert advantage.tree_rloo(all_right, prior=2.0).advantage.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("prior", [0.0, 1.0, 3.0])
def test_first_turns_of_tree_rloo_have_the_policy_gradient_for_their_mean(prior):
    """A policy of one parameter: the first turn is 1 with chance p, then the last one with chance q[first]; it succeeds
    if that is 1. Over all outcomes of two bare rollouts, with a fork where the first one surprises, the mean of
    A times the turn's score function is dJ/dp of the first turn."""
    p, q = 0.3, (0.2, 0.6)
    chance = lambda x, of: of if x else 1 - of
    total = 0.0
    for a1, b1, a2, b2, c in itertools.product((0, 1), repeat=5):
        weight = chance(a1, p) * chance(b1, q[a1]) * chance(a2, p) * chance(b2, q[a2])
        rollout = lambda a, b: [make_turn([a], 1), make_turn([b], 0, float(b))]
        surprise = b1 != (q[a1] > 0.5)
        if surprise:
            weight *= chance(c, q[a1])
        elif c:
            continue  # no fork: one outcome, not two
        forks = [(0, 1, [make_turn([c], 0, float(c))])] if surprise else []
        tree = build([rollout(a1, b1), rollout(a2, b2)], forks).tree
        tree = grow.with_values(tree, np.array([0]), np.array([0.4]))
        found = dict(zip((credit := advantage.tree_rloo(tree, prior=prior)).node.tolist(), credit.advantage, strict=True))
        slope = lambda a: 1 / p if a else -1 / (1 - p)
        total += weight * (found[1] * slope(a1) + found[3] * slope(a2)) / 2
    np.testing.assert_allclose(total, q[1] - q[0], rtol=1e-5)


def test_a_negative_prior_is_refused():
    with pytest.raises(ValueError, match="prior is -1.0; the predictor's score counts as at least 0"):
        advantage.tree_rloo(worked_case().tree, prior=-1.0)


def test_grpo_by_hand():
    # Rewards 1, 0, 0, 0: mean 1/4, population variance 3/16, so A = (3/4) / (sqrt(3)/4) = sqrt(3), and -1/sqrt(3).
    tree = build([chain(1, r) for r in (1.0, 0.0, 0.0, 0.0)]).tree
    found = list(of_leaf(advantage.grpo(tree)).values())
    np.testing.assert_allclose(found, [3**0.5, *[-(3**-0.5)] * 3], rtol=1e-6)
    # Sample variance 1/4: A = 3/2 and -1/2. Without the division: 3/4 and -1/4.
    np.testing.assert_allclose(list(of_leaf(advantage.grpo(tree, ddof=1)).values()), [1.5, -0.5, -0.5, -0.5], rtol=1e-6)
    np.testing.assert_allclose(list(of_leaf(advantage.dr_grpo(tree)).values()), [0.75, -0.25, -0.25, -0.25], rtol=1e-6)


@every_estimator
def test_a_group_of_one_is_exactly_zero(estimate):
    # A raw reward of 1 must not leak through, nor a NaN of the sample standard deviation.
    credit = estimate(build([chain(3, 1.0)]).tree)
    assert np.all(credit.advantage == 0)


@every_estimator
@pytest.mark.parametrize("reward_value", [0.0, 1.0, 0.1, 1 / 3, -0.7])
def test_a_group_without_variance_is_exactly_zero(estimate, reward_value):
    # 0.1 and 1/3 are not their own mean in floating point: (r - mean) / std would be of order 1.
    bare = [chain(2, reward_value) for _ in range(3)]
    tree = build(bare, [(0, 1, chain(1, reward_value)), (0, 1, chain(1, reward_value))]).tree
    assert np.all(estimate(tree).advantage == 0)


def test_backups_that_differ_by_rounding_alone_are_no_contrast():
    # Turn 1 backs up to ((a + b + b) / 3 + c) / 2 and turn 4 to (a + b + b + c + c + c) / 6: the same number, which
    # float64 rounds twice in the first and once in the second.
    a, b, c = 0.2, 0.3, 0.7
    first = [(0, 2, chain(1, b)), (0, 2, chain(1, b)), (0, 1, chain(1, c))]
    second = [(1, 1, chain(1, r)) for r in (b, b, c, c, c)]
    tree = build([chain(3, a), chain(2, a)], first + second).tree
    value = backup.child_mean(tree, tree.reward)
    assert 0 < abs(value[1] - value[4]) < 1e-15
    trained = advantage.tree_rpo(tree).node.tolist()
    assert trained == [2, 3, 5, *range(6, 14)]  # the groups below turns 1, 2 and 4, not the root's


def test_singletons_and_mixed_group_sizes_stay_apart():
    # Rollout 0 is alone (intra 0); rollout 1 has a continuation. Inter over (1, 0, 1): mean 2/3, std sqrt(2)/3.
    tree = build([chain(2, 1.0), chain(2, 0.0)], [(1, 1, chain(1, 1.0))]).tree
    inter = {2: 0.5**0.5, 4: -(2**0.5), 5: 0.5**0.5}
    intra = {2: 0.0, 4: -1.0, 5: 1.0}
    found = of_leaf(advantage.tree_grpo(tree))
    np.testing.assert_allclose([found[i] for i in (2, 4, 5)], [inter[i] + intra[i] for i in (2, 4, 5)], rtol=1e-6)


@every_estimator
@given(case=cases())
def test_advantages_are_finite_and_sum_to_zero_in_each_group(estimate, case: Case):
    credit = estimate(case.tree)
    assert np.all(np.isfinite(credit.advantage))
    first = {s: int(np.flatnonzero(credit.sequence == s)[0]) for s in range(credit.num_sequences)}
    per_sequence = credit.advantage[list(first.values())]
    if estimate is advantage.tree_rloo:  # each turn has its group; where nothing was forked below it sums to 0
        return
    if estimate in (ESTIMATORS["tree_rpo"], ESTIMATORS["tree_rpo_sample"]):
        group = case.tree.parent[credit.node[list(first.values())]]  # the parent of the edge's first turn
    else:
        group = np.zeros(per_sequence.size, int)  # intra groups sum to 0 too, so the whole does
    for g in np.unique(group):
        np.testing.assert_allclose(per_sequence[group == g].sum(), 0, atol=1e-5)


@given(cases())
def test_tree_rpo_has_one_group_per_branching_node_with_contrast(case: Case):
    credit = advantage.tree_rpo(case.tree)
    edges = tree_rpo_by_recursion(case.root, 0)
    assert credit.num_sequences == len(edges)
    branching = {n.index for n in case.root.preorder() if len(n.children) >= 2}
    heads = [nodes[0] for nodes, _, _ in edges]
    assert {int(case.tree.parent[h]) for h in heads} <= branching


@pytest.mark.parametrize("estimate", [advantage.grpo, advantage.tree_rpo, advantage.tree_grpo])
def test_another_ddof_is_refused(estimate):
    with pytest.raises(ValueError, match="ddof is 2; use 0"):
        estimate(worked_case().tree, ddof=2)


def test_success_plays_no_part():
    case = build([[make_turn(2, 0, reward=r, success=s)] for r, s in ((1.0, 0.0), (1.0, 1.0))])
    assert np.all(advantage.grpo(case.tree).advantage == 0)


def test_a_tree_without_rollouts():
    tree = grow.new_tree(Prompt("p", np.ones(1, np.int32), state=None))
    assert advantage.grpo(tree).num_sequences == 0
    with pytest.raises(ValueError, match="no leaves"):
        advantage.tree_rpo(tree)
