"""The command that reports on a predictor: it measures what the checkpoint's policy does; mistakes are one line."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest

from tests.tiny_run import restored
from trace_jax import config as config_lib
from trace_jax import config_arguments, loop, predictor_quality, predictor_report
from trace_jax.config import ConfigError
from trace_jax.rollout import keys
from trace_jax.rollout.scheduler import sample_batch
from trace_jax.tree import grow, query
from trace_jax.types import Finish, Prompt, Stage, Turn

# ml_collections loads config files with it.
pytestmark = pytest.mark.filterwarnings(r"ignore:the load_module\(\) method is deprecated:DeprecationWarning")
SMALL = ("--prompts=17", "--rollouts=4", "--anchors=6", "--continuations=2")  # pools of 8


@pytest.fixture(scope="module")
def workdir(adapted_run, tmp_path_factory):
    """A copy of the run, to be written into."""
    return shutil.copytree(adapted_run.workdir, tmp_path_factory.mktemp("reported") / "run")


@pytest.fixture
def command(capsys):
    """Runs the command in this process: (exit status, what it printed, its errors)."""

    def call(*flags):
        status = 0
        try:
            predictor_report.main([str(flag) for flag in flags])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture(scope="module")
def report(workdir):
    """The figures, and every key that a rollout was sampled with."""
    used, real = [], keys.episode_key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "episode_key", lambda *place: used.append(real(*place)) or used[-1])
        predictor_report.main([f"--workdir={workdir}", *SMALL])
    return json.loads((workdir / "predictor" / "report.json").read_text()), used


def test_what_is_measured(report, adapted_run):
    """Of 17 prompts, rollouts and anchors by count; every rollout has noise of its own that training never draws."""
    figures, used = report
    assert (figures["root/items"], figures["root/pools"], figures["anchor/items"]) == (17, 2, 6)
    assert figures["step"] == 1 and figures["errors"] == 0
    assert figures["root_budget"] == adapted_run.config.budget.roots == 8
    assert len(set(used)) == len(used) == 17 * 4 + 6 * 2
    assert {stream for _, stream, *_ in used} == {keys.Stream.ORACLE}
    far = {keys.prompt_key(f"arithmetic/train/{9_000_000 + i}") for i in range(17)}
    assert {place[3] for place in used} == far


def test_the_numbers_are_those_of_the_checkpoint(report, adapted_run):
    """Scores and rates again, by the parts of a run that was restored in another way."""
    run = restored(adapted_run.config, adapted_run.workdir)

    async def again():
        await loop.publish(run)
        prompts = run.training_prompts(17, 9_000_000)
        scores = await run.learned.scorer.score_prompts(prompts)
        sampling = run.sampling(keys.Stream.ORACLE, seed=0, step=0)
        found = await sample_batch(run.engine, run.environment, prompts, 4, sampling=sampling, concurrency=64)
        trees = {each.tree.prompt_uid: each.tree for each in found}
        await run.engine.close()
        return scores, np.array([np.nanmean(trees[prompt.uid].success) for prompt in prompts])

    scores, rates = asyncio.run(again())
    figures = report[0]
    assert figures["root/success"] == pytest.approx(rates.mean()) and 0 < rates.mean() < 1
    assert figures["root/bias"] == pytest.approx(np.mean(scores - rates))
    brier = np.mean(scores**2 - 2 * scores * rates + rates)  # of single 0/1 outcomes: y^2 = y
    assert figures["root/brier"] == figures["depth_0/brier"] == pytest.approx(brier)
    share = figures["root/groups_per_unit_learned"] / figures["root/groups_per_unit_oracle"]
    assert figures["root/groups_per_unit_share_of_oracle"] == pytest.approx(share)


def test_the_same_command_gives_the_same_bytes(report, workdir, command):
    before = {path.name: path.read_bytes() for path in (workdir / "predictor").iterdir()}
    status, out, _ = command(f"--workdir={workdir}", *SMALL, "--config.sampling.concurrency=3")
    assert status == 0 and "learned / oracle" in out and "figure: " in out and "predictor.png" in out
    after = {path.name: path.read_bytes() for path in (workdir / "predictor").iterdir()}
    assert set(after) == {"report.json", "report.md", "predictor.png"}
    assert after["report.json"] == before["report.json"] and after["report.md"] == before["report.md"]
    assert after["predictor.png"].startswith(b"\x89PNG") and len(after["predictor.png"]) > 50_000
    assert not (workdir / "weights").exists()


def test_a_signal_stops_it_and_writes_nothing(report, workdir, command, monkeypatch):
    before = (workdir / "predictor" / "report.json").read_bytes()

    async def stopped(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    monkeypatch.setattr(predictor_quality, "_bare", stopped)
    status, out, err = command(f"--workdir={workdir}", *SMALL, "--seed=5")
    assert status == 0 and "stopped; nothing was written" in out and "Traceback" not in err
    assert (workdir / "predictor" / "report.json").read_bytes() == before


def flat_tree(uid, *lengths, lost=()):
    """Bare rollouts of so many turns; those of `lost` were given up by the engine."""
    tokens = lambda n: np.arange(1, n + 1, dtype=np.int32)

    def rollout(number, turns):
        finish = Finish.ENGINE_ERROR if number in lost else Finish.ANSWER
        middle = [Turn(tokens(1), np.zeros(1, np.float32), tokens(1), Finish.TURN, 0)] * (turns - 1)
        end = Turn(tokens(1), np.zeros(1, np.float32), tokens(0), finish, 0, reward=1.0, success=1.0)
        return 0, Stage.ROOT_ROLLOUT, [*middle, end]

    return grow.add_rollouts(grow.new_tree(Prompt(uid, tokens(2), None)), [rollout(*e) for e in enumerate(lengths)])


def test_roots_are_allocated_as_the_run_does():
    """TRACE with its least number of rollouts and its cap; for another strategy the paper's rule."""
    config, scores = config_lib.RunConfig(), np.linspace(0.1, 0.9, 64)
    budget = dataclasses.replace(config.budget, min_per_prompt=5, max_per_prompt=9)
    allocate = predictor_quality._allocator(dataclasses.replace(config, budget=budget))
    counts = allocate(scores, 100, np.random.default_rng(0))
    assert counts.sum() == 100 and set(counts) - {0} <= {5, 6, 7, 8, 9}
    assert predictor_quality._allocator(dataclasses.replace(config, strategy="pcl")) is None


def test_anchors_are_those_of_the_first_two_rollouts_of_whole_prompts():
    trees = [flat_tree("a", 3, 2, 4), flat_tree("b", 1, 1, 4), flat_tree("c", 2, 4, 2, lost=(0,))]
    every = predictor_quality._choose(trees, 100, np.random.default_rng(0))
    assert [(number, query.depth(trees[number])[nodes].tolist()) for number, nodes in every] == [
        (0, [1, 2, 1]), (2, [1, 2, 3])
    ]
    drawn = [predictor_quality._choose(trees, 4, np.random.default_rng(seed)) for seed in range(8)]
    sizes = {tuple((number, nodes.size) for number, nodes in each) for each in drawn}
    assert sizes == {((0, 3), (2, 1)), ((0, 1), (2, 3))}  # the last of them is cut


def test_a_prompt_with_lost_rollouts():
    """What the engine gave up is no outcome; a prompt with less than two others is left out."""
    trees = [flat_tree("a", 1, 1, 1, lost=(2,)), flat_tree("b", 1, 1, 1, lost=(0, 1))]
    prompts = [Prompt(uid, np.ones(1, np.int32), None, group) for uid, group in (("a", "x"), ("b", "y"))]
    roots = predictor_quality._roots(prompts, np.array([[0.25, 0.5]]), trees)
    assert roots.group == ["x"] and roots.score.tolist() == [[0.25]]
    assert roots.measured.successes.tolist() == [2] and roots.measured.rollouts.tolist() == [2]


def test_mistakes_are_one_line(workdir, adapted_run, command, monkeypatch, tmp_path):
    copy = lambda name: shutil.copytree(workdir, tmp_path / name)
    here = f"--workdir={workdir}"

    def changed(name, **changes):
        folder = tmp_path / name
        folder.mkdir()
        config = dataclasses.replace(adapted_run.config, **changes)
        (folder / "config.json").write_text(config_lib.to_json(config))
        return f"--workdir={folder}"

    shutil.rmtree((no_checkpoint := copy("no_checkpoint")) / "checkpoints")
    (no_metrics := copy("no_metrics")).joinpath("metrics.jsonl").unlink()
    (no_steps := copy("no_steps")).joinpath("metrics.jsonl").write_text('{"step": 0}\n')
    (blocked := copy("blocked")) and shutil.rmtree(blocked / "predictor", ignore_errors=True)
    (blocked / "predictor").write_text("a file")
    oracle = dataclasses.replace(adapted_run.config.predictor, kind="oracle")
    cases = [
        ([], "the following arguments are required: --workdir"),
        ([f"--workdir={tmp_path / 'none'}"], "holds no run that can be read"),
        ([f"--workdir={no_checkpoint}"], "holds no checkpoint yet; train first"),
        ([f"--workdir={no_metrics}"], "holds no metrics of a run"),
        ([f"--workdir={no_steps}"], "metrics.jsonl says nothing of the steps up to 1"),
        ([f"--workdir={blocked}"], "cannot be written"),
        ([changed("grpo", strategy="grpo")], "has no learned predictor to report on (strategy 'grpo')"),
        ([changed("oracle", predictor=oracle)], "has no learned predictor to report on (predictor.kind 'oracle')"),
        ([here, "--prompts=7"], "--prompts is 7, less than a pool of this run, 8"),
        ([here, "--rollouts=1"], "argument --rollouts: '1' is no number of at least 2"),
        ([here, "--continuations=x"], "argument --continuations: 'x' is no number of at least 2"),
        ([here, "--seed=-1"], "argument --seed: '-1' is no number of at least 0"),
        ([here, "--config.budget.pool=4"], "--config.budget.pool belongs to the run"),
        ([here, "--prompt=9"], "Unknown command line flag 'prompt'"),
    ]
    for flags, message in cases:
        status, _, err = command(*flags)
        assert status == 1 and err.startswith("error: ") and message in err, (flags, err)
        assert len(err.strip().splitlines()) == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(here)[2] == "error: the figure needs matplotlib; pip install 'trace_jax[plots]'\n"


def test_settings_that_move_the_sampling(workdir):
    config = config_arguments.of_run(workdir)
    for setting in ("--config.engine=sglang", "--config.sglang.urls=http://a:1", "--config.local.slots=3"):
        predictor_report._check_settings([setting])
    with pytest.raises(ConfigError, match="config.local belongs to the run"):
        predictor_report._check_settings(["--config.local=3"])
    assert config_arguments.with_settings(config, []) == config
