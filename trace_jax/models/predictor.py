"""Success predictors: V(H) in [0, 1] from the tokens of a history H, in three forms behind one interface.

`critic` is a decoder of its own with a scalar read-out (the paper's form: a Qwen3-0.6B critic, shared by prompts and
prefixes). `policy_head` is a small network on the policy's own hidden states (our option): it has no backbone of its
own to store and train. `both` reads both hidden states (our option). None sends a gradient to the policy.

The paper names neither the read-out nor the squashing. Ours: one output at the last token of the history, a sigmoid on
top, and a last layer that starts at zero, so that an untrained predictor says 0.5 to everything.

Each form can have several members (our option): read-outs of their own on the same hidden states, which disagree where
data are few. See `predictor_heads` for what they are, and for what untrained members say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.models.predictor_heads import ReadOut, read_out

Params = Any


@dataclasses.dataclass(frozen=True)
class PredictorModel:
    """A predictor as pure functions.

    `logits(params, policy_params, token_BT, pos_BT, end_BT)` returns float32 [B, T], or [S, B, T] of S > 1 members:
    sigmoid of entry [.., b, t] is the predicted success of the history that ends with that token. Entry t reads only
    tokens that t sees, `k <= t and t < end[k]` (see `types.PackedBatch`), so several histories can share a row. Padding
    gets finite numbers that mean nothing. The gradient in `policy_params` is exactly zero. `param_axes()` is a tree
    like the params whose leaves are PartitionSpecs of logical axis names, as in `decoder.param_axes`.

    `around(decoder_params, key)` are params with the given backbone, no copy of it, and a fresh read-out; None where
    the predictor has no backbone of its own.
    """

    init: Callable[[jax.Array], Params]  # key -> float32 params
    logits: Callable[[Params, Params, jax.Array, jax.Array, jax.Array], jax.Array]
    param_axes: Callable[[], Params]
    around: Callable[[Params, jax.Array], Params] | None = None


def critic(cfg: DecoderConfig, *, members: int = 1, mlp_size: int | None = None) -> PredictorModel:
    """A decoder of its own and a linear read-out in float32; `policy_params` is ignored and may be None.

    Params: {"decoder": as of `decoder.init_params`, float32, never with an lm_head,
             "head": {"score": {"kernel" [D, 1], "bias" [1]}}}.
    With members the read-out is no longer linear, and "head" is as of `predictor_heads.read_out`.

    Args:
      mlp_size: hidden units of each member's read-out; without members there are none, and this is not used.

    Raises ValueError for members without mlp_size, and as `predictor_heads.read_out`.
    """
    head = read_out((cfg.hidden_size,), mlp_size=mlp_size if members > 1 else None, members=members)
    return _with_backbone(cfg, head, lambda policy_params, *row: ())


def policy_head(policy_cfg: DecoderConfig, *, mlp_size: int, members: int = 1) -> PredictorModel:
    """score(gelu(hidden(RMSNorm(h)))) in float32 on the policy's final hidden states h, which get no gradient.

    Params with F = mlp_size: {"norm": {"scale" [D]}, "hidden": {"kernel" [D, F], "bias" [F]},
                               "score": {"kernel" [F, 1], "bias" [1]}}; with members as of `predictor_heads.read_out`.
    Raises ValueError for mlp_size < 1 and members < 1.
    """
    head = read_out((policy_cfg.hidden_size,), mlp_size=mlp_size, members=members)

    def logits(params, policy_params, *row):
        return head.logits(params, _policy_states(policy_cfg, policy_params, *row))

    return PredictorModel(head.init, logits, head.param_axes)


def both(cfg: DecoderConfig, policy_cfg: DecoderConfig, *, mlp_size: int, members: int = 1) -> PredictorModel:
    """score(gelu(hidden([RMSNorm(c), RMSNorm(h)]))) in float32 on the final hidden states of a decoder of its own, c,
    and of the policy, h, which get no gradient (our choice).

    Both read the same tokens, so the decoder must have the policy's vocabulary.

    Params with F = mlp_size: {"decoder": as in `critic`, "head": {"critic_norm": {"scale" [D]},
    "policy_norm": {"scale" [P]}, "hidden": {"kernel" [D + P, F], "bias" [F]}, "score": {"kernel" [F, 1], "bias" [1]}}};
    with members "head" is as of `predictor_heads.read_out`.
    Raises ValueError for mlp_size < 1, members < 1, and a vocabulary that is smaller than the policy's.
    """
    if cfg.vocab_size < policy_cfg.vocab_size:
        raise ValueError(
            f"predictor: its decoder has {cfg.vocab_size} tokens, the policy {policy_cfg.vocab_size}; "
            "both must read the same ones"
        )
    sizes, norms = (cfg.hidden_size, policy_cfg.hidden_size), ("critic_norm", "policy_norm")
    head = read_out(sizes, mlp_size=mlp_size, members=members, norms=norms)
    return _with_backbone(cfg, head, lambda *args: (_policy_states(policy_cfg, *args),))


def _with_backbone(cfg: DecoderConfig, head: ReadOut, others: Callable[..., tuple[jax.Array, ...]]) -> PredictorModel:
    """A decoder of its own under `head`, which gets `others(policy_params, token, pos, end)` as well."""
    # A critic has no logits, so it needs no lm_head; it is trained, so its parameters are float32.
    cfg = dataclasses.replace(cfg, tie_embeddings=True, param_dtype="float32")

    def init(key: jax.Array) -> Params:
        decoder_key, head_key = jax.random.split(key)
        return around(decoder.init_params(cfg, decoder_key), head_key)

    def around(decoder_params: Params, key: jax.Array) -> Params:
        return {"decoder": decoder_params, "head": head.init(key)}

    def logits(params, policy_params, *row):
        hidden_BTD = decoder.hidden_states(cfg, params["decoder"], *row)
        return head.logits(params["head"], hidden_BTD, *others(policy_params, *row))

    axes = lambda: {"decoder": decoder.param_axes(cfg), "head": head.param_axes()}
    return PredictorModel(init, logits, axes, around)


def _policy_states(policy_cfg: DecoderConfig, policy_params: Params, *row: jax.Array) -> jax.Array:
    # Stopped at the weights, not at the states: then no backward pass through the policy is traced at all.
    return decoder.hidden_states(policy_cfg, jax.lax.stop_gradient(policy_params), *row)
