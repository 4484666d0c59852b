"""Explored prompts. Oracles: allocation by hand, every number of pairs tried, frequencies."""

from __future__ import annotations

import numpy as np
import pytest

from trace_jax.budget.contrast import advantage_mass, any_contrast, pairs
from trace_jax.budget.explore import add_pairs
from trace_jax.budget.root import allocate_roots, clamp_probability, is_feasible
from trace_jax.budget.root_dp import allocate_table
from trace_jax.budget.trace import Trace


def test_explored_prompts_are_drawn_evenly_from_those_left_out():
    # 12 rollouts: 8 to the fair coins, since a fifth rollout of one gains .0625 and one elsewhere .0099; and two pairs.
    v = np.array([0.5, 0.5, 0.01, 0.01, 0.99, 0.0, 1.0])
    rng = np.random.default_rng(0)
    draws = np.array([Trace(12, 2, explore_roots=4).roots(v, 7, rng) for _ in range(2000)])
    assert np.all(draws[:, :2] == 4)
    assert np.all(np.sort(draws[:, 2:], axis=1) == [0, 0, 0, 2, 2])
    # each of 5 with chance 2/5: 800 of 2000, standard deviation sqrt(480) = 21.9
    assert np.all(np.abs((draws[:, 2:] > 0).sum(axis=0) - 800) < 5 * 21.9)


def test_too_few_prompts_left_out():
    # Three fair coins, worth .5, .75 and .875 with 2, 3 and 4 rollouts; 9 rollouts, of which 4 explore. The optimum for
    # 5 is (3, 2) and leaves one for two pairs; that for 7 is (3, 2, 2), worth 1.75 (4, 3: 1.625), and leaves none.
    solved = []

    def solve(total):
        solved.append(total)
        return allocate_table(any_contrast(np.full(3, 0.5), total), total, max_per_prompt=4)

    m = add_pairs(solve, lambda total: is_feasible(3, total, 4), 9, 2, np.random.default_rng(0))
    assert m.tolist() == [3, 3, 3] and solved == [5, 7, 9]
    # A pool that the optimum fills: no pair at all.
    assert Trace(12, 0, 4, explore_roots=6).roots(np.full(3, 0.5), 3, np.random.default_rng(0)).tolist() == [4, 4, 4]


def test_the_most_pairs_that_find_a_prompt():
    rng = np.random.default_rng(1)
    for _ in range(150):
        size, total, wanted = int(rng.integers(2, 9)), int(rng.integers(6, 24)), int(rng.integers(1, 4))
        if total - 2 * wanted < 2:
            continue
        v = rng.random(size)  # without ties, so that the generator does not change what is opened
        fits = [n for n in range(wanted + 1) if np.count_nonzero(allocate_roots(v, total - 2 * n) == 0) >= n]
        m = Trace(total, 0, explore_roots=2 * wanted).roots(v, size, rng)
        rest = allocate_roots(v, total - 2 * max(fits))
        assert m.sum() == total
        assert m[rest > 0].tolist() == rest[rest > 0].tolist()
        assert sorted(m[rest == 0])[::-1][: max(fits)] == [2] * max(fits)


def test_a_rest_that_is_no_sum_of_groups_is_passed_over():
    # Groups of 4: 8 prompts, 32 rollouts, up to 4 pairs. 24 leave two prompts; with 2 pairs 28 leave one; with one pair
    # 30 is no multiple of 4; without a pair every prompt has its group.
    strategy = Trace(32, 0, max_per_prompt=4, min_per_prompt=4, explore_roots=8)
    assert strategy.roots(np.full(8, 0.5), 8, np.random.default_rng(0)).tolist() == [4] * 8


def test_without_exploration_nothing_changes():
    v = np.full(24, 0.3)  # all ties: the generator decides
    a, b = np.random.default_rng(3), np.random.default_rng(3)
    assert Trace(20, 2).roots(v, 24, a).tolist() == allocate_roots(v, 20, rng=b).tolist()
    assert a.random() == b.random()


@pytest.mark.parametrize("objective", [None, any_contrast, advantage_mass, pairs])
@pytest.mark.parametrize("draws", [(), (3,)])
def test_trace_solves_its_objective(objective, draws):
    rng = np.random.default_rng(4)
    for least, explored in ((2, 0), (4, 0), (3, 4)):
        v = rng.random((*draws, 16))
        strategy = Trace(28, 2, max_per_prompt=6, min_per_prompt=least, objective=objective, explore_roots=explored)
        m = strategy.roots(v, 16, rng)
        assert m.dtype == np.int64 and m.sum() == 28 and m.max() <= 6
        table = (objective or any_contrast)(clamp_probability(v), 28)
        best = allocate_table(table, 28 - explored, min_per_prompt=least, max_per_prompt=6)
        # no ties, so the opened prompts are those of the optimum, and the others hold pairs
        assert m[best > 0].tolist() == best[best > 0].tolist()
        assert sorted(m[best == 0])[::-1][: explored // 2] == [2] * (explored // 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"explore_roots": 3}, "explore_roots is 3; use an even number from 0 to .* = 6"),
        ({"explore_roots": 8}, "explore_roots is 8; use an even number from 0 to .* = 6"),
        ({"explore_roots": -2}, "explore_roots is -2"),
        ({"explore_roots": 6, "min_per_prompt": 4}, "explore_roots is 6; .* = 4"),
        (
            {"explore_roots": 2, "min_per_prompt": 4, "max_per_prompt": 4},
            "explore_roots is 2, which leaves 6 of root_budget 8, no sum of 4 to 4 rollouts each",
        ),
        ({"min_per_prompt": 1}, "min_per_prompt is 1"),
        ({"min_per_prompt": 9}, "root_budget is 8; contrast takes at least 9"),
        ({"min_per_prompt": 5, "max_per_prompt": 4}, "max_per_prompt is 4; use 5 or more"),
    ],
)
def test_errors_name_the_value_and_the_limit(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        Trace(8, 2, **fields)
    assert "\n" not in str(error.value)
