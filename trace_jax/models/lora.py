"""Low-rank adapters (LoRA, arXiv 2106.09685): every linear map of every layer gets W + (alpha / R) a b.

Adapters are a variable collection of their own, a tree like the parameters that has {"a", "b"} where they have a
linear kernel. Embedding, lm_head, norms and biases have none. What trains is the adapters alone; the parameters stay
as they were loaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig

Params = Any
Adapters = Any
_INPUT_AXES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}  # of each kernel, before its output axes


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Rank and strength of the adapters."""

    rank: int  # R >= 1
    alpha: float  # > 0; the product a b counts alpha / R times

    def validate(self) -> LoraConfig:
        """Raises ValueError for numbers that make no adapter."""
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"lora: rank {self.rank} must be at least 1 and alpha {self.alpha} above 0")
        return self


def init_adapters(cfg: DecoderConfig, lora: LoraConfig, key: jax.Array) -> Adapters:
    """Fresh float32 adapters: a is N(0, 1 / fan_in), b is 0, so that they change nothing yet.

    Raises ValueError for a decoder with fused projections: q, k and v would have to share one `a`.
    """
    lora.validate()
    if cfg.fuse_projections:
        raise ValueError("lora: adapters need fuse_projections=False in training; the engine fuses after the merge")
    shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    count = iter(range(10**6))

    def fresh(name: str, kernel: jax.ShapeDtypeStruct) -> dict[str, jax.Array]:
        layers, inputs, outputs = _split(cfg, name, kernel.shape)
        a = jax.random.normal(jax.random.fold_in(key, next(count)), (*layers, *inputs, lora.rank))
        return {"a": a * math.prod(inputs) ** -0.5, "b": jnp.zeros((*layers, lora.rank, *outputs))}

    return _map_kernels(shapes, fresh)


def adapter_axes(cfg: DecoderConfig) -> Adapters:
    """A tree like `init_adapters`' whose leaves are PartitionSpecs of logical axis names; the rank axis stays whole."""

    def named(name: str, axes: PartitionSpec) -> dict[str, PartitionSpec]:
        layers, inputs, outputs = _split(cfg, name, tuple(axes))
        return {"a": PartitionSpec(*layers, *inputs, None), "b": PartitionSpec(*layers, None, *outputs)}

    return _map_kernels(decoder.param_axes(cfg), named)


def collection(lora: LoraConfig, adapters: Adapters) -> Params:
    """The `lora` collection that `decoder.hidden_states` takes: `b` times alpha / R, and `a` as it is."""
    return _map_adapters(adapters, lambda leaf: {"a": leaf["a"], "b": leaf["b"] * (lora.alpha / lora.rank)})


def merge(cfg: DecoderConfig, lora: LoraConfig, params: Params, adapters: Adapters) -> Params:
    """Parameters of the same form with W + (alpha / R) a b in place of W, summed in float32."""

    def merged(tree: Params, adapter: Adapters, name: str) -> Params:
        if "a" in adapter:
            kernel = tree["kernel"]
            layers, inputs, outputs = _split(cfg, name, kernel.shape)
            a = adapter["a"].reshape(*layers, math.prod(inputs), -1)
            b = adapter["b"].reshape(*layers, a.shape[-1], math.prod(outputs))
            delta = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) * (lora.alpha / lora.rank)
            total = kernel.astype(jnp.float32) + delta.reshape(kernel.shape)
            return {**tree, "kernel": total.astype(kernel.dtype)}
        return {key: merged(tree[key], adapter[key], key) if key in adapter else tree[key] for key in tree}

    return merged(params, adapters, "")


def _split(cfg: DecoderConfig, name: str, shape: tuple) -> tuple[tuple, tuple, tuple]:
    """(layer axes, input axes, output axes) of the kernel of the layer `name`."""
    stacked = int(cfg.scan_layers)
    inputs = stacked + _INPUT_AXES[name]
    return shape[:stacked], shape[stacked:inputs], shape[inputs:]


def _map_kernels(tree: Params, function: Callable[[str, Any], dict]) -> Adapters:
    """{.., name: {"kernel": x}, ..} -> {.., name: function(name, x), ..} for the linear maps; the rest is left out."""
    found = {}
    for name, inner in tree.items():
        if name in _INPUT_AXES:
            found[name] = function(name, inner["kernel"])
        elif isinstance(inner, dict) and (below := _map_kernels(inner, function)):
            found[name] = below
    return found


def _map_adapters(tree: Adapters, function: Callable[[dict], dict]) -> Adapters:
    if "a" in tree:
        return function(tree)
    return {name: _map_adapters(inner, function) for name, inner in tree.items()}
