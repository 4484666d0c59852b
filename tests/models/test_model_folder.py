"""Model folders: what is written comes back bit by bit; each way a folder can be wrong has its own line."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trace_jax.models import decoder, folder
from trace_jax.models.config import DecoderConfig

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
WEIGHTS = "trace_jax.safetensors"


def params_of(cfg):
    """Random parameters in the decoder's layout; nothing is compiled."""
    shapes = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


@pytest.fixture
def saved(tmp_path):
    folder.save(tmp_path / "deep" / "model", MODEL, params_of(MODEL))
    return tmp_path / "deep" / "model"


def edit(path, **changes):
    """Changes a JSON file; a value of None takes the name out."""
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))


def error_of(function, *args):
    with pytest.raises(ValueError) as error:
        function(*args)
    assert "\n" not in str(error.value) and str(error.value).startswith("model folder ")
    return str(error.value)


@pytest.mark.parametrize("change", [{}, {"scan_layers": True}, {"fuse_projections": False, "tie_embeddings": True}])
def test_round_trip_is_bitwise(tmp_path, change):
    cfg = dataclasses.replace(MODEL, **change)
    params = params_of(cfg)
    folder.save(tmp_path, cfg, params)
    execution = {name: getattr(cfg, name) for name in ("scan_layers", "fuse_projections")}
    assert folder.load_config(tmp_path, **execution) == cfg
    got = folder.load_params(tmp_path, cfg)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_config_is_in_hugging_faces_terms(saved):
    document = json.loads((saved / "config.json").read_text())
    assert document == {
        "model_type": "qwen3",
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 12,
        "rope_theta": 5e3,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32,
    }


def test_execution_fields_are_the_callers(saved):
    cfg = folder.load_config(saved, remat=True, dtype="bfloat16")
    assert (cfg.remat, cfg.dtype, cfg.scan_layers) == (True, "bfloat16", False)


def test_rates_may_be_written_as_integers(saved):
    edit(saved / "config.json", rope_theta=10000)
    assert folder.load_config(saved).rope_theta == 10000


def test_configs_that_cannot_be_read(saved, tmp_path):
    assert "config.json cannot be read" in error_of(folder.load_config, tmp_path / "nowhere")
    path = saved / "config.json"
    good = path.read_text()
    for damaged in ("", good[: len(good) // 2]):
        path.write_text(damaged)
        assert "config.json cannot be read" in error_of(folder.load_config, saved)
    path.write_text("[1, 2]")
    assert "is not of model_type qwen3" in error_of(folder.load_config, saved)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gemma"}, "is not of model_type qwen3"),
        ({"model_type": None}, "is not of model_type qwen3"),
        ({"head_dim": None, "rope_theta": None}, "lacks head_dim, rope_theta"),
        ({"hidden_size": "eight"}, "hidden_size is 'eight' in config.json, must be of type int"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True in config.json, must be of type int"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1 in config.json, must be of type bool"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6' in config.json, must be of type float"),
    ],
)
def test_configs_that_describe_no_model(saved, changes, message):
    edit(saved / "config.json", **changes)
    assert message in error_of(folder.load_config, saved)


def test_shapes_that_cannot_be_built(saved):
    edit(saved / "config.json", head_dim=3)
    with pytest.raises(ValueError, match="head_dim 3 is odd"):
        folder.load_config(saved)


def test_weights_that_cannot_be_read(saved):
    path = saved / WEIGHTS
    content = path.read_bytes()
    for damaged in (b"", content[:5], content[: len(content) // 2], content[:-1]):
        path.write_bytes(damaged)
        assert f"{WEIGHTS} cannot be read" in error_of(folder.load_params, saved, MODEL)
    path.unlink()
    assert f"{WEIGHTS} cannot be read" in error_of(folder.load_params, saved, MODEL)


def test_weights_of_another_model(saved):
    def rewritten(change):
        tensors = load_file(saved / WEIGHTS)
        change(tensors)
        save_file(tensors, saved / "changed.safetensors")
        (saved / "changed.safetensors").replace(saved / WEIGHTS)
        return error_of(folder.load_params, saved, MODEL)

    scale = "final_norm.scale"
    assert f"tensor {scale} is float32 (9,) there, float32 (8,) in the model" in rewritten(
        lambda t: t.update({scale: np.ones(9, np.float32)})
    )
    assert f"tensor {scale} is float16 (8,) there, float32 (8,) in the model" in rewritten(
        lambda t: t.update({scale: np.ones(8, np.float16)})
    )
    assert f"tensor {scale} is absent there, float32 (8,) in the model" in rewritten(lambda t: t.pop(scale))
    assert "tensor extra is float32 (1,) there, unknown in the model" in rewritten(
        lambda t: t.update({scale: np.ones(8, np.float32), "extra": np.ones(1, np.float32)})
    )
