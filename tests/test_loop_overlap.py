"""Rollouts of the next step while this one trains, on the in-process engine: what is stale, what is kept when it ends."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.tiny_run import bits, go, restored, settings, timeless
from trace_jax import loop
from trace_jax.engines.base import EngineDown

AHEAD = {"overlap": True, "eval.every": 0, "checkpoint.every": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ahead")


def config(folder, changes=()):
    return settings(AHEAD | {"warm_start.cache": str(folder / "warm")} | dict(changes))


@pytest.fixture(scope="module")
def straight(folder):
    return go(config(folder), folder / "straight")


def test_one_step_stale_and_corrected(straight):
    rows = straight.rows[1:]
    assert [row["train/staleness"] for row in rows] == [0, 1, 1, 1]
    assert [row["rollout/budget_units"] for row in rows] == [16] * 4
    first, *later = rows
    assert "time/wait" not in rows[-1] and all("time/wait" in row for row in rows[:-1])
    trained = [row for row in rows if row["train/optimizer_steps"]]
    assert trained and all("train/tis_weight" in row for row in trained)
    # fresh rollouts agree with the trainer to rounding; those of weights before an update do not
    after = [row for row, before in zip(later, rows, strict=False) if before["train/optimizer_steps"]]
    gaps = [row["train/logprob_gap_max"] for row in after if row["train/optimizer_steps"]]
    assert gaps and min(gaps) > 1e-4
    if first["train/optimizer_steps"]:
        assert first["train/logprob_gap_max"] < 1e-4


def test_the_first_step_is_the_same_and_the_prompts_are(straight, folder):
    """Without overlap the first step has the same rollouts; later ones the same prompts from other weights."""
    alone = go(config(folder, {"overlap": False, "loss.tis": "on"}), folder / "alone")
    names = [name for name in alone.rows[1] if name.startswith(("rollout/", "train/"))]
    assert {name: alone.rows[1][name] for name in names} == {name: straight.rows[1][name] for name in names}
    assert alone.parts.cursor == straight.parts.cursor == 4 * 8
    assert alone.rows[4]["train/staleness"] == 0


def test_two_runs_are_equal(straight, folder):
    again = go(config(folder), folder / "again")
    assert timeless(again.rows) == timeless(straight.rows) and bits(again.parts) == bits(straight.parts)


def test_a_signal_while_both_run_ends_with_the_step(monkeypatch, capsys, straight, folder):
    """The update cannot be stopped half-way: the step counts, its row is written, its weights are saved."""
    real = loop.learn

    def learn(run, gathered):
        if run.step == 1:
            signal.pthread_kill(main_thread, signal.SIGTERM)
        return real(run, gathered)

    main_thread = threading.main_thread().ident
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learn", learn)
        stopped = go(config(folder), folder / "stopped")
    assert "stopped after step 2;" in capsys.readouterr().out
    assert timeless(stopped.rows, "train/kl_after") == timeless(straight.rows[:3], "train/kl_after")
    assert restored(stopped.config, stopped.workdir).step == 2 and stopped.parts.ahead is None
    again = go(config(folder), folder / "stopped")
    assert [row["step"] for row in again.rows] == [0, 1, 2, 3, 4]
    # what had been sampled ahead is gone: the first step after a stop has fresh rollouts
    assert [row["train/staleness"] for row in again.rows[1:]] == [0, 1, 0, 1]


def test_an_engine_that_is_gone_meanwhile_costs_no_step(monkeypatch, folder):
    """The rollouts ahead come to nothing; the step is whole, and the next one samples for itself."""
    real, failed = loop.collect_batch, []

    async def collect(*arguments, **options):
        if options["sampling"].step == 2 and not failed:
            failed.append(True)
            raise EngineDown("no server")
        return await real(*arguments, **options)

    monkeypatch.setattr(loop, "collect_batch", collect)
    done = go(config(folder), folder / "gone")
    assert failed and [row["train/staleness"] for row in done.rows[1:]] == [0, 1, 0, 1]


def test_an_update_that_fails_ends_the_run(monkeypatch, folder):
    def learn(run, gathered):
        raise FloatingPointError("the gradient's norm is nan")

    monkeypatch.setattr(loop, "learn", learn)
    with pytest.raises(FloatingPointError, match="norm is nan"):
        go(config(folder), folder / "nan")
