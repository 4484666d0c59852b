"""Updates and schedules against arithmetic done by hand or in numpy."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trace_jax.train import optimizer


def _step(tx, params, *grads):
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, updates


def test_clip_then_sgd_by_hand():
    # gradient (3, 4) has norm 5, clipped to 1: (.6, .8); rate .5 -> update (-.3, -.4)
    tx = optimizer.build(optimizer.sgd(optimizer.constant(0.5), momentum=0.0), clip_norm=1.0, max_update_norm=None)
    _, updates = _step(tx, jnp.zeros(2), jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(updates, [-0.3, -0.4], rtol=1e-6)


def test_small_gradient_is_not_clipped():
    tx = optimizer.build(optimizer.sgd(optimizer.constant(1.0), momentum=0.0), clip_norm=1.0, max_update_norm=None)
    _, updates = _step(tx, jnp.zeros(2), jnp.array([0.3, 0.4]))
    np.testing.assert_array_equal(updates, np.array([-0.3, -0.4], np.float32))


def test_clip_is_over_the_whole_tree():
    # two leaves of norm 3 and 4: global norm 5, both are divided by 5
    tx = optimizer.build(optimizer.sgd(optimizer.constant(1.0), momentum=0.0), clip_norm=1.0, max_update_norm=None)
    _, updates = _step(tx, {"a": jnp.zeros(1), "b": jnp.zeros(1)}, {"a": jnp.array([3.0]), "b": jnp.array([4.0])})
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.6, -0.8], rtol=1e-6)


def test_momentum_by_hand():
    # u1 = .2, u2 = .2 + .9 * .2 = .38; rate .1: total change -.058
    tx = optimizer.build(optimizer.sgd(optimizer.constant(0.1), momentum=0.9), clip_norm=1.0, max_update_norm=None)
    params, _ = _step(tx, jnp.zeros(1), jnp.array([0.2]), jnp.array([0.2]))
    np.testing.assert_allclose(params, [-0.058], rtol=1e-6)


def _numpy_adamw(params, grads, rate, b1, b2, eps, decay):
    m = v = np.zeros_like(params)
    for t, grad in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * grad
        v = b2 * v + (1 - b2) * grad**2
        params = params - rate * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * params)
    return params


def test_adamw_against_numpy():
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=5), rng.normal(size=(7, 5)) * 0.1  # norms below 1: the clip is idle
    base = optimizer.adamw(optimizer.constant(0.01), b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)
    tx = optimizer.build(base, clip_norm=10.0, max_update_norm=None)
    got, _ = _step(tx, jnp.asarray(start, jnp.float32), *jnp.asarray(grads, jnp.float32))
    np.testing.assert_allclose(got, _numpy_adamw(start, grads, 0.01, 0.8, 0.95, 1e-6, 0.1), rtol=2e-5)


def test_update_limit_bounds_the_change_of_the_parameters():
    # Adam's first step is rate * sign(gradient): norm .1 * sqrt(4) = .2 > .03, so it is scaled to norm .03
    base = optimizer.adamw(optimizer.constant(0.1), b1=0.9, b2=0.999, eps=1e-12, weight_decay=0.0)
    tx = optimizer.build(base, clip_norm=1.0, max_update_norm=0.03)
    params, _ = _step(tx, jnp.zeros(4), jnp.array([0.5, -0.1, 0.2, -0.3]))
    np.testing.assert_allclose(params, 0.015 * np.array([-1, 1, -1, 1]), rtol=1e-4)


def test_update_limit_leaves_a_short_step_alone():
    base = optimizer.sgd(optimizer.constant(0.01), momentum=0.0)
    grad = jnp.array([0.6, 0.8])
    limited, _ = _step(optimizer.build(base, clip_norm=1.0, max_update_norm=0.03), jnp.zeros(2), grad)
    free, _ = _step(optimizer.build(base, clip_norm=1.0, max_update_norm=None), jnp.zeros(2), grad)
    np.testing.assert_array_equal(limited, free)


def test_zero_gradient_moves_nothing():
    for base in (
        optimizer.sgd(optimizer.constant(1.0), momentum=0.9),
        optimizer.adamw(optimizer.constant(1.0), b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0),
    ):
        params, _ = _step(optimizer.build(base, clip_norm=1.0, max_update_norm=0.1), jnp.ones(3), jnp.zeros(3))
        np.testing.assert_array_equal(params, np.ones(3))


def test_warmup_cosine_closed_form():
    schedule = optimizer.warmup_cosine(2.0, warmup_steps=4, total_steps=12, final_fraction=0.1)
    # warm-up: 2 * s / 4; then 8 steps of .2 + 1.8 * (1 + cos(pi u)) / 2 with u = (s - 4) / 8; constant afterwards
    want = [0.0, 0.5, 1.0, 1.5] + [0.2 + 0.9 * (1 + math.cos(math.pi * (s - 4) / 8)) for s in range(4, 13)] + [0.2]
    np.testing.assert_allclose([schedule(s) for s in (*range(13), 40)], want, rtol=1e-6, atol=1e-7)


def test_without_warmup_the_first_step_counts():
    assert optimizer.warmup_cosine(1.0, warmup_steps=0, total_steps=10, final_fraction=0.0)(0) == 1.0
    assert optimizer.constant(0.25)(0) == optimizer.constant(0.25)(10**6) == 0.25


def test_schedule_counts_optimizer_steps():
    # warm-up over 2 steps of rate 0, .5, then 1: three steps on gradient 1 move by 0 + .5 + 1
    schedule = optimizer.warmup_cosine(1.0, warmup_steps=2, total_steps=10**6, final_fraction=1.0)
    tx = optimizer.build(optimizer.sgd(schedule, momentum=0.0), clip_norm=1.0, max_update_norm=None)
    params, _ = _step(tx, jnp.zeros(1), *[jnp.ones(1)] * 3)
    np.testing.assert_allclose(params, [-1.5], rtol=1e-6)


def test_impossible_settings_are_named():
    with pytest.raises(ValueError, match="warmup_steps 10 .* total_steps 10"):
        optimizer.warmup_cosine(1.0, warmup_steps=10, total_steps=10, final_fraction=0.0)
    base = optimizer.sgd(optimizer.constant(1.0), momentum=0.0)
    with pytest.raises(ValueError, match="clip_norm is 0"):
        optimizer.build(base, clip_norm=0, max_update_norm=None)
    with pytest.raises(ValueError, match="max_update_norm is -1"):
        optimizer.build(base, clip_norm=1.0, max_update_norm=-1)


def test_tables_hold_every_choice():
    assert set(optimizer.OPTIMIZERS) == {"adamw", "sgd"}
    assert set(optimizer.SCHEDULES) == {"constant", "warmup_cosine"}
    assert optimizer.OPTIMIZERS["sgd"] is optimizer.sgd and optimizer.SCHEDULES["constant"] is optimizer.constant
