"""Losses of the success predictor. Each returns (sum, weight), so that micro-batches add up before the division."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def squared_error(logit: jax.Array, target: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squared error of the predicted success (paper Eq. 19; the sigmoid is our choice, the paper gives only the range).

        sum w (sigmoid(logit) - target)^2,   sum w

    Its gradient vanishes where the sigmoid saturates, also on a wrong side.

    Args (arrays of one and the same shape):
        logit: the predictor's output before the sigmoid.
        target: backed-up success (Eq. 18), in [0, 1].
        weight: >= 0; where it is 0 the other entries may be anything, also NaN, and add nothing to value or gradient.

    Returns:
        (weighted sum, total weight), f32 scalars; the mean is sum / weight over all micro-batches.

    Raises:
        ValueError: shapes differ.
    """
    return _weighted(lambda z, y: jnp.square(jax.nn.sigmoid(z) - y), logit, target, weight)


def binary_cross_entropy(logit: jax.Array, target: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the predicted success with soft targets (our option beside Eq. 19).

        sum w (-y log s - (1 - y) log(1 - s)) = sum w (log(1 + e^z) - y z),   sum w;   s = sigmoid(z)

    The least value is the entropy of the targets, not zero. The gradient s - y does not vanish in saturation.
    Arguments, results and errors as in `squared_error`.
    """
    return _weighted(lambda z, y: jax.nn.softplus(z) - y * z, logit, target, weight)


def _weighted(
    loss: Callable[[jax.Array, jax.Array], jax.Array], logit: jax.Array, target: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if not logit.shape == target.shape == weight.shape:
        raise ValueError(
            f"predictor loss: logit {logit.shape}, target {target.shape} and weight {weight.shape} must have one shape"
        )
    weight = weight.astype(jnp.float32)
    z, y = (jnp.where(weight != 0, x.astype(jnp.float32), 0.0) for x in (logit, target))
    return jnp.sum(weight * loss(z, y)), jnp.sum(weight)
