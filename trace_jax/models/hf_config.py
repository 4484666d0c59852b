"""Hugging Face's `config.json` <-> DecoderConfig, for model_type qwen3 (dense), qwen2 (2 and 2.5) and llama.

Both spellings of RoPE are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`. The first is
written, because transformers 4 and 5 both read it. What the decoder does not compute is refused, never dropped.
Values that a file leaves out are those of transformers' config classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trace_jax.models.config import DecoderConfig, Llama3Scaling

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SIZES = {  # our field -> Hugging Face's; every file has these
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_size": "intermediate_size",
}
_DEFAULT_POSITIONS = {"qwen3": 32768, "qwen2": 32768, "llama": 2048}
_DEFAULT_WINDOW = 28  # max_window_layers: from this layer on
_DEFAULT_KV_HEADS = {"qwen3": 32, "qwen2": 32}  # where the name is absent; llama, and a null anywhere: as many as heads
_ABSENT = object()
_TYPES = {"int": (int,), "float": (int, float), "bool": (bool,)}


def from_document(document: Any, **execution: Any) -> DecoderConfig:
    """The decoder that a parsed `config.json` describes; `execution` sets how it is computed.

    Raises ValueError for an architecture that is not read, for a part that is not computed (sliding windows, other
    RoPE scalings, MLP biases, quantised weights, ...), and for a value that is missing or of another type.
    """
    if not isinstance(document, Mapping):
        raise ValueError("config.json holds no JSON object; copy the file again")
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(
            f"config.json is of model_type {kind!r}, which is not read; the architectures that are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    missing = [theirs for theirs in _SIZES.values() if document.get(theirs) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}; copy the file again")
    fields = {ours: _typed(document, theirs, "int") for ours, theirs in _SIZES.items()}
    _refuse_what_is_not_computed(document)
    fields["max_positions"] = _positive(document, "max_position_embeddings", "int", _DEFAULT_POSITIONS[kind])
    fields["num_kv_heads"] = _kv_heads(document, kind, fields["num_heads"])
    fields["head_dim"] = _head_dim(document, kind, fields["hidden_size"], fields["num_heads"])
    fields["rms_norm_eps"] = _positive(document, "rms_norm_eps", "float", 1e-6)
    fields["tie_embeddings"] = _typed(document, "tie_word_embeddings", "bool", False)
    fields["qk_norm"] = kind == "qwen3"
    bias = kind != "qwen2" and _typed(document, "attention_bias", "bool", False)
    fields["qkv_bias"], fields["o_bias"] = bias or kind == "qwen2", bias
    fields["rope_theta"], fields["rope_scaling"] = _rope(document, fields["max_positions"])
    return DecoderConfig(**fields, **execution).validate()


def to_document(
    cfg: DecoderConfig, *, dtype: str = "float32", token_ids: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The `config.json` of a decoder.

    Args:
      dtype: of the weights in the files beside it.
      token_ids: those of `TOKEN_IDS` that are known, for who generates with the files; null by default.
    Raises ValueError where no architecture that is read computes what this decoder computes.
    """
    kind = model_type(cfg)
    document: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    document |= {theirs: getattr(cfg, ours) for ours, theirs in _SIZES.items()}
    document |= {
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": float(cfg.rms_norm_eps),
        "rope_theta": float(cfg.rope_theta),
        "rope_scaling": None,
        "tie_word_embeddings": cfg.tie_embeddings,
        "torch_dtype": dtype,
    } | dict.fromkeys(TOKEN_IDS)
    if kind != "qwen2":
        document["attention_bias"] = cfg.qkv_bias
    if kind == "llama":
        document["mlp_bias"] = False
    else:
        document["use_sliding_window"] = False
    if cfg.rope_scaling is not None:
        document["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(cfg.rope_scaling.factor),
            "low_freq_factor": float(cfg.rope_scaling.low_freq_factor),
            "high_freq_factor": float(cfg.rope_scaling.high_freq_factor),
            "original_max_position_embeddings": cfg.rope_scaling.original_max_positions,
        }
    return document | dict(token_ids or {})


def model_type(cfg: DecoderConfig) -> str:
    """Hugging Face's name of the architecture that computes the same function. Raises ValueError where there is none.

    Norms on queries and keys make it qwen3; biases on q, k, v alone qwen2; the rest is llama.
    """
    if cfg.qkv_bias == cfg.o_bias:
        kind = "qwen3" if cfg.qk_norm else "llama"
    else:
        kind = "qwen2"
        if cfg.qk_norm or cfg.o_bias:
            raise ValueError(
                f"model: no architecture of {', '.join(ARCHITECTURES)} has qk_norm={cfg.qk_norm} with "
                f"qkv_bias={cfg.qkv_bias} and o_bias={cfg.o_bias}; make the biases equal, or drop qk_norm and o_bias"
            )
    if kind == "llama" and cfg.hidden_size % cfg.num_heads:
        raise ValueError(
            f"model: a llama config needs a hidden_size that is a multiple of num_heads, {cfg.hidden_size} is none of "
            f"{cfg.num_heads}; change one of them or set qk_norm"
        )
    return kind


def _refuse_what_is_not_computed(document: Mapping[str, Any]) -> None:
    act = document.get("hidden_act") or "silu"
    if act != "silu":
        raise ValueError(f"config.json has hidden_act {act!r}; only silu is computed: use another checkpoint")
    if document.get("mlp_bias"):
        raise ValueError("config.json has mlp_bias: biases of the MLP are not computed; use another checkpoint")
    if document.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a quantization_config: quantised weights are not read; use the checkpoint's bfloat16 form"
        )
    window = document.get("use_sliding_window") and document.get("sliding_window") is not None
    window = window and _typed(document, "max_window_layers", "int", _DEFAULT_WINDOW) < document["num_hidden_layers"]
    kinds = document.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types is {kinds!r} in config.json, must be a list; copy the file again")
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if window or other:
        raise ValueError(
            f"config.json turns on {', '.join(other) or 'use_sliding_window'}; here every layer attends to the "
            "whole context: use a checkpoint without it"
        )
    if document.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"config.json has partial_rotary_factor {document['partial_rotary_factor']}; RoPE turns whole heads here: "
            "use another checkpoint"
        )


def _kv_heads(document: Mapping[str, Any], kind: str, heads: int) -> int:
    if document.get("num_key_value_heads", 0) is None:
        return heads
    return _typed(document, "num_key_value_heads", "int", _DEFAULT_KV_HEADS.get(kind, heads))


def _head_dim(document: Mapping[str, Any], kind: str, hidden: int, heads: int) -> int:
    if document.get("head_dim") is not None:
        return _typed(document, "head_dim", "int")
    return 128 if kind == "qwen3" and "head_dim" not in document else hidden // max(heads, 1)


def _rope(document: Mapping[str, Any], max_positions: int) -> tuple[float, Llama3Scaling | None]:
    """theta and scaling from either spelling; `rope_scaling` wins, as in transformers."""
    name = "rope_scaling" if document.get("rope_scaling") else "rope_parameters"
    rope = document.get(name) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"config.json: {name} is not one table for all layers; use another checkpoint")
    theta = _positive(rope if "rope_theta" in rope else document, "rope_theta", "float", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        _refuse_what_is_not_computed({"partial_rotary_factor": rope["partial_rotary_factor"]})
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"config.json has RoPE of type {kind!r}, computed are 'default' and 'llama3'; where the model card calls "
            f"it optional (Qwen's yarn), delete {name} and stay within the unscaled context"
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    missing = [key for key in keys if key not in rope]
    if missing:
        raise ValueError(f"config.json: {name} of type llama3 lacks {', '.join(missing)}; copy the file again")
    original = _positive(rope, "original_max_position_embeddings", "int", max_positions)
    factors = {key: float(_positive(rope, key, "float")) for key in keys}
    if factors["high_freq_factor"] <= factors["low_freq_factor"]:
        raise ValueError(
            f"config.json: {name} has high_freq_factor {factors['high_freq_factor']}, must be above low_freq_factor "
            f"{factors['low_freq_factor']}; copy the file again"
        )
    return theta, Llama3Scaling(**factors, original_max_positions=original)


def _typed(document: Mapping[str, Any], name: str, kind: str, default: Any = _ABSENT) -> Any:
    value = document.get(name, default) if default is not _ABSENT else document[name]
    if type(value) not in _TYPES[kind]:
        raise ValueError(f"{name} is {value!r} in config.json, must be of type {kind}")
    return value


def _positive(document: Mapping[str, Any], name: str, kind: str, default: Any = _ABSENT) -> Any:
    value = _typed(document, name, kind, default)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r} in config.json, must be above 0 and finite; copy the file again")
    return value
