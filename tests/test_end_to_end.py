"""Whole runs: what they write, that stopping changes no bit, that order of arrival changes none, how bad input ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.sglang_faults import serving
from tests.sglang_stand_in import StandIn
from tests.tiny_run import Done, bits, go, recording, restored, settings, timeless
from trace_jax import assemble, loop, saving
from trace_jax import config as config_lib
from trace_jax import run as run_lib
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_tasks import DATA_TASKS
from trace_jax.models import folder as model_folder
from trace_jax.train.checkpoint import CheckpointError
from trace_jax.train.metrics import read_jsonl

ROOT = Path(__file__).parents[1]
UNITS = 16  # 8 root rollouts, and 2 continuations of half a unit for each
ROLLOUT = {
    f"rollout/{name}"
    for name in "effective_ratio useful_groups_per_unit active_prompts skipped_prompts budget_units generated_tokens"
    " prefilled_tokens cached_tokens prefix_hit_rate tool_calls format_valid_share success expected_tokens cache_evictions mixed_version_trees"
    " preloaded_tokens".split()
}
TIME = {
    f"time/{name}"
    for name in ("publish", "gather", "score", "rollout", "learn", "predictor_update", "policy_update", "step")
}
PREDICTOR = {
    f"predictor/{name}"
    for name in "spearman_prompt spearman_prefix brier ece brier_prefix bias_depth_0 mse_depth_0 bias_depth_4".split()
}
FITTED = {f"predictor/{name}" for name in ("loss", "grad_norm", "update_norm", "examples", "optimizer_steps")}
TRAIN = {"train/tokens", "train/rows", "train/fill_ratio", "train/optimizer_steps", "train/staleness"}
TRAINED = {
    f"train/{name}"
    for name in "loss grad_norm update_norm param_norm entropy logprob_gap_mean logprob_gap_p99 logprob_gap_max"
    " approx_kl kl_after clip_low clip_high ratio_max".split()
}
EVAL = {"eval/success", "eval/standard_error", "eval/mixed", "eval/success_1", "eval/generated_tokens"}

# Every piece of state that a checkpoint must carry is in use here.
STATEFUL = {
    "budget.unit": "tokens",
    "budget.tokens": 150,
    "budget.explore_share": 0.25,
    "predictor.replay_steps": 2,
    "predictor.replay_decay": 0.5,
    "predictor.targets": "direct",
    "predictor.update_steps": 2,
    "predictor.calibration": "temperature",
    "predictor.held_share": 0.5,
    "predictor.warmup_prompts": 4,
    "predictor.warmup_rollouts": 2,
    "predictor.warmup_steps": 3,
    "loss.advantage": "tree_rloo",
    "loss.value_prior": 1.0,
    "loss.aggregation": "sequence_mean_token_sum",
    "loss.prompt_weight": "sequences",
}
OPTIONS = {
    "budget.objective": "advantage_mass",
    "budget.min_per_prompt": 3,
    "predictor.kind": "policy_head",
    "predictor.frozen_states": True,
    "predictor.members": 3,
    "predictor.expected": True,
    "predictor.loss": "bce",
    "predictor.weighting": "count",
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 1.0,
    "optimizer.momentum": 0.5,
    "optimizer.max_update_norm": 0.05,
    "loss.advantage": "tree_grpo",
    "loss.tis": "on",
    "loss.kl_coef": 0.1,
    "loss.epochs": 2,
    "loss.mini_batches": 2,
}
ADAPTED = {
    "arithmetic.shots": (1,),
    "lora.rank": 4,
    "lora.alpha": 8.0,
    "model.fuse_projections": False,
    "model.context_length": 112,
    "loss.row_length": 128,
    "sampling.max_turn_tokens": 12,
    "warm_start.steps": 500,
    "optimizer.learning_rate": 1e-2,
}
BAYES = {
    "task": "lookup",
    "strategy": "pcl",
    "predictor.kind": "bayes",
    "predictor.loss": "bce",
    "predictor.weighting": "count",
    "predictor.replay_decay": 0.9,
    "predictor.warmup_prompts": 4,
    "predictor.state_layers": 2,
    "predictor.feature_size": 24,
    "predictor.prior_precision": 0.5,
}
READ: set[str] = set()  # settings that the runs of this file looked at


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Work folders of this module; the warm starts of all its runs are cached below it."""
    return tmp_path_factory.mktemp("runs")


def tiny(folder: Path, changes=()) -> RunConfig:
    config = settings({"warm_start.cache": str(folder / "warm")} | dict(changes))
    return recording(config, READ)


def finished(folder: Path, name: str, changes=()) -> Done:
    return go(tiny(folder, changes), folder / name)


@pytest.fixture(scope="module")
def critic(folder):
    return finished(folder, "critic")


@pytest.fixture(scope="module")
def stateful(folder):
    return finished(folder, "stateful", STATEFUL)


@pytest.fixture(scope="module")
def head(folder):
    return finished(folder, "head", OPTIONS)


@pytest.fixture(scope="module")
def oracle(folder):
    return finished(folder, "oracle", {"predictor.kind": "oracle"})


@pytest.fixture(scope="module")
def grpo(folder):
    return finished(folder, "grpo", {"strategy": "grpo", "logging.tensorboard": True})


@pytest.fixture(scope="module")
def lookup(folder):
    return finished(folder, "lookup", {"task": "lookup", "predictor.kind": "both", "predictor.shuffle": True})


@pytest.fixture(scope="module")
def lookup_pcl(folder):
    return finished(folder, "lookup_pcl", BAYES)


@pytest.fixture(scope="module")
def treepo(folder):
    return finished(folder, "treepo", {"strategy": "treepo", "sampling.max_response_tokens": 18})


@pytest.fixture(scope="module")
def adapted(folder):
    """Labelled lines behind an example that all prompts share; adapters train."""
    return finished(folder, "adapted", ADAPTED | {"warm_start.cache": str(folder / "warm_adapted")})


@pytest.fixture(scope="module")
def served(folder):
    """A step on a stand-in of a server, whose tokens mean nothing: for the settings that only such a run looks at."""
    server = StandIn(vocab_size=20)
    with serving(server):
        changes = {"engine": "sglang", "sglang.urls": server.url, "steps": 1, "eval.every": 0}
        return finished(folder, "served", changes | {"loss.max_logprob_gap": 100.0})


RUNS = ("critic", "stateful", "head", "oracle", "grpo", "lookup", "lookup_pcl", "treepo", "adapted")


@pytest.fixture(scope="module", params=RUNS)
def done(request):
    """Each kind of run in turn."""
    return request.getfixturevalue(request.param)


def names(row):
    return {name for name, value in row.items() if value is not None}


def test_what_a_run_writes(done):
    assert json.loads((done.workdir / "config.json").read_text()) == json.loads(config_lib.to_json(done.config))
    assert [row["step"] for row in done.rows] == [0, 1, 2, 3, 4]
    assert EVAL <= names(done.rows[0]) and not names(done.rows[0]) & (ROLLOUT | TRAIN)
    for row in done.rows[1:]:
        assert ROLLOUT | TIME | TRAIN <= set(row)
        assert EVAL <= names(row) if row["step"] in (2, 4) else not EVAL & set(row)
        assert all(isinstance(value, (int, float)) or value is None for value in row.values())
    assert sorted(os.listdir(done.workdir / "checkpoints")) == ["00000002", "00000004", "format.json"]
    assert (done.workdir / "tensorboard").exists() == done.config.logging.tensorboard


def test_a_run_learns_something(done):
    """Some step found contrast and moved the policy: what follows compares runs in which something happened."""
    trained = [row for row in done.rows[1:] if row["train/optimizer_steps"]]
    assert trained
    for row in trained:
        assert TRAINED <= names(row) and row["train/update_norm"] > 0 and row["train/kl_after"] > 0
        assert row["train/logprob_gap_max"] < 1e-4  # the engine's log-probs are the trainer's
    assert any(row["rollout/effective_ratio"] > 0 for row in done.rows[1:])


def test_importance_weights_of_an_engine_that_agrees(head):
    """The in-process engine's log-probs are the trainer's to rounding: weights of 1, none at the cap."""
    weights = [row["train/tis_weight"] for row in head.rows[1:] if row["train/optimizer_steps"]]
    assert weights and weights == pytest.approx([1.0] * len(weights), abs=1e-4)
    assert not any(row.get("train/tis_capped") for row in head.rows[1:])


def test_drift_is_called_out_once(folder, capsys):
    """A limit below rounding errors stands for an engine that drifts."""
    done = finished(folder, "drift", {"strategy": "grpo", "loss.max_logprob_gap": 1e-12, "eval.every": 0})
    assert sum(bool(row["train/optimizer_steps"]) for row in done.rows[1:]) > 1
    assert capsys.readouterr().err.count("warning: train/logprob_gap_mean is") == 1


def test_predictor_metrics(done):
    uses_one = done.config.strategy in ("trace", "pcl")
    learned = uses_one and done.config.predictor.kind != "oracle"
    for row in done.rows[1:]:
        assert (PREDICTOR <= set(row)) == uses_one and (FITTED <= set(row)) == learned
        if uses_one:
            assert {"predictor/brier", "predictor/ece"} <= names(row)
        if learned:
            assert row["predictor/optimizer_steps"] > 0 and row["predictor/examples"] > 0
        assert ("rollout/oracle_tokens" in row) == (done.config.predictor.kind == "oracle")


def test_the_budget_is_spent_to_the_unit(done):
    for row in done.rows[1:]:
        assert row["rollout/budget_units"] == row["rollout/root_rollouts"] + row["rollout/continuations"] / 2
        assert row["rollout/active_prompts"] + row["rollout/skipped_prompts"] == 8
        assert row["rollout/errors"] == 0
        assert row["rollout/useful_groups_per_unit"] == row["rollout/useful_groups"] / row["rollout/budget_units"]
        finishes = sum(value for name, value in row.items() if name.startswith("rollout/finish_"))
        assert finishes == row["rollout/root_rollouts"] + row["rollout/continuations"]
        if done.config.budget.unit == "rollouts":
            assert row["rollout/budget_units"] == UNITS
        if done.config.strategy == "treepo":  # 8 root rollouts, 4 for a prompt
            assert row["rollout/active_prompts"] == 2
        if done.config.strategy in ("grpo", "pcl"):
            assert (row["rollout/root_rollouts"], row["rollout/active_prompts"]) == (UNITS, UNITS / 4)


def test_options_of_the_update(head):
    steps = [row for row in head.rows[1:] if row["train/optimizer_steps"]]
    for row in steps:
        assert {"train/kl_ref", "train/tis_weight", "train/behaviour_gap"} <= names(row)
        assert row["train/optimizer_steps"] == 4 and row["train/update_norm"] <= 0.05 * (1 + 1e-5)
    assert steps[0]["train/kl_ref"] > 0  # later mini-batches have moved away from the reference already


def test_a_token_budget_follows_what_rollouts_cost(stateful):
    first, *later = stateful.rows[1:]
    assert first["rollout/expected_tokens"] is None and first["rollout/root_rollouts"] == 8
    for row in later:
        # The largest even number of roots whose expected tokens stay within the budget.
        roots = row["rollout/root_rollouts"]
        assert roots % 2 == 0 and row["rollout/budget_units"] == 2 * roots
        assert row["rollout/expected_tokens"] <= 150 < row["rollout/expected_tokens"] * (roots + 2) / roots
        assert 75 < row["rollout/generated_tokens"] < 300
    assert stateful.parts.costs.root > 0 and stateful.parts.costs.continuation > 0
    assert {"predictor/warmup_tokens", "predictor/loss"} <= names(stateful.rows[0])
    assert stateful.parts.cursor == 4 * 8  # a pool a step; the warm-up's prompts lie elsewhere


def test_a_token_budget_stays_within_what_the_pool_can_hold(folder):
    """Far too many tokens for 8 prompts with at most 2 rollouts, or 8 groups of 4; far too few for one group."""
    cap = {"budget.max_per_prompt": 2, "budget.unit": "tokens", "budget.tokens": 10**6, "steps": 2, "eval.every": 0}
    assert finished(folder, "capped", cap).rows[2]["rollout/root_rollouts"] == 16
    for tokens, units in ((10**6, 32), (1, 4)):
        groups = {"strategy": "grpo", "budget.unit": "tokens", "budget.tokens": tokens, "steps": 2, "eval.every": 0}
        assert finished(folder, f"groups_{tokens}", groups).rows[2]["rollout/budget_units"] == units


def test_nothing_compiles_twice(done):
    preload = int(done.parts.environment.trunk.size > 0)
    assert done.parts.engine.compiles() == {"copy": 2, "preload": preload, "prefill": 1, "decode": 1}
    assert done.parts.trainer.compiles() == {"accumulate": 1, "apply": 1, "score": 1}
    if done.parts.learned is not None:
        own = int(not done.parts.learned.recorded)  # a predictor on recorded states has no pass of its own
        assert done.parts.learned.trainer.compiles() == {"score": own, "update": own}


def test_adapters_go_back_to_the_weights_they_belong_to(adapted, folder, tmp_path):
    parts = adapted.parts
    assert saving.snapshot(parts).document["base"] == model_folder.identity(folder / "warm_adapted" / "arithmetic")
    other = dataclasses.replace(parts, base="another")
    checkpoints = saving.open_checkpoints(adapted.config, adapted.workdir / "checkpoints")
    with contextlib.closing(checkpoints), pytest.raises(CheckpointError, match="belong to other weights") as error:
        saving.restore(other, checkpoints)
    one_line(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.context_length": 32, "loss.row_length": 32}, r"context_length is 32, but the examples alone have \d+"),
        (
            {"predictor.kind": "policy_head", "predictor.max_tokens": 60},
            "config.predictor.max_tokens is 60, but a policy_head reads the .* tokens of the examples first",
        ),
    ],
)
def test_examples_that_do_not_fit(folder, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        assemble.assemble(tiny(folder, ADAPTED | changes), tmp_path)
    one_line(error)


def test_adapters_alone_are_trained_and_saved(adapted):
    parts = adapted.parts
    trained = jax.tree_util.tree_leaves_with_path(saving.snapshot(parts).arrays["policy"].params)
    assert {path[-1].key for path, _ in trained} == {"a", "b"}
    assert any(np.any(leaf) for path, leaf in trained if path[-1].key == "b")


def test_a_shared_beginning_is_computed_once_a_step(adapted):
    parts, trunk = adapted.parts, adapted.parts.environment.trunk.size
    # at the start, and at the four steps and the two evaluations (2, 4) that come after other weights or an evaluation
    assert trunk > 30 and parts.engine.preloaded_tokens == trunk * 7
    asyncio.run(loop.publish(parts))  # the engine forgot all prefixes after the last evaluation
    assert parts.engine.preloaded_tokens == trunk * 8
    merged = jax.tree.leaves(parts.trainer.full_params(parts.policy.params))
    assert all(np.array_equal(one, other) for one, other in zip(jax.tree.leaves(parts.served), merged, strict=True))
    for row in adapted.rows[1:]:
        assert row["rollout/cached_tokens"] >= trunk * row["rollout/root_rollouts"]
        assert row["rollout/preloaded_tokens"] == trunk
    gaps = [row["train/logprob_gap_max"] for row in adapted.rows[1:] if row["train/optimizer_steps"]]
    assert gaps and max(gaps) < 1e-4


def test_the_last_checkpoint_is_the_end_of_the_run(done):
    assert bits(restored(done.config, done.workdir)) == bits(done.parts)


def test_seeds_draw_their_own_prompts_and_share_the_held_out_ones(critic):
    def drawn(seed, cursor):
        parts = dataclasses.replace(critic.parts, config=dataclasses.replace(critic.config, seed=seed))
        return [prompt.uid for prompt in parts.training_prompts(8, cursor)], [p.uid for p in parts.prompts("eval", 0, 3)]

    first, next_pool, other = drawn(0, 0), drawn(0, 8), drawn(1, 0)
    assert first[0] == [f"arithmetic/train/{i}" for i in range(8)]
    assert len({*first[0], *next_pool[0], *other[0]}) == 24 and first[1] == other[1]


def test_equal_weights_are_evaluated_equally(critic):
    async def twice():
        return [await loop.evaluate_run(critic.parts) for _ in range(2)]

    blank = lambda result: dataclasses.replace(result, counts=result.counts.generated_tokens)
    first, second = asyncio.run(twice())
    assert blank(first) == blank(second) and first.success == critic.rows[-1]["eval/success"]


def test_concurrency_changes_no_number(critic, folder):
    narrow = finished(folder, "narrow", {"sampling.concurrency": 3})
    assert all(row["rollout/cache_evictions"] == 0 for row in narrow.rows[1:])
    free = ("rollout/cached_tokens", "rollout/prefilled_tokens")
    assert timeless(narrow.rows, *free) == timeless(critic.rows, *free)
    assert bits(narrow.parts) == bits(critic.parts)


MESH_SCRIPT = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 2)
from tests.tiny_run import bits, go, settings
changes = {"mesh.fsdp": 2, "warm_start.cache": sys.argv[1], "eval.every": 0, "steps": 2}
first = go(settings(changes), Path(sys.argv[2]))
assert len(first.parts.policy.params["embed"]["embedding"].sharding.device_set) == 2
second = go(settings(changes | {"steps": 4}), Path(sys.argv[2]))
for parts in (first.parts, second.parts):
    print(parts.step, parts.engine.compiles(), parts.trainer.compiles(), parts.learned.trainer.compiles())
"""


def test_a_mesh_of_two_devices(folder):
    """Sharded parameters are trained, saved, restored and served, and still nothing compiles twice."""
    arguments = [sys.executable, "-c", MESH_SCRIPT, str(folder / "warm_mesh"), str(folder / "mesh")]
    process = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    once = (
        "{'preload': 0, 'copy': 2, 'prefill': 1, 'decode': 1} {'accumulate': 1, 'apply': 1, 'score': 1} "
        "{'score': 1, 'update': 1}"
    )
    assert f"2 {once}" in process.stdout and f"4 {once}" in process.stdout
    assert [row["step"] for row in read_jsonl(folder / "mesh" / "metrics.jsonl")] == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures(*RUNS, "served")
def test_every_setting_is_read():
    def fields(value, name=""):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            yield f"{name}{field.name}"
            if dataclasses.is_dataclass(inner):
                yield from fields(inner, f"{name}{field.name}.")

    elsewhere = {*DATA_TASKS, "data", "chat"}  # tests/test_end_to_end_tasks.py reads these
    small = {name for name in fields(RunConfig()) if name.split(".")[0] not in elsewhere}
    assert small - {"warm_start.pretrained"} <= READ


# Stopping and going on.


@pytest.mark.parametrize("name", ["stateful", "head", "grpo", "lookup_pcl", "adapted"])
def test_two_steps_and_two_more_are_four(request, folder, name):
    straight = request.getfixturevalue(name)
    workdir = folder / f"{name}_halves"
    go(dataclasses.replace(straight.config, steps=2), workdir)
    again = go(straight.config, workdir)
    assert again.parts is not straight.parts and again.parts.step == 4
    assert timeless(again.rows) == timeless(straight.rows)
    assert bits(again.parts) == bits(straight.parts)
    assert bits(restored(again.config, workdir)) == bits(straight.parts)


def test_a_finished_run_is_left_as_it_is(critic):
    again = go(critic.config, critic.workdir)
    assert again.rows == critic.rows and bits(again.parts) == bits(critic.parts)


def interrupted(monkeypatch, config, workdir, *, at: int, number=signal.SIGTERM):
    """A run that gets a signal while it evaluates for the `at`-th time."""
    real, calls = loop.evaluate_run, []

    async def evaluate(*arguments):
        calls.append(0)
        if len(calls) == at:
            signal.raise_signal(number)
            await asyncio.sleep(60)
        return await real(*arguments)

    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate_run", evaluate)
        stopped = go(config, workdir)
    assert len(calls) == at
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    return stopped


@pytest.mark.parametrize("at, step", [(1, 0), (2, 2), (3, 4)], ids=["before", "between", "after"])
def test_a_signal_during_an_evaluation(monkeypatch, capsys, stateful, folder, at, step):
    """The evaluation is done again, and nothing of it is lost; before the first step everything is done again."""
    workdir = folder / f"evaluation_{at}"
    stopped = interrupted(monkeypatch, stateful.config, workdir, at=at, number=(signal.SIGTERM, signal.SIGINT)[at % 2])
    assert stopped.parts.step == step and f"stopped after step {step};" in capsys.readouterr().out
    assert "eval/success" not in (stopped.rows[-1] if step else {})
    assert any((workdir / "checkpoints").glob("0*")) == (step > 0)
    again = go(stateful.config, workdir)
    assert timeless(again.rows) == timeless(stateful.rows) and bits(again.parts) == bits(stateful.parts)


def test_a_crash_goes_on_from_the_last_checkpoint(monkeypatch, stateful, folder):
    real = loop.train_step

    async def crash(run, *arguments):
        if run.step == 3:
            raise RuntimeError("power cut")
        return await real(run, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            go(stateful.config, folder / "crash")
    assert [row["step"] for row in read_jsonl(folder / "crash" / "metrics.jsonl")] == [0, 1, 2, 3]
    again = go(stateful.config, folder / "crash")
    assert timeless(again.rows) == timeless(stateful.rows) and bits(again.parts) == bits(stateful.parts)


def test_a_signal_before_training_raises_keyboard_interrupt(monkeypatch, folder):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run_lib, "assemble", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run_lib.run(tiny(folder), folder / "early")
    assert signal.getsignal(signal.SIGTERM) == before and not any((folder / "early" / "checkpoints").glob("0*"))


def command(folder: Path, workdir: Path, **changes) -> list[str]:
    flags = {"warm_start.cache": folder / "warm"} | {name.replace("__", "."): value for name, value in changes.items()}
    head = [sys.executable, "-m", "trace_jax.main", "--config=tests/tiny_config.py", f"--workdir={workdir}"]
    return [*head, *(f"--config.{name}={value}" for name, value in flags.items())]


def signalled(arguments: list[str], number: int, ready, what: str) -> str:
    """Starts a process, sends it a signal once `ready()`, and returns what it printed; it must end well, and soon."""
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        end = time.monotonic() + 240
        while not ready():
            assert process.poll() is None and time.monotonic() < end, f"no {what}"
            time.sleep(0.02)
        process.send_signal(number)
        begin = time.monotonic()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert time.monotonic() - begin < 20 and "Traceback" not in output
    return output


def test_processes_that_get_signals_add_up_to_one_run(folder):
    """SIGTERM somewhere in a run of 100 steps, Ctrl-C somewhere later, then to the end: the bits of one go."""
    changes = {"steps": 100, "eval.every": 0, "checkpoint.every": 0}
    straight, workdir = finished(folder, "straight", changes), folder / "pieces"
    arguments = command(folder, workdir, **{name.replace(".", "__"): value for name, value in changes.items()})
    metrics = workdir / "metrics.jsonl"
    count = lambda: len(read_jsonl(metrics)) if metrics.exists() else 0
    for number in (signal.SIGTERM, signal.SIGINT):
        begin = count()
        output = signalled(arguments, number, lambda: count() >= begin + 4, "steps")  # noqa: B023
        assert f"stopped after step {count() - 1}; the same command goes on from here" in output
        assert begin + 4 <= count() < 101
        assert os.listdir(workdir / "checkpoints").count(f"{count() - 1:08d}") == 1
    again = go(straight.config, workdir)
    assert timeless(again.rows) == timeless(straight.rows) and bits(again.parts) == bits(straight.parts)


def test_a_process_that_is_stopped_while_it_warms_up(folder):
    workdir = folder / "warming"
    arguments = command(folder, workdir, warm_start__steps=10**7, warm_start__cache=workdir)
    ready = lambda: (workdir / "arithmetic").exists()  # made right before the warm start trains
    output = signalled(arguments, signal.SIGTERM, ready, "warm start")
    assert output.rstrip().endswith("stopped before training; the same command starts again")


# Bad input.


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_checkpoint_of_another_config_is_refused_untouched(critic):
    before = {path: path.read_bytes() for path in critic.workdir.rglob("*") if path.is_file()}
    other = dataclasses.replace(critic.config, loss=dataclasses.replace(critic.config.loss, clip_low=0.1))
    with pytest.raises(CheckpointError) as error:
        run_lib.run(other, critic.workdir)
    assert "is of another config: loss.clip_low is 0.2 there, 0.1 here" in one_line(error)
    assert {path: path.read_bytes() for path in critic.workdir.rglob("*") if path.is_file()} == before


def test_the_command_says_so_in_one_line(critic, folder):
    """Another config, and the right one with a damaged checkpoint: no traceback, though readers leave some behind."""
    workdir = folder / "damaged"
    shutil.copytree(critic.workdir, workdir)
    os.truncate(workdir / "checkpoints" / "00000004" / "arrays" / "manifest.ocdbt", 7)
    for change, message in (({"seed": 5}, "seed is 0 there, 5 here"), ({}, "cannot be read")):
        arguments = command(folder, workdir, **change)
        process = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert process.returncode == 1 and process.stderr.count("\n") == 1
        assert process.stderr.startswith("error: checkpoint: step 4 in ") and message in process.stderr


# Reads that fail leave callbacks and coroutines behind in orbax's event loop; Python reports them when it collects.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("part", ["document/metadata", "arrays/manifest.ocdbt"])
def test_a_damaged_checkpoint(critic, folder, part):
    workdir = folder / f"damaged_{part.split('/')[0]}"
    shutil.copytree(critic.workdir, workdir)
    os.truncate(workdir / "checkpoints" / "00000004" / part, 7)
    with pytest.raises(CheckpointError, match="step 4 in .* cannot be read .* to resume from step 2") as error:
        run_lib.run(critic.config, workdir)
    one_line(error)
    del error
    gc.collect()
    shutil.rmtree(workdir / "checkpoints" / "00000004")
    again = go(critic.config, workdir)  # as the message advises
    assert timeless(again.rows) == timeless(critic.rows) and bits(again.parts) == bits(critic.parts)


def test_metrics_that_were_damaged_or_moved_away(critic, folder):
    workdir = folder / "metrics"
    shutil.copytree(critic.workdir, workdir)
    path = workdir / "metrics.jsonl"
    path.write_text("so long\n" + path.read_text())
    with pytest.raises(ConfigError, match="--workdir: metrics: line 1 of .* move the file away") as error:
        run_lib.run(critic.config, workdir)
    one_line(error)
    path.unlink()
    longer = dataclasses.replace(critic.config, steps=5)
    assert [row["step"] for row in go(longer, workdir).rows] == [5]


def test_a_workdir_that_is_a_file(folder):
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match="--workdir: .*File exists") as error:
        run_lib.run(tiny(folder), folder / "file")
    one_line(error)


def test_weights_and_biases_that_are_not_installed(monkeypatch, critic, folder):
    def absent(*_, **__):
        raise ImportError("metrics: wandb is not installed; run `pip install 'trace_jax[wandb]'`")

    monkeypatch.setattr(run_lib, "WandbWriter", absent)
    with pytest.raises(ConfigError, match="config.logging.wandb_project: metrics: wandb is not installed") as error:
        run_lib.run(tiny(folder, {"logging.wandb_project": "trace"}), folder / "wandb")
    one_line(error)


def test_a_foreign_folder_of_checkpoints(folder):
    (folder / "foreign" / "checkpoints" / "epoch_7").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds epoch_7, which is no checkpoint of this project") as error:
        run_lib.run(tiny(folder), folder / "foreign")
    one_line(error)
    assert not (folder / "foreign" / "config.json").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        # "(1+2)\n" and an answer do not fit 6 tokens.
        ({"model.context_length": 6}, r"config.model.context_length is 6, but prompt arithmetic/eval/\d alone has"),
        ({"model.context_length": 16, "loss.row_length": 16}, r"config.warm_start: demonstration demo/\d+ has \d+ tok"),
        ({"model.num_heads": 3, "model.num_kv_heads": 2}, "config.model: model: num_heads 3 is not a multiple"),
        ({"arithmetic.max_number": 7}, "config.arithmetic: arithmetic: max_number is 7, must be in 9..99"),
        ({"arithmetic.difficulty": (0.0,) * 12 + (1.0,)}, "config.arithmetic: .* operations are integers in 1..12"),
        ({"mesh.tensor": 64}, r"config.mesh needs 64 devices, but this machine has \d+; make it smaller"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit_the_task_or_the_machine(folder, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        cache = {"warm_start.steps": 1, "warm_start.cache": str(folder / "misfit" / "warm")}
        run_lib.run(tiny(folder, cache | changes), folder / "misfit")
    one_line(error)


def test_a_warm_start_that_cannot_be_cached(folder):
    with pytest.raises(ConfigError, match="config.warm_start.cache: .*; choose a folder that can be written"):
        run_lib.run(tiny(folder, {"warm_start.cache": "/proc/none"}), folder / "misfit")


@pytest.fixture
def model(critic, folder, tmp_path):
    """A copy of the warm-started model's folder, and settings that start from it."""
    shutil.copytree(folder / "warm" / "arithmetic", tmp_path / "model")
    return tmp_path / "model", tiny(folder, {"model.path": str(tmp_path / "model")})


def test_a_warm_start_is_a_model_folder(model, folder, tmp_path):
    cached, loaded = (assemble.assemble(config, tmp_path).policy for config in (tiny(folder), model[1]))
    assert len(jax.tree.leaves(loaded)) == len(jax.tree.leaves(cached))
    jax.tree.map(np.testing.assert_array_equal, loaded, cached)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: [path.unlink() for path in f.glob("tokenizer*")], "config.model.path: .* holds no tokenizer"),
        (lambda f: (f / "config.json").unlink(), "config.model: model folder .*: config.json cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), "config.model.path: .*safetensors cannot be read"),
        (lambda f: os.truncate(f / "model.safetensors", 4000), "config.model.path: .*safetensors cannot be read"),
        (lambda f: edit(f, vocab_size=5), r"config.model: .*: the tokenizer has \d+ tokens, the model 5"),
        (lambda f: edit(f, max_position_embeddings=31), "context_length is 32, but model folder .* for 31 tokens"),
        (lambda f: edit(f, hidden_size=16), "config.model.path: .* config and weights must belong together"),
        (shutil.rmtree, "config.model.path: model folder .* does not exist"),
        (lambda f: edit(f, model_type="gpt2"), "config.model: model folder .*gpt2"),
        (lambda f: edit(f, vocab_size=2000), r"config.model: .*: the tokenizer has \d+ tokens, the model 2000"),
        (lambda f: lose_a_shard(f), "config.model.path: model folder .*model-00002-of-.*"),
        (lambda f: poison(f), "config.model.path: model folder .*: tensor model.norm.weight holds NaN"),
    ],
    ids="tokenizer config weights truncated vocabulary context shapes folder architecture padding shard nan".split(),
)
def test_model_folders_that_lack_something(model, tmp_path, damage, message):
    path, config = model
    damage(path)
    with pytest.raises(ConfigError, match=message) as error:
        run_lib.run(config, tmp_path / "run")
    one_line(error)


def lose_a_shard(folder: Path) -> None:
    cfg = model_folder.load_config(folder)
    params = model_folder.load_params(folder, cfg)
    (folder / "model.safetensors").unlink()
    model_folder.save(folder, cfg, params, max_shard_bytes=10_000)
    next(folder.glob("model-00002-of-*")).unlink()


def poison(folder: Path) -> None:
    cfg = model_folder.load_config(folder)
    params = model_folder.load_params(folder, cfg)
    scale = params["final_norm"]["scale"].at[3].set(np.nan)
    model_folder.save(folder, cfg, params | {"final_norm": {"scale": scale}})


def test_padding_of_the_vocabulary_is_never_sampled_or_scored(model, tmp_path, capsys):
    """Rows beyond the tokenizer's, as large models have them, with weights that would win every draw."""
    path, config = model
    cfg = model_folder.load_config(path)
    params = model_folder.load_params(path, cfg)
    table = params["embed"]["embedding"]
    direction = jax.numpy.concatenate([table, 50.0 * jax.numpy.ones((100, table.shape[1]))])
    wide = dataclasses.replace(cfg, vocab_size=cfg.vocab_size + 100)
    model_folder.save(path, wide, params | {"embed": {"embedding": direction}})
    done = go(dataclasses.replace(config, steps=1), tmp_path / "run")
    assert f"ids from {cfg.vocab_size} are never sampled" in capsys.readouterr().out
    assert done.parts.trainer.model.sampled_vocab == cfg.vocab_size
    plain = go(tiny(Path(config.warm_start.cache).parent, {"steps": 1}), tmp_path / "plain")
    for name in ("eval/success", "rollout/success", "rollout/generated_tokens"):
        assert [row.get(name) for row in done.rows] == [row.get(name) for row in plain.rows]


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_damaged_warm_start_says_what_to_delete(critic, folder, tmp_path):
    shutil.copytree(folder / "warm", tmp_path / "warm")
    os.truncate(tmp_path / "warm" / "arithmetic" / "model.safetensors", 100)
    record = tmp_path / "warm" / "arithmetic" / "warm_start.json"
    assert record.exists()
    with pytest.raises(ConfigError, match="warm start: .* cannot be read .*, or delete that folder") as error:
        run_lib.run(tiny(folder, {"warm_start.cache": str(tmp_path / "warm")}), tmp_path / "run")
    one_line(error)
