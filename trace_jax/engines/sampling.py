"""Draws one token a row from softmax(logits) with one uniform number a row. Arrays in, arrays out.

Shape letters: W rows, V vocabulary, N blocks, L entries of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_BLOCK = 128  # L; any value gives the same distribution


def draw(logits_WV: jax.Array, uniform_W: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(token int32 [W], its log-prob f32 [W]) by inverting the distribution function at `uniform_W` in [0, 1).

        token = min {v : sum_{u <= v} exp(logit_u) > uniform * sum_u exp(logit_u)}

    One number a row, where the Gumbel trick needs one for each entry of a large vocabulary. The sum is inverted in two
    steps, first over blocks of entries and then inside the block, so no [W, V] running sum exists.
    """
    rows, vocabulary = logits_WV.shape
    logits_WV = jnp.pad(logits_WV, ((0, 0), (0, -vocabulary % _BLOCK)), constant_values=-jnp.inf)
    logits_WNL = logits_WV.reshape(rows, -1, _BLOCK)
    top_W = jnp.max(logits_WNL, axis=(1, 2))
    mass_WN = jnp.sum(jnp.exp(logits_WNL - top_W[:, None, None]), axis=2)
    block_W, left_W = _invert(mass_WN, uniform_W * jnp.sum(mass_WN, axis=1))
    logits_WL = jnp.take_along_axis(logits_WNL, block_W[:, None, None], axis=1)[:, 0]
    inside_W, _ = _invert(jnp.exp(logits_WL - top_W[:, None]), left_W)
    chosen_W = jnp.take_along_axis(logits_WL, inside_W[:, None], axis=1)[:, 0]
    logprob_W = chosen_W - top_W - jnp.log(jnp.sum(mass_WN, axis=1))
    return block_W * _BLOCK + inside_W, logprob_W


def _invert(mass_WN: jax.Array, target_W: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(first entry whose running sum exceeds the target, what the target has left there). Never an entry without mass:
    where rounding leaves no such entry, the heaviest is taken."""
    upto_WN = jnp.cumsum(mass_WN, axis=1)
    fits_WN = (upto_WN > target_W[:, None]) & (mass_WN > 0)
    index_W = jnp.where(jnp.any(fits_WN, axis=1), jnp.argmax(fits_WN, axis=1), jnp.argmax(mass_WN, axis=1))
    pick = lambda x_WN: jnp.take_along_axis(x_WN, index_W[:, None], axis=1)[:, 0]
    return index_W.astype(jnp.int32), target_W - pick(upto_WN) + pick(mass_WN)
