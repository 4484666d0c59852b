"""Figures of a predictor's scores against hand computation on a few prompts, and against the truth on many."""

import numpy as np
import pytest

from trace_jax.eval import predictor_measures as measures
from trace_jax.eval.predictor_measures import Scored
from trace_jax.eval.regret import Measured


def scored(score, successes, rollouts, group=None, depth=None):
    size = len(successes)
    return Scored(
        np.asarray(score),
        Measured(np.array(successes), np.array(rollouts)),
        group or ["a"] * size,
        np.zeros(size, int) if depth is None else np.array(depth),
    )


def test_quality_by_hand():
    # Rates 3/4, 1/4, 1. Brier of p on k of 4: p^2 - 2p k/4 + k/4:
    #   .5 on 3: .25 - .75 + .75 = .25; .25 on 1: .0625 - .125 + .25 = .1875; 1 on 4: 0.
    # Class a = {0, 1}: 0 is told 1/4, 1 is told 3/4, and 2, alone in b, the rate of all others 4/8:
    #   .0625 - .375 + .75 = .4375; .5625 - .375 + .25 = .4375; .25 - 1 + 1 = .25.
    # Constant: 0 is told 5/8, 1 7/8, 2 1/2: .390625 - .9375 + .75 = .203125; .765625 - .4375 + .25 = .578125; .25.
    # True rates: k(4-k)/12: 3/12, 3/12, 0.
    found = measures.quality(scored([0.5, 0.25, 1.0], [3, 1, 4], [4, 4, 4], ["a", "a", "b"]))
    assert found == {
        "items": 3,
        "success": pytest.approx(2 / 3),
        "bias": pytest.approx(-0.25 / 3),
        "brier": pytest.approx(0.4375 / 3),
        "brier_class": pytest.approx(1.125 / 3),
        "brier_constant": pytest.approx(1.03125 / 3),
        "brier_perfect": pytest.approx(0.5 / 3),
        "ece": pytest.approx(0.25 / 3),  # three bins of one: |.5 - .75|, 0, 0
        "spearman": 1.0,
    }
    draws = scored([[0.25, 0.0, 1.0], [0.75, 0.5, 1.0]], [3, 1, 4], 4, ["a", "a", "b"])  # their mean is the same
    assert measures.quality(draws) == found
    nothing = measures.quality(scored([], np.zeros(0, int), np.zeros(0, int)))
    assert nothing.pop("items") == 0 and nothing.keys() < found.keys() and np.isnan(list(nothing.values())).all()


def test_the_perfect_brier_has_no_bias():
    """Against the closed form, over many draws of few rollouts."""
    rng = np.random.default_rng(0)
    v, size = np.array([0.1, 0.5, 0.9] * 20_000), np.array([2, 3, 5] * 20_000)
    found = measures.perfect_brier(Measured(rng.binomial(size, v), size))
    assert found == pytest.approx((2 * 0.09 + 3 * 0.25 + 5 * 0.09) / 10, abs=0.003)


def test_depths_are_pooled_from_four_on():
    roots = scored([0.5], [1], [2])
    anchors = scored([0.0, 1.0, 0.5, 0.75], [0, 1, 2, 1], [2, 2, 2, 2], list("abcd"), [1, 1, 4, 6])
    found = measures.by_depth(roots, anchors)
    assert {name: found[f"depth_{d}/{name}"] for d in (0,) for name in ("items", "bias", "brier")} == {
        "items": 1, "bias": 0.0, "brier": 0.25
    }
    # depth 1: scores 0 and 1 for rates 0 and 1/2; depth 4: .5 and .75 for rates 1 and 1/2
    assert found["depth_1/items"] == found["depth_4/items"] == 2 and "depth_2/items" not in found
    assert (found["depth_1/bias"], found["depth_1/brier"]) == (0.25, 0.25)
    assert found["depth_4/bias"] == -0.125 and found["depth_4/brier"] == pytest.approx((0.25 + 0.0625 + 0.25) / 2)


def test_root_gains_of_a_predictor_that_knows():
    """Two pools of two prompts: one is always right, of the other every rollout alternates. Two rollouts go to one."""
    successes, sizes = [40, 20, 20, 0], [40, 40, 40, 40]
    gains = measures.root_gains(
        scored([1.0, 0.5, 0.5, 0.0], successes, sizes),
        pool=2,
        root_budget=2,
        allocate=None,
        uniform_rollouts=2,
        rng=np.random.default_rng(0),
    )
    # The other prompt's contrast: about 1/2 (a judging half of 20 rollouts); uniform: the mean with a prompt of none.
    contrast = gains["effective_ratio_learned"]
    assert contrast == pytest.approx(0.5, abs=0.08) and gains["effective_ratio_oracle"] == contrast
    assert gains["effective_ratio_uniform"] == pytest.approx(contrast / 2)
    assert gains["groups_per_unit_learned"] == pytest.approx(contrast / 2)
    assert 0.2 * contrast < gains["effective_ratio_shuffled"] < 0.8 * contrast  # half of the permutations are wrong
    assert gains["effective_ratio_share_of_oracle"] == gains["groups_per_unit_share_of_oracle"] == 1.0
    assert gains["effective_ratio_share_of_shuffled"] == contrast / gains["effective_ratio_shuffled"]
    assert (gains["pools"], gains["active"], gains["plugged_in"]) == (2, 1, 0)
    with pytest.raises(ValueError, match="4 prompts are less than a pool of 8"):
        measures.root_gains(
            scored([1.0, 0.5, 0.5, 0.0], successes, sizes),
            pool=8,
            root_budget=2,
            allocate=None,
            uniform_rollouts=2,
            rng=np.random.default_rng(0),
        )


def test_pools_are_taken_as_they_come():
    """In the second one nothing can be bought, so the mean is half of the first; the prompt beyond them is left out."""
    items = scored([0.5, 0.5, 0.0, 0.0, 0.5], [20, 20, 0, 0, 20], 40)
    gains = measures.root_gains(
        items, pool=2, root_budget=2, allocate=None, uniform_rollouts=2, rng=np.random.default_rng(1)
    )
    assert gains["pools"] == 2 and gains["effective_ratio_learned"] == pytest.approx(0.25, abs=0.04)


def test_prefix_gains_by_hand():
    """One prompt, factual success: one anchor always succeeds again, one never does. A continuation flips or does not.

    Scores the wrong way round buy nothing; the oracle buys a flip, the uniform one half, a shuffled one one in two.
    """
    right = scored([1.0, 0.0], [8, 0], 8, depth=[1, 2])
    outcome, prompt = np.array([1, 1]), np.array([0, 0])
    gains = measures.prefix_gains(right, outcome, prompt, 1, np.random.default_rng(0))
    assert gains["flips_per_continuation_learned"] == gains["flips_per_continuation_oracle"] == 1.0
    assert gains["flips_per_continuation_uniform"] == 0.5
    assert 0.2 < gains["flips_per_continuation_shuffled"] < 0.8 and gains["plugged_in"] == 0
    assert gains["flips_per_continuation_share_of_shuffled"] == 1 / gains["flips_per_continuation_shuffled"]
    wrong = scored([0.0, 1.0], [8, 0], 8, depth=[1, 2])
    gains = measures.prefix_gains(wrong, outcome, prompt, 1, np.random.default_rng(0))
    assert gains["flips_per_continuation_learned"] == gains["flips_per_continuation_share_of_oracle"] == 0.0


def test_parts_keep_what_belongs_together():
    items = scored([[0.1, 0.2, 0.3]], [0, 1, 2], [2, 3, 4], ["a", "b", "c"], [1, 2, 3])
    part = items.part(np.array([False, True, True]))
    assert part.probability.tolist() == [0.2, 0.3] and part.group == ["b", "c"] and part.depth.tolist() == [2, 3]
    assert part.measured.successes.tolist() == [1, 2] and part.measured.rollouts.tolist() == [3, 4] and part.size == 2
