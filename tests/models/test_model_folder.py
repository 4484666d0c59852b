"""Model folders: what is written comes back bit by bit; each way a folder can be wrong has its own line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trace_jax.models import decoder, folder
from trace_jax.models.config import DecoderConfig, Llama3Scaling

MODEL = DecoderConfig(
    vocab_size=11,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_size=12,
    rope_theta=5e3,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    max_positions=32,
    fuse_projections=True,
)
LLAMA = dataclasses.replace(MODEL, qk_norm=False, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 16))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def params_of(cfg):
    """Random parameters in the decoder's layout; nothing is compiled."""
    shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def assert_same_bits(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def saved(tmp_path):
    folder.save(tmp_path / "deep" / "model", MODEL, params_of(MODEL))
    return tmp_path / "deep" / "model"


@pytest.fixture
def sharded(tmp_path):
    folder.save(tmp_path / "sharded", MODEL, params_of(MODEL), max_shard_bytes=1500)
    return tmp_path / "sharded"


def edit(path, **changes):
    """Changes a JSON file; a value of None takes the name out."""
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path.with_suffix(".changed"))
    path.with_suffix(".changed").replace(path)


def error_of(function, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    assert "\n" not in str(error.value) and str(error.value).startswith("model folder ")
    return str(error.value)


LAYOUTS = [dict(zip(("scan_layers", "fuse_projections"), two)) for two in itertools.product((False, True), repeat=2)]
KINDS = {
    "qwen3": {},
    "qwen3 biased": {"qkv_bias": True, "o_bias": True},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "tie_embeddings": True},
    "llama": {"qk_norm": False, "num_layers": 11},
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bitwise(tmp_path, kind, layout):
    cfg = dataclasses.replace(MODEL, **KINDS[kind], **layout)
    params = params_of(cfg)
    folder.save(tmp_path, cfg, params)
    assert folder.load_config(tmp_path, **layout) == cfg
    assert_same_bits(folder.load_params(tmp_path, cfg), params)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", WEIGHTS}


def test_every_layout_reads_what_another_wrote(tmp_path):
    plain = dataclasses.replace(MODEL, fuse_projections=False)
    params = params_of(plain)
    folder.save(tmp_path / "plain", plain, params)
    for layout in LAYOUTS:
        cfg = dataclasses.replace(MODEL, **layout)
        there = folder.load_params(tmp_path / "plain", cfg)
        folder.save(tmp_path / "back", cfg, there)
        assert (tmp_path / "back" / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()
    fused = dataclasses.replace(MODEL, scan_layers=False)
    assert_same_bits(folder.load_params(tmp_path / "plain", fused), decoder.engine_params(plain, params))


def test_shards_hold_what_one_file_holds(saved, sharded):
    names = sorted(path.name for path in sharded.iterdir())
    files = [name for name in names if name.startswith("model-")]
    count = len(files)
    assert count > 3 and files == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert names == ["config.json", *files, INDEX]
    index = json.loads((sharded / INDEX).read_text())
    one = load_file(saved / WEIGHTS)
    many = {}
    for file in files:
        content = load_file(sharded / file)
        assert sum(tensor.nbytes for tensor in content.values()) <= 1500
        assert content.keys() == {name for name, where in index["weight_map"].items() if where == file}
        many |= content
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    assert one.keys() == many.keys() and all((one[name] == many[name]).all() for name in one)
    assert_same_bits(folder.load_params(sharded, MODEL), params_of(MODEL))


def test_an_old_model_leaves_no_files_behind(sharded):
    (sharded / "tokenizer.json").write_text("{}")
    folder.save(sharded, LLAMA, params_of(LLAMA))
    assert sorted(path.name for path in sharded.iterdir()) == ["config.json", WEIGHTS, "tokenizer.json"]
    assert_same_bits(folder.load_params(sharded, folder.load_config(sharded, fuse_projections=True)), params_of(LLAMA))


def test_ids_of_special_tokens_survive(tmp_path):
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
    folder.save(tmp_path, MODEL, params_of(MODEL), token_ids=ids)
    assert folder.load_token_ids(tmp_path) == ids
    edit(tmp_path / "config.json", bos_token_id=None)
    assert folder.load_token_ids(tmp_path) == {"eos_token_id": [2, 3]}
    (tmp_path / "config.json").write_text("3")
    assert "holds no JSON object" in error_of(folder.load_token_ids, tmp_path)


def test_what_a_killed_writer_left_goes(saved):
    (saved / "model-00001-of-00009.safetensors.part").write_text("half")
    folder.save(saved, MODEL, params_of(MODEL))
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", WEIGHTS]


def test_a_crash_leaves_no_model_that_is_half_another(tmp_path, saved):
    class Stopped(Exception):
        pass

    class Breaks:
        shape = (8,)

        def __getitem__(self, index):
            raise Stopped

    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    broken = params_of(MODEL)
    broken["final_norm"]["scale"] = Breaks()
    for where in (saved, tmp_path / "new"):
        with pytest.raises(Stopped):
            folder.save(where, MODEL, broken, max_shard_bytes=1500)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert list((tmp_path / "new").iterdir()) == []


def test_types_of_files_and_parameters(tmp_path):
    params = params_of(MODEL)
    folder.save(tmp_path, MODEL, params, dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()} == {np.dtype(ml_dtypes.bfloat16)}
    half = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), params)
    assert_same_bits(folder.load_params(tmp_path, MODEL, dtype="bfloat16"), half)
    assert_same_bits(folder.load_params(tmp_path, dataclasses.replace(MODEL, param_dtype="bfloat16")), half)
    assert_same_bits(folder.load_params(tmp_path, MODEL), jax.tree.map(lambda leaf: leaf.astype(np.float32), half))
    with pytest.raises(ValueError, match="dtype 'int8' is not one of float32, bfloat16, float16"):
        folder.load_params(tmp_path, MODEL, dtype="int8")


def test_a_critic_has_no_head(saved, tmp_path):
    params = params_of(MODEL)
    del params["lm_head"]
    assert_same_bits(folder.load_params(saved, MODEL, with_head=False), params)
    tied = dataclasses.replace(MODEL, tie_embeddings=True)
    assert_same_bits(folder.load_params(saved, tied, with_head=False), params)
    folder.save(tmp_path / "tied", tied, params)
    assert_same_bits(folder.load_params(tmp_path / "tied", MODEL, with_head=False), params)


def test_a_head_beside_tied_embeddings(tmp_path):
    tied = dataclasses.replace(MODEL, tie_embeddings=True)
    folder.save(tmp_path, tied, params_of(tied))
    embedding = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(tmp_path / WEIGHTS, lambda t: t.update({"lm_head.weight": embedding}))
    assert_same_bits(folder.load_params(tmp_path, tied), params_of(tied))
    rewrite(tmp_path / WEIGHTS, lambda t: t.update({"lm_head.weight": embedding + 1}))
    assert "lm_head.weight differs from model.embed_tokens.weight" in error_of(folder.load_params, tmp_path, tied)


def test_execution_fields_are_the_callers(saved):
    cfg = folder.load_config(saved, remat=True, dtype="bfloat16")
    assert (cfg.remat, cfg.dtype, cfg.scan_layers) == (True, "bfloat16", False)


def test_configs_that_cannot_be_read(saved, tmp_path):
    assert "config.json cannot be read" in error_of(folder.load_config, tmp_path / "nowhere")
    path = saved / "config.json"
    good = path.read_text()
    for damaged in ("", good[: len(good) // 2]):
        path.write_text(damaged)
        assert "config.json cannot be read" in error_of(folder.load_config, saved)
    path.write_text("[1, 2]")
    assert "holds no JSON object" in error_of(folder.load_config, saved)
    path.write_text('{"model_type": "gemma"}')
    assert "model_type 'gemma', which is not read; the architectures that are: qwen3, qwen2, llama" in error_of(
        folder.load_config, saved
    )


def test_weights_that_cannot_be_read(saved, tmp_path):
    path = saved / WEIGHTS
    content = path.read_bytes()
    for damaged in (b"", content[:5], content[: len(content) // 2], content[:-1]):
        path.write_bytes(damaged)
        assert f"{WEIGHTS} cannot be read" in error_of(folder.load_params, saved, MODEL)
    path.unlink()
    assert f"{WEIGHTS} cannot be read (neither it nor {INDEX} is there)" in error_of(folder.load_params, saved, MODEL)
    assert "does not exist" in error_of(folder.load_params, tmp_path / "nowhere", MODEL)


def test_shards_that_cannot_be_read(sharded):
    index, second = sharded / INDEX, sorted(sharded.glob("model-*"))[1]
    good, content = index.read_text(), second.read_bytes()
    second.write_bytes(content[:-1])
    assert f"{second.name} cannot be read" in error_of(folder.load_params, sharded, MODEL)
    held = sorted(name for name, file in json.loads(good)["weight_map"].items() if file == second.name)
    second.unlink()
    message = error_of(folder.load_params, sharded, MODEL)
    count = len(list(sharded.glob("model-*"))) + 1
    assert f"1 of the {count} files that {INDEX} names are absent ({second.name})" in message
    second.write_bytes(content)
    rewrite(second, lambda t: t.pop(held[0]))
    assert f"{second.name} lacks {held[0]}, which {INDEX} says is in it" in error_of(folder.load_params, sharded, MODEL)
    for damaged in ("", good[:40], "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'):
        index.write_text(damaged)
        assert f"{INDEX} cannot be read" in error_of(folder.load_params, sharded, MODEL)


SCALE = "model.norm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(SCALE), f"the weights lack {SCALE};"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1" in name], "lack model.layers.1.input_layernorm.weig"),
        (lambda t: t.update({SCALE: np.ones(9, np.float32)}), f"tensor {SCALE} is F32 (9,) there, F32/BF16/F16 (8,)"),
        (lambda t: t.update({SCALE: np.ones(8, np.int8)}), f"tensor {SCALE} is I8 (8,) there"),
        (lambda t: t.update({"extra": np.ones(1, np.float32)}), "the weights have besides the model's extra;"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(8, np.float32)}),
            "besides the model's model.layers.0.self_attn.q_proj.bias",
        ),
        (lambda t: t.update({SCALE: np.full(8, np.nan, np.float32)}), f"tensor {SCALE} holds NaN or infinite numbers"),
        (
            lambda t: t.update({"lm_head.weight": np.full((11, 8), np.inf, ml_dtypes.bfloat16)}),
            "tensor lm_head.weight holds NaN or infinite numbers",
        ),
    ],
    ids=["missing", "layer", "shape", "type", "extra", "bias", "nan", "inf"],
)
def test_weights_of_another_model(saved, change, message):
    rewrite(saved / WEIGHTS, change)
    assert message in error_of(folder.load_params, saved, MODEL)


def test_long_lists_are_shortened(saved):
    deep = dataclasses.replace(MODEL, num_layers=12)
    message = error_of(folder.load_params, saved, deep)
    assert "lack model.layers.2.input_layernorm.weight" in message and message.count("model.layers") == 3
    assert "and 107 more; config and weights must belong together" in message  # 10 layers of 11 tensors


def test_buffers_of_old_files_are_ignored(saved):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    rewrite(saved / WEIGHTS, lambda t: t.update(buffer))
    assert_same_bits(folder.load_params(saved, MODEL), params_of(MODEL))


def test_parameters_of_another_layout_are_not_saved(tmp_path):
    params = params_of(MODEL)
    params["final_norm"]["scale"] = np.ones(9, np.float32)
    with pytest.raises(ValueError, match=r"a parameter has shape \(9,\), its config says \(8,\)"):
        folder.save(tmp_path, MODEL, params)
    with pytest.raises(ValueError, match="not in the layout of scan_layers=True, fuse_projections=True, tie_e.*=False"):
        folder.save(tmp_path, dataclasses.replace(MODEL, scan_layers=True), params)
    with pytest.raises(ValueError, match="no architecture of qwen3, qwen2, llama has qk_norm=True with qkv_bias=True"):
        folder.save(tmp_path, dataclasses.replace(MODEL, qkv_bias=True), params)
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_and_tokenizer():
    qwen = dataclasses.replace(MODEL, vocab_size=151936)  # Qwen2.5 with its tokenizer of 151665
    assert folder.check_vocabulary(qwen, 151936) is None
    notice = folder.check_vocabulary(qwen, 151665)
    assert "271 of the model's 151936 rows are padding; ids from 151665 are never sampled" in notice
    assert folder.check_vocabulary(qwen, 151936 - 1023) is not None
    for size in (151936 - 1024, 151937, 32000):
        with pytest.raises(ValueError, match=f"the tokenizer has {size} tokens, the model 151936; they must belong"):
            folder.check_vocabulary(qwen, size)


def test_identity_follows_config_and_weights(tmp_path, saved):
    first = folder.identity(saved)
    assert len(first) == 16 and int(first, 16) >= 0
    shutil.copytree(saved, tmp_path / "copy")
    for file in (tmp_path / "copy").iterdir():
        os.utime(file, ns=(1, 1))
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")  # not the model's
    assert folder.identity(str(tmp_path / "copy")) == first
    seen = {first}
    rewrite(saved / WEIGHTS, lambda t: t.update({"model.norm.weight": t["model.norm.weight"] + 1}))
    seen.add(folder.identity(saved))
    edit(saved / "config.json", rope_theta=7e3)
    seen.add(folder.identity(saved))
    assert len(seen) == 3


def test_identity_reads_both_ends_of_each_file(sharded, tmp_path):
    """Of 3 MiB the first and last number and the size count, the middle does not."""
    first = folder.identity(sharded)
    last = sorted(sharded.glob("model-*"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the last shard's last number
    assert folder.identity(sharded) != first

    big = tmp_path / "big"
    big.mkdir()
    (big / "config.json").write_text("{}")
    numbers = np.zeros(3 * 2**18, np.float32)
    digests = []
    for at in (None, 0, 2**18 + 2**17, -1):
        changed = numbers.copy()
        if at is not None:
            changed[at] = 1
        save_file({"x": changed}, big / WEIGHTS)
        digests.append(folder.identity(big))
    assert digests[2] == digests[0] and len(set(digests)) == 3
    save_file({"x": np.append(numbers, np.float32(0))}, big / WEIGHTS)
    assert folder.identity(big) not in digests


def test_identity_of_what_cannot_be_read(tmp_path, saved):
    assert "does not exist" in error_of(folder.identity, tmp_path / "nowhere")
    content = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(content[:-1])
    assert f"{WEIGHTS} cannot be read" in error_of(folder.identity, saved)
    (saved / WEIGHTS).write_bytes(content)
    (saved / "config.json").unlink()
    assert "config.json cannot be read (No such file" in error_of(folder.identity, saved)
    (saved / "config.json").mkdir()
    assert "config.json cannot be read (Is a directory)" in error_of(folder.identity, saved)
