"""Predictor losses: hand-derived values and gradients, optax as a second opinion, masked == removed."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trace_jax.objectives import value

LOSSES = [value.squared_error, value.binary_cross_entropy]


def test_squared_error_by_hand():
    # sigmoid(0) = 1/2, sigmoid(ln 3) = 3/4. Errors (1/2 - 1)^2 = 1/4 with weight 2, (3/4 - 1/2)^2 = 1/16 with weight 1.
    logit, target, weight = jnp.array([0.0, math.log(3.0)]), jnp.array([1.0, 0.5]), jnp.array([2.0, 1.0])
    np.testing.assert_allclose(value.squared_error(logit, target, weight), (0.5625, 3.0), rtol=1e-6)
    # d/dz = 2 w (s - y) s (1 - s): 2*2*(-1/2)*1/4 = -1/2 and 2*1*(1/4)*3/16 = 3/32
    grad = jax.grad(lambda z: value.squared_error(z, target, weight)[0])(logit)
    np.testing.assert_allclose(grad, [-0.5, 0.09375], rtol=1e-6)


def test_binary_cross_entropy_by_hand():
    # s = 1/2, y = 1: ln 2 with weight 2. s = 3/4, y = 1/2: -(ln 3/4 + ln 1/4) / 2 = ln 4 - ln(3) / 2 with weight 1.
    logit, target, weight = jnp.array([0.0, math.log(3.0)]), jnp.array([1.0, 0.5]), jnp.array([2.0, 1.0])
    expected = 2 * math.log(2) + math.log(4) - math.log(3) / 2
    np.testing.assert_allclose(value.binary_cross_entropy(logit, target, weight), (expected, 3.0), rtol=1e-6)
    grad = jax.grad(lambda z: value.binary_cross_entropy(z, target, weight)[0])(logit)
    np.testing.assert_allclose(grad, [2 * (0.5 - 1), 0.75 - 0.5], rtol=1e-6)  # w (s - y)


def test_binary_cross_entropy_equals_optax():
    rng = np.random.default_rng(0)
    logit, target, weight = rng.normal(size=20) * 5, rng.uniform(size=20), rng.uniform(size=20)
    got, _ = value.binary_cross_entropy(*map(jnp.float32, (logit, target, weight)))
    want = np.sum(weight * optax.sigmoid_binary_cross_entropy(jnp.float32(logit), jnp.float32(target)))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_equals_removed_and_micro_batches_add_up(loss):
    rng = np.random.default_rng(1)
    logit, target, weight = rng.normal(size=6), rng.uniform(size=6), rng.uniform(0.5, 1, size=6)
    whole = loss(*map(jnp.float32, (logit, target, weight)))
    parts = [loss(*map(jnp.float32, (logit[s], target[s], weight[s]))) for s in (slice(0, 2), slice(2, 6))]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-5)
    garbage = np.array([np.nan, np.inf, -np.inf])
    padded = [
        jnp.float32(np.concatenate([x, g])) for x, g in ((logit, garbage), (target, garbage), (weight, np.zeros(3)))
    ]
    np.testing.assert_allclose(loss(*padded), whole, rtol=1e-6)
    grad = jax.grad(lambda z: loss(z, *padded[1:])[0])(padded[0])
    want = jax.grad(lambda z: loss(z, jnp.float32(target), jnp.float32(weight))[0])(jnp.float32(logit))
    np.testing.assert_allclose(grad[:6], want, rtol=1e-6)
    np.testing.assert_array_equal(grad[6:], 0.0)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_train_on_is_zero(loss):
    total, weight = loss(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros((2, 3)))
    assert (total, weight) == (0.0, 0.0)


@pytest.mark.parametrize(("loss", "worst"), [(value.squared_error, 1.0), (value.binary_cross_entropy, 1000.0)])
def test_saturated_logits_stay_finite(loss, worst):
    # z = +-1000 on the wrong side: squared error 1 each, cross-entropy 1000 each. On the right side 0.
    logit, one = jnp.array([1000.0, -1000.0]), jnp.ones(2)
    wrong, right = jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0])
    np.testing.assert_allclose(loss(logit, wrong, one), (2 * worst, 2.0), rtol=1e-6)
    np.testing.assert_allclose(loss(logit, right, one), (0.0, 2.0), atol=1e-6)
    assert np.all(np.isfinite(jax.grad(lambda z: loss(z, wrong, one)[0])(logit)))


@pytest.mark.parametrize("loss", LOSSES)
def test_minimum_is_at_the_mean_target(loss):
    # Targets (0, 0, 1) for one input: both losses are proper, so the gradient vanishes where the sigmoid is 1/3.
    logit = jnp.float32(math.log(0.5))  # sigmoid = 1/3
    grad = jax.grad(lambda z: loss(jnp.full(3, z), jnp.array([0.0, 0.0, 1.0]), jnp.ones(3))[0])(logit)
    np.testing.assert_allclose(grad, 0.0, atol=1e-6)


def test_unequal_shapes_are_named():
    with pytest.raises(ValueError, match=r"logit \(2,\), target \(3,\) and weight \(2,\) must have one shape"):
        value.squared_error(jnp.zeros(2), jnp.zeros(3), jnp.zeros(2))
