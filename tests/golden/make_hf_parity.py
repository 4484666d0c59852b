"""Makes tests/golden/hf_parity: tiny models as transformers saves them, with inputs and the logits it computes.

    pip install -e '.[parity]'
    python tests/golden/make_hf_parity.py

Written with transformers 5.24 and torch 2.13 on a CPU in float32. The live tests draw their models here too.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FOLDER = Path(__file__).parent / "hf_parity"
ROWS, TOKENS = 2, 24
_BASE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
# Bounds of 2 and 1/4 turns in 16 tokens: the four frequencies of a head of 8 turn 2.5, 0.5, 0.1 and 0.02 times.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 0.25,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "qwen3_tied_biased": ("qwen3", {"head_dim": 6, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_scaled": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "num_attention_heads": 2}),
    "llama": ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama_scaled": ("llama", {"tie_word_embeddings": True, "head_dim": 8, "rope_parameters": LLAMA3}),
    "llama_biased": ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
}


def model(kind: str, options: dict, seed: int) -> PreTrainedModel:
    """A model with random weights: kernels keep the scale of their input, norms and biases are far from 1 and 0."""
    config = AutoConfig.for_model(kind, **{**_BASE, **options})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.from_numpy(rng.normal(size=tuple(parameter.shape)).astype(np.float32))
            if parameter.ndim == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(0.5 * noise if name.endswith("bias") else 1 + 0.3 * noise)
    return made


def draw(seed: int) -> tuple[str, dict]:
    """A random architecture with random options."""
    rng = np.random.default_rng(seed)
    kind = ("qwen3", "qwen2", "llama")[seed % 3]
    kv_heads, groups = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    heads = kv_heads * groups
    options = {
        "vocab_size": int(rng.integers(20, 60)),
        "hidden_size": heads * 2 * int(rng.integers(1, 5)),
        "intermediate_size": int(rng.integers(5, 40)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": bool(rng.integers(2)),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-3])),
        "rope_parameters": dict(LLAMA3) if rng.integers(2) else {"rope_type": "default", "rope_theta": 1e6},
    }
    if kind == "qwen3" or (kind == "llama" and rng.integers(2)):
        options["head_dim"] = 2 * int(rng.integers(1, 7))
    if kind != "qwen2":
        options["attention_bias"] = bool(rng.integers(2))
    return kind, options


def tokens(made: PreTrainedModel, seed: int) -> np.ndarray:
    """int32 [ROWS, TOKENS]."""
    return np.random.default_rng(seed).integers(0, made.config.vocab_size, (ROWS, TOKENS)).astype(np.int32)


def logits(made: PreTrainedModel, token_BT: np.ndarray) -> np.ndarray:
    """float32 [B, T, V]."""
    with torch.no_grad():
        return made(torch.from_numpy(token_BT.astype(np.int64))).logits.numpy()


def main() -> None:
    """Writes every case anew; one of them in shards."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, (kind, options)) in zip(itertools.count(), CASES.items()):
        made = model(kind, options, seed)
        shard = "8KB" if name == "llama_biased" else "1GB"
        made.save_pretrained(FOLDER / name, max_shard_size=shard)
        (FOLDER / name / "generation_config.json").unlink()
        token_BT = tokens(made, seed)
        save_file({"tokens": token_BT, "logits": logits(made, token_BT)}, FOLDER / name / "parity.safetensors")


if __name__ == "__main__":
    main()
