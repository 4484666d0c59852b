"""Attention over the row itself, over a cache, and over a trunk that all rows share. Arrays in, arrays out.

Shape letters: B rows (W slots), T tokens fed at once (C), N query heads, K key/value heads, G = N / K, M = B G T
queries of one key/value head, H head_dim, S cache length, L tokens of the trunk.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that a row that sees nothing yields numbers and not NaN


class KeyValue(NamedTuple):
    """Keys and values of one layer.

    Keys lie with the positions last: scores then are a plain matrix product, which a CPU does in half the time.
    """

    keys: jax.Array  # [W, K, H, S]; of a trunk [K, H, L]
    values: jax.Array  # [W, K, S, H]; of a trunk [K, L, H]


def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the row's own tokens, [B, T, N, H]; f32 scores and softmax. Reverse mode only."""
    b, t, n, h = q_BTNH.shape
    kv, g = k_BTKH.shape[2], n // k_BTKH.shape[2]
    # float32 queries take the scale: the smaller array. Others would be rounded again, so their f32 scores take it.
    of_query, of_score = (h**-0.5, 1.0) if q_BTNH.dtype == jnp.float32 else (1.0, h**-0.5)
    q_BKQH = (q_BTNH * of_query).reshape(b, t, kv, g, h).transpose(0, 2, 3, 1, 4).reshape(b, kv, g * t, h)
    bias_BQS = jnp.tile(jnp.where(visible_BTS, 0.0, _MASKED), (1, g, 1))
    out_BKQH = _weighted_mean(q_BKQH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), bias_BQS, of_score)
    return _heads_last(out_BKQH.reshape(b, kv, g, t, h))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted_mean(q_BKQH, k_BKSH, v_BKSH, bias_BQS, scale):
    """softmax(scale q k + bias) v, with Q = G T queries as rows of one matrix per key/value head.

    The backward pass is written out: derived, it transposes copies of the [Q, S] weights, which takes a CPU longer than
    the products.
    """
    return _weighted_mean_forward(q_BKQH, k_BKSH, v_BKSH, bias_BQS, scale)[0]


def _weighted_mean_forward(q_BKQH, k_BKSH, v_BKSH, bias_BQS, scale):
    score_BKQS = jnp.einsum("bkqh,bksh->bkqs", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    weight_BKQS = jax.nn.softmax(score_BKQS * scale + bias_BQS[:, None], axis=-1)
    out_BKQH = jnp.einsum("bkqs,bksh->bkqh", weight_BKQS.astype(v_BKSH.dtype), v_BKSH)
    return out_BKQH, (q_BKQH, k_BKSH, v_BKSH, weight_BKQS, out_BKQH)


def _weighted_mean_backward(scale, saved, d_out_BKQH):
    """With w = softmax(scale s), o = w v: ds = scale w (do v - sum_h do o), summed over the head's axis h."""
    q_BKQH, k_BKSH, v_BKSH, weight_BKQS, out_BKQH = saved
    d_v_BKSH = jnp.einsum("bkqs,bkqh->bksh", weight_BKQS.astype(v_BKSH.dtype), d_out_BKQH)
    d_weight_BKQS = jnp.einsum("bkqh,bksh->bkqs", d_out_BKQH, v_BKSH, preferred_element_type=jnp.float32)
    mean_BKQ1 = jnp.sum(d_out_BKQH.astype(jnp.float32) * out_BKQH.astype(jnp.float32), axis=-1, keepdims=True)
    d_score_BKQS = (weight_BKQS * (d_weight_BKQS - mean_BKQ1) * scale).astype(q_BKQH.dtype)
    d_q_BKQH = jnp.einsum("bkqs,bksh->bkqh", d_score_BKQS, k_BKSH)
    d_k_BKSH = jnp.einsum("bkqs,bkqh->bksh", d_score_BKQS, q_BKQH)
    return d_q_BKQH, d_k_BKSH, d_v_BKSH, None


_weighted_mean.defvjp(_weighted_mean_forward, _weighted_mean_backward)


def attend_cached(q_BTNH: jax.Array, cache: KeyValue, visible_BTS: jax.Array, trunk: KeyValue | None) -> jax.Array:
    """The same over [trunk; cache], [B, T, N, H]: every query sees the whole trunk, `visible_BTS` is for the cache."""
    if trunk is None:
        return _mix(q_BTNH, cache.keys, cache.values, visible_BTS)
    b, t, n, h = q_BTNH.shape
    kv = cache.keys.shape[1]
    own_BKGTS = _scores(q_BTNH, cache.keys, visible_BTS)
    # The trunk has no row axis: one product per head, with the queries of all rows as its rows.
    q_KMH = q_BTNH.reshape(b, t, kv, n // kv, h).transpose(2, 0, 3, 1, 4).reshape(kv, -1, h)
    shared_KML = jnp.einsum("kmh,khl->kml", q_KMH, trunk.keys, preferred_element_type=jnp.float32) * h**-0.5
    by_row = lambda x_KM: x_KM.reshape(kv, b, n // kv, t, *x_KM.shape[2:]).swapaxes(0, 1)
    by_head = lambda x_BKGT: x_BKGT.swapaxes(0, 1).reshape(kv, -1)
    top_BKGT = jnp.maximum(own_BKGTS.max(-1), by_row(shared_KML.max(-1)))
    own_BKGTS = jnp.exp(own_BKGTS - top_BKGT[..., None])
    shared_KML = jnp.exp(shared_KML - by_head(top_BKGT)[..., None])
    total_BKGT = own_BKGTS.sum(-1) + by_row(shared_KML.sum(-1))
    dtype = cache.values.dtype
    mix = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)  # rounded once, at the end
    out_BKGTH = mix("bkgts,bksh->bkgth", own_BKGTS.astype(dtype), cache.values)
    out_BKGTH += by_row(mix("kml,klh->kmh", shared_KML.astype(dtype), trunk.values))
    return _heads_last((out_BKGTH / total_BKGT[..., None]).astype(dtype))


def write(cache: KeyValue, start_W: jax.Array, count_W: jax.Array, k_WCKH: jax.Array, v_WCKH: jax.Array) -> KeyValue:
    """Writes the first `count` new keys and values of each slot at start, start + 1, ..."""
    length = cache.values.shape[2]
    if k_WCKH.shape[1] == 1:  # decode: touch one position of each slot
        slot_W = jnp.arange(start_W.shape[0])
        at_W = jnp.where(count_W > 0, start_W, length)  # out of range: mode="drop" ignores it
        keys = cache.keys.at[slot_W, :, :, at_W].set(k_WCKH[:, 0].astype(cache.keys.dtype), mode="drop")
        values = cache.values.at[slot_W, :, at_W].set(v_WCKH[:, 0].astype(cache.values.dtype), mode="drop")
        return KeyValue(keys, values)
    # prefill: a scatter of W * C positions is a serial loop on a CPU, a gather is not
    from_WS = jnp.arange(length)[None] - start_W[:, None]
    fresh_WS = (from_WS >= 0) & (from_WS < count_W[:, None])
    # The keys would be gathered number by number, as their positions lie last; a product with 0s and 1s is exact too.
    chosen_WCS = (from_WS[:, None] == jnp.arange(k_WCKH.shape[1])[None, :, None]).astype(k_WCKH.dtype)
    keys = jnp.einsum("wckh,wcs->wkhs", k_WCKH, chosen_WCS, precision="highest").astype(cache.keys.dtype)
    from_WS = jnp.clip(from_WS, 0, k_WCKH.shape[1] - 1)
    values = jnp.take_along_axis(v_WCKH, from_WS[:, :, None, None], axis=1).swapaxes(1, 2).astype(cache.values.dtype)
    return KeyValue(
        jnp.where(fresh_WS[:, None, None, :], keys, cache.keys),
        jnp.where(fresh_WS[:, None, :, None], values, cache.values),
    )


def _mix(q_BTNH, k_BKHS, v_BKSH, visible_BTS):
    weight_BKGTS = jax.nn.softmax(_scores(q_BTNH, k_BKHS, visible_BTS), axis=-1).astype(v_BKSH.dtype)
    return _heads_last(jnp.einsum("bkgts,bksh->bkgth", weight_BKGTS, v_BKSH))


def _scores(q_BTNH, k_BKHS, visible_BTS):
    b, t, n, h = q_BTNH.shape
    kv = k_BKHS.shape[1]
    q_BKGTH = q_BTNH.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)
    score_BKGTS = jnp.einsum("bkgth,bkhs->bkgts", q_BKGTH, k_BKHS, preferred_element_type=jnp.float32) * h**-0.5
    return jnp.where(visible_BTS[:, None, None], score_BKGTS, _MASKED)


def _heads_last(x_BKGTH):
    b, k, g, t, h = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)
