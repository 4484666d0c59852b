"""The policy's own hidden states as fixed features of a history, for a predictor that is linear in them (ours).

The states behind some layers at the history's last token become one vector: each layer's state is divided by its root
mean square, so it has length sqrt(D), and where that makes more numbers than wanted, a fixed random matrix with entries
N(0, 1 / max_size) takes them down to that many, which keeps lengths and products in expectation: what is fitted to them
costs the same for every policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.models.decoder import Params

_EPSILON = 1e-6

# (policy_params, token_BT, pos_BT, end_BT) -> float32 [B, T, size]
Features = Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class StateFeatures:
    """One map from states to features, for whoever holds the states already, and for packed rows.

    `of_rows` has the signature of `Features`; entry t depends on the tokens that t sees alone (see
    `types.PackedBatch`), and no gradient reaches the policy.
    """

    layers: tuple[int, ...]  # whose states are read, in this order
    size: int  # F, numbers of a feature vector
    of_states: Callable[[jax.Array], jax.Array]  # residual stream float32 [..., len(layers), D] -> float32 [..., F]
    of_rows: Features


def of_policy(cfg: DecoderConfig, *, layers: int, max_size: int) -> StateFeatures:
    """Features from the residual stream behind `layers` layers, evenly spaced and with the last one among them.

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
    # Drawn here, once: the engine makes features at every call.
    projection = None if size == full else np.asarray(jax.random.normal(jax.random.key(0), (full, size)) / size**0.5)

    def of_states(states_LD):
        scale_L1 = jnp.sqrt(jnp.mean(jnp.square(states_LD), axis=-1, keepdims=True) + _EPSILON)
        flat_F = (states_LD / scale_L1).reshape(*states_LD.shape[:-2], full)
        return flat_F if projection is None else flat_F @ projection

    def of_rows(policy_params, token_BT, pos_BT, end_BT):
        policy_params = jax.lax.stop_gradient(policy_params)
        return of_states(decoder.layer_states(cfg, policy_params, token_BT, pos_BT, end_BT, chosen))

    return StateFeatures(chosen, size, of_states, of_rows)


def spaced_layers(num_layers: int, wanted: int) -> tuple[int, ...]:
    """Indices of min(wanted, num_layers) layers, evenly spaced, the last layer among them."""
    count = min(wanted, num_layers)
    return tuple(round(num_layers * (i + 1) / count) - 1 for i in range(count))
