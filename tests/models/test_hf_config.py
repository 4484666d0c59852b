"""config.json <-> DecoderConfig: published configs by hand, every refusal, and the way there and back."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from trace_jax.models import hf_config
from trace_jax.models.config import DecoderConfig, Llama3Scaling

# The lines that matter of three published files, in the spelling of their day.
QWEN3_8B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_HALF_B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA32_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
PUBLISHED = {"qwen3": QWEN3_8B, "qwen2": QWEN25_HALF_B, "llama": LLAMA32_1B}


def test_published_configs():
    assert hf_config.from_document(QWEN3_8B, remat=True) == DecoderConfig(
        vocab_size=151936,
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=12288,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        qk_norm=True,
        max_positions=40960,
        remat=True,
    )
    assert hf_config.from_document(QWEN25_HALF_B) == DecoderConfig(
        vocab_size=151936,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        mlp_size=4864,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        qk_norm=False,
        qkv_bias=True,
        o_bias=False,
        max_positions=32768,
    )
    assert hf_config.from_document(LLAMA32_1B) == DecoderConfig(
        vocab_size=128256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_size=8192,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        qk_norm=False,
        max_positions=131072,
    )


@pytest.mark.parametrize("kind", PUBLISHED)
def test_what_is_written_says_what_was_read(kind):
    """Every line of the published file is in ours, except numbers of windows that are off."""
    written = hf_config.to_document(hf_config.from_document(PUBLISHED[kind]))
    off = {"max_window_layers", "sliding_window"}
    assert {key: written.get(key) for key in PUBLISHED[kind] if key not in off} == {
        key: value for key, value in PUBLISHED[kind].items() if key not in off
    }
    assert type(written["rope_theta"]) is float  # transformers 5 is strict about types


def test_transformers_5_spelling_of_rope():
    rope = dict(LLAMA32_1B["rope_scaling"], rope_theta=500000.0)
    old = hf_config.from_document(LLAMA32_1B)
    new = {key: value for key, value in LLAMA32_1B.items() if not key.startswith("rope")}
    assert hf_config.from_document(new | {"rope_parameters": rope}) == old
    plain = hf_config.from_document(new | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}})
    assert (plain.rope_theta, plain.rope_scaling) == (7e3, None)
    nothing = hf_config.from_document(new)
    assert (nothing.rope_theta, nothing.rope_scaling) == (1e4, None)
    # the oldest name of the type, and a length that is the context's where it is not given
    rope = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    assert hf_config.from_document(LLAMA32_1B | {"rope_scaling": rope}).rope_scaling == Llama3Scaling(8, 1, 4, 131072)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_values_that_may_be_absent(kind):
    left_out = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling")
    bare = {key: value for key, value in PUBLISHED[kind].items() if key not in left_out}
    del bare["max_position_embeddings"]
    bare["num_attention_heads"] = 64 if kind != "qwen2" else 32
    cfg = hf_config.from_document(bare)
    assert (cfg.tie_embeddings, cfg.rms_norm_eps, cfg.rope_theta) == (False, 1e-6, 1e4)
    head_dim, kv_heads, positions = {"qwen3": (128, 32, 32768), "qwen2": (28, 32, 32768), "llama": (32, 64, 2048)}[kind]
    assert (cfg.head_dim, cfg.num_kv_heads, cfg.max_positions) == (head_dim, kv_heads, positions)
    explicit = hf_config.from_document(bare | {"num_key_value_heads": None, "head_dim": None})
    assert explicit.num_kv_heads == bare["num_attention_heads"]
    assert explicit.head_dim == bare["hidden_size"] // bare["num_attention_heads"]


SMALL = DecoderConfig(
    vocab_size=11, hidden_size=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, mlp_size=8, max_positions=64
)


def test_there_and_back():
    for qk_norm, qkv_bias, o_bias, tied, scaled in itertools.product((False, True), repeat=5):
        cfg = dataclasses.replace(
            SMALL,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            tie_embeddings=tied,
            rope_scaling=Llama3Scaling(4.0, 0.5, 3.0, 16) if scaled else None,
        )
        expressible = qkv_bias == o_bias or (qkv_bias and not qk_norm)
        if expressible:
            assert hf_config.from_document(hf_config.to_document(cfg)) == cfg
            kind = "qwen3" if qk_norm else "llama" if qkv_bias == o_bias else "qwen2"
            assert hf_config.to_document(cfg)["model_type"] == hf_config.model_type(cfg) == kind
        else:
            with pytest.raises(ValueError, match="no architecture of qwen3, qwen2, llama has qk_norm"):
                hf_config.to_document(cfg)
    with pytest.raises(ValueError, match="multiple of num_heads, 13 is none of 4"):
        hf_config.to_document(dataclasses.replace(SMALL, hidden_size=13, qk_norm=False))


def test_ids_and_type_of_the_files():
    document = hf_config.to_document(SMALL, dtype="bfloat16", token_ids={"eos_token_id": 2})
    assert (document["torch_dtype"], document["eos_token_id"], document["bos_token_id"]) == ("bfloat16", 2, None)
    assert document["architectures"] == ["Qwen3ForCausalLM"]


REFUSED = [
    ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe', which is not read; the architectures that are: qwen3, qw"),
    ({"model_type": None}, "model_type None, which is not read"),
    ({"model_type": ["llama"]}, "model_type ['llama'], which is not read"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only silu is computed"),
    ({"mlp_bias": True}, "mlp_bias: biases of the MLP are not computed"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantised weights are not read; use the checkpoint's bfloat16"),
    ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3}, "turns on use_sliding_window"),
    ({"use_sliding_window": True, "sliding_window": 4096, "num_hidden_layers": 29}, "turns on use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "turns on sliding_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; RoPE turns whole heads"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": None}, "partial_rotary_factor 0.5"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE of type 'yarn', computed are 'default' and 'llama3'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "RoPE of type 'linear'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of type 'dynamic'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "of type llama3 lacks low_freq_factor, high_freq"),
    (
        {"rope_scaling": LLAMA32_1B["rope_scaling"] | {"high_freq_factor": 1.0}},
        "high_freq_factor 1.0, must be above low_freq_factor 1.0",
    ),
    ({"rope_scaling": "linear"}, "rope_scaling is not one table for all layers"),
    ({"rope_scaling": None, "rope_parameters": {"full_attention": {}}}, "rope_parameters is not one table"),
    ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
    ({"hidden_size": "eight"}, "hidden_size is 'eight' in config.json, must be of type int"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True in config.json, must be of type int"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1 in config.json, must be of type bool"),
    ({"rope_theta": "1e6"}, "rope_theta is '1e6' in config.json, must be of type float"),
    ({"rope_theta": 0}, "rope_theta is 0 in config.json, must be above 0 and finite"),
    ({"rope_theta": float("nan")}, "rope_theta is nan in config.json, must be above 0 and finite"),
    ({"rope_scaling": LLAMA32_1B["rope_scaling"] | {"rope_theta": -5.0}}, "rope_theta is -5.0 in config.json, must be"),
    ({"rope_scaling": LLAMA32_1B["rope_scaling"] | {"factor": 0.0}}, "factor is 0.0 in config.json, must be above 0"),
    (
        {"rope_scaling": LLAMA32_1B["rope_scaling"] | {"original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0 in config.json, must be above 0",
    ),
    ({"rms_norm_eps": -1}, "rms_norm_eps is -1 in config.json, must be above 0 and finite"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf in config.json, must be above 0 and finite"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0 in config.json, must be above 0"),
    (
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": None},
        "max_window_layers is None in config.json, must be of type int",
    ),
    ({"layer_types": 3}, "layer_types is 3 in config.json, must be a list"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention' in config.json, must be a list"),
    ({"layer_types": [["full_attention"]]}, "turns on ['full_attention']"),
    ({"head_dim": 3}, "head_dim 3 is odd"),
    ({"num_key_value_heads": 3}, "num_heads 32 is not a multiple of num_kv_heads 3"),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[str(change)[:40] for change, _ in REFUSED])
def test_what_is_refused(change, message):
    with pytest.raises(ValueError) as error:
        hf_config.from_document(LLAMA32_1B | change)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_window_that_no_layer_has_is_no_window():
    document = QWEN25_HALF_B | {"use_sliding_window": True, "max_window_layers": 24}
    assert hf_config.from_document(document) == hf_config.from_document(QWEN25_HALF_B)
    assert hf_config.from_document(QWEN25_HALF_B | {"max_window_layers": None})  # nothing reads it


@pytest.mark.parametrize("document", [[1, 2], "text", None])
def test_no_object(document):
    with pytest.raises(ValueError, match="holds no JSON object"):
        hf_config.from_document(document)
