"""A real server that is killed, and one that hangs, in the middle of a step's episodes: nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from experiments.sglang_cpu import faults
from experiments.sglang_cpu.faults_lab import Lab, RealServer, record
from tests import tiny_run
from tests.sglang_server import server_python
from trace_jax import setup_run
from trace_jax.assemble import assemble
from trace_jax.engines import sglang_pool, sglang_server
from trace_jax.models import folder as model_folder
from trace_jax.tasks.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def lab_parts(tmp_path_factory):
    """The tiny config's policy with random parameters, and a private server of it."""
    python, home = server_python(), tmp_path_factory.mktemp("real_faults")
    config = tiny_run.settings({"engine": "sglang", "sglang.urls": "http://127.0.0.1:1"})
    run = assemble(config, home, may_train=False)
    model_folder.save(home / "model", run.trainer.model, run.trainer.full_params(run.policy.params))
    save_tokenizer(setup_run.make_tokenizer(config, setup_run.make_task(config)), home / "model")
    server = RealServer(home / "model", python, run.limits.context_length, home / "server.log", seed=0)
    yield run, server
    server.kill()


@pytest.mark.parametrize("drill", [faults.killed, faults.hanging])
def test_a_fault_of_the_only_server_loses_nothing(lab_parts, tmp_path, monkeypatch, drill):
    """All 64 units are spent, all leaves are there, none of them is an engine's error, and all are of the version that
    the server did not have when it came back."""
    monkeypatch.setattr(sglang_pool, "HEARTBEAT", 1.0)
    monkeypatch.setattr(sglang_server, "HEALTH", 10.0)
    run, server = lab_parts

    async def main():
        lab = Lab(run, [server], tmp_path / "weights", direct=True, outage_timeout=280.0)
        return await record(lab, drill.__name__, drill, "completed", 300.0)

    row = asyncio.run(main())
    assert row["outcome"] == "completed", row
    assert row["units"] == row["units_planned"] == 64.0 and row["leaves"] == row["leaves_expected"]
    assert row["engine_error_leaves"] == row["wrong_version_leaves"] == 0
    assert row["server_losses"] >= 1 and row["server_returns"] >= 1 and row["retries"] >= 1
