"""Runs of experiments: what is kept of a finished run, and that one which was stopped is not taken for one."""

from __future__ import annotations

import json
import os

import pytest

from experiments import runs


@pytest.fixture
def main_that_writes(tmp_path, monkeypatch):
    """`main_that_writes(STEPS)`: the run's process writes metrics of these steps of 2, and ends without an error."""
    monkeypatch.setattr(runs, "ROOT", tmp_path)

    def prepare(steps):
        def run(command, **_):
            folder = tmp_path / command[3].removeprefix("--workdir=")
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps({"steps": 2}))
            rows = [{"step": step, "eval/success": 0.5} for step in steps]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        monkeypatch.setattr(runs.subprocess, "run", run)

    return prepare


def test_a_finished_run_is_kept_and_not_run_again(tmp_path, main_that_writes, monkeypatch):
    main_that_writes([0, 1, 2])
    runs.run_one(runs.Path("w"), tmp_path / "raw", "a-run", ["--x=1"])
    assert {path.name for path in (tmp_path / "raw").iterdir()} == {"a-run.jsonl", "a-run.config.json"}
    monkeypatch.setattr(runs.subprocess, "run", None)
    runs.run_one(runs.Path("w"), tmp_path / "raw", "a-run", ["--x=1"])


@pytest.mark.parametrize("steps", [[], [0, 1]])
def test_a_run_that_was_stopped_is_not_kept(tmp_path, main_that_writes, steps):
    main_that_writes(steps)
    with pytest.raises(RuntimeError, match="a-run was stopped before its last step"):
        runs.run_one(runs.Path("w"), tmp_path / "raw", "a-run", [])
    assert not list((tmp_path / "raw").iterdir())


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """A command line of two seeds, two tasks and one strategy, two at a time."""
    argv = ["run", "--jobs=2", "--workdir=w", f"--raw={tmp_path / 'raw'}", "--seeds=3,4"]
    monkeypatch.setattr(runs.sys, "argv", argv)
    return runs.parse("An experiment.", tmp_path, seeds="0", strategies=("grpo",))


def test_runs_side_by_side_have_a_core_each_and_a_warm_start(tmp_path, main_that_writes, arguments, monkeypatch):
    main_that_writes([0, 1, 2])
    started, fake = [], runs.subprocess.run

    def run(command, **settings):
        started.append((command[3].removeprefix("--workdir=w/"), command[4:], os.sched_getaffinity(0)))
        fake(command, **settings)

    monkeypatch.setattr(runs.subprocess, "run", run)
    runs.run_all(arguments, lambda task, strategy, seed: [f"--config.seed={seed}"])
    first = {name: flags for name, flags, _ in started[:2]}
    assert set(first) == {"arithmetic-warm-start", "lookup-warm-start"}
    assert all(flags[:2] == ["--config.seed=3", "--config.steps=0"] for flags in first.values())
    own = {name: flags for name, flags, _ in started[2:]}
    names = [(f"{task}-grpo-{seed}", seed) for task in ("arithmetic", "lookup") for seed in (3, 4)]
    assert own == {name: [f"--config.seed={seed}"] for name, seed in names}
    assert all(len(cores) == 1 for _, _, cores in started[2:])
    assert len(list((tmp_path / "raw").glob("*.jsonl"))) == 4
    runs.run_all(arguments, lambda *_: [])
    assert len(started) == 6  # all is there


def test_a_failure_side_by_side_is_raised_and_stops_what_has_not_begun(main_that_writes, arguments):
    main_that_writes([0])
    with pytest.raises(RuntimeError, match="was stopped before its last step"):
        runs.run_all(arguments, lambda *_: [])
    assert not list(arguments.raw.iterdir())
