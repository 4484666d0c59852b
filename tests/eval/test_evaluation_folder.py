"""The folder of an evaluation: settings that are kept, files that are whole or not there."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

from trace_jax.eval.folder import EvaluationFolder
from trace_jax.eval.identity import params_digest

SETTINGS = {"config.task": "arithmetic", "config.arithmetic.difficulty": (1.0, 2.0), "--seed": 0}


def test_settings_are_kept_from_the_first_time(tmp_path):
    folder = EvaluationFolder(tmp_path / "new" / "one")
    folder.check({"anything": 1})  # nothing there yet
    folder.begin(SETTINGS)
    assert json.loads((tmp_path / "new" / "one" / "settings.json").read_text())["config.arithmetic.difficulty"] == [1.0, 2.0]
    again = EvaluationFolder(tmp_path / "new" / "one")
    again.begin(SETTINGS)
    again.check({"--seed": 0})
    for changed, message in (
        ({"--seed": 1}, "begun with --seed 0, here it is 1; put it back or choose another folder"),
        ({"config.arithmetic.difficulty": (1.0,)}, r"difficulty \[1.0, 2.0\], here it is \[1.0\]"),
        ({"config.new": None}, "config.new 'absent', here it is None"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            again.begin(SETTINGS | changed)
        assert "\n" not in str(error.value)


def test_figures_survive_and_a_kill_while_writing_leaves_the_old_ones(tmp_path):
    folder = EvaluationFolder(tmp_path)
    assert folder.figures() == {}
    folder.write({"benchmarks": {"a": {"avg": 0.5}}}, "table")
    (tmp_path / "results.json.tmp").write_text('{"benchm')  # what a kill leaves
    assert EvaluationFolder(tmp_path).figures() == {"a": {"avg": 0.5}}
    assert (tmp_path / "results.md").read_text() == "table\n"
    with pytest.raises(ValueError):
        folder.write({"benchmarks": {"a": {"avg": float("nan")}}}, "")
    assert folder.figures() == {"a": {"avg": 0.5}}


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "rollouts-a.jsonl").write_text("")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "settings.json").write_text("{")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "settings.json").write_text("[]")
    for name, message in (
        ("file", "cannot be written"),
        ("run", "holds a run or a model"),
        ("lost", "holds rollouts, but no settings.json"),
        ("torn", "settings.json cannot be read"),
        ("list", "settings.json holds no object"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*; choose another folder") as error:
            EvaluationFolder(tmp_path / name)
        assert "\n" not in str(error.value)


def test_parameters_are_told_apart():
    params = {"a": jnp.arange(24.0).reshape(2, 3, 4), "b": {"scale": jnp.ones(5)}}
    same = {"b": {"scale": jnp.ones(5)}, "a": jnp.arange(24.0).reshape(2, 3, 4)}
    assert params_digest(params) == params_digest(same) and len(params_digest(params)) == 16
    others = [
        {"a": params["a"].at[0, 0, 1].add(1e-6), "b": params["b"]},
        {"a": params["a"].at[-1, -1, -1].add(1e-5), "b": params["b"]},
        {"a": params["a"].reshape(2, 4, 3), "b": params["b"]},
        {"a": params["a"], "c": params["b"]},
        {"a": params["a"].astype(jnp.bfloat16), "b": params["b"]},
    ]
    assert len({params_digest(p) for p in [params, *others]}) == 6
