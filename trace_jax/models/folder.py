"""Model folders in Hugging Face's form: `config.json` and safetensors, in and out. The tokenizer lies beside them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trace_jax.models import hf_config, tensor_map, weights
from trace_jax.models.config import DecoderConfig

_ROWS = 4096  # of an embedding, compared at a time
_SAMPLE = 2**20  # bytes at either end of a file that tell it from others
PADDING_ROWS = 1024  # a vocabulary that is larger than its tokenizer by fewer rows is padded; by more, another's


def load_config(folder: str | Path, **execution: Any) -> DecoderConfig:
    """The decoder of a model folder; `execution` sets how it is computed (scan_layers, remat, dtype, ...).

    Raises ValueError where `config.json` is missing or damaged, and for what `hf_config.from_document` refuses.
    """
    document = _document(folder)
    try:
        return hf_config.from_document(document, **execution)
    except ValueError as error:
        raise ValueError(f"model folder {folder}: {error}") from error


def load_token_ids(folder: str | Path) -> dict[str, Any]:
    """The ids of special tokens that `config.json` names, for `save` after training: those who generate need them."""
    document = _document(folder)
    if not isinstance(document, dict):
        raise ValueError(f"model folder {folder}: {weights.CONFIG} holds no JSON object; copy the file again")
    return {name: document[name] for name in hf_config.TOKEN_IDS if name in document}


def load_params(
    folder: str | Path,
    cfg: DecoderConfig,
    *,
    dtype: str | None = None,
    shardings: Any = None,
    with_head: bool = True,
) -> Any:
    """The parameters of a model folder in the layout of `cfg`, each block read straight for the device that holds it.

    Host memory stays about one device's block of one parameter.

    Args:
      dtype: of the parameters, whatever the files' own; `cfg.param_dtype` by default.
      shardings: a tree of shardings like the parameters; the first device by default.
      with_head: False leaves out the lm_head of an untied model and ignores the files', for a critic.
    Raises ValueError that names what is missing, extra, of another shape, damaged or not finite. An lm_head beside tied
    embeddings must equal them. Buffers that older versions of transformers saved (RoPE frequencies) are ignored.
    """
    folder = Path(folder)
    kind = weights.numpy_dtype(dtype or cfg.param_dtype)
    views = tensor_map.tensor_map(cfg, with_head=with_head)
    with weights.Reader(folder) as reader:
        _check_tensors(folder, reader, views, ignore_head=not with_head)
        if with_head and cfg.tie_embeddings and tensor_map.HEAD in reader.names():
            _check_tied(folder, reader)
        leaves, tree = jax.tree.flatten(views, is_leaf=_is_view)
        if shardings is None:
            targets = [jax.sharding.SingleDeviceSharding(jax.local_devices()[0])] * len(leaves)
        else:
            targets = tree.flatten_up_to(shardings)
        return tree.unflatten([_load_leaf(reader, *pair, kind) for pair in zip(leaves, targets, strict=True)])


def save(
    folder: str | Path,
    cfg: DecoderConfig,
    params: Any,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 2**30,
    token_ids: Mapping[str, Any] | None = None,
) -> None:
    """Writes the files that transformers loads, from parameters in any layout; makes the folder if need be.

    Tensor by tensor, under temporary names (see `weights.write`). Files of the folder that are not the model's stay.

    Args:
      params: host or device arrays of this process, in the layout of `cfg`.
      dtype: of the files. float32 of float32 parameters comes back bit by bit.
      max_shard_bytes: where the next file begins.
      token_ids: see `load_token_ids`.
    Raises ValueError for a decoder that no Hugging Face architecture computes, and for parameters of another layout.
    """
    document = hf_config.to_document(cfg, dtype=dtype, token_ids=token_ids)
    views, tree = jax.tree.flatten(tensor_map.tensor_map(cfg), is_leaf=_is_view)
    if jax.tree.structure(params) != tree:
        raise ValueError(
            f"model: the parameters are not in the layout of scan_layers={cfg.scan_layers}, "
            f"fuse_projections={cfg.fuse_projections}, tie_embeddings={cfg.tie_embeddings}; give their own config"
        )
    entries = []
    for view, leaf in zip(views, jax.tree.leaves(params), strict=True):
        if tuple(leaf.shape) != view.shape:
            raise ValueError(f"model: a parameter has shape {tuple(leaf.shape)}, its config says {view.shape}")
        entries += [(tensor.name, tensor.stored, content) for tensor, content in tensor_map.pieces(view, leaf)]
    entries.sort(key=lambda entry: _order(entry[0]))
    weights.write(Path(folder), document, entries, dtype, max_shard_bytes)


def check_vocabulary(cfg: DecoderConfig, tokenizer_size: int) -> str | None:
    """Whether a tokenizer of so many tokens belongs to the model: None if it fits exactly, or one line to show.

    A model may have fewer than `PADDING_ROWS` rows more than its tokenizer has tokens (Qwen2.5 and Qwen3 have 270-400,
    for even shapes): padding that is never sampled. Raises ValueError for a larger difference, and for a tokenizer
    with more tokens than the model.
    """
    spare = cfg.vocab_size - tokenizer_size
    if spare < 0 or spare >= PADDING_ROWS:
        raise ValueError(
            f"the tokenizer has {tokenizer_size} tokens, the model {cfg.vocab_size}; they must belong together "
            f"(0 to {PADDING_ROWS - 1} more rows in the model are padding)"
        )
    if spare == 0:
        return None
    return (
        f"vocabulary: {spare} of the model's {cfg.vocab_size} rows are padding; ids from {tokenizer_size} are never "
        "sampled"
    )


def identity(folder: str | Path) -> str:
    """16 hex digits that tell a model folder from others: where the same come back, the model is taken for the same.

    A blake2b digest of `config.json` and, of each file of weights, name, size, first and last MiB (our choice: a check
    of whole files would read all of a large model). Independent of path and times. Raises ValueError, one line, for a
    folder whose config or weights cannot be read.
    """
    folder = Path(folder)
    with weights.Reader(folder) as reader:
        names = sorted(reader.files())
    digest, name = hashlib.blake2b(digest_size=8), weights.CONFIG
    try:
        content = (folder / name).read_bytes()
        digest.update(f"{len(content)}\n".encode() + content)
        for name in names:
            with open(folder / name, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{name}\n{size}\n".encode())
                for start in (0, max(size - _SAMPLE, 0)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise ValueError(
            f"model folder {folder}: {name} cannot be read ({error.strerror}); give a folder that holds a model"
        ) from error
    return digest.hexdigest()


def _document(folder: str | Path) -> Any:
    try:
        return json.loads((Path(folder) / weights.CONFIG).read_text())
    except (OSError, ValueError) as error:
        reason = f"{weights.CONFIG} cannot be read ({error})"
        raise ValueError(f"model folder {folder}: {reason}; give a folder that holds a model") from error


def _load_leaf(reader: weights.Reader, view: tensor_map.View, sharding: Any, dtype: np.dtype) -> jax.Array:
    """Reads each distinct block once and puts it on all the devices of this process that hold it."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(view.shape).items():
        bounds = (entry.indices(size) for entry, size in zip(index, view.shape, strict=True))
        holders.setdefault(tuple((start, stop) for start, stop, _ in bounds), []).append(device)
    arrays = []
    for bounds, devices in holders.items():
        out = np.empty([stop - start for start, stop in bounds], dtype)
        block = tuple(slice(*pair) for pair in bounds)
        tensor_map.fill(view, block, out, lambda tensor, wanted: reader.read(tensor.name, wanted))
        arrays += jax.block_until_ready([jax.device_put(out, device) for device in devices])
    return jax.make_array_from_single_device_arrays(view.shape, sharding, arrays)


def _check_tensors(folder: Path, reader: weights.Reader, views: Any, *, ignore_head: bool) -> None:
    leaves = jax.tree.leaves(views, is_leaf=_is_view)
    wanted = {tensor.name: tensor for view in leaves for tensor in tensor_map.tensors(view)}
    found = {name for name in reader.names() if not name.endswith("rotary_emb.inv_freq")}
    if ignore_head or tensor_map.HEAD not in wanted:
        found -= {tensor_map.HEAD}
    remedy = "config and weights must belong together"
    for problem, names in (("lack", set(wanted) - found), ("have besides the model's", found - set(wanted))):
        if names:
            raise ValueError(
                f"model folder {folder}: the weights {problem} {weights.shortened(sorted(names, key=_order))}; {remedy}"
            )
    for name, tensor in wanted.items():
        stored, shape = reader.form(name)
        if shape != tensor.stored or stored not in weights.DTYPES.values():
            wants = f"{'/'.join(weights.DTYPES.values())} {tensor.stored} in the model"
            raise ValueError(f"model folder {folder}: tensor {name} is {stored} {shape} there, {wants}; {remedy}")


def _check_tied(folder: Path, reader: weights.Reader) -> None:
    """Compares lm_head and embedding a few rows at a time."""
    names = (tensor_map.EMBEDDING, tensor_map.HEAD)
    (rows, columns), other = (reader.form(name)[1] for name in names)

    def same(start: int) -> bool:
        block = (slice(start, min(start + _ROWS, rows)), slice(0, columns))
        return np.array_equal(*(reader.read(name, block) for name in names))

    if other != (rows, columns) or not all(map(same, range(0, rows, _ROWS))):
        raise ValueError(
            f"model folder {folder}: {tensor_map.HEAD} differs from {tensor_map.EMBEDDING}, but {weights.CONFIG} ties "
            "them; set tie_word_embeddings to false there"
        )


def _is_view(node: Any) -> bool:
    return isinstance(node, tensor_map.View)


def _order(name: str) -> tuple[list[int], str]:
    """Layer 10 comes after layer 9."""
    return [int(part) for part in name.split(".") if part.isdigit()], name
