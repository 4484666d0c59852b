"""Model folders: `config.json` in Hugging Face's terms, parameters as safetensors. The tokenizer lies beside them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig

_CONFIG, _WEIGHTS = "config.json", "trace_jax.safetensors"
# our field -> Hugging Face's
_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_size": "intermediate_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}


def save(folder: str | Path, cfg: DecoderConfig, params: Any) -> None:
    """Writes `config.json` and the parameters of a Qwen3-style decoder; makes the folder if need be."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    document = {"model_type": "qwen3"} | {theirs: getattr(cfg, ours) for ours, theirs in _NAMES.items()}
    (folder / _CONFIG).write_text(json.dumps(document, indent=2))
    save_file(_flat(params), folder / _WEIGHTS)


def load_config(folder: str | Path, **execution: Any) -> DecoderConfig:
    """The decoder of a model folder; `execution` sets how it is computed (scan_layers, remat, dtype, ...).

    Raises ValueError where `config.json` is missing, damaged or of another architecture than qwen3.
    """
    path = Path(folder) / _CONFIG
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model folder {folder}: {_CONFIG} cannot be read ({error}); give a folder that holds a model")
    if not isinstance(document, dict) or document.get("model_type") != "qwen3":
        raise ValueError(
            f"model folder {folder}: {_CONFIG} is not of model_type qwen3, the only one that is read; use another"
        )
    missing = [theirs for theirs in _NAMES.values() if theirs not in document]
    if missing:
        raise ValueError(f"model folder {folder}: {_CONFIG} lacks {', '.join(missing)}; copy the file again")
    fields = {ours: document[theirs] for ours, theirs in _NAMES.items()}
    for field in dataclasses.fields(DecoderConfig):
        value = fields.get(field.name)
        allowed = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(field.type, ())
        if field.name in fields and type(value) not in allowed:
            raise ValueError(
                f"model folder {folder}: {_NAMES[field.name]} is {value!r} in {_CONFIG}, must be of type {field.type}"
            )
    return DecoderConfig(**fields, **execution).validate()


def load_params(folder: str | Path, cfg: DecoderConfig) -> Any:
    """The parameters as numpy arrays. Raises ValueError that names what is missing, extra or of another form."""
    path = Path(folder) / _WEIGHTS
    try:
        flat = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"model folder {folder}: {_WEIGHTS} cannot be read ({error}); copy the file again")
    shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    describe = lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}"
    expected = {_name(path): describe(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    for name in sorted(set(expected) | set(flat)):
        found = describe(flat[name]) if name in flat else "absent"
        if expected.get(name, "unknown") != found:
            raise ValueError(
                f"model folder {folder}: tensor {name} is {found} there, {expected.get(name, 'unknown')} in the model; "
                "config and weights must belong together"
            )
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[_name(path)], shapes)


def _flat(params: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_name(path): np.ascontiguousarray(leaf) for path, leaf in leaves}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(key.key for key in path)
