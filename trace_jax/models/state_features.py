"""The policy's own hidden states as fixed features of a history, for a predictor that is linear in them (ours)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.models.decoder import Params

_EPSILON = 1e-6

# (policy_params, token_BT, pos_BT, end_BT) -> float32 [B, T, size]
Features = Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]


def state_features(cfg: DecoderConfig, *, layers: int, max_size: int) -> tuple[Features, int]:
    """(features, size): the residual stream behind `layers` layers, evenly spaced and with the last one among them.

    Each layer's state is divided by its root mean square, so it has length sqrt(D). Where `layers` D is more than
    `max_size`, a fixed random matrix with entries N(0, 1 / max_size) takes them down to that many numbers, which keeps
    lengths and products in expectation: what is fitted to them costs the same for every policy. Entry t depends on the
    tokens that t sees alone (see `types.PackedBatch`). No gradient reaches the policy.

    Args:
      cfg: the policy's decoder.
      layers: 1 to its number of layers; where there are fewer, all of them.
      max_size: the most numbers of a feature vector, at least 1.

    Raises ValueError for numbers below 1.
    """
    if layers < 1 or max_size < 1:
        raise ValueError(f"state features: {layers} layers and at most {max_size} numbers; both must be at least 1")
    chosen = spaced_layers(cfg.num_layers, layers)
    full = len(chosen) * cfg.hidden_size
    size = min(full, max_size)

    def features(policy_params, token_BT, pos_BT, end_BT):
        states_BTLD = decoder.layer_states(
            cfg, jax.lax.stop_gradient(policy_params), token_BT, pos_BT, end_BT, chosen
        )
        scale_BTL1 = jnp.sqrt(jnp.mean(jnp.square(states_BTLD), axis=-1, keepdims=True) + _EPSILON)
        flat_BTF = (states_BTLD / scale_BTL1).reshape(*token_BT.shape, full)
        if size == full:
            return flat_BTF
        return flat_BTF @ (jax.random.normal(jax.random.key(0), (full, size)) / jnp.sqrt(size))

    return features, size


def spaced_layers(num_layers: int, wanted: int) -> tuple[int, ...]:
    """Indices of min(wanted, num_layers) layers, evenly spaced, the last layer among them."""
    count = min(wanted, num_layers)
    return tuple(round(num_layers * (i + 1) / count) - 1 for i in range(count))
