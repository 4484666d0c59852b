"""Whole runs on SGLang servers: a real one on the CPU, and stand-ins that die.

The real one proves that the loop and the server agree (log-probs, forks, versions); what happens when servers are gone
does not depend on a model.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.sglang_faults import serving
from tests.sglang_stand_in import StandIn
from tests.tiny_run import bits, go, restored, settings
from trace_jax import assemble, loop
from trace_jax.engines import sglang_pool
from trace_jax.engines.base import EngineDown
from trace_jax.train.metrics import read_jsonl

# The shape of the model that the test server was started with: it loads weights of that shape only. What the server draws
# is its own: a policy that is right half of the time, and enough rollouts, make a step without contrast all but impossible.
SERVED = {
    "warm_start.steps": 90,
    "budget.roots": 24,
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.mlp_size": 128,
}
UNITS = 48  # 24 root rollouts, and 2 continuations of half a unit for each


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Work folders of this module, with the warm starts of their runs."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def on_server(sglang_server, folder):
    """`on_server(NAME, changes)`: a run of the tiny config on the real server."""

    def run(name, changes=()):
        served = {"engine": "sglang", "sglang.urls": sglang_server.url, "warm_start.cache": str(folder / "warm")}
        return go(settings(SERVED | served | dict(changes)), folder / name)

    yield run
    sglang_server.restore()


@pytest.fixture(scope="module")
def straight(on_server):
    return on_server("straight")


def trained(done):
    rows = [row for row in done.rows[1:] if row["train/optimizer_steps"]]
    assert rows, "no step found contrast: the run proves nothing"
    return rows


def test_a_run_on_a_real_server(straight):
    assert [row["step"] for row in straight.rows] == [0, 1, 2, 3, 4]
    for row in straight.rows[1:]:
        assert row["rollout/budget_units"] == UNITS
        assert row["rollout/root_rollouts"] + row["rollout/continuations"] / 2 == UNITS
        assert row["rollout/errors"] == row["rollout/mixed_version_trees"] == row["rollout/bad_replies"] == 0
        assert row["train/staleness"] == 0
    for row in trained(straight):  # the sampler's log-probs are the trainer's, whatever was trained before
        assert row["train/logprob_gap_mean"] <= row["train/logprob_gap_p99"] <= row["train/logprob_gap_max"] < 1e-4
        assert row["train/tis_weight"] == pytest.approx(1.0, abs=1e-4) and row["train/update_norm"] > 0
    assert not (straight.workdir / "weights").exists()


def test_forks_find_their_prefixes(straight):
    """All but the last token of each prefix, which is always computed."""
    forked = [row for row in straight.rows[1:] if row["rollout/continuations"]]
    assert forked
    for row in forked:
        assert row["rollout/prefix_hit_rate"] > 0.9
    assert sum(row["rollout/cached_tokens"] for row in forked) > sum(row["rollout/prefilled_tokens"] for row in forked)


def test_a_run_goes_on_where_it_was(on_server, straight, folder):
    """From its checkpoint, and with the weights of that checkpoint on the server: the gap says so."""
    done = on_server("halves", {"steps": 2})
    assert bits(restored(done.config, done.workdir)) == bits(done.parts)
    again = on_server("halves")
    assert again.parts.step == 4 and [row["step"] for row in again.rows] == [0, 1, 2, 3, 4]
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in trained(again))
    assert again.parts.cursor == straight.parts.cursor  # the same prompts; what was drawn for them is the server's


def test_rollouts_one_step_ahead(on_server):
    """From step 2 on, rollouts are of the weights before the last update; the correction knows both."""
    done = on_server("ahead", {"overlap": True, "eval.every": 0})
    assert [row["train/staleness"] for row in done.rows[1:]] == [0, 1, 1, 1]
    assert [row["rollout/budget_units"] for row in done.rows[1:]] == [UNITS] * 4
    assert [row["rollout/mixed_version_trees"] for row in done.rows[1:]] == [0] * 4
    fresh, stale = done.rows[1], [row for row in done.rows[2:] if row["train/optimizer_steps"]]
    assert fresh["train/logprob_gap_max"] < 1e-4
    moved = [row for row in stale if done.rows[row["step"] - 1]["train/optimizer_steps"]]
    assert moved and all(row["train/logprob_gap_max"] > 1e-4 for row in moved)  # the policy is another one by then
    assert done.parts.ahead is None and done.parts.step == 4


def test_adapters_behind_shared_examples(start_server, folder):
    """As the config of the pretrained model has it: adapters are merged into what is served, and the examples that all
    prompts begin with are computed before the rollouts. Their labels make a vocabulary of its own, hence a server."""
    adapted = {
        "arithmetic.shots": (1,),
        "budget.roots": 24,
        "lora.rank": 4,
        "model.fuse_projections": False,
        "model.context_length": 112,
        "loss.row_length": 128,
        "sampling.max_turn_tokens": 12,
        "warm_start.steps": 500,
        "warm_start.cache": str(folder / "warm_adapted"),
        "optimizer.learning_rate": 1e-2,
        "steps": 2,
        "eval.every": 0,
    }
    assemble.assemble(settings(adapted), folder / "adapted")  # makes the model folder
    server = start_server(model=folder / "warm_adapted" / "arithmetic", context_length=112)
    done = go(settings(adapted | {"engine": "sglang", "sglang.urls": server.url}), folder / "adapted")
    trunk = done.parts.environment.trunk.size
    assert trunk > 30 and done.parts.engine.preloaded_tokens >= 3 * trunk
    for row in done.rows[1:]:
        assert row["rollout/cached_tokens"] >= trunk * row["rollout/root_rollouts"]
        assert 0 <= row["rollout/prefix_hit_rate"] < 1
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in trained(done))


def test_a_server_of_another_model_is_not_killed_by_the_weights(sglang_server, folder):
    """SGLang dies of tensors of another shape; the folders' config.json tell it first."""
    fields = {"engine": "sglang", "sglang.urls": sglang_server.url, "warm_start.steps": 2, "strategy": "grpo"}
    other = settings(SERVED | fields | {"budget.pool": 12, "model.mlp_size": 96, "warm_start.cache": str(folder / "warm_other")})
    with pytest.raises(EngineDown, match="another model than this run's: intermediate_size 128 against 96") as error:
        go(other, folder / "other")
    assert "\n" not in str(error.value)
    assert sglang_server.get("/model_info")["model_path"] != str(folder / "other" / "weights" / "version-0")


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(sglang_pool, "RETRY_FIRST", 0.02)
    monkeypatch.setattr(sglang_pool, "RETRY_MOST", 0.1)


def stood_in(server, folder, changes=()):
    budget = {"strategy": "grpo", "budget.roots": 24, "budget.pool": 12}
    servers = {"engine": "sglang", "sglang.urls": server.url, "sglang.outage_timeout": 2.0}
    warm = {"warm_start.cache": str(folder / "warm_in"), "warm_start.steps": 5}
    return settings(budget | servers | warm | dict(changes))


def test_servers_that_die_for_good_end_the_run_and_lose_nothing(_impatient, monkeypatch, folder):
    """The second step's weights find no server: what two steps learnt is kept, and the same settings go on later."""
    server, real = StandIn(vocab_size=20), loop.learn
    with serving(server) as thread:
        config = stood_in(server, folder, {"eval.every": 0, "checkpoint.every": 0})

        def learn(run, gathered):
            report = real(run, gathered)
            if run.step == 2:
                thread.run(server.stop())
            return report

        with monkeypatch.context() as patch:
            patch.setattr(loop, "learn", learn)
            with pytest.raises(EngineDown, match="no SGLang server has been in rotation for 2 s: .* goes on") as error:
                go(config, folder / "dies")
        assert "\n" not in str(error.value)
        rows = read_jsonl(folder / "dies" / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["rollout/budget_units"] == UNITS
        assert restored(config, folder / "dies").step == 2
        server.restart()
        thread.run(server.start())
        again = go(config, folder / "dies")
    assert [row["step"] for row in again.rows] == [0, 1, 2, 3, 4]
    assert again.rows[:3] == rows and again.parts.step == 4


def test_a_server_that_dies_within_a_step_costs_no_rollout(_impatient, monkeypatch, folder):
    """One of two, in the middle of the rollouts; it comes back with other weights and is not believed until reloaded."""
    first, second = StandIn(vocab_size=20, delay=0.02), StandIn(vocab_size=20, delay=0.02, seed=1)
    with serving(first, second):
        urls = {"sglang.urls": f"{first.url},{second.url}", "steps": 3, "eval.every": 0}
        died, honest = [], first._generate

        async def generate(document):
            if not died and first.version == "1":
                died.append(first.version)
                first.restart()  # a new process at the same address, with the weights of its start
            return await honest(document)

        monkeypatch.setattr(first, "_generate", generate)
        done = go(stood_in(first, folder, urls), folder / "one_dies")
    assert died == ["1"] and first.version == second.version == "3"
    rows = done.rows[1:]
    assert [row["rollout/budget_units"] for row in rows] == [UNITS] * 3
    assert [row["rollout/root_rollouts"] for row in rows] == [UNITS] * 3
    assert sum(row["rollout/finish_engine_error"] + row["rollout/mixed_version_trees"] for row in rows) == 0
    assert rows[1]["rollout/mixed_versions"] > 0 and rows[1]["rollout/server_losses"] == 1
    leaves = sum(value for name, value in rows[1].items() if name.startswith("rollout/finish_"))
    assert leaves == UNITS and np.isfinite(rows[1]["rollout/success"])
