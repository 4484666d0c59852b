"""Cross-entropy by hand, and padding that must not reach it."""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.objectives.supervised import supervised_loss


def test_weighted_mean_by_hand_and_zero_gradient_on_padding():
    # 0.25 * 2 + 0.75 * 0.4 = 0.8; the third token is padding with a log-prob of -inf.
    logprob, weight = jnp.array([-2.0, -0.4, -jnp.inf]), jnp.array([0.25, 0.75, 0.0])
    unused = jnp.full(3, jnp.nan)
    loss, metrics = supervised_loss(logprob, unused, unused, unused, weight)
    np.testing.assert_allclose(loss, 0.8, rtol=1e-6)
    np.testing.assert_allclose(metrics["nll"][0] / metrics["nll"][1], 0.8, rtol=1e-6)
    gradient = jax.grad(lambda x: supervised_loss(x, unused, unused, unused, weight)[0])(logprob)
    np.testing.assert_array_equal(gradient, [-0.25, -0.75, 0.0])
