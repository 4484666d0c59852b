"""Runs of experiments: what is kept of a finished run, and that one which was stopped is not taken for one."""

from __future__ import annotations

import json

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
