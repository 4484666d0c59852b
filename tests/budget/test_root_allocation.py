"""Stage-1 allocator. Oracles: the golden vectors, enumeration in exact rationals, the DP, closed forms."""

from __future__ import annotations

import itertools
import json
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.budget.root import allocate_roots, clamp_probability, feasible_cap, root_value
from trace_jax.budget.root_dp import allocate_roots_dp

VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "spec_vectors.json").read_text())


def objective(v, m) -> float:
    return float(root_value(clamp_probability(v), m).sum())


def check_feasible(m, total, cap) -> None:
    assert m.dtype == np.int64
    assert m.sum() == total
    assert np.all((m == 0) | ((m >= 2) & (m <= cap)))


def exact_objective(v: list[Fraction], m) -> Fraction:
    """Eq. 12-13 in rationals, written as the chance of all successes or all failures."""
    return sum((1 - x**k - (1 - x) ** k for x, k in zip(v, map(int, m), strict=True) if k >= 2), Fraction(0))


def enumerated_optimum(v: list[Fraction], total: int, cap: int) -> Fraction | None:
    """The best objective over every allocation there is; None where there is none."""
    sizes = [0, *range(2, cap + 1)]
    values = [exact_objective(v, m) for m in itertools.product(sizes, repeat=len(v)) if sum(m) == total]
    return max(values, default=None)


@pytest.mark.parametrize("case", VECTORS["root_allocation"], ids=lambda c: f"{c['v']}-{c['M']}")
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_golden_vectors(case, seed):
    rng = None if seed is None else np.random.default_rng(seed)
    if case.get("infeasible"):
        with pytest.raises(ValueError, match="total is 1"):
            allocate_roots(case["v"], case["M"], rng=rng)
        return
    m = allocate_roots(case["v"], case["M"], rng=rng)
    check_feasible(m, case["M"], case["M"])
    if case["unique"]:
        assert m.tolist() == case["m"]
    np.testing.assert_allclose(root_value(case["v"], m).sum(), case["objective"], atol=1e-12)


def test_root_value_golden_and_closed_forms():
    case = VECTORS["root_value"]
    np.testing.assert_allclose(root_value(case["v"], np.arange(7)), case["V_root_m_0_to_6"], atol=1e-12)
    # two rollouts differ with chance 2 v (1 - v); three give 3 v (1 - v); a fair coin gives 1 - 2^(1 - m)
    v = np.linspace(0, 1, 11)
    np.testing.assert_allclose(root_value(v, 2), 2 * v * (1 - v), atol=1e-15)
    np.testing.assert_allclose(root_value(v, 3), 3 * v * (1 - v), atol=1e-15)
    np.testing.assert_allclose(root_value(0.5, np.arange(1, 9)), 1 - 2.0 ** (1 - np.arange(1, 9)), atol=1e-15)
    assert root_value([0.0, 1.0], 5).tolist() == [0.0, 0.0]


def test_root_value_is_the_frequency_of_mixed_outcomes():
    rng = np.random.default_rng(0)
    success = rng.random((200_000, 4)) < 0.3
    mixed = (success.any(axis=1) & ~success.all(axis=1)).mean()
    # standard error sqrt(.25 / 2e5) = .0011
    assert abs(mixed - root_value(0.3, 4)) < 0.005


def test_naive_greedy_trap():
    # Greedy on V(m+1) - V(m) sees gain 0 for a first rollout and returns (8, 0, 0, 0), worth 1 - 2^-7 = 0.992.
    m = allocate_roots([0.5, 0.2, 0.9, 0.02], 8)
    assert m.tolist() == [4, 4, 0, 0]


def test_matches_enumeration_in_exact_rationals_with_many_ties():
    # v = a/8 and few rollouts: every gain is exact in floats, so a tie is a tie, and the optimum must be hit exactly.
    rng = np.random.default_rng(1)
    checked = 0
    for _ in range(1500):
        size, total = int(rng.integers(1, 5)), int(rng.integers(0, 10))
        cap = int(rng.integers(2, 7))
        numerators = rng.choice([1, 2, 4, 4, 6, 7], size=size)
        v = [Fraction(int(a), 8) for a in numerators]
        best = enumerated_optimum(v, total, min(cap, max(total, 2)))
        if best is None:
            with pytest.raises(ValueError):
                allocate_roots(numerators / 8, total, max_per_prompt=cap)
            continue
        m = allocate_roots(numerators / 8, total, max_per_prompt=cap, rng=rng)
        check_feasible(m, total, cap)
        assert exact_objective(v, m) == best, (v, total, cap, m)
        checked += 1
    assert checked > 800


def random_probabilities(rng: np.random.Generator, size: int) -> np.ndarray:
    kind = rng.integers(6)
    if kind == 0:
        return rng.random(size)
    if kind == 1:
        return np.full(size, rng.random())  # constant: a cold start
    if kind == 2:
        return rng.choice([0.0, 1.0, 1e-4, 1e-3, 0.999, 0.5], size)  # saturated
    if kind == 3:
        return rng.choice(rng.random(2), size)  # two values, many ties
    if kind == 4:
        return np.clip(0.3 + 1e-9 * rng.standard_normal(size), 0, 1)  # nearly constant
    return rng.beta(0.2, 0.2, size)  # mostly solved or never solved


def random_total(rng: np.random.Generator, size: int, cap: int | None, most: int) -> int | None:
    """A feasible total, or None where the draw has none."""
    limit = most if cap is None else min(most, size * cap)
    total = int(rng.integers(0, limit + 1))
    total += total % 2 if cap == 2 and total < limit else 0
    return None if total == 1 or (cap == 2 and total % 2) else total


@pytest.mark.parametrize(
    ("instances", "most_prompts", "most_rollouts"), [(4000, 6, 16), (150, 80, 120)], ids=["small", "large"]
)
def test_matches_dynamic_programming(instances, most_prompts, most_rollouts):
    rng = np.random.default_rng(most_prompts)
    checked = 0
    for _ in range(instances):
        size = int(rng.integers(1, most_prompts + 1))
        cap = [None, 2, 3, 4, 5, 9][rng.integers(6)]
        total = random_total(rng, size, cap, most_rollouts)
        if total is None:
            continue
        v = random_probabilities(rng, size)
        m = allocate_roots(v, total, max_per_prompt=cap, rng=rng if rng.random() < 0.5 else None)
        check_feasible(m, total, total if cap is None else cap)
        expected = objective(v, allocate_roots_dp(v, total, max_per_prompt=cap))
        assert abs(objective(v, m) - expected) < 1e-12, (v, total, cap, m)
        checked += 1
    assert checked > 0.8 * instances


@pytest.mark.parametrize("cap", [3, 4, 5])
def test_matches_dynamic_programming_on_every_feasible_total(cap):
    # From 2 rollouts to a pool that is full to the cap, so that repair meets prompts that can't grow.
    rng = np.random.default_rng(cap)
    for _ in range(12):
        size = int(rng.integers(1, 7))
        v = random_probabilities(rng, size)
        for total in range(2, size * cap + 1):
            m = allocate_roots(v, total, max_per_prompt=cap, rng=rng)
            check_feasible(m, total, cap)
            expected = objective(v, allocate_roots_dp(v, total, max_per_prompt=cap))
            assert abs(objective(v, m) - expected) < 1e-12, (v, total, cap, m)


def test_repair_by_each_move():
    # v = .5, .3 and M = 4. p = .25, .21; fourth gains .125, .1218. Greedy on the envelope: (3, 1).
    # Close the second: loss .21 - .125 = .085. Take one from the first: loss .25 - .21 = .04. So (2, 2).
    assert allocate_roots([0.5, 0.3], 4).tolist() == [2, 2]
    # v = .5, .1 and M = 4. p = .25, .09. Greedy: (3, 0) then the fourth gain .125 > .09, so (4, 0): no repair.
    assert allocate_roots([0.5, 0.1], 4).tolist() == [4, 0]
    # v = .5, .15 and M = 4. p = .25, .1275 > .125. Greedy: (3, 1). Closing loses .0025, taking one loses .1225: (4, 0).
    assert allocate_roots([0.5, 0.15], 4).tolist() == [4, 0]
    # The same with a cap of 3: the first can't grow, so (2, 2).
    assert allocate_roots([0.5, 0.15], 4, max_per_prompt=3).tolist() == [2, 2]


def test_cap_of_two_takes_the_most_uncertain_pairs():
    assert allocate_roots([0.1, 0.5, 0.9, 0.4, 0.02], 6, max_per_prompt=2).tolist() == [2, 2, 0, 2, 0]


probabilities = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(v=probabilities, total=st.integers(2, 60), seed=st.integers(0, 9))
def test_invariances_and_at_least_as_good_as_uniform(v, total, seed):
    v = np.array(v)
    m = allocate_roots(v, total, rng=np.random.default_rng(seed))
    check_feasible(m, total, total)
    best = objective(v, m)
    mirrored = allocate_roots(1 - v, total)
    np.testing.assert_allclose(objective(v, mirrored), best, atol=1e-12)
    shuffled = np.random.default_rng(seed).permutation(v.size)
    np.testing.assert_allclose(objective(v[shuffled], allocate_roots(v[shuffled], total)), best, atol=1e-12)
    for group in range(2, total + 1):  # uniform: the first total / group prompts get `group` each
        if total % group == 0 and total // group <= v.size:
            uniform = np.where(np.arange(v.size) < total // group, group, 0)
            assert best >= objective(v, uniform) - 1e-12


def test_zero_budget_and_empty_pool():
    assert allocate_roots([0.2, 0.8], 0).tolist() == [0, 0]
    assert allocate_roots([], 0).shape == (0,)
    assert allocate_roots([], 0).dtype == np.int64


def test_saturated_predictions_are_clamped():
    assert clamp_probability([0.0, 0.4, 1.0]).tolist() == [1e-3, 0.4, 0.999]
    # Clamped, all prompts are worth the same and the budget is spread; unclamped, any allocation would be worth 0.
    assert np.count_nonzero(allocate_roots([0.0, 1.0, 0.0, 1.0], 12)) == 4


def test_budget_far_beyond_float_underflow_is_spread_evenly():
    # From about 1100 rollouts on, the gains of v = .5 are 0 in floats.
    assert allocate_roots(np.full(4, 0.5), 20_000).tolist() == [5000] * 4


def test_ties_follow_the_generator_and_else_the_index():
    v = np.full(8, 0.3)
    assert allocate_roots(v, 6).tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    same = [allocate_roots(v, 6, rng=np.random.default_rng(5)).tolist() for _ in range(2)]
    assert same[0] == same[1]
    rng = np.random.default_rng(0)
    opened = sum((allocate_roots(v, 6, rng=rng) > 0).astype(int) for _ in range(4000))
    # each prompt is one of the two open ones with chance 1/4: 1000 of 4000, standard deviation sqrt(750) = 27
    assert np.all(np.abs(opened - 1000) < 5 * 27.4)


def test_no_preference_without_ties():
    v = np.array([0.5, 0.2, 0.9, 0.02, 0.41])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        assert allocate_roots(v, 11, rng=rng).tolist() == allocate_roots(v, 11).tolist()


@pytest.mark.parametrize(
    ("v", "total", "cap", "words"),
    [
        ([0.5], 1, None, "total is 1"),
        ([0.5, 0.5], -3, None, "total is -3"),
        ([0.5, 0.5], 9, 4, "total is 9, but 2 prompts .* at most 4 .* take 8"),
        ([], 2, None, "total is 2, but 0 prompts"),
        ([0.5, 0.5], 3, 2, "total is 3, but 0 or 2 rollouts each make an even sum"),
        ([0.5, 0.5], 4, 1, "max_per_prompt is 1"),
        ([0.5, 1.2], 4, None, r"success_probability\[1\] is 1.2, outside \[0, 1\]"),
        ([-0.1, 0.2], 4, None, r"success_probability\[0\] is -0.1"),
        ([0.1, 0.2, float("nan")], 4, None, r"success_probability\[2\] is nan"),
        ([[[0.5, 0.5]]], 4, None, r"success_probability has shape \(1, 1, 2\)"),
        (np.ones((0, 2)), 4, None, r"success_probability has shape \(0, 2\)"),
        ([[0.5, 0.5], [0.5, 1.2]], 4, None, r"success_probability\[1, 1\] is 1.2"),
        (0.5, 4, None, r"success_probability has shape \(\)"),
    ],
)
@pytest.mark.parametrize("solver", [allocate_roots, allocate_roots_dp])
def test_errors_name_the_value_and_the_limit(solver, v, total, cap, words):
    with pytest.raises(ValueError, match=words) as error:
        solver(v, total, max_per_prompt=cap)
    assert "\n" not in str(error.value)


def test_total_must_be_an_integer():
    with pytest.raises(TypeError):
        allocate_roots([0.5, 0.5], 4.0)
    assert allocate_roots([0.5, 0.5], np.int64(4)).sum() == 4


def test_feasible_cap_agrees_with_enumeration():
    for size, total, cap in itertools.product(range(4), range(10), range(2, 6)):
        sizes = [0, *range(2, cap + 1)]
        exists = any(sum(m) == total for m in itertools.product(sizes, repeat=size))
        if exists:
            assert feasible_cap(size, total, cap) == min(cap, total)
        else:
            with pytest.raises(ValueError):
                feasible_cap(size, total, cap)
