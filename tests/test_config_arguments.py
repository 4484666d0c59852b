"""Settings from files and runs, with changes from a command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trace_jax import config as config_lib
from trace_jax import config_arguments
from trace_jax.config import ConfigError, RunConfig

# ml_collections loads config files with it.
pytestmark = pytest.mark.filterwarnings(r"ignore:the load_module\(\) method is deprecated:DeprecationWarning")
TINY = str(Path(__file__).parent / "tiny_config.py")


def test_a_file_and_changes():
    config = config_arguments.from_file(TINY, ["--config.steps=7", "--config.model.path=x"])
    assert (config.steps, config.model.path, config.model.hidden_size) == (7, "x", 32)


def test_a_run_and_changes(tmp_path):
    config = dataclasses.replace(RunConfig(), steps=3, model=config_lib.ModelConfig(path="there"))
    (tmp_path / "config.json").write_text(config_lib.to_json(config))
    found = config_arguments.of_run(tmp_path)
    assert found == config == config_arguments.with_settings(found, [])
    settings = ["--config.engine=sglang", "--config.arithmetic.difficulty=(1.0,2.0)", "--config.data.folder=d"]
    changed = config_arguments.with_settings(found, settings)
    assert (changed.engine, changed.arithmetic.difficulty, changed.data.folder) == ("sglang", (1.0, 2.0), "d")
    assert dataclasses.replace(changed, engine="local", arithmetic=config.arithmetic, data=config.data) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--config.loss.cliplow=1"], "--config.loss.cliplow is not a setting; did you mean clip_low?"),
        (["--config.steps=many"], "--config.steps=many: invalid literal"),
        (["more"], "'more' is not a flag; settings are given as --config.NAME=VALUE"),
        (["--foo=1"], "Unknown command line flag 'foo'"),
    ],
)
def test_mistakes_are_one_line(settings, message):
    for call in (lambda: config_arguments.from_file(TINY, settings), lambda: config_arguments.with_settings(RunConfig(), settings)):
        with pytest.raises(ConfigError) as error:
            call()
        assert message in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        config_arguments.from_file(str(tmp_path / "none.py"), [])
    with pytest.raises(ConfigError, match="--workdir: .* holds no run that can be read"):
        config_arguments.of_run(tmp_path)
