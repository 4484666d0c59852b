"""Which Hugging Face tensors make up each leaf of a decoder's parameter tree, in every layout.

Shape letters as in decoder.py; L layers. Hugging Face's linear weights are [out, in], ours [in.., out..]. A layout
(`fuse_projections`, `scan_layers`) is a description made of three nodes: `Tensor` is one tensor of the files, seen
reshaped and transposed; `Concat` and `Stack` join views along an axis. `fill` reads a description, or any block of it,
without touching the rest of the tensors; `pieces` is the way back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trace_jax.models.config import DecoderConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Block = tuple[slice, ...]  # one slice with bounds and step 1 for each axis
ReadBlock = Callable[["Tensor", Block], np.ndarray]  # (tensor, block of its stored shape) -> that block


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the files: stored axis a is split into the sizes `groups[a]`, then all axes are permuted."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in the files."""
        return tuple(math.prod(group) for group in self.groups)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the parameter tree."""
        sizes = [size for group in self.groups for size in group]
        return tuple(sizes[axis] for axis in self.order)


@dataclasses.dataclass(frozen=True)
class Concat:
    """Views joined along an axis that they have."""

    axis: int
    parts: tuple[View, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The joined shape."""
        first, axis = self.parts[0].shape, self.axis
        return (*first[:axis], sum(part.shape[axis] for part in self.parts), *first[axis + 1 :])


@dataclasses.dataclass(frozen=True)
class Stack:
    """Views of one shape joined along a new axis."""

    axis: int
    parts: tuple[View, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The stacked shape."""
        first = self.parts[0].shape
        return (*first[: self.axis], len(self.parts), *first[self.axis :])


View = Tensor | Concat | Stack


def tensor_map(cfg: DecoderConfig, *, with_head: bool = True) -> dict[str, Any]:
    """A tree like the decoder's parameters whose leaves are views.

    `with_head=False` leaves out the lm_head of an untied decoder.
    """
    tree: dict[str, Any] = {
        "embed": {"embedding": _plain(EMBEDDING, cfg.vocab_size, cfg.hidden_size)},
        "final_norm": {"scale": _plain("model.norm.weight", cfg.hidden_size)},
    }
    if with_head and not cfg.tie_embeddings:
        tree["lm_head"] = {"kernel": _transposed(HEAD, cfg.vocab_size, cfg.hidden_size)}
    layers = [_layer(cfg, f"model.layers.{i}.") for i in range(cfg.num_layers)]
    if cfg.scan_layers:
        return tree | {"layers": _stacked(layers)}
    return tree | {f"layer_{i}": layer for i, layer in enumerate(layers)}


def leaves(tree: dict[str, Any]) -> Iterator[View]:
    """The views of a tree, in order."""
    for node in tree.values():
        if isinstance(node, dict):
            yield from leaves(node)
        else:
            yield node


def tensors(view: View) -> Iterator[Tensor]:
    """The tensors that a view is made of, in order."""
    if isinstance(view, Tensor):
        yield view
    else:
        for part in view.parts:
            yield from tensors(part)


def fill(view: View, block: Block, out: np.ndarray, read: ReadBlock) -> None:
    """Writes the block `view[block]` into `out` (of the block's shape), reading only the blocks of tensors it needs."""
    if isinstance(view, Tensor):
        out[...] = _read_view(view, block, read)
        return
    wanted = block[view.axis]
    before = (slice(None),) * view.axis
    if isinstance(view, Stack):
        rest = block[: view.axis] + block[view.axis + 1 :]
        for i in range(wanted.start, wanted.stop):
            fill(view.parts[i], rest, out[(*before, i - wanted.start)], read)
        return
    start = 0
    for part in view.parts:
        stop = start + part.shape[view.axis]
        low, high = max(start, wanted.start), min(stop, wanted.stop)
        if low < high:
            inner = block[: view.axis] + (slice(low - start, high - start),) + block[view.axis + 1 :]
            fill(part, inner, out[(*before, slice(low - wanted.start, high - wanted.start))], read)
        start = stop


def pieces(view: View, array: Any) -> Iterator[tuple[Tensor, Callable[[], np.ndarray]]]:
    """(tensor, a function that takes its content, as the files store it, out of a leaf) for each tensor of the view."""
    for tensor, index in _places(view, (slice(None),) * len(view.shape)):
        yield tensor, lambda tensor=tensor, index=index: _as_stored(tensor, np.asarray(array[index]))


def _places(view: View, index: tuple[Any, ...]) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """Where each tensor lies in the leaf: slices, and integers on stacked axes (which numpy drops)."""
    if isinstance(view, Tensor):
        yield view, index
        return
    # the view's own axes are those that are still slices
    at = [i for i, entry in enumerate(index) if isinstance(entry, slice)][view.axis]
    start = index[at].start or 0
    for part in view.parts:
        if isinstance(view, Stack):
            here, start = start, start + 1
        else:
            here, start = slice(start, start + part.shape[view.axis]), start + part.shape[view.axis]
        yield from _places(part, (*index[:at], here, *index[at + 1 :]))


def _read_view(tensor: Tensor, block: Block, read: ReadBlock) -> np.ndarray:
    """Reads whole runs of the stored axes: what a block wants of a split axis' inner sizes is cut in memory."""
    wanted = [block[tensor.order.index(axis)] for axis in range(len(tensor.order))]  # in the split, unpermuted order
    stored, inner, sizes, axis = [], [], [], 0
    for group in tensor.groups:
        run, first = math.prod(group[1:]), wanted[axis]
        stored.append(slice(first.start * run, first.stop * run))
        sizes += [first.stop - first.start, *group[1:]]
        inner += [slice(None), *wanted[axis + 1 : axis + len(group)]]
        axis += len(group)
    return read(tensor, tuple(stored)).reshape(sizes)[tuple(inner)].transpose(tensor.order)


def _as_stored(tensor: Tensor, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(np.argsort(tensor.order)).reshape(tensor.stored))


def _layer(cfg: DecoderConfig, prefix: str) -> dict[str, Any]:
    d, n, k, h, f = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_size
    attention = {name: _heads(cfg, f"{prefix}self_attn.{name}_proj", heads) for name, heads in zip("qkv", (n, k, k))}
    o = f"{prefix}self_attn.o_proj."
    out = {"kernel": Tensor(f"{o}weight", ((d,), (n, h)), (1, 2, 0))}
    if cfg.o_bias:
        out["bias"] = _plain(f"{o}bias", d)
    norms = {}
    if cfg.qk_norm:
        norms = {f"{x}_norm": {"scale": _plain(f"{prefix}self_attn.{x}_norm.weight", h)} for x in "qk"}
    gate, up = (_transposed(f"{prefix}mlp.{name}_proj.weight", f, d) for name in ("gate", "up"))
    mlp = {"gate": {"kernel": gate}, "up": {"kernel": up}}
    if cfg.fuse_projections:
        q, k, v = (attention[name] for name in "qkv")
        kernel = Concat(1, (q["kernel"], k["kernel"], v["kernel"]))
        bias = {"bias": Concat(0, (q["bias"], k["bias"], v["bias"]))} if cfg.qkv_bias else {}
        attention, mlp = {"qkv": {"kernel": kernel} | bias}, {"gate_up": {"kernel": Stack(1, (gate, up))}}
    return {
        "attention_norm": {"scale": _plain(f"{prefix}input_layernorm.weight", d)},
        "attention": attention | {"o": out} | norms,
        "mlp_norm": {"scale": _plain(f"{prefix}post_attention_layernorm.weight", d)},
        "mlp": mlp | {"down": {"kernel": _transposed(f"{prefix}mlp.down_proj.weight", d, f)}},
    }


def _heads(cfg: DecoderConfig, name: str, heads: int) -> dict[str, Tensor]:
    leaf = {"kernel": Tensor(f"{name}.weight", ((heads, cfg.head_dim), (cfg.hidden_size,)), (2, 0, 1))}
    if cfg.qkv_bias:
        leaf["bias"] = Tensor(f"{name}.bias", ((heads, cfg.head_dim),), (0, 1))
    return leaf


def _plain(name: str, *shape: int) -> Tensor:
    return Tensor(name, tuple((size,) for size in shape), tuple(range(len(shape))))


def _transposed(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name, ((rows,), (columns,)), (1, 0))


def _stacked(layers: Sequence[Any]) -> Any:
    if isinstance(layers[0], dict):
        return {key: _stacked([layer[key] for layer in layers]) for key in layers[0]}
    return Stack(0, tuple(layers))
