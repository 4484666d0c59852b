"""Logits equal those that transformers computed: tests/golden/make_hf_parity.py wrote the models and the numbers.

Measured over all cases and layouts: at most 6e-6 (logits reach 4).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from trace_jax.models import decoder, folder
from trace_jax.models.config import Llama3Scaling

GOLDEN = Path(__file__).parents[1] / "golden" / "hf_parity"
CASES = sorted(path.name for path in GOLDEN.iterdir())
SCANNED = {"scan_layers": True, "fuse_projections": True}
SCALED = Llama3Scaling(4.0, 0.25, 2.0, 16)


def logits_of(cfg, params, token_BT):
    pos_BT = np.broadcast_to(np.arange(token_BT.shape[1], dtype=np.int32), token_BT.shape)
    end_BT = np.full_like(token_BT, token_BT.shape[1])
    compute = jax.jit(lambda params, *rows: decoder.hidden_states(cfg, params, *rows) @ decoder.unembed(cfg, params))
    return np.asarray(compute(params, token_BT, pos_BT, end_BT))


def test_every_option_has_a_case():
    """What the cases' names promise, as our fields say it."""
    cfgs = {name: folder.load_config(GOLDEN / name) for name in CASES}
    flags = {
        name: (c.qk_norm, c.qkv_bias, c.o_bias, c.tie_embeddings, c.rope_scaling == SCALED) for name, c in cfgs.items()
    }
    assert flags == {
        "llama": (False, False, False, False, False),
        "llama_biased": (False, True, True, False, False),
        "llama_scaled": (False, False, False, True, True),
        "qwen2": (False, True, False, False, False),
        "qwen2_tied": (False, True, False, True, False),
        "qwen3": (True, False, False, False, False),
        "qwen3_scaled": (True, False, False, True, True),
        "qwen3_tied_biased": (True, True, True, True, False),
    }
    assert {name for name, c in cfgs.items() if c.head_dim * c.num_heads != c.hidden_size} == {
        "llama_scaled",
        "qwen3",
        "qwen3_scaled",
        "qwen3_tied_biased",
    }
    assert {c.num_heads // c.num_kv_heads for c in cfgs.values()} == {1, 2, 4}
    assert all(c.rope_theta == 500 and c.rms_norm_eps == 1e-5 and c.max_positions == 64 for c in cfgs.values())


@pytest.mark.parametrize(
    "name, layout",
    [(name, {}) for name in CASES] + [(name, SCANNED) for name in ("qwen3_tied_biased", "qwen2", "llama_scaled")],
    ids=str,
)
def test_logits(name, layout):
    cfg = folder.load_config(GOLDEN / name, **layout)
    expected = load_file(GOLDEN / name / "parity.safetensors")
    got = logits_of(cfg, folder.load_params(GOLDEN / name, cfg), expected["tokens"])
    assert np.abs(expected["logits"]).max() > 1  # small numbers would agree whatever we did
    np.testing.assert_allclose(got, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_comes_back_as_it_was(name, tmp_path):
    cfg = folder.load_config(GOLDEN / name, **SCANNED)
    folder.save(tmp_path, cfg, folder.load_params(GOLDEN / name, cfg))
    theirs = {}
    for path in GOLDEN.joinpath(name).glob("model*.safetensors"):
        theirs |= load_file(path)
    ours = load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)
    assert folder.load_config(tmp_path) == folder.load_config(GOLDEN / name)


def test_every_field_matters(tmp_path):
    """The cases would notice an option that is ignored."""
    for name, change in {
        "qwen3": {"rms_norm_eps": 0.1},
        "qwen3_scaled": {"rope_scaling": None},
        "llama_scaled": {"rope_scaling": dataclasses.replace(SCALED, high_freq_factor=1.0)},
        "llama": {"rope_theta": 1e4},
    }.items():
        cfg = folder.load_config(GOLDEN / name)
        expected = load_file(GOLDEN / name / "parity.safetensors")
        got = logits_of(dataclasses.replace(cfg, **change), folder.load_params(GOLDEN / name, cfg), expected["tokens"])
        assert np.abs(got - expected["logits"]).max() > 1e-2, (name, change)


def test_the_older_spelling_of_rope(tmp_path):
    shutil.copytree(GOLDEN / "llama_scaled", tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    document = json.loads(path.read_text())
    rope = document.pop("rope_parameters")
    document |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    path.write_text(json.dumps(document))
    assert folder.load_config(tmp_path / "old") == folder.load_config(GOLDEN / "llama_scaled")


def test_parameters_arrive_on_a_device():
    params = folder.load_params(GOLDEN / "qwen2", folder.load_config(GOLDEN / "qwen2"))
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {
        jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    }
