"""Inversion of the distribution function against numpy's running sum in float64, and its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.engines import sampling

draw = jax.jit(sampling.draw)


@pytest.mark.parametrize("vocabulary", [2, 11, 128, 129, 1000])
def test_tokens_and_logprobs_equal_the_inverted_running_sum(vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 3, (400, vocabulary)).astype(np.float32)
    uniform = rng.random(400).astype(np.float32)
    token, logprob = draw(jnp.asarray(logits), jnp.asarray(uniform))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    upto = np.cumsum(np.exp(exact), axis=1)
    expected = (upto <= uniform[:, None]).sum(axis=1)
    # The token may differ where the uniform number falls within f32 rounding of a step of the running sum.
    step = np.abs(upto - uniform[:, None]).min(axis=1)
    assert np.all((np.asarray(token) == expected) | (step < 1e-5))
    assert np.mean(np.asarray(token) == expected) > 0.99
    np.testing.assert_allclose(logprob, exact[np.arange(400), token], atol=2e-5)


def test_the_ends_of_the_unit_interval_and_entries_without_mass():
    """Mass on entries 3 and 140 of 200 only: 1/4 and 3/4."""
    logits = np.full((4, 200), -np.inf, np.float32)
    logits[:, 3], logits[:, 140] = 0.0, np.log(3.0)
    uniform = np.array([0.0, 0.2499, 0.2501, np.nextafter(1, 0)], np.float32)
    token, logprob = draw(jnp.asarray(logits), jnp.asarray(uniform))
    assert np.asarray(token).tolist() == [3, 3, 140, 140]
    np.testing.assert_allclose(np.exp(logprob), [0.25, 0.25, 0.75, 0.75], rtol=1e-6)


def test_rounding_at_the_end_never_picks_padding():
    """A uniform number that rounds the target up to the whole mass: the heaviest entry stands in."""
    token, _ = draw(jnp.asarray([[0.0, 1.0, -5.0]]), jnp.asarray([1.0]))
    assert np.asarray(token).tolist() == [1]
