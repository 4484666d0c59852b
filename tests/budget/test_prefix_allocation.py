"""Stage-2 allocator. Oracles: the golden vectors, a recursion over anchors, closed forms, simulation."""

from __future__ import annotations

import functools
import json
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.budget.prefix import agreement, allocate_prefixes, prefix_value

VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "spec_vectors.json").read_text())


def recursive_optimum(q: tuple, total: int):
    """The best objective, by trying every count of the first anchor. Rationals in, rationals out."""

    @functools.cache
    def best(first: int, left: int):
        if first == len(q) - 1:
            return 1 - q[first] ** left
        return max(1 - q[first] ** k + best(first + 1, left - k) for k in range(left + 1))

    return best(0, total)


@pytest.mark.parametrize("case", VECTORS["prefix_allocation"], ids=lambda c: f"{c['q']}-{c['budget']}")
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_golden_vectors(case, seed):
    success, value = np.array(case["anchors_r_V"]).T
    q = agreement(success, value)
    np.testing.assert_allclose(q, case["q"], atol=1e-15)
    k = allocate_prefixes(q, case["budget"], rng=None if seed is None else np.random.default_rng(seed))
    assert k.dtype == np.int64 and k.sum() == case["budget"]
    if "K" in case:
        assert k.tolist() == case["K"]
    np.testing.assert_allclose(prefix_value(q, k).sum(), case["objective"], atol=1e-12)


def test_matches_recursion_in_exact_rationals():
    # q = a/8 and few continuations: all gains are exact in floats, so the optimum must be hit exactly, ties or not.
    rng = np.random.default_rng(0)
    for _ in range(600):
        numerators = rng.choice([0, 1, 2, 4, 4, 7, 8], size=int(rng.integers(1, 5)))
        total = int(rng.integers(0, 9))
        q = tuple(Fraction(int(a), 8) for a in numerators)
        k = allocate_prefixes(numerators / 8, total, rng=rng)
        assert k.sum() == total and np.all(k >= 0)
        assert sum(1 - x ** int(n) for x, n in zip(q, k, strict=True)) == recursive_optimum(q, total)


def test_matches_recursion_on_random_reals():
    rng = np.random.default_rng(1)
    for _ in range(1500):
        size = int(rng.integers(1, 7))
        q = rng.random(size) if rng.random() < 0.5 else rng.choice([0.0, 0.3, 0.999999, 1.0], size)
        total = int(rng.integers(0, 13))
        k = allocate_prefixes(q, total, rng=rng if rng.random() < 0.5 else None)
        assert k.sum() == total and np.all(k >= 0)
        assert abs(prefix_value(q, k).sum() - recursive_optimum(tuple(q.tolist()), total)) < 1e-12


@settings(max_examples=150, deadline=None)
@given(q=st.lists(st.floats(0, 1), min_size=1, max_size=20), total=st.integers(0, 200), seed=st.integers(0, 9))
def test_no_single_move_improves_it(q, total, seed):
    # For concave values and one sum constraint, "no unit gains by moving" is the optimality condition.
    q = np.array(q)
    k = allocate_prefixes(q, total, rng=np.random.default_rng(seed))
    assert k.sum() == total and np.all(k >= 0)
    next_gain = prefix_value(q, k + 1) - prefix_value(q, k)
    last_gain = (prefix_value(q, k) - prefix_value(q, k - 1))[k > 0] if total else np.array([1.0])
    assert next_gain.max() <= last_gain.min() + 1e-12


@pytest.mark.filterwarnings("error")
def test_certain_anchors():
    # q = 0 flips with the first continuation, q = 1 never: one for each q = 0 anchor, the rest spread evenly.
    assert allocate_prefixes([0.0, 1.0, 0.0], 2).tolist() == [1, 0, 1]
    assert allocate_prefixes([0.0, 1.0, 0.0], 9).tolist() == [3, 3, 3]
    assert allocate_prefixes([1.0, 1.0], 3).tolist() == [2, 1]
    assert allocate_prefixes([1.0, 0.5], 5).tolist() == [0, 5]


@pytest.mark.filterwarnings("error")
def test_budget_far_beyond_float_underflow_is_exact_and_even():
    assert allocate_prefixes(np.full(4, 0.5), 20_002).tolist() == [5001, 5001, 5000, 5000]
    assert allocate_prefixes([0.1, 0.5, 0.9, 0.999999, 1.0 - 2**-53, 1.0, 0.0], 30_000).sum() == 30_000


def test_ties_follow_the_generator_and_else_the_index():
    q = np.full(6, 0.4)
    assert allocate_prefixes(q, 2).tolist() == [1, 1, 0, 0, 0, 0]
    rng = np.random.default_rng(0)
    served = sum(allocate_prefixes(q, 2, rng=rng) for _ in range(3000))
    # each anchor is among the two with chance 1/3: 1000 of 3000, standard deviation sqrt(667) = 25.8
    assert np.all(np.abs(served - 1000) < 5 * 25.8)


def test_zero_budget_and_no_anchors():
    assert allocate_prefixes([0.3, 0.6], 0).tolist() == [0, 0]
    assert allocate_prefixes([], 0).shape == (0,)
    with pytest.raises(ValueError, match="total is 4, but the prompt has no anchor; spend it on root rollouts"):
        allocate_prefixes([], 4)


@pytest.mark.parametrize(
    ("q", "total", "words"),
    [
        ([0.5, 1.01], 2, r"agreement\[1\] is 1.01, outside \[0, 1\]"),
        ([float("nan")], 2, r"agreement\[0\] is nan"),
        ([[[0.5]]], 2, r"agreement has shape \(1, 1, 1\)"),
        (np.ones((0, 1)), 2, r"agreement has shape \(0, 1\)"),
        ([[0.5], [1.5]], 2, r"agreement\[1, 0\] is 1.5"),
        ([0.5], -1, "total is -1"),
    ],
)
def test_errors_name_the_value_and_the_limit(q, total, words):
    with pytest.raises(ValueError, match=words):
        allocate_prefixes(q, total)


def test_agreement_is_the_chance_to_repeat_the_outcome():
    # By hand: after a success the chance to repeat it is V; after a failure it is 1 - V.
    np.testing.assert_allclose(agreement([1, 0, 1, 0], [0.9, 0.9, 0.0, 1.0]), [0.9, 0.1, 0.0, 0.0], atol=1e-15)
    rng = np.random.default_rng(0)
    fresh = rng.random((100_000, 3)) < 0.3  # three continuations from V = .3 after a failure
    flipped = fresh.any(axis=1).mean()
    assert abs(flipped - prefix_value(agreement([0], [0.3]), 3)[0]) < 0.01  # standard error .0015


@pytest.mark.parametrize("reward", [0.5, 0.67, 1e-3])
def test_agreement_refuses_a_graded_reward(reward):
    with pytest.raises(ValueError, match=rf"success\[1\] is {reward}, not 0 or 1"):
        agreement([1, reward], [0.5, 0.5])


@pytest.mark.parametrize(
    ("success", "value", "words"),
    [
        ([1, 2], [0.5, 0.5], r"success\[1\] is 2.0"),
        ([1, float("nan")], [0.5, 0.5], r"success\[1\] is nan"),
        ([1, 0], [0.5, -0.1], r"value\[1\] is -0.1"),
        ([1, 0], [0.5], "success has 2 entries and value 1"),
    ],
)
def test_agreement_refuses_bad_input(success, value, words):
    with pytest.raises(ValueError, match=words):
        agreement(success, value)


def test_prefix_value_closed_forms():
    assert prefix_value([0.0, 0.0, 1.0, 1.0, 0.5], [0, 3, 0, 3, 3]).tolist() == [0.0, 1.0, 0.0, 0.0, 0.875]
