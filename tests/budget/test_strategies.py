"""Strategies behind one interface, and a throw-away one that shows what a further one costs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from trace_jax.budget.grpo import Grpo
from trace_jax.budget.pcl import Pcl
from trace_jax.budget.prefix import agreement, prefix_value
from trace_jax.budget.root import root_value
from trace_jax.budget.strategy import Strategy, flat_prompts, flat_roots, no_forks
from trace_jax.budget.trace import Trace
from trace_jax.budget.treepo import TreePo


@dataclasses.dataclass(frozen=True)
class EveryOther:
    """A throw-away strategy: the even prompts, flat; what a further strategy costs."""

    rollouts_per_prompt: int
    total_rollouts: int
    name: ClassVar[str] = "every_other"
    needs_predictor: ClassVar[bool] = False
    continuations_per_root: ClassVar[int] = 0

    def roots(self, success_probability, pool_size, rng):
        ranking = np.concatenate([np.arange(0, pool_size, 2), np.arange(1, pool_size, 2)])
        return flat_roots(ranking, self.total_rollouts, self.rollouts_per_prompt)

    def forks(self, success, value, rollout, total, rng):
        return no_forks(success, total)


ALL = [Grpo(8, 64), Pcl(8, 64), TreePo(4, 32, 2), Trace(40, 2), EveryOther(8, 64)]


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
def test_every_strategy_spends_its_budget_exactly(strategy: Strategy):
    rng = np.random.default_rng(0)
    v = rng.random(24)
    budget = strategy.root_budget if hasattr(strategy, "root_budget") else strategy.total_rollouts
    for _ in range(20):
        m = strategy.roots(v if strategy.needs_predictor else None, 24, rng)
        assert m.shape == (24,) and m.dtype == np.int64 and m.sum() == budget and not np.any(m == 1)
        total = int(m.max()) * strategy.continuations_per_root
        success, value = rng.integers(0, 2, 7).astype(float), rng.random(7)
        rollout = np.arange(7) % 4  # of 4 bare rollouts
        k = strategy.forks(success, value if strategy.needs_predictor else None, rollout, total, rng)
        assert k.shape == (7,) and k.dtype == np.int64 and k.sum() == total and k.min() >= 0


def test_equal_generators_give_equal_choices():
    for strategy in ALL:
        a, b = (strategy.roots(np.full(24, 0.3), 24, np.random.default_rng(7)) for _ in range(2))
        assert a.tolist() == b.tolist()


def test_grpo_draws_prompts_uniformly():
    strategy, rng = Grpo(rollouts_per_prompt=8, total_rollouts=16), np.random.default_rng(0)
    draws = np.array([strategy.roots(None, 8, rng) for _ in range(4000)])
    assert np.all(np.sort(draws, axis=1) == [0, 0, 0, 0, 0, 0, 8, 8])
    # chosen with chance 2/8: 1000 of 4000, standard deviation sqrt(750) = 27.4
    assert np.all(np.abs((draws > 0).sum(axis=0) - 1000) < 5 * 27.4)


def test_grpo_serves_the_whole_pool_if_it_just_fits():
    assert Grpo(4, 12).roots(None, 3, np.random.default_rng(0)).tolist() == [4, 4, 4]


def test_pcl_takes_what_is_nearest_one_half():
    # distances .5 .4 .1 .05 .45 0: prompts 5, 3, 2, whatever the generator
    v = np.array([0.0, 0.9, 0.4, 0.55, 0.05, 0.5])
    for seed in range(5):
        assert Pcl(2, 6).roots(v, 6, np.random.default_rng(seed)).tolist() == [0, 0, 2, 2, 0, 2]


def test_pcl_breaks_ties_at_random_and_only_ties():
    # .25 and .75 are as far from one half as each other; one of the four goes beside prompt 0, each with chance 1/4
    v, rng = np.array([0.5, 0.25, 0.75, 0.25, 0.75, 1.0]), np.random.default_rng(0)
    chosen = np.array([Pcl(2, 4).roots(v, 6, rng) > 0 for _ in range(4000)]).sum(axis=0)
    assert chosen[0] == 4000 and chosen[5] == 0 and chosen.sum() == 8000
    assert np.all(np.abs(chosen[1:5] - 1000) < 5 * 27.4)  # as for GRPO


def test_treepo_draws_prompts_uniformly():
    strategy, rng = TreePo(4, 8, 2), np.random.default_rng(0)
    draws = np.array([strategy.roots(None, 8, rng) for _ in range(4000)])
    assert np.all(np.sort(draws, axis=1) == [0, 0, 0, 0, 0, 0, 4, 4])
    assert np.all(np.abs((draws > 0).sum(axis=0) - 1000) < 5 * 27.4)


def test_treepo_forks_two_different_anchors_of_each_rollout():
    """Four rollouts with 2, 3, 5 and 1 anchors, in an order that mixes them; the last has both forks at its only one."""
    rollout = np.array([7, 3, 3, 9, 9, 9, 9, 9, 2, 3, 2])
    strategy, rng = TreePo(4, 8, 2), np.random.default_rng(0)
    draws = np.array([strategy.forks(np.ones(11), None, rollout, 8, rng) for _ in range(3000)])
    for name, size in ((2, 2), (3, 3), (9, 5), (7, 1)):
        own = draws[:, rollout == name]
        assert own.shape[1] == size and np.all(own.sum(axis=1) == 2) and own.max() == (2 if size == 1 else 1)
        # each anchor with chance 2/size; the standard deviation is below sqrt(3000) / 2 = 27.4
        assert np.all(np.abs(own.mean(axis=0) - 2 / size) < 5 * 27.4 / 3000)


def test_treepo_gives_the_share_of_a_rollout_without_anchors_to_the_others():
    """Anchors of 2 of 4 bare rollouts: 2 forks each, and 4 more over all 3 anchors: one each and one at random."""
    rollout, rng = np.array([4, 4, 8]), np.random.default_rng(0)
    draws = np.array([TreePo(4, 8, 2).forks(np.ones(3), None, rollout, 8, rng) for _ in range(3000)])
    assert np.all(draws.sum(axis=1) == 8)
    assert {tuple(row) for row in draws.tolist()} == {(3, 2, 3), (2, 3, 3), (2, 2, 4)}
    assert np.all(np.abs((draws - [2, 2, 3]).mean(axis=0) - 1 / 3) < 5 * np.sqrt(2 / 9 / 3000))


def test_treepo_without_forks():
    assert TreePo(4, 8, 0).forks(np.ones(2), None, np.arange(2), 0, np.random.default_rng(0)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grpo(8, 60), "total_rollouts is 60, .* multiple of rollouts_per_prompt=8"),
        (lambda: Grpo(8, 0), "total_rollouts is 0"),
        (lambda: Grpo(1, 8), "rollouts_per_prompt is 1"),
        (lambda: Grpo(8, 64).roots(None, 7, np.random.default_rng(0)), "needs 8 prompts, but the pool has 7"),
        (lambda: Grpo(8, 64).forks(np.ones(3), None, np.arange(3), 2, np.random.default_rng(0)), "total is 2"),
        (lambda: Pcl(8, 60), "total_rollouts is 60, .* multiple of rollouts_per_prompt=8"),
        (lambda: Pcl(8, 64).roots(np.full(7, 0.5), 7, np.random.default_rng(0)), "needs 8 prompts, but the pool has 7"),
        (lambda: Pcl(8, 64).roots(None, 8, np.random.default_rng(0)), "each of 8 prompts, got none"),
        (lambda: Pcl(8, 64).roots(np.full(3, 0.5), 8, np.random.default_rng(0)), "each of 8 prompts, got 3"),
        (lambda: Pcl(8, 64).roots(np.full(8, np.nan), 8, np.random.default_rng(0)), "nan, outside"),
        (lambda: Pcl(8, 64).forks(np.ones(3), np.ones(3), np.arange(3), 2, np.random.default_rng(0)), "total is 2"),
        (lambda: TreePo(4, 30, 2), "is 30, .* multiple of rollouts_per_prompt=4"),
        (lambda: TreePo(4, 32, -1), "continuations_per_root is -1"),
        (lambda: TreePo(4, 32, 2).roots(None, 7, np.random.default_rng(0)), "needs 8 prompts, but the pool has 7"),
        (lambda: TreePo(4, 32, 2).forks(np.ones(0), None, np.arange(0), 8, np.random.default_rng(0)), "has no anchor"),
        (lambda: TreePo(4, 32, 2).forks(np.ones(5), None, np.arange(5), 8, np.random.default_rng(0)),
         "total is 8, but 5 bare rollouts with 2 continuations each take 10"),
        (lambda: Trace(1, 2), "root_budget is 1"),
        (lambda: Trace(8, -1), "continuations_per_root is -1"),
        (lambda: Trace(8, 2, 1), "max_per_prompt is 1"),
        (lambda: Trace(8, 2, 3).roots(np.full(2, 0.5), 2, np.random.default_rng(0)), "total is 8, but 2 prompts"),
        (lambda: Trace(8, 2).roots(None, 2, np.random.default_rng(0)), "each of 2 prompts, got none"),
        (lambda: Trace(8, 2).roots(np.full(3, 0.5), 2, np.random.default_rng(0)), "each of 2 prompts, got 3"),
        (lambda: Trace(8, 2).forks(np.ones(3), None, np.arange(3), 2, np.random.default_rng(0)), "each of 3 anchors, got none"),
        (lambda: Trace(8, 2).forks(np.array([0.4]), np.ones(1), np.zeros(1, int), 2, np.random.default_rng(0)), "0.4, not 0 or 1"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_the_limit(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_flat_helpers():
    assert flat_prompts(12, 4) == 3
    assert flat_roots(np.array([2, 0, 3, 1]), 4, 2).tolist() == [2, 0, 2, 0]
    assert no_forks(np.ones(3), 0).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="total is 1"):
        no_forks(np.ones(3), 1)


def test_trace_reproduces_the_worked_example():
    # m = 2, N = 2: rollout 1 succeeded (V = .6, .9), rollout 2 failed (V = .3), so q = .6, .9, .7. The gains are
    # .4, .24, .144 | .1, .09 | .3, .21, .147: the four largest are .4, .3, .24, .21.
    strategy = Trace(root_budget=4, continuations_per_root=2)
    k = strategy.forks(np.array([1.0, 1.0, 0.0]), np.array([0.6, 0.9, 0.3]), np.array([0, 0, 1]), 4, np.random.default_rng(0))
    assert k.tolist() == [2, 0, 2]


def test_trace_respects_its_cap_and_may_go_without_forks():
    m = Trace(12, 0, max_per_prompt=3).roots(np.array([0.5, 0.5, 0.01, 0.99]), 4, np.random.default_rng(0))
    assert m.tolist() == [3, 3, 3, 3]
    assert Trace(12, 0).forks(np.ones(2), np.ones(2), np.arange(2), 0, np.random.default_rng(0)).tolist() == [0, 0]


def test_trace_with_true_values_finds_more_contrast_than_flat_and_random():
    # Most prompts are nearly solved or nearly hopeless; all strategies spend 64 root rollouts.
    rng = np.random.default_rng(0)
    v = rng.beta(0.3, 0.3, 64)
    contrast = {
        s.name: np.mean([root_value(v, s.roots(v, 64, rng)).sum() for _ in range(50)])
        for s in (Trace(64, 0), Pcl(8, 64), Grpo(8, 64))
    }
    assert contrast["trace"] > contrast["pcl"] > contrast["grpo"]
    success, value = (rng.random(20) < 0.5).astype(float), rng.random(20)
    q, rollout = agreement(success, value), np.arange(20) // 4
    found = prefix_value(q, Trace(64, 1).forks(success, value, rollout, 8, rng)).sum()
    forks = TreePo(4, 32, 1).forks
    at_random = np.mean([prefix_value(q, forks(success, None, rollout, 8, rng)).sum() for _ in range(50)])
    assert found > at_random
