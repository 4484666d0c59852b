"""Small GGUF files for the tests, laid out as llama.cpp's converter does."""

from __future__ import annotations

import gguf
import numpy as np

SPECIAL = ("<|end|>", "<|start|>")
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ 1", "a b", "ab c"]
SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "mlp_size": 64,
}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_letters() -> list[str]:
    """The letters that stand for bytes in byte-level BPE: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def vocabulary() -> list[str]:
    return [*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES), "<think>"]


def weights(architecture: str, *, tied: bool, bias: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names and in its layout."""
    rng = np.random.default_rng(seed)
    d, f, v = SIZES["hidden_size"], SIZES["mlp_size"], len(vocabulary())
    n, k, h = (SIZES[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    tensors = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not tied:
        tensors["lm_head.weight"] = (v, d)
    for i in range(SIZES["num_layers"]):
        layer = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        layer |= {f"self_attn.{x}_proj.weight": (heads * h, d) for x, heads in (("q", n), ("k", k), ("v", k))}
        layer |= {"self_attn.o_proj.weight": (d, n * h), "mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d)}
        layer |= {"mlp.down_proj.weight": (d, f)}
        if architecture == "qwen3":
            layer |= {"self_attn.q_norm.weight": (h,), "self_attn.k_norm.weight": (h,)}
        if architecture == "qwen2" or bias:
            layer |= {f"self_attn.{x}_proj.bias": (heads * h,) for x, heads in (("q", n), ("k", k), ("v", k))}
        if bias:
            layer |= {"self_attn.o_proj.bias": (d,)}
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    mean = lambda name: 1 if "norm" in name else 0
    scale = lambda shape: shape[1] ** -0.5 if len(shape) == 2 else 0.3
    return {
        name: (mean(name) + scale(shape) * rng.normal(size=shape)).astype(np.float32) for name, shape in tensors.items()
    }


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama.cpp's llama architecture: row 2i of a head is its row i, row 2i + 1 its row i + H/2."""
    out = np.empty_like(array)
    size = array.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = array[head * size + i]
            out[head * size + 2 * i + 1] = array[head * size + i + size // 2]
    return out


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer or name == "lm_head.weight":
        return outer.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    inner, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_INNER[inner]}.{kind}"


def write(
    path,
    architecture,
    tensors,
    *,
    pre="qwen2",
    quantised=None,
    extra=(),
    metadata=None,
    model="gpt2",
    pad=0,
    merges=MERGES,
):
    """A file with `tensors` (Hugging Face's names).

    `extra` are further (GGUF name, array[, type of the raw bytes]); `metadata` changes values.
    """
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        f"{architecture}.block_count": SIZES["num_layers"],
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": SIZES["hidden_size"],
        f"{architecture}.feed_forward_length": SIZES["mlp_size"],
        f"{architecture}.attention.head_count": SIZES["num_heads"],
        f"{architecture}.attention.head_count_kv": SIZES["num_kv_heads"],
        f"{architecture}.attention.key_length": SIZES["head_dim"],
        f"{architecture}.rope.dimension_count": SIZES["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 500.0,
        f"{architecture}.vocab_size": len(vocabulary()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}",
    }
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in (values | (metadata or {})).items():
        if value is not None:
            add[type(value)](key, value)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary() + [f"[PAD{i}]" for i in range(pad)])
    writer.add_token_types([3, 3] + [1] * (len(vocabulary()) - 3) + [4] + [5] * pad)
    writer.add_token_merges(merges)
    for name, array in tensors.items():
        heads = {"q": SIZES["num_heads"], "k": SIZES["num_kv_heads"]}
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = permuted(array, heads[name.split("_proj")[0][-1]])
        if quantised is not None and array.ndim == 2:
            data = gguf.quants.quantize(array, quantised)
            writer.add_tensor(gguf_name(name), data, raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name), array)
    for name, array, *kind in extra:
        writer.add_tensor(name, array, raw_dtype=kind[0] if kind else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
