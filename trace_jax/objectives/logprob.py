"""Log-probabilities of chosen tokens without the [B, T, V] logits.

Shape letters: B rows, T positions of a row, D hidden size, V vocabulary, N chunks, C positions of a chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    target_BT: jax.Array,
    *,
    temperature: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target token and entropy of the distribution that it is drawn from.

        p = softmax(hidden @ kernel / temperature);   logprob = log p[target];   entropy = -sum_v p_v log p_v   (nats)

    `chunk` positions of all rows are worked on at a time, and the backward pass computes the logits of a chunk anew, so
    the largest array is [B, chunk, V] in both passes (our choice; the chunks run along T, because rows are what a mesh
    shards). A chunk that holds the whole row is kept for the backward pass instead, which is faster. The product
    accumulates in f32, with factors as precise as jax's matmul precision setting says; everything after it is f32.

    The entropy is over the whole vocabulary; -logprob is the surprisal of one sampled token, another quantity.

    Args:
        hidden_BTD: [B, T, D]; entry t is the state that predicts target t (packed rows: gather by `PackedBatch.prev`).
        kernel_DV: [D, V] unembedding.
        target_BT: int [B, T], in 0..V-1; entries that nobody trains may hold any id in that range.
        temperature: Python float > 0.
        chunk: positions per step, >= 1; T need not be a multiple of it.

    Returns:
        (logprob_BT, entropy_BT), both f32 and both differentiable in hidden_BTD and kernel_DV.

    Raises:
        ValueError: shapes don't fit, or temperature or chunk is out of range.
    """
    if hidden_BTD.shape[:-1] != target_BT.shape or hidden_BTD.shape[-1:] != kernel_DV.shape[:1]:
        raise ValueError(
            f"token_logprobs: hidden {hidden_BTD.shape}, kernel {kernel_DV.shape} and target {target_BT.shape} "
            "must be [B, T, D], [D, V] and [B, T]"
        )
    if not temperature > 0:
        raise ValueError(f"token_logprobs: temperature={temperature} must be > 0")
    if chunk < 1:
        raise ValueError(f"token_logprobs: chunk={chunk} must be >= 1")
    length = target_BT.shape[1]
    chunk = max(1, min(chunk, length))
    num_chunks = -(-length // chunk)

    def split(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [N, B, C, ...]; zeros fill the last chunk; join cuts off what comes of them."""
        x = jnp.pad(x, [(0, 0), (0, num_chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, chunk, *x.shape[2:]), 1, 0)

    def join(x_NBC: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_NBC, 0, 1).reshape(target_BT.shape[0], num_chunks * chunk)[:, :length]

    if num_chunks == 1:
        return _dense_logprobs(hidden_BTD, kernel_DV, target_BT, temperature)
    # prevent_cse guards a remat against its surroundings; a scan body has none, and the barriers would cost time.
    one_chunk = jax.checkpoint(lambda h, t: _dense_logprobs(h, kernel_DV, t, temperature), prevent_cse=False)
    logprob_NBC, entropy_NBC = jax.lax.map(lambda xs: one_chunk(*xs), (split(hidden_BTD), split(target_BT)))
    return join(logprob_NBC), join(entropy_NBC)


def _dense_logprobs(
    hidden_BCD: jax.Array, kernel_DV: jax.Array, target_BC: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    # One matrix of all rows: with two axes the backward pass would transpose a copy of the logits on a CPU.
    hidden_RD = hidden_BCD.reshape(-1, hidden_BCD.shape[-1])
    logit_RV = jnp.matmul(hidden_RD, kernel_DV, preferred_element_type=jnp.float32)
    logit_BCV = logit_RV.reshape(*hidden_BCD.shape[:-1], -1) / temperature
    log_norm_BC = jax.nn.logsumexp(logit_BCV, axis=-1)
    chosen_BC = jnp.take_along_axis(logit_BCV, target_BC[..., None], axis=-1)[..., 0]
    prob_BCV = jnp.exp(logit_BCV - log_norm_BC[..., None])
    return chosen_BC - log_norm_BC, log_norm_BC - jnp.sum(prob_BCV * logit_BCV, axis=-1)
