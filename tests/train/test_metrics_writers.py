"""Metrics files read back with other readers than the ones that wrote them."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest

from trace_jax.train import metrics


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_per_step_with_null_for_nan(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = metrics.JsonlWriter(path, resume_step=0)
    writer.write(0, {"a/b": 1.5, "n": 3, "nan": float("nan"), "inf": np.float32("inf"), "none": None})
    # readable before close: every line is flushed
    assert path.read_text() == '{"step": 0, "a/b": 1.5, "n": 3, "nan": null, "inf": null, "none": null}\n'
    writer.write(2, {"x": np.float32(0.25), "k": np.int64(7), "z": np.array(2.0)})
    writer.close()
    assert _lines(path)[1] == {"step": 2, "x": 0.25, "k": 7, "z": 2.0}


@pytest.mark.parametrize("resume, kept", [(0, []), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_resume_cuts_off_the_steps_that_run_again(tmp_path, resume, kept):
    path = tmp_path / "metrics.jsonl"
    writer = metrics.JsonlWriter(path, resume_step=0)
    for step in range(4):
        writer.write(step, {"v": step * 10})
    writer.close()
    writer = metrics.JsonlWriter(path, resume_step=resume)
    writer.write(resume, {"v": -1})
    writer.close()
    assert _lines(path) == [{"step": s, "v": s * 10} for s in kept] + [{"step": resume, "v": -1}]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "v": 1}\n{"step": 1, "v"')
    assert metrics.read_jsonl(path) == [{"step": 0, "v": 1}]
    writer = metrics.JsonlWriter(path, resume_step=5)
    writer.write(5, {})
    writer.close()
    assert _lines(path) == [{"step": 0, "v": 1}, {"step": 5}]


def test_complete_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    assert metrics.read_jsonl(path) == [{"step": 0}, {"step": 1}]


@pytest.mark.parametrize("line", ["garbage", "[1, 2]", '{"v": 1}', ""])
def test_broken_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 of"):
        metrics.read_jsonl(path)


def test_a_step_is_written_once_and_in_order(tmp_path):
    writer = metrics.JsonlWriter(tmp_path / "m.jsonl", resume_step=3)
    writer.write(3, {})
    with pytest.raises(ValueError, match="step 3 after step 3"):
        writer.write(3, {})
    with pytest.raises(ValueError, match="step 1 after step 3"):
        writer.write(1, {})
    writer.close()


@pytest.mark.parametrize("value", ["text", True, np.zeros(2)])
def test_what_is_no_number_is_named(tmp_path, value):
    writer = metrics.JsonlWriter(tmp_path / "m.jsonl", resume_step=0)
    with pytest.raises(ValueError, match="metrics: odd is"):
        writer.write(0, {"odd": value})
    writer.close()


def _events(folder):
    """Scalars of all event files, parsed from the records (length, crc, payload, crc) without TensorBoard."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            at += 12 + size + 4
    return found


def test_tensorboard_holds_the_finite_scalars(tmp_path):
    writer = metrics.TensorBoardWriter(tmp_path, resume_step=0)
    writer.write(0, {"a/b": 0.5, "bad": float("nan")})
    writer.write(1, {"a/b": 0.75})
    writer.close()
    assert _events(tmp_path) == [(0, "a/b", 0.5), (1, "a/b", 0.75)]


def _wandb_stub(calls):
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append(("log", step, values)), finish=lambda: calls.append(("finish",))
    )
    return types.SimpleNamespace(init=lambda **kwargs: (calls.append(("init", kwargs)), run)[1])


def test_wandb_gets_every_step(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", _wandb_stub(calls))
    writer = metrics.WandbWriter("project", name="run", config={"seed": 1}, folder=tmp_path)
    writer.write(4, {"a": 1.0, "b": float("nan")})
    writer.close()
    assert calls[0][1] == dict(
        project="project", name="run", id="run", resume="allow", config={"seed": 1}, dir=str(tmp_path)
    )
    assert calls[1:] == [("log", 4, {"a": 1.0}), ("finish",)]


def test_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    with pytest.raises(ImportError, match=r"pip install 'trace_jax\[wandb\]'"):
        metrics.WandbWriter("p", name="n", config={}, folder=tmp_path)


def test_writers_fan_out(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    writers = metrics.Writers(metrics.JsonlWriter(path, resume_step=0) for path in paths)
    writers.write(0, {"v": 1})
    writers.close()
    assert _lines(paths[0]) == _lines(paths[1]) == [{"step": 0, "v": 1}]
    with pytest.raises(ValueError, match="closed"):
        writers.write(1, {"v": 1})
