"""A decoder-only transformer for Qwen3, Qwen2/2.5 and Llama checkpoints, as pure functions over a parameter tree.

Shape letters: B rows, T tokens of a row, D hidden, N query heads, K key/value heads, G = N / K, H head_dim, F mlp,
V vocabulary, W slots of the engine, C tokens fed at once, S cache length.

Numerics: activations in `cfg.dtype`; RMSNorm, RoPE angles, attention scores and softmax in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.models import attention
from trace_jax.models.attention import KeyValue
from trace_jax.models.config import DecoderConfig
from trace_jax.models.layers import Kernel, Linear, Norm, apply_rope, rope_table

Params = Any

_STATES = "states"  # collection of what each layer hands on


def init_params(cfg: DecoderConfig, key: jax.Array) -> Params:
    """Fresh parameters in `cfg.param_dtype`: kernels N(0, 1/fan_in), embeddings N(0, 0.02^2), norms 1, biases 0."""
    return nn.meta.unbox(_boxed_init(cfg, key))


def param_axes(cfg: DecoderConfig) -> Params:
    """A tree like `init_params`' whose leaves are PartitionSpecs of logical axis names.

    Names: vocab, embed, heads, kv_heads, head_dim, mlp, layers. `train/sharding.py` maps them to mesh axes.
    """
    boxed = jax.eval_shape(lambda: _boxed_init(cfg, jax.random.key(0)))
    return nn.get_partition_spec(boxed)


def hidden_states(
    cfg: DecoderConfig,
    params: Params,
    token_BT: jax.Array,
    pos_BT: jax.Array,
    end_BT: jax.Array,
    lora: Params = None,
) -> jax.Array:
    """Final-norm hidden states [B, T, D] in float32 of packed rows.

    Token q sees token k of its row iff `k <= q and q < end[k]` (see `types.PackedBatch`). `lora` is the collection that
    `lora.collection` makes of adapters; None leaves every layer as its parameters have it.
    """
    variables = {"params": params} if lora is None else {"params": params, "lora": lora}
    hidden_BTD, _ = Decoder(cfg).apply(variables, token_BT, pos_BT, _visible(token_BT.shape[1], end_BT), None)
    return hidden_BTD.astype(jnp.float32)


def layer_states(
    cfg: DecoderConfig,
    params: Params,
    token_BT: jax.Array,
    pos_BT: jax.Array,
    end_BT: jax.Array,
    layers: tuple[int, ...],
) -> jax.Array:
    """The residual stream behind each of `layers` (0 is the first), float32 [B, T, len(layers), D], before any norm.

    Tokens see each other as in `hidden_states`.
    """
    _, found = Decoder(cfg).apply(
        {"params": params}, token_BT, pos_BT, _visible(token_BT.shape[1], end_BT), None, mutable=[_STATES]
    )
    return _behind(cfg, found[_STATES], layers)


def _behind(cfg: DecoderConfig, states: Params, layers: tuple[int, ...]) -> jax.Array:
    """float32 [B, T, len(layers), D] out of what the blocks of one pass left in the collection."""
    if cfg.scan_layers:
        (stacked_LBTD,) = states["layers"]["out"]
        chosen = [stacked_LBTD[i] for i in layers]
    else:
        chosen = [states[f"layer_{i}"]["out"][0] for i in layers]
    return jnp.stack(chosen, axis=2).astype(jnp.float32)


def _visible(length: int, end_BT: jax.Array) -> jax.Array:
    """bool [B, T, T]: `k <= q and q < end[k]`."""
    index_T = jnp.arange(length)
    causal_TT = index_T[None, :] <= index_T[:, None]
    return causal_TT[None] & (index_T[None, :, None] < end_BT[:, None, :])


def extend(
    cfg: DecoderConfig,
    params: Params,
    token_WC: jax.Array,
    start_W: jax.Array,
    count_W: jax.Array,
    cache: list[KeyValue],
    trunk: list[KeyValue] | None = None,
    layers: tuple[int, ...] | None = None,
) -> tuple[jax.Array, list[KeyValue]] | tuple[jax.Array, list[KeyValue], jax.Array]:
    """Feeds new tokens of each slot through the model on top of its cache: prefill (C > 1) and decode (C = 1).

    Slot w has `start_W[w]` tokens in its cache and gets the first `count_W[w]` (0..C) of its row; the rest is padding.
    With a trunk (`as_trunk`), the tokens of every slot come after the trunk's, which are stored once for all.
    Returns float32 hidden states [W, C, D] and the new cache; with `layers` also the residual stream behind each of
    them, float32 [W, C, len(layers), D], as `layer_states` has it. Needs `scan_layers=False`: see `engine_params`.
    """
    if cfg.scan_layers:
        raise ValueError("extend needs unrolled layers; convert with engine_params first")
    at_WC = start_W[:, None] + jnp.arange(token_WC.shape[1])[None, :]
    visible_WCS = jnp.arange(cache[0].values.shape[2])[None, None, :] <= at_WC[:, :, None]
    pos_WC = at_WC + trunk_length(trunk)
    cache = [(layer, start_W, count_W, trunk[i] if trunk else None) for i, layer in enumerate(cache)]
    inputs = {"params": params}, token_WC, pos_WC, visible_WCS, cache
    if layers is None:
        hidden_WCD, cache = Decoder(cfg).apply(*inputs)
        return hidden_WCD.astype(jnp.float32), cache
    (hidden_WCD, cache), found = Decoder(cfg).apply(*inputs, mutable=[_STATES])
    return hidden_WCD.astype(jnp.float32), cache, _behind(cfg, found[_STATES], layers)


def init_cache(cfg: DecoderConfig, rows: int, length: int) -> list[KeyValue]:
    """An empty cache in `cfg.dtype`: the keys and values of each layer."""
    k, h = cfg.num_kv_heads, cfg.head_dim
    empty = lambda: KeyValue(
        jnp.zeros((rows, k, h, length), cfg.dtype), jnp.zeros((rows, k, length, h), cfg.dtype)
    )
    return [empty() for _ in range(cfg.num_layers)]


def as_trunk(cache: list[KeyValue]) -> list[KeyValue]:
    """The cache of one row, filled to its end, as the beginning that all rows of another cache share."""
    return jax.tree.map(lambda x: x[0], cache)


def trunk_length(trunk: list[KeyValue] | None) -> int:
    """Tokens of a trunk; 0 without one."""
    return trunk[0].values.shape[1] if trunk else 0


def unembed(cfg: DecoderConfig, params: Params) -> jax.Array:
    """The kernel [D, V] that turns hidden states into logits, V = `cfg.sampled_vocab` if it is set."""
    kernel_DV = params["embed"]["embedding"].T if cfg.tie_embeddings else params["lm_head"]["kernel"]
    return kernel_DV if cfg.sampled_vocab is None else kernel_DV[:, : cfg.sampled_vocab]


def engine_config(cfg: DecoderConfig) -> DecoderConfig:
    """The same function in the layout that decodes fastest: layers unrolled, projections fused, nothing recomputed."""
    return dataclasses.replace(cfg, scan_layers=False, fuse_projections=True, remat=False)


def engine_params(cfg: DecoderConfig, params: Params) -> Params:
    """Parameters of `cfg` in the layout of `engine_config(cfg)`."""
    params = dict(params)
    if cfg.scan_layers:
        stacked = params.pop("layers")
        for i in range(cfg.num_layers):
            params[f"layer_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    if not cfg.fuse_projections:
        for i in range(cfg.num_layers):
            params[f"layer_{i}"] = _fuse_layer(params[f"layer_{i}"])
    return params


def _fuse_layer(layer: Params) -> Params:
    attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
    q, k, v = (attention.pop(name) for name in ("q", "k", "v"))
    attention["qkv"] = {name: jnp.concatenate([q[name], k[name], v[name]], axis=-2) for name in q}
    gate, up = mlp.pop("gate"), mlp.pop("up")
    mlp["gate_up"] = {"kernel": jnp.stack([gate["kernel"], up["kernel"]], axis=1)}
    return {**layer, "attention": attention, "mlp": mlp}


def _boxed_init(cfg: DecoderConfig, key: jax.Array) -> Params:
    token = jnp.zeros((1, 1), jnp.int32)
    return Decoder(cfg).init(key, token, token, jnp.ones((1, 1, 1), bool), None)["params"]


class Decoder(nn.Module):
    """Embedding, layers, final norm. Call through the functions above."""

    cfg: DecoderConfig

    @nn.compact
    def __call__(self, token_BT, pos_BT, visible_BTS, cache):
        cfg = self.cfg
        embed = nn.Embed(
            cfg.vocab_size,
            cfg.hidden_size,
            dtype=cfg.dtype,
            param_dtype=cfg.param_dtype,
            embedding_init=nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed")),
            name="embed",
        )
        x_BTD = embed(token_BT)
        rope = rope_table(cfg, pos_BT)
        if cfg.scan_layers:
            x_BTD, _ = _scanned(cfg)(cfg, name="layers")(x_BTD, rope, visible_BTS, None)
            new_cache = None
        else:
            block = nn.remat(Block) if cfg.remat and cache is None else Block
            new_cache = []
            for i in range(cfg.num_layers):
                layer_cache = None if cache is None else cache[i]
                x_BTD, layer_cache = block(cfg, name=f"layer_{i}")(x_BTD, rope, visible_BTS, layer_cache)
                new_cache.append(layer_cache)
        if not cfg.tie_embeddings:  # declared here, used through `unembed`, so that logits can be computed in chunks
            Kernel((cfg.hidden_size, cfg.vocab_size), ("embed", "vocab"), cfg.param_dtype, name="lm_head")()
        return _norm(cfg, "final_norm")(x_BTD), new_cache


def _scanned(cfg: DecoderConfig):
    block = nn.remat(Block, prevent_cse=False) if cfg.remat else Block
    return nn.scan(
        block,
        variable_axes={"params": 0, "lora": 0, _STATES: 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
        length=cfg.num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm)."""

    cfg: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD, rope, visible_BTS, cache):
        h_BTD, cache = Attention(self.cfg, name="attention")(
            _norm(self.cfg, "attention_norm")(x_BTD), rope, visible_BTS, cache
        )
        x_BTD = x_BTD + h_BTD
        x_BTD = x_BTD + Mlp(self.cfg, name="mlp")(_norm(self.cfg, "mlp_norm")(x_BTD))
        self.sow(_STATES, "out", x_BTD)  # kept only where `_behind` wants it
        return x_BTD, cache


class Attention(nn.Module):
    """Grouped-query attention with RoPE, over the row itself or over a cache."""

    cfg: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD, rope, visible_BTS, cache):
        cfg = self.cfg
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD)
        if cfg.qk_norm:
            q_BTNH = _norm(cfg, "q_norm", "head_dim")(q_BTNH)
            k_BTKH = _norm(cfg, "k_norm", "head_dim")(k_BTKH)
        q_BTNH, k_BTKH = apply_rope(q_BTNH, rope), apply_rope(k_BTKH, rope)
        if cache is None:
            out_BTNH = attention.attend(q_BTNH, k_BTKH, v_BTKH, visible_BTS)
        else:
            old, start_W, count_W, trunk = cache
            cache = attention.write(old, start_W, count_W, k_BTKH, v_BTKH)
            out_BTNH = attention.attend_cached(q_BTNH, cache, visible_BTS, trunk)
        shapes = ((cfg.num_heads, cfg.head_dim), (cfg.hidden_size,))
        return _linear(cfg, *shapes, ("heads", "head_dim", "embed"), bias=cfg.o_bias, name="o")(out_BTNH), cache

    def _project(self, x_BTD):
        cfg = self.cfg
        n, k = cfg.num_heads, cfg.num_kv_heads
        if cfg.fuse_projections:
            qkv = self._heads("qkv", n + 2 * k, "heads", x_BTD)
            return qkv[:, :, :n], qkv[:, :, n : n + k], qkv[:, :, n + k :]
        return (
            self._heads("q", n, "heads", x_BTD),
            self._heads("k", k, "kv_heads", x_BTD),
            self._heads("v", k, "kv_heads", x_BTD),
        )

    def _heads(self, name, heads, axis, x_BTD):
        cfg = self.cfg
        shapes = ((cfg.hidden_size,), (heads, cfg.head_dim))
        return _linear(cfg, *shapes, ("embed", axis, "head_dim"), bias=cfg.qkv_bias, name=name)(x_BTD)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    cfg: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD):
        cfg = self.cfg
        d, f = cfg.hidden_size, cfg.mlp_size
        if cfg.fuse_projections:
            both = _linear(cfg, (d,), (2, f), ("embed", None, "mlp"), name="gate_up")(x_BTD)
            gate, up = both[..., 0, :], both[..., 1, :]
        else:
            gate = _linear(cfg, (d,), (f,), ("embed", "mlp"), name="gate")(x_BTD)
            up = _linear(cfg, (d,), (f,), ("embed", "mlp"), name="up")(x_BTD)
        return _linear(cfg, (f,), (d,), ("mlp", "embed"), name="down")(nn.silu(gate) * up)


def _linear(cfg: DecoderConfig, inputs, outputs, axes, *, name: str, bias: bool = False) -> Linear:
    return Linear(inputs, outputs, axes, bias, cfg.dtype, cfg.param_dtype, name=name)


def _norm(cfg: DecoderConfig, name: str, axis: str = "embed") -> Norm:
    return Norm(axis, cfg.rms_norm_eps, cfg.dtype, cfg.param_dtype, name=name)
