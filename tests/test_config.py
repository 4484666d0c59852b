"""The settings tree: defaults, flags, types, what a checkpoint must share, and the command line's one-line errors."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from configs import sglang as sglang_example
from trace_jax import config as config_lib
from trace_jax import config_checks
from trace_jax.config import ConfigError, RunConfig

# ml_collections loads config files with it.
pytestmark = pytest.mark.filterwarnings(r"ignore:the load_module\(\) method is deprecated:DeprecationWarning")
ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
SGLANG = str(ROOT / "configs" / "sglang.py")


def leaves(value, name=""):
    """(dotted name, value) of every field."""
    for field in dataclasses.fields(value):
        path, item = f"{name}.{field.name}".lstrip("."), getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            yield from leaves(item, path)
        else:
            yield path, item


FIELDS = dict(leaves(RunConfig()))
# Fields whose default is None, with a value; others get one that is derived from the default.
OPTIONAL = {
    "data.folder": "data",
    "math.python_url": "http://127.0.0.1:8080",
    "multihop_qa.search_url": "http://127.0.0.1:8000",
    "budget.max_per_prompt": 4,
    "sampling.max_response_tokens": 9,
    "sampling.deadline": 2.5,
    "model.path": "models/tiny",
    "model.gguf_cache": "models",
    "warm_start.cache": "models",
    "optimizer.max_update_norm": 0.25,
    "predictor.path": "models/critic",
    "predictor.max_tokens": 64,
    "predictor.update_steps": 4,
    "logging.wandb_project": "trace",
    "sglang.router": "http://127.0.0.1:30100",
    "sglang.weights_folder": "weights",
    "devices.visible": "0,1",
    "devices.memory_fraction": 0.4,
}


def another(name, value):
    """A value of the same type that is not the default."""
    if value is None:
        return OPTIONAL[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (0.5, 2.0) if not value or isinstance(value[0], float) else ("base", "other")
    return value + "_x" if isinstance(value, str) else value + 3


def from_flags(*arguments):
    """The settings that a command line with these flags gives."""
    argv = ["prog", f"--config={QUICKSTART}", *arguments]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=argv)
    values(argv)
    return config_lib.parse(holder.value)


def test_defaults_come_back_as_they_are():
    assert config_lib.parse(config_lib.default_config()) == RunConfig()
    config_checks.check(RunConfig())
    config_checks.check(from_flags())


def test_every_optional_field_has_a_value_here():
    assert set(OPTIONAL) == {name for name, value in FIELDS.items() if value is None}


def test_every_field_can_be_set_by_a_flag():
    want = {name: another(name, value) for name, value in FIELDS.items()}
    text = lambda value: repr(value) if isinstance(value, tuple) else str(value)
    got = dict(leaves(from_flags(*(f"--config.{name}={text(value)}" for name, value in want.items()))))
    assert got == want
    assert {name: type(value) for name, value in got.items()} == {name: type(value) for name, value in want.items()}


@pytest.mark.parametrize("devices", ["separate", "shared"])
def test_the_examples_of_servers_work(devices):
    values, argv = flags.FlagValues(), ["prog", f"--config={SGLANG}:{devices}", "--config.sglang.urls=http://a:1"]
    holder = config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=argv)
    values(argv)
    config = config_checks.check(config_lib.parse(holder.value))
    assert config.engine == "sglang" and config.sglang.urls == "http://a:1" and config.devices.visible == "0"
    assert config_lib.corrects(config) and config.arithmetic == from_flags().arithmetic
    # servers that sample while the policy trains cannot give their memory back meanwhile
    assert (config.overlap, config.sglang.release_memory) == ((True, False) if devices == "separate" else (False, True))


def test_an_example_that_is_none():
    with pytest.raises(ConfigError, match="configs/sglang.py:both is none of its examples; take :separate or :shared"):
        sglang_example.get_config("both")


def test_flags_without_an_equals_sign_and_numbers_as_integers():
    arguments = ("--config.task", "lookup", "--config.sampling.temperature=2", "--config.lookup.difficulty=(1, 3)")
    config = from_flags(*arguments)
    assert config.task == "lookup" and config.lookup.difficulty == (1.0, 3.0)
    assert config.sampling.temperature == 2.0 and isinstance(config.sampling.temperature, float)


def test_the_config_is_locked():
    config = config_lib.default_config()
    with pytest.raises(AttributeError):
        config.stepz = 3
    with pytest.raises(AttributeError):
        config.budget.root = 3


def test_names_and_types_are_checked_though_the_lock_is_off():
    def broken(change):
        config = config_lib.default_config()
        with config.unlocked(), config.ignore_type():
            change(config)
        with pytest.raises(ConfigError) as error:
            config_lib.parse(config)
        assert "\n" not in str(error.value)
        return str(error.value)

    def drop(config):
        del config.budget["roots"]

    assert "config.stepz is not a setting; config has task, strategy" in broken(lambda c: c.update(stepz=3))
    assert "config.budget.m is not a setting; config.budget has pool, roots" in broken(lambda c: c.budget.update(m=3))
    assert broken(lambda c: c.update(steps=1.5)) == "config.steps is 1.5, must be of type int"
    assert broken(lambda c: c.update(steps=True)) == "config.steps is True, must be of type int"
    assert broken(lambda c: c.update(steps=None)) == "config.steps is None, must be of type int"
    assert broken(lambda c: c.loss.update(clip_low="a")) == "config.loss.clip_low is 'a', must be of type float"
    assert broken(lambda c: c.loss.update(rescore=1)) == "config.loss.rescore is 1, must be of type bool"
    assert broken(lambda c: c.arithmetic.update(difficulty=("a",))).endswith("must be a tuple of numbers")
    assert broken(lambda c: c.arithmetic.update(difficulty=3)).endswith("difficulty is 3, must be a tuple of numbers")
    assert broken(lambda c: c.math.update(eval_sets=("a", 1))).endswith("must be a tuple of names")
    assert broken(drop) == "config.budget.roots is missing; start from trace_jax.config.default_config()"


def test_json_holds_every_field():
    document = json.loads(config_lib.to_json(RunConfig()))

    def flat(value, name=""):
        if not isinstance(value, dict):
            return {name: tuple(value) if isinstance(value, list) else value}
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}".lstrip(".")).items()}

    assert flat(document) == FIELDS


def test_a_resumed_run_may_change_what_does_not_change_a_step():
    base = RunConfig()
    longer = dataclasses.replace(
        base,
        steps=99,
        eval=dataclasses.replace(base.eval, prompts=3),
        checkpoint=dataclasses.replace(base.checkpoint, every=1),
        logging=dataclasses.replace(base.logging, tensorboard=False),
        loss=dataclasses.replace(base.loss, max_logprob_gap=9.0),
        sglang=dataclasses.replace(base.sglang, urls="http://127.0.0.1:30001"),
        devices=dataclasses.replace(base.devices, visible="3"),
    )
    assert config_lib.fingerprint(longer) == config_lib.fingerprint(base)
    moved = dataclasses.replace(base, warm_start=dataclasses.replace(base.warm_start, cache="elsewhere"))
    assert config_lib.fingerprint(moved) == config_lib.fingerprint(base)
    for change in ({"seed": 1}, {"task": "lookup"}, {"loss": dataclasses.replace(base.loss, clip_low=0.1)}):
        assert config_lib.fingerprint(dataclasses.replace(base, **change)) != config_lib.fingerprint(base)
    # What only another task reads changes nothing; where a service runs doesn't either.
    other = {"math": dataclasses.replace(base.math, max_turns=9), "chat": dataclasses.replace(base.chat, shots=1)}
    assert config_lib.fingerprint(dataclasses.replace(base, **other)) == config_lib.fingerprint(base)
    math = dataclasses.replace(base, task="math")
    assert config_lib.fingerprint(dataclasses.replace(math, chat=other["chat"])) != config_lib.fingerprint(math)
    assert config_lib.fingerprint(dataclasses.replace(math, math=other["math"])) != config_lib.fingerprint(math)
    served = dataclasses.replace(base.math, python_url="http://127.0.0.1:1", python_workers=1)
    assert config_lib.fingerprint(dataclasses.replace(math, math=served)) == config_lib.fingerprint(math)
    cosine = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, schedule="warmup_cosine"))
    # A cosine ends with the run, so its length is part of what a step computes.
    assert config_lib.fingerprint(dataclasses.replace(cosine, steps=99)) != config_lib.fingerprint(cosine)


@pytest.mark.parametrize(
    "engine, overlap, tis, weights",
    [
        ("local", False, "auto", False),
        ("local", True, "auto", True),
        ("sglang", False, "auto", True),
        ("sglang", True, "auto", True),
        ("local", False, "on", True),
        ("sglang", False, "off", False),
        ("local", True, "off", False),
    ],
)
def test_importance_weights_where_sampler_and_trainer_differ(engine, overlap, tis, weights):
    loss = dataclasses.replace(RunConfig().loss, tis=tis)
    config = dataclasses.replace(RunConfig(), engine=engine, overlap=overlap, loss=loss)
    assert config_lib.corrects(config) is weights


BAD_COMMANDS = {
    "unknown key": (["--config.budget.root=8"], "--config.budget.root is not a setting; did you mean roots?"),
    "wrong type": (["--config.steps=many"], "flag --config.steps=many: invalid literal for int()"),
    "impossible": (["--config.budget.roots=1"], "config.budget.roots is 1, must be at least 2"),
    "no config file": (["--config=configs/absent.py"], "No such file or directory: 'configs/absent.py'"),
    "no flag": (["steps=3"], "'steps=3' is not a flag; settings are given as --config.NAME=VALUE"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_a_bad_command_is_one_line_and_status_1(case, tmp_path):
    arguments, message = BAD_COMMANDS[case]
    command = [sys.executable, "-m", "trace_jax.main", "--config=configs/quickstart.py", f"--workdir={tmp_path / 'w'}"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n")
    assert not (tmp_path / "w").exists()
