"""The layers that the decoder is made of: linear maps with optional adapters, RMSNorm, rotary positions.

Shape letters as in `decoder.py`; R is the rank of an adapter.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from trace_jax.models.config import DecoderConfig, Llama3Scaling


class Linear(nn.Module):
    """y = x W + b, contracted over `len(inputs)` trailing axes of x.

    Where the `lora` collection holds adapters `a` [*inputs, R] and `b` [R, *outputs] for this layer, y gets (x a) b on
    top, and W takes part in the forward pass only (arXiv 2106.09685).
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical names of the kernel's axes, inputs then outputs
    bias: bool
    dtype: str
    param_dtype: str

    @nn.compact
    def __call__(self, x):
        fan_in = math.prod(self.inputs)
        init = _normal(fan_in, self.axes)
        kernel = self.param("kernel", init, self.inputs + self.outputs, self.param_dtype)
        rows = x.shape[: x.ndim - len(self.inputs)]
        x = x.reshape(-1, fan_in)  # matrices: with more axes the backward pass transposes copies of x on a CPU
        y = x @ kernel.reshape(fan_in, -1).astype(self.dtype)
        if self.has_variable("lora", "a"):
            a, b = (self.get_variable("lora", name).astype(self.dtype) for name in ("a", "b"))
            y = y + (x @ a.reshape(fan_in, -1)) @ b.reshape(b.shape[0], -1)
        y = y.reshape(*rows, *self.outputs)
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[len(self.inputs) :])
            bias = self.param("bias", zeros, self.outputs, self.param_dtype).astype(self.dtype)
            y = y + bias.reshape((1,) * len(rows) + bias.shape)
        return y


class Kernel(nn.Module):
    """A bare matrix [in, out], for the caller to use as it likes."""

    shape: tuple[int, int]
    axes: tuple[str | None, ...]
    param_dtype: str

    @nn.compact
    def __call__(self):
        return self.param("kernel", _normal(self.shape[0], self.axes), self.shape, self.param_dtype)


class Norm(nn.Module):
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * scale, in float32."""

    axis: str
    eps: float
    dtype: str
    param_dtype: str

    @nn.compact
    def __call__(self, x):
        ones = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        scale = self.param("scale", ones, x.shape[-1:], self.param_dtype).astype(jnp.float32)
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (y * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(self.dtype)


def _normal(fan_in: int, axes: tuple[str | None, ...]):
    return nn.with_logical_partitioning(nn.initializers.normal(fan_in**-0.5), axes)


def rope_table(cfg: DecoderConfig, pos_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, H/2] in float32 of the rotary angles pos * theta^(-2i/H), scaled if the config says so."""
    inverse = cfg.rope_theta ** (-jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)
    if cfg.rope_scaling is not None:
        inverse = _llama3(inverse, cfg.rope_scaling)
    angle = pos_BT.astype(jnp.float32)[:, :, None] * inverse[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def _llama3(inverse: jax.Array, scaling: Llama3Scaling) -> jax.Array:
    """Long wave lengths are stretched by `factor`, short ones kept, those between blended linearly."""
    wave_length = 2 * jnp.pi / inverse
    ratio = scaling.original_max_positions / wave_length
    blend = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def apply_rope(x_BTNH: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the halves (x1, x2) of the last axis: (x1 cos - x2 sin, x2 cos + x1 sin), Hugging Face's layout."""
    cos, sin = (table[:, :, None, :] for table in rope)
    x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTNH.dtype)
