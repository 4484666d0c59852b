"""token_logprobs against the dense formula in numpy float64, and its memory against [B, T, V]."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.objectives import logprob

B, T, D, V = 3, 11, 5, 17


def _inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    kernel = rng.normal(size=(D, V)).astype(np.float32)
    return hidden, kernel, rng.integers(0, V, size=(B, T)).astype(np.int32)


def _dense(hidden, kernel, target, temperature):
    """Straight from the definition, in float64: p = softmax(h W / T); log p[target]; -sum p log p."""
    logit = hidden.astype(np.float64) @ kernel.astype(np.float64) / temperature
    prob = np.exp(logit - logit.max(-1, keepdims=True))
    prob /= prob.sum(-1, keepdims=True)
    rows, cols = np.indices(target.shape)
    return np.log(prob[rows, cols, target]), -(prob * np.log(prob)).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])  # 4 does not divide T = 11; 64 is longer than the row
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_equals_the_dense_formula(chunk, temperature):
    hidden, kernel, target = _inputs()
    got = logprob.token_logprobs(hidden, kernel, target, temperature=temperature, chunk=chunk)
    want = _dense(hidden, kernel, target, temperature)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.float32 and g.shape == (B, T)
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


def test_hand_derived():
    # One position, D = 1, h = 1, kernel (0, ln 3), temperature 1: p = (1/4, 3/4).
    # log p[1] = ln(3/4); entropy = (1/4) ln 4 + (3/4) ln(4/3) = ln 4 - (3/4) ln 3.
    # At temperature 1/2 the logits double: p = (1/10, 9/10), entropy = ln 10 - (9/10) ln 9.
    hidden, kernel, target = jnp.ones((1, 1, 1)), jnp.array([[0.0, math.log(3.0)]]), jnp.array([[1]])
    lp, entropy = logprob.token_logprobs(hidden, kernel, target, temperature=1.0, chunk=1)
    np.testing.assert_allclose([lp[0, 0], entropy[0, 0]], [math.log(0.75), math.log(4) - 0.75 * math.log(3)], rtol=1e-6)
    lp, entropy = logprob.token_logprobs(hidden, kernel, target, temperature=0.5, chunk=1)
    np.testing.assert_allclose([lp[0, 0], entropy[0, 0]], [math.log(0.9), math.log(10) - 0.9 * math.log(9)], rtol=1e-6)


def test_entropy_is_not_surprisal():
    # Zero logits: whatever the target, entropy = ln V. A kernel that all but decides for token 0 and the unlikely
    # target 1: surprisal about 50, entropy about 0.
    hidden, kernel, target = _inputs()
    _, entropy = logprob.token_logprobs(hidden, 0 * kernel, target, temperature=1.0, chunk=4)
    np.testing.assert_allclose(entropy, math.log(V), rtol=1e-6)
    peaked = jnp.zeros((1, V)).at[0, 0].set(50.0)
    lp, entropy = logprob.token_logprobs(jnp.ones((1, 1, 1)), peaked, jnp.array([[1]]), temperature=1.0, chunk=1)
    np.testing.assert_allclose([lp[0, 0], entropy[0, 0]], [-50.0, 0.0], atol=1e-5)


def test_gradients_equal_the_analytic_ones():
    # d log p[a] / d logit_v = [v = a] - p_v;  d entropy / d logit_v = -p_v (log p_v + H);  logit = h W / T.
    hidden, kernel, target = _inputs(1)
    temperature, rng = 0.7, np.random.default_rng(2)
    u, s = rng.normal(size=(2, B, T))  # weights of log-prob and entropy in the scalar

    def scalar(h, w):
        lp, entropy = logprob.token_logprobs(h, w, target, temperature=temperature, chunk=4)
        return jnp.sum(lp * u + entropy * s)

    got_hidden, got_kernel = jax.jit(jax.grad(scalar, (0, 1)))(hidden, kernel)
    logit = hidden.astype(np.float64) @ kernel / temperature
    prob = np.exp(logit) / np.exp(logit).sum(-1, keepdims=True)
    entropy = -(prob * np.log(prob)).sum(-1, keepdims=True)
    d_logit = u[..., None] * (np.eye(V)[target] - prob) - s[..., None] * prob * (np.log(prob) + entropy)
    np.testing.assert_allclose(got_hidden, d_logit @ kernel.T / temperature, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        got_kernel, np.einsum("btd,btv->dv", hidden, d_logit) / temperature, rtol=1e-4, atol=1e-5
    )


def test_large_logits_stay_finite():
    hidden, kernel, target = _inputs()
    loss = lambda h: sum(jnp.sum(x) for x in logprob.token_logprobs(h, 1e4 * kernel, target, temperature=1.0, chunk=4))
    value, grad = jax.value_and_grad(loss)(hidden)
    assert np.isfinite(value) and np.all(np.isfinite(grad))


def test_bfloat16_inputs_give_float32_results():
    # bf16 inputs are exact in float64, products accumulate in f32: only f32 rounding is left.
    hidden, kernel, target = _inputs()
    hidden, kernel = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(kernel, jnp.bfloat16)
    got = logprob.token_logprobs(hidden, kernel, target, temperature=1.0, chunk=4)
    want = _dense(np.asarray(hidden, np.float64), np.asarray(kernel, np.float64), target, 1.0)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


def _largest_array(jaxpr) -> int:
    """Elements of the largest array that any equation of a jaxpr, however deeply nested, makes."""
    largest = 0
    for eqn in jaxpr.eqns:
        largest = max([largest, *(math.prod(v.aval.shape) for v in eqn.outvars)])
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                largest = max(largest, _largest_array(inner))
    return largest


def _memory(chunk, rows=2, length=64, width=4, vocab=1024):
    def scalar(h, w, t):
        lp, entropy = logprob.token_logprobs(h, w, t, temperature=1.0, chunk=chunk)
        return jnp.sum(lp + entropy)

    shapes = (
        jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
    )
    grad = jax.jit(jax.value_and_grad(scalar, (0, 1)))
    largest = _largest_array(jax.make_jaxpr(grad)(*shapes).jaxpr)
    return largest, grad.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_no_array_of_all_logits_in_either_pass():
    # B T V = 2 * 64 * 1024 = 131,072 elements; one chunk of 4 positions makes 2 * 4 * 1024 = 8,192.
    # With chunk = T the full array does appear: the check sees what it looks for.
    full = 2 * 64 * 1024
    largest, temporaries = _memory(chunk=4)
    assert largest == 2 * 4 * 1024
    assert temporaries < 4 * full
    largest, temporaries = _memory(chunk=64)
    assert largest == full
    assert temporaries >= 4 * full


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": np.zeros((B, T + 1), np.int32)}, r"must be \[B, T, D\], \[D, V\] and \[B, T\]"),
        ({"kernel": np.zeros((D + 1, V), np.float32)}, r"must be \[B, T, D\]"),
        ({"temperature": 0.0}, "temperature=0.0 must be > 0"),
        ({"chunk": 0}, "chunk=0 must be >= 1"),
    ],
)
def test_bad_arguments_are_named(change, message):
    hidden, kernel, target = _inputs()
    kwargs = {"hidden": hidden, "kernel": kernel, "target": target, "temperature": 1.0, "chunk": 4} | change
    args = [kwargs.pop(name) for name in ("hidden", "kernel", "target")]
    with pytest.raises(ValueError, match=message):
        logprob.token_logprobs(*args, **kwargs)
