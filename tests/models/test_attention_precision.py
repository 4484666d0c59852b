"""Attention in bfloat16 against float64: what is rounded is each weight and the result, once each, and nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.models import attention
from trace_jax.models.attention import KeyValue

B, T, N, K, H, LENGTH, TRUNK = 3, 4, 4, 2, 8, 24, 16  # sqrt(8) is no power of two: a scale in bfloat16 would show
HALF_STEP = 2.0**-8  # of bfloat16, relative: 8 bits


def inputs(seed):
    """Queries, keys and values that bfloat16 holds exactly, scores up to about 30, values above 0."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float64)
    return draw(B, T, N, H) * 4, draw(B, LENGTH, K, H) * 2, abs(draw(B, LENGTH, K, H))


def visible(length, first):
    return np.arange(length)[None, None] <= first + np.arange(T)[None, :, None] + np.zeros((B, 1, 1), int)


def reference(q, k, v, visible_BTS):
    """(mean, bound on the error): query by query."""
    out = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        score = np.where(visible_BTS[b, t], k[b, :, n // (N // K)] @ q[b, t, n] / np.sqrt(H), -np.inf)
        weight = np.exp(score - score.max())
        out[b, t, n] = weight / weight.sum() @ v[b, :, n // (N // K)]
    # Each weight and the result are rounded; values are positive, so no sum cancels. 1%: float32.
    return out, 2.02 * HALF_STEP * out


def bf16(x):
    return jnp.asarray(x, jnp.bfloat16)


def cache_of(k_BSKH, v_BSKH):
    return KeyValue(bf16(k_BSKH.transpose(0, 2, 3, 1)), bf16(v_BSKH.transpose(0, 2, 1, 3)))


@pytest.mark.parametrize("trunk", [0, TRUNK])
def test_cached(trunk):
    for seed in range(8):
        q, k, v = inputs(seed)
        k[:, :trunk], v[:, :trunk] = k[:1, :trunk], v[:1, :trunk]
        own, shared = cache_of(k[:, trunk:], v[:, trunk:]), cache_of(k[:1, :trunk], v[:1, :trunk])
        beginning = KeyValue(shared.keys[0], shared.values[0]) if trunk else None
        got = attention.attend_cached(bf16(q), own, visible(LENGTH - trunk, 20 - trunk), beginning)
        assert got.dtype == jnp.bfloat16
        out, bound = reference(q, k, v, visible(LENGTH, 20))
        assert (np.abs(np.asarray(got, np.float64) - out) <= bound).all()


def test_own_row():
    for seed in range(8):
        q, k, v = inputs(seed)
        got = attention.attend(bf16(q), bf16(k), bf16(v), visible(LENGTH, 20))
        assert got.dtype == jnp.bfloat16
        out, bound = reference(q, k, v, visible(LENGTH, 20))
        assert (np.abs(np.asarray(got, np.float64) - out) <= bound).all()
