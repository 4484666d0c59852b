"""Success predictors: V(H) in [0, 1] from the tokens of a history H, in two forms behind one interface.

`critic` is a decoder of its own with a scalar read-out (the paper's form: a Qwen3-0.6B critic, shared by prompts and
prefixes). `policy_head` is a small network on the policy's own hidden states (our option): it has no backbone of its
own to store and train. Neither sends a gradient to the policy.

The paper names neither the read-out nor the squashing. Ours: one output at the last token of the history, a sigmoid on
top, and a last layer that starts at zero, so that an untrained predictor says 0.5 to everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig

Params = Any


@dataclasses.dataclass(frozen=True)
class PredictorModel:
    """A predictor as pure functions.

    `logits(params, policy_params, token_BT, pos_BT, end_BT)` returns float32 [B, T]: sigmoid of entry [b, t] is the
    predicted success of the history that ends with that token. Entry t reads only tokens that t sees,
    `k <= t and t < end[k]` (see `types.PackedBatch`), so several histories can share a row. Padding gets finite numbers
    that mean nothing. The gradient in `policy_params` is exactly zero. `param_axes()` is a tree like the params whose
    leaves are PartitionSpecs of logical axis names, as in `decoder.param_axes`.

    `around(decoder_params, key)` are params with the given backbone, no copy of it, and a fresh read-out; None where
    the predictor has no backbone of its own.
    """

    init: Callable[[jax.Array], Params]  # key -> float32 params
    logits: Callable[[Params, Params, jax.Array, jax.Array, jax.Array], jax.Array]
    param_axes: Callable[[], Params]
    around: Callable[[Params, jax.Array], Params] | None = None


def critic(cfg: DecoderConfig) -> PredictorModel:
    """A decoder of its own and a linear read-out in float32; `policy_params` is ignored and may be None.

    Params: {"decoder": as of `decoder.init_params`, float32, never with an lm_head,
             "head": {"score": {"kernel" [D, 1], "bias" [1]}}}.
    """
    # A critic has no logits, so it needs no lm_head; it is trained, so its parameters are float32.
    cfg = dataclasses.replace(cfg, tie_embeddings=True, param_dtype="float32")
    head = _Head(mlp_size=None)

    def init(key: jax.Array) -> Params:
        decoder_key, head_key = jax.random.split(key)
        return around(decoder.init_params(cfg, decoder_key), head_key)

    def around(decoder_params: Params, key: jax.Array) -> Params:
        return {"decoder": decoder_params, "head": _init_head(head, cfg.hidden_size, key)}

    def logits(params, policy_params, token_BT, pos_BT, end_BT):
        del policy_params
        hidden_BTD = decoder.hidden_states(cfg, params["decoder"], token_BT, pos_BT, end_BT)
        return head.apply({"params": params["head"]}, hidden_BTD)

    return PredictorModel(
        init, logits, lambda: {"decoder": decoder.param_axes(cfg), "head": _head_axes(head, cfg.hidden_size)}, around
    )


def policy_head(policy_cfg: DecoderConfig, *, mlp_size: int) -> PredictorModel:
    """score(gelu(hidden(RMSNorm(h)))) in float32 on the policy's final hidden states h, which get no gradient.

    Params with F = mlp_size: {"norm": {"scale" [D]}, "hidden": {"kernel" [D, F], "bias" [F]},
                               "score": {"kernel" [F, 1], "bias" [1]}}.
    Raises ValueError for mlp_size < 1.
    """
    if mlp_size < 1:
        raise ValueError(f"predictor head: mlp_size={mlp_size} must be >= 1")
    head = _Head(mlp_size=mlp_size)

    def logits(params, policy_params, token_BT, pos_BT, end_BT):
        # Stopped at the weights, not at the states: then no backward pass through the policy is traced at all.
        hidden_BTD = decoder.hidden_states(policy_cfg, jax.lax.stop_gradient(policy_params), token_BT, pos_BT, end_BT)
        return head.apply({"params": params}, hidden_BTD)

    return PredictorModel(
        lambda key: _init_head(head, policy_cfg.hidden_size, key),
        logits,
        lambda: _head_axes(head, policy_cfg.hidden_size),
    )


class _Head(nn.Module):
    """[.., D] -> [..]: an RMS-normed hidden layer of `mlp_size` units, or none; a scalar output that starts at zero."""

    mlp_size: int | None

    @nn.compact
    def __call__(self, x_BTD):
        x, axis = x_BTD.astype(jnp.float32), "embed"
        if self.mlp_size is not None:
            scale = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
            x = nn.RMSNorm(scale_init=scale, name="norm")(x)
            kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            bias = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
            x, axis = nn.gelu(nn.Dense(self.mlp_size, kernel_init=kernel, bias_init=bias, name="hidden")(x)), "mlp"
        kernel = nn.with_logical_partitioning(nn.initializers.zeros, (axis, None))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
        return nn.Dense(1, kernel_init=kernel, bias_init=bias, name="score")(x)[..., 0]


def _init_head(head: _Head, hidden_size: int, key: jax.Array) -> Params:
    return nn.meta.unbox(head.init(key, jnp.zeros((1, 1, hidden_size)))["params"])


def _head_axes(head: _Head, hidden_size: int) -> Params:
    boxed = jax.eval_shape(head.init, jax.random.key(0), jnp.zeros((1, 1, hidden_size)))
    return nn.get_partition_spec(boxed)["params"]
