"""The written-out backward pass of attention against jax's own derivative of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.models import attention

B, T, N, K, H = 2, 7, 6, 2, 4


def formula(q, k, v, visible):
    """Query head n reads key/value head n // (N / K); every pair by itself."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    score = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    weight = jax.nn.softmax(jnp.where(visible[:, None], score, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weight, v)


def drawn(dtype=np.float32):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((B, T, N, H), (B, T, K, H), (B, T, K, H)))
    visible = np.tril(rng.random((B, T, T)) < 0.7) | np.eye(T, dtype=bool)
    return q, k, v, visible, rng.standard_normal((B, T, N, H)).astype(dtype)


def test_values_and_gradients():
    q, k, v, visible, direction = drawn()
    results = []
    for function in (attention.attend, formula):
        loss = lambda *x, f=function: jnp.sum(f(*x, visible) * direction)
        results.append((function(q, k, v, visible), *jax.grad(loss, argnums=(0, 1, 2))(q, k, v)))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_query_that_sees_nothing_gives_finite_numbers():
    q, k, v, visible, _ = drawn()
    visible[0, 3] = False
    value, gradient = jax.value_and_grad(lambda q: jnp.sum(attention.attend(q, k, v, visible)))(q)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_half_precision_keeps_its_dtype():
    q, k, v, visible, direction = (jnp.asarray(x, jnp.bfloat16) if x.dtype != bool else x for x in drawn())
    loss = lambda q, k, v: jnp.sum(attention.attend(q, k, v, visible) * direction)
    gradients = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert {x.dtype for x in (attention.attend(q, k, v, visible), *gradients)} == {jnp.dtype("bfloat16")}
    exact = jax.grad(lambda *x: jnp.sum(formula(*x, visible) * direction), argnums=(0, 1, 2))(
        *(x.astype(jnp.float32) for x in (q, k, v))
    )
    for got, want in zip(gradients, exact, strict=True):
        assert float(jnp.abs(got - want).max()) == pytest.approx(0, abs=0.06)
