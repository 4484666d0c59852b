"""A finished run as a model folder: the same policy, whoever reads it."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.adapted_run import CHANGES
from tests.tiny_run import settings
from trace_jax import config as config_lib
from trace_jax import saving, setup_run
from trace_jax.assemble import assemble, prepare_policy
from trace_jax.config import ConfigError
from trace_jax.export import export
from trace_jax.models import folder as model_folder
from trace_jax.train.checkpoint import Snapshot

def whole_policy(done):
    """The parameters of the whole policy at the end of a run."""
    return done.parts.trainer.full_params(done.parts.policy.params)


@pytest.fixture(scope="module")
def done(adapted_run):
    return adapted_run


def test_the_export_is_the_policy_with_its_adapters_merged(done, tmp_path):
    assert export(done.workdir, tmp_path / "model", "float32") == 1
    cfg = model_folder.load_config(tmp_path / "model")
    params = model_folder.load_params(tmp_path / "model", cfg)
    expected = done.parts.trainer.full_params(done.parts.policy.params)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    start = model_folder.load_params(done.workdir.parent / "warm" / "arithmetic", cfg)
    assert not np.array_equal(params["layer_0"]["mlp"]["up"]["kernel"], start["layer_0"]["mlp"]["up"]["kernel"])


def test_a_run_can_start_from_an_export(done, tmp_path):
    export(done.workdir, tmp_path / "model", "float32")
    config = settings(CHANGES | {"model.path": str(tmp_path / "model")})
    parts = assemble(config, tmp_path / "next")
    own, new = (setup_run.make_tokenizer(c, parts.environment.task) for c in (done.config, parts.config))
    assert own.get_vocab() == new.get_vocab()
    whole = parts.trainer.full_params(parts.policy.params)
    jax.tree.map(np.testing.assert_array_equal, whole, whole_policy(done))


def test_no_data_and_no_tools_are_needed(done, tmp_path):
    """A checkpoint of a run on a data set that is not here, of a family whose sandbox may not start here."""
    export(done.workdir, tmp_path / "base", "float32")
    changes = {"task": "math", "strategy": "grpo", "model.path": str(tmp_path / "base"), "chat.max_prompt_tokens": 16}
    changes |= {"data.folder": str(tmp_path / "none"), "seed": 3, "model.fuse_projections": False}
    config = settings(changes)
    parts = prepare_policy(config)
    state = parts.trainer.adopt(jax.tree.map(lambda leaf: leaf + 0.5, whole_policy(done)), config.seed)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config_lib.to_json(config))
    with contextlib.closing(saving.open_checkpoints(config, tmp_path / "run" / "checkpoints")) as checkpoints:
        checkpoints.save(Snapshot(step=7, arrays={"policy": state}, host={}, document={"base": ""}))
    assert export(tmp_path / "run", tmp_path / "model", "float32") == 7
    params = model_folder.load_params(tmp_path / "model", model_folder.load_config(tmp_path / "model"))
    jax.tree.map(lambda got, was: np.testing.assert_array_equal(got, was + 0.5), params, whole_policy(done))


def test_a_warm_start_that_is_gone(done, tmp_path):
    """Adapters need the weights below them; a checkpoint of all parameters does not."""
    lost = dataclasses.replace(done.config, warm_start=dataclasses.replace(done.config.warm_start, cache="nowhere"))
    with pytest.raises(ConfigError, match="no longer holds the model that the adapters belong to; restore"):
        assemble(lost, tmp_path, may_train=False)
    full = dataclasses.replace(lost, lora=config_lib.LoraSettings())
    assert assemble(full, tmp_path, may_train=False).step == 0


def test_half_precision(done, tmp_path):
    export(done.workdir, tmp_path / "model", "bfloat16")
    cfg = model_folder.load_config(tmp_path / "model")
    params = model_folder.load_params(tmp_path / "model", cfg)
    for got, full in zip(jax.tree.leaves(params), jax.tree.leaves(whole_policy(done)), strict=True):
        np.testing.assert_allclose(got, full, rtol=2**-8)


def test_bad_folders_are_named_in_one_line(done, tmp_path):
    with pytest.raises(ConfigError, match="--workdir: .* holds no run"):
        export(tmp_path / "none", tmp_path / "model", "float32")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "config.json").write_text(config_lib.to_json(done.config))
    with pytest.raises(ConfigError, match="holds no checkpoint yet; train first"):
        export(tmp_path / "early", tmp_path / "model", "float32")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="--folder: .* holds a model already"):
        export(done.workdir, tmp_path / "model", "float32")


def test_the_command(done, tmp_path):
    command = [sys.executable, "-m", "trace_jax.export", f"--workdir={done.workdir}"]
    finished = lambda *flags: subprocess.run(
        [*command, *flags], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120
    )
    first, again = (finished(f"--folder={tmp_path / 'model'}") for _ in range(2))
    assert first.returncode == 0 and "policy of step 1 written to" in first.stdout
    assert again.returncode == 1 and again.stderr.strip().startswith("error: --folder:")
    assert again.stderr.strip().count("\n") == 0


def test_a_config_reads_itself_back(done):
    assert config_lib.from_json(config_lib.to_json(done.config)) == done.config
    with pytest.raises(ConfigError, match="config.steps is missing"):
        text = config_lib.to_json(done.config).replace('"steps": 1', '"stepz": 1', 1)
        config_lib.from_json(text.replace('"stepz": 1,', "", 1))
    with pytest.raises(ValueError, match="no object"):
        config_lib.from_json("[]")
    assert dataclasses.is_dataclass(config_lib.from_json(config_lib.to_json(done.config)).lora)
