"""policy_loss against hand-derived numbers, the textbook surrogate per path, and masked == removed."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.objectives import policy

LOG = math.log


def _loss(ratio, adv_pos, adv_neg, weight=1.0, **kwargs):
    """The loss of tokens with the given ratios: old log-prob -1, new log-prob -1 + log r."""
    ratio, adv_pos, adv_neg, weight = np.broadcast_arrays(*np.atleast_1d(ratio, adv_pos, adv_neg, weight))
    old = -np.ones(ratio.shape, np.float32)
    return policy.policy_loss(*map(jnp.float32, (old + np.log(ratio), old, adv_pos, adv_neg, weight)), **kwargs)


@pytest.mark.parametrize(
    ("ratio", "adv_pos", "adv_neg", "expected"),
    [
        (1.0, 2.0, 0.0, -2.0),  # on policy: -A
        (1.0, 0.0, -2.0, 2.0),
        (1.1, 2.0, 0.0, -2.2),  # inside the range: -r A
        (1.5, 2.0, 0.0, -2.56),  # above 1.28 with A > 0: clipped, -1.28 * 2
        (0.5, 2.0, 0.0, -1.0),  # below 0.8 with A > 0: not clipped, -0.5 * 2
        (1.5, 0.0, -2.0, 3.0),  # above with A < 0: not clipped, 1.5 * 2
        (0.5, 0.0, -2.0, 1.6),  # below with A < 0: clipped, 0.8 * 2
        (2.0, 1.0, -1.0, 0.72),  # two paths, A = +1 and -1: -(1.28 - 2); the summed advantage 0 would give 0
        (0.5, 1.0, -1.0, 0.3),  # -(0.5 - 0.8)
    ],
)
def test_hand_derived(ratio, adv_pos, adv_neg, expected):
    loss, _ = _loss(ratio, adv_pos, adv_neg)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_is_a_sum_and_micro_batches_add_up():
    ratio, pos, neg = np.array([0.5, 1.0, 1.5, 2.0]), np.array([0.1, 0.0, 0.2, 0.0]), np.array([0.0, -0.3, -0.1, -0.2])
    # by hand: 0.5*0.1 = 0.05 | 1*-0.3 | 1.28*0.2 + 1.5*-0.1 = 0.106 | 2*-0.2 = -0.4; sum -0.544, loss 0.544
    whole, metrics = _loss(ratio, pos, neg)
    np.testing.assert_allclose(whole, 0.544, rtol=1e-6)
    first, m1 = _loss(ratio[:1], pos[:1], neg[:1])
    rest, m2 = _loss(ratio[1:], pos[1:], neg[1:])
    np.testing.assert_allclose(first + rest, whole, rtol=1e-6)
    for name in ("clip_low", "clip_high", "approx_kl"):
        np.testing.assert_allclose(np.add(m1[name], m2[name]), metrics[name], rtol=1e-5)


paths = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(-3.0, 3.0)), min_size=1, max_size=5)


@given(paths, st.floats(0.05, 8.0), st.floats(0.0, 0.9), st.floats(0.0, 2.0))
def test_equals_the_textbook_surrogate_summed_over_paths(paths, ratio, clip_low, clip_high):
    # Oracle: the surrogate as printed, one path at a time, in float64. The implementation gets two sums per token.
    expected = -sum(w * min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a) for w, a in paths)
    adv_pos = sum(w * max(a, 0.0) for w, a in paths)
    adv_neg = sum(w * min(a, 0.0) for w, a in paths)
    loss, _ = _loss(ratio, adv_pos, adv_neg, clip_low=clip_low, clip_high=clip_high)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)


def test_gradient_by_hand():
    # d loss / d logprob = -r (adv_pos [r <= 1.28] + adv_neg [r >= 0.8]); weights of one token each.
    #   r = 1.1: -1.1 (2 - 1) = -1.1 | r = 1.5: -1.5 * -1 = 1.5 | r = 0.5: -0.5 * 2 = -1
    old = -jnp.ones(3)
    pos, neg, weight = jnp.full(3, 2.0), jnp.full(3, -1.0), jnp.ones(3)
    logprob = old + jnp.log(jnp.array([1.1, 1.5, 0.5]))
    grad = jax.grad(lambda lp: policy.policy_loss(lp, old, pos, neg, weight)[0])(logprob)
    np.testing.assert_allclose(grad, [-1.1, 1.5, -1.0], rtol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_on_policy_gradient_when_old_is_the_same_array(clip):
    # Only `logprob` carries a gradient, else r = exp(0) would have none. On the bound (clip 0) it is the unclipped one.
    pos, neg, weight = jnp.array([0.5, 0.0]), jnp.array([0.0, -0.25]), jnp.ones(2)
    loss = lambda lp: policy.policy_loss(lp, lp, pos, neg, weight, clip_low=clip, clip_high=clip)[0]
    np.testing.assert_allclose(jax.grad(loss)(jnp.array([-1.0, -2.0])), [-0.5, 0.25], rtol=1e-6)


def _garbage_padded(seed):
    """Four real tokens; the same with padding full of NaN, infinities and huge numbers between them."""
    rng = np.random.default_rng(seed)
    real = {
        "logprob": -rng.uniform(0.1, 2, 4),
        "old_logprob": -rng.uniform(0.1, 2, 4),
        "adv_pos": rng.uniform(0, 1, 4),
        "adv_neg": -rng.uniform(0, 1, 4),
        "weight": rng.uniform(0.1, 1, 4),
        "ref_logprob": -rng.uniform(0.1, 2, 4),
        "behaviour_logprob": -rng.uniform(0.1, 2, 4),
    }
    at = np.array([1, 2, 5, 7])
    padded = {}
    for i, (name, x) in enumerate(real.items()):
        garbage = np.roll([np.nan, np.inf, -np.inf, 1e30], i)
        padded[name] = np.insert(x, [0, 2, 2, 3], 0.0 if name == "weight" else garbage)
    assert np.array_equal(padded["weight"][at], real["weight"]) and np.count_nonzero(padded["weight"]) == 4
    to_jax = lambda d: {k: jnp.asarray(v, jnp.float32) for k, v in d.items()}
    return to_jax(real), to_jax(padded), at


def test_masked_equals_removed():
    real, padded, at = _garbage_padded(0)

    def run(arrays):
        arrays = dict(arrays)
        logprob = arrays.pop("logprob")
        f = lambda lp: policy.policy_loss(lp, **arrays, kl_coef=0.1, tis_cap=1.5)
        (loss, metrics), grad = jax.value_and_grad(f, has_aux=True)(logprob)
        return loss, metrics, grad

    loss, metrics, grad = run(real)
    loss_p, metrics_p, grad_p = run(padded)
    np.testing.assert_allclose(loss_p, loss, rtol=1e-6)
    np.testing.assert_allclose(grad_p[at], grad, rtol=1e-6)
    np.testing.assert_array_equal(np.delete(grad_p, at), 0.0)
    assert metrics.keys() == metrics_p.keys()
    for name in metrics:
        np.testing.assert_allclose(metrics_p[name], metrics[name], rtol=1e-6, err_msg=name)


def test_all_padding_is_exactly_zero():
    nan, zero = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3))
    f = lambda lp: policy.policy_loss(
        lp, nan, nan, nan, zero, kl_coef=1.0, ref_logprob=nan, tis_cap=2.0, behaviour_logprob=nan
    )
    (loss, metrics), grad = jax.value_and_grad(f, has_aux=True)(nan)
    assert loss == 0.0
    np.testing.assert_array_equal(grad, 0.0)
    for name, pair in metrics.items():
        np.testing.assert_array_equal(pair, (0.0, 0.0), err_msg=name)


def test_no_contrast_means_no_gradient():
    # A group without variance: A = 0 but weight > 0. Zero loss and gradient whatever the ratio; the token still counts.
    logprob, old, zero, weight = jnp.array([-1.0, -3.0]), jnp.array([-2.0, -1.0]), jnp.zeros(2), jnp.ones(2)
    f = lambda lp: policy.policy_loss(lp, old, zero, zero, weight)
    (loss, metrics), grad = jax.value_and_grad(f, has_aux=True)(logprob)
    assert loss == 0.0 and metrics["clip_low"] == (0.0, 2.0) and metrics["clip_high"] == (0.0, 2.0)
    np.testing.assert_array_equal(grad, 0.0)


def test_metrics_by_hand():
    # r = (2, 0.5, 2, 0.5, 1), A = (+, +, -, -, +): high is cut for the first, low for the fourth; five tokens.
    # k3(r) = r - 1 - log r: 1 - ln 2 at 2, -1/2 + ln 2 at 1/2, 0 at 1; sum 2 (1 - ln 2) + 2 (ln 2 - 1/2) = 1.
    ratio, pos, neg = [2.0, 0.5, 2.0, 0.5, 1.0], [1.0, 1.0, 0.0, 0.0, 1.0], [0.0, 0.0, -1.0, -1.0, 0.0]
    _, metrics = _loss(ratio, pos, neg)
    assert metrics.keys() == {"clip_low", "clip_high", "approx_kl", "ratio_max"}
    np.testing.assert_allclose(metrics["clip_high"], (1, 5))
    np.testing.assert_allclose(metrics["clip_low"], (1, 5))
    np.testing.assert_allclose(metrics["approx_kl"], (1.0, 5), rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio_max"], (2.0, 1), rtol=1e-6)


def test_k3_is_the_kl_divergence_on_average():
    # Tokens drawn from old = (1/4, 3/4), new = (1/2, 1/2): E_old[k3] = KL(old || new) = 1/4 ln 1/2 + 3/4 ln 3/2.
    # Four tokens in the proportions of old stand for the expectation.
    old, new = np.array([0.25, 0.75, 0.75, 0.75]), np.full(4, 0.5)
    _, metrics = _loss(new / old, 0.0, 0.0)
    total, count = metrics["approx_kl"]
    np.testing.assert_allclose(total / count, 0.25 * LOG(0.5) + 0.75 * LOG(1.5), rtol=1e-5)


def test_kl_penalty_by_hand():
    # d = ref - new = ln 2: k3 = 2 - 1 - ln 2; weight 0.5, coefficient 0.1: 0.05 (1 - ln 2). Surrogate 0 (no advantage).
    # Gradient: weight * coef * (1 - e^d) = 0.05 * (1 - 2) = -0.05, which pulls the log-prob up toward the reference.
    zero, weight = jnp.zeros(1), jnp.array([0.5])
    new, ref = jnp.array([-2.0]), jnp.array([-2.0 + LOG(2.0)])
    f = lambda lp: policy.policy_loss(lp, new, zero, zero, weight, kl_coef=0.1, ref_logprob=ref)
    (loss, metrics), grad = jax.value_and_grad(f, has_aux=True)(new)
    np.testing.assert_allclose(loss, 0.05 * (1 - LOG(2.0)), rtol=1e-5)
    np.testing.assert_allclose(grad, [-0.05], rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_ref"], (1 - LOG(2.0), 1), rtol=1e-5)


def test_truncated_importance_weight_by_hand():
    # old - behaviour = ln 1.5 and ln 4, cap 2: c = 1.5 and 2. On policy with A = 1 and -1: loss -(1.5 - 2) = 0.5,
    # gradient -c A = (-1.5, 2): c itself has no gradient. Mean gap (ln 1.5 + ln 4) / 2 = ln 6 / 2.
    old, behaviour = jnp.array([-1.0, -1.0]), jnp.array([-1.0 - LOG(1.5), -1.0 - LOG(4.0)])
    pos, neg, weight = jnp.array([1.0, 0.0]), jnp.array([0.0, -1.0]), jnp.ones(2)
    f = lambda lp, b: policy.policy_loss(lp, old, pos, neg, weight, tis_cap=2.0, behaviour_logprob=b)
    (loss, metrics), (grad, grad_behaviour) = jax.value_and_grad(f, (0, 1), has_aux=True)(old, behaviour)
    np.testing.assert_allclose(loss, 0.5, rtol=1e-5)
    np.testing.assert_allclose(grad, [-1.5, 2.0], rtol=1e-5)
    np.testing.assert_array_equal(grad_behaviour, 0.0)
    np.testing.assert_allclose(metrics["tis_weight"], (3.5, 2), rtol=1e-5)
    np.testing.assert_array_equal(metrics["tis_capped"], (1, 2))
    np.testing.assert_allclose(metrics["behaviour_gap"], (LOG(6.0), 2), rtol=1e-5)


def test_behaviour_logprob_alone_only_reports():
    old, pos, neg, weight = jnp.array([-1.0]), jnp.array([1.0]), jnp.zeros(1), jnp.ones(1)
    loss, metrics = policy.policy_loss(old, old, pos, neg, weight, behaviour_logprob=jnp.array([-1.5]))
    np.testing.assert_allclose(loss, -1.0)
    np.testing.assert_allclose(metrics["behaviour_gap"], (0.5, 1))
    assert not {"tis_weight", "tis_capped"} & metrics.keys()


@pytest.mark.parametrize("cap, capped", [(0.5, 3), (1.0, 2), (3.0, 1), (5.0, 0)])
def test_share_of_tokens_at_the_cap(cap, capped):
    # weights before the cap 1/2, 1 and 4; the fourth token, at 1e9, is not trained. A weight that equals the cap counts.
    behaviour = -jnp.log(jnp.array([0.5, 1.0, 4.0, 1e9]))
    old, zero, weight = jnp.zeros(4), jnp.zeros(4), jnp.array([1.0, 1.0, 1.0, 0.0])
    _, metrics = policy.policy_loss(old, old, zero, zero, weight, tis_cap=cap, behaviour_logprob=behaviour)
    np.testing.assert_array_equal(metrics["tis_capped"], (capped, 3))
    mean = sum(min(w, cap) for w in (0.5, 1.0, 4.0))
    np.testing.assert_allclose(metrics["tis_weight"], (mean, 3), rtol=1e-5)


def test_extreme_ratios_stay_finite_and_visible():
    # log r = +-1000 is clamped to +-20: loss 1 * e^20 with A = -1; no gradient beyond the clamp.
    old = jnp.array([-1000.0, 0.0])
    logprob, zero, minus, weight = jnp.array([0.0, -1000.0]), jnp.zeros(2), -jnp.ones(2), jnp.ones(2)
    f = lambda lp: policy.policy_loss(lp, old, zero, minus, weight)
    (loss, metrics), grad = jax.value_and_grad(f, has_aux=True)(logprob)
    np.testing.assert_allclose(loss, math.exp(policy.MAX_LOG_RATIO) + 0.8, rtol=1e-5)
    np.testing.assert_array_equal(grad, 0.0)
    np.testing.assert_allclose(metrics["ratio_max"], (math.exp(policy.MAX_LOG_RATIO), 1), rtol=1e-5)


def test_a_nan_on_a_trained_token_is_not_hidden():
    one = jnp.ones(1)
    loss, _ = policy.policy_loss(-one, jnp.array([jnp.nan]), one, 0 * one, one)
    assert np.isnan(loss)
    loss, _ = policy.policy_loss(-one, -one, one, 0 * one, one * jnp.nan, kl_coef=1.0, ref_logprob=-one)
    assert np.isnan(loss)


def test_low_precision_inputs_are_computed_in_float32():
    # 1 + 2^-9 is not a bf16 number: a ratio formed in bf16 would be 1.
    logprob, old = jnp.array([2.0**-9], jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)
    loss, _ = policy.policy_loss(logprob, old, jnp.ones(1), jnp.zeros(1), jnp.ones(1))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, -math.exp(2.0**-9), rtol=1e-6)


def test_bad_arguments_are_named():
    one = jnp.ones(2)
    with pytest.raises(ValueError, match=r"adv_neg has shape \(1, 2\) but logprob has \(2,\)"):
        policy.policy_loss(one, one, one, one[None], one)
    with pytest.raises(ValueError, match=r"kl_coef=0\.1 needs ref_logprob"):
        policy.policy_loss(one, one, one, one, one, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"tis_cap=2\.0 needs behaviour_logprob"):
        policy.policy_loss(one, one, one, one, one, tis_cap=2.0)
