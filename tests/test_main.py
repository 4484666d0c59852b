"""The entry point in this process: how each end of a run is told, and with which status."""

from __future__ import annotations

import pytest
from absl import flags

from trace_jax import main as main_lib
from trace_jax import run as run_lib
from trace_jax.config import ConfigError
from trace_jax.train.checkpoint import CheckpointError

# ml_collections loads config files with it.
pytestmark = pytest.mark.filterwarnings(r"ignore:the load_module\(\) method is deprecated:DeprecationWarning")


@pytest.fixture
def command(monkeypatch):
    """Parses a command line for one test and calls main with what is no flag."""

    def call(*arguments):
        argv = ["main", *arguments]
        monkeypatch.setattr("sys.argv", argv)
        main_lib.main(main_lib._parse(argv))

    yield call
    for name in [name for name in flags.FLAGS if name.startswith("config.")]:
        delattr(flags.FLAGS, name)  # ml_collections defines one for each setting that was given
    for name in ("config", "workdir"):
        flags.FLAGS[name].unparse()
    flags.FLAGS.unparse_flags()


GOOD = ("--config=tests/tiny_config.py", "--workdir=somewhere", "--config.steps=7")


def test_settings_and_workdir_reach_the_run(command, monkeypatch):
    seen = []
    monkeypatch.setattr(run_lib, "run", lambda config, workdir: seen.append((config.steps, workdir)))
    command(*GOOD)
    assert seen == [(7, "somewhere")]


@pytest.mark.parametrize("error", [ConfigError, CheckpointError, FloatingPointError])
def test_expected_errors_are_one_line_and_status_1(command, monkeypatch, capsys, error):
    def fail(*_):
        raise error("this and that; do so")

    monkeypatch.setattr(run_lib, "run", fail)
    with pytest.raises(SystemExit) as end:
        command(*GOOD)
    assert end.value.code == 1 and capsys.readouterr().err == "error: this and that; do so\n"


def test_defects_keep_their_traceback(command, monkeypatch):
    def fail(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(run_lib, "run", fail)
    with pytest.raises(ValueError, match="a defect"):
        command(*GOOD)


def test_an_early_interrupt_is_no_failure(command, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_lib, "run", stop)
    command(*GOOD)
    assert "stopped before training; the same command starts again" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (GOOD[:1], "give --config=configs/quickstart.py and --workdir=FOLDER"),
        (GOOD[1:2], "give --config=configs/quickstart.py and --workdir=FOLDER"),
        ((*GOOD, "more"), "'more' is not a flag; settings are given as --config.NAME=VALUE"),
        ((*GOOD, "--config.task=chess"), "config.task is 'chess'; choose one of arithmetic, lookup, math, multihop_qa, bfcl"),
        ((*GOOD, "--config.loss.cliplow=1"), "--config.loss.cliplow is not a setting; did you mean clip_low?"),
    ],
)
def test_mistakes_are_one_line_and_status_1(command, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(run_lib, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as end:
        command(*arguments)
    assert end.value.code == 1 and capsys.readouterr().err == f"error: {message}\n"
