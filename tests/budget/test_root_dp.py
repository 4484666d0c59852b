"""The DP over tables. Oracle: enumeration of every allocation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trace_jax.budget.contrast import advantage_mass, any_contrast, pairs
from trace_jax.budget.root import feasible_cap, is_feasible, root_value
from trace_jax.budget.root_dp import allocate_roots_dp, allocate_table


def allocations(size: int, least: int, cap: int) -> np.ndarray:
    return np.array(list(itertools.product([0, *range(least, cap + 1)], repeat=size)), np.int64).reshape(-1, size)


def test_roots_match_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(600):
        size, cap = int(rng.integers(1, 5)), int(rng.integers(2, 7))
        table = allocations(size, 2, cap)
        total = int(table[rng.integers(len(table))].sum())  # of some allocation, so there is one
        v = rng.choice(rng.uniform(0.001, 0.999, size=3), size)
        best = root_value(v, table[table.sum(axis=1) == total]).sum(axis=1).max()
        m = allocate_roots_dp(v, total, max_per_prompt=cap)
        assert m.sum() == total and np.all((m == 0) | ((m >= 2) & (m <= cap)))
        assert abs(root_value(v, m).sum() - best) < 1e-12


TABLES = {
    "any_contrast": lambda rng, size, cap: any_contrast(rng.random((int(rng.integers(1, 4)), size)), cap),
    "advantage_mass": lambda rng, size, cap: advantage_mass(rng.random((int(rng.integers(1, 4)), size)), cap),
    "pairs": lambda rng, size, cap: pairs(rng.random((int(rng.integers(1, 4)), size)), cap),
    "any": lambda rng, size, cap: rng.standard_normal((size, cap + 1)),
    "ties": lambda rng, size, cap: rng.integers(0, 3, (size, cap + 1)).astype(float),
}


@pytest.mark.parametrize("kind", TABLES)
def test_table_matches_enumeration(kind):
    rng = np.random.default_rng(1)
    for _ in range(150):
        size, least = int(rng.integers(1, 5)), int(rng.integers(2, 5))
        cap = least + int(rng.integers(0, 4))
        every = allocations(size, least, cap)
        total = int(every[rng.integers(len(every))].sum())
        value = TABLES[kind](rng, size, max(cap, total) + int(rng.integers(0, 3)))
        every = every[every.sum(axis=1) == total]
        best = value[np.arange(size), every].sum(axis=1).max()
        m = allocate_table(
            value, total, min_per_prompt=least, max_per_prompt=cap, rng=rng if rng.random() < 0.5 else None
        )
        assert m.dtype == np.int64 and m.sum() == total and np.all((m == 0) | ((m >= least) & (m <= cap)))
        assert abs(value[np.arange(size), m].sum() - best) < 1e-12, (value, total, least, cap, m)


def test_counts_beyond_one_chunk():
    # 200 rollouts for two prompts: every split by hand.
    rng = np.random.default_rng(2)
    for _ in range(10):
        value = rng.random((2, 201))
        splits = [k for k in range(201) if k not in (1, 199)]
        best = max(value[0, k] + value[1, 200 - k] for k in splits)
        m = allocate_table(value, 200, rng=rng)
        assert m.sum() == 200 and value[0, m[0]] + value[1, m[1]] == best


def test_pairs_fill_the_prompts_nearest_one_half():
    assert allocate_table(pairs([0.1, 0.5, 0.6, 0.95], 8), 16, max_per_prompt=8).tolist() == [0, 8, 8, 0]


def test_a_minimum_makes_larger_groups():
    v = np.full(8, 0.5)
    assert sorted(allocate_roots_dp(v, 12).tolist()) == [0] * 4 + [3] * 4  # 4 V(3) = 3.0; 3 V(4) = 2.625; 6 V(2) = 3.0
    m = allocate_table(any_contrast(v, 12), 12, min_per_prompt=4)
    assert sorted(m.tolist()) == [0] * 5 + [4] * 3


def test_ties_follow_the_generator_and_else_the_index():
    value = pairs(np.full(4, 0.3), 4)
    assert np.count_nonzero(allocate_table(value, 4, max_per_prompt=4)) == 1
    assert len({tuple(allocate_table(value, 4, max_per_prompt=4).tolist()) for _ in range(3)}) == 1
    rng = np.random.default_rng(0)
    opened = sum(allocate_table(value, 4, max_per_prompt=4, rng=rng) > 0 for _ in range(2000))
    # one prompt takes all, each with chance 1/4: 500 of 2000, standard deviation sqrt(375) = 19.4
    assert opened.sum() == 2000 and np.all(np.abs(opened - 500) < 5 * 19.4)


def test_zero_budget_and_no_prompt():
    assert allocate_roots_dp([0.5, 0.1], 0).tolist() == [0, 0]
    assert allocate_table(np.zeros((2, 1)), 0).tolist() == [0, 0]
    assert allocate_table(np.zeros((0, 5)), 0).shape == (0,)


def test_feasibility_agrees_with_enumeration():
    for size, total, least, most in itertools.product(range(4), range(14), range(2, 6), [*range(2, 8), None]):
        cap = total if most is None else most
        exists = any(sum(m) == total for m in itertools.product([0, *range(least, cap + 1)], repeat=size))
        assert is_feasible(size, total, most, least) == exists, (size, total, least, most)
        if most is not None and most < least:
            continue  # no limits that a group can have: an error even for a total of 0
        if exists:
            assert feasible_cap(size, total, most, least) == min(cap, total)
        else:
            with pytest.raises(ValueError, match=f"total is {total}, .*;"):
                feasible_cap(size, total, most, least)


@pytest.mark.parametrize(
    ("value", "total", "least", "most", "words"),
    [
        (np.zeros((3, 9)), 5, 4, 4, "total is 5, but 1 prompts with at most 4 .* take 4 and 2 with at least 4 "),
        (np.zeros((3, 9)), 3, 4, None, "total is 3, and min_per_prompt is 4; use 0, or 4 and more"),
        (np.zeros((3, 9)), 8, 5, 4, "max_per_prompt is 4; use 5 or more"),
        (np.zeros((3, 9)), 8, 1, 4, "min_per_prompt is 1"),
        (np.zeros((1, 9)), 8, 2, 4, "total is 8, but 1 prompts"),
        (np.zeros((3, 8)), 8, 2, None, r"value_BM has 8 columns, .* 0 to 8 rollouts; pass 9"),
        (np.zeros(9), 8, 2, None, r"value_BM has shape \(9,\)"),
        (np.array([[0, 0, 1, np.nan]]), 3, 2, None, r"value_BM\[0, 3\] is nan"),
    ],
)
def test_errors_name_the_value_and_the_limit(value, total, least, most, words):
    with pytest.raises(ValueError, match=words) as error:
        allocate_table(value, total, min_per_prompt=least, max_per_prompt=most)
    assert "\n" not in str(error.value)
