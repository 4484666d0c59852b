"""Maximum likelihood of given tokens: the loss of a warm start from demonstrations."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def supervised_loss(
    logprob: jax.Array, old_logprob: jax.Array, adv_pos: jax.Array, adv_neg: jax.Array, weight: jax.Array
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """-sum(weight * logprob), with the signature of a policy loss, whose other arguments it ignores.

    Arrays share one shape; weights of a whole step sum to one, so this is the mean cross-entropy in nats a token.
    Tokens of weight 0 contribute exactly zero, whatever their log-prob. Reports the mean under `nll`.
    """
    del old_logprob, adv_pos, adv_neg
    trained = weight != 0
    total = -jnp.sum(jnp.where(trained, weight * jnp.where(trained, logprob, 0.0), 0.0))
    return total, {"nll": (total, jnp.sum(weight))}
