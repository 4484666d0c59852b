"""The evaluation command: whose numbers it gives, that stopping changes no bit, how each mistake is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.adapted_run import CHANGES
from tests.sglang_faults import serving
from tests.sglang_stand_in import StandIn
from trace_jax import config_arguments, evaluation
from trace_jax import evaluate as evaluate_lib
from trace_jax.config import ConfigError, RunConfig
from trace_jax.engines import sglang_pool
from trace_jax.eval.outcomes import OutcomesFile
from trace_jax.export import export

# ml_collections loads config files with it.
pytestmark = pytest.mark.filterwarnings(r"ignore:the load_module\(\) method is deprecated:DeprecationWarning")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def done(adapted_run):
    """A run of one step, evaluated before and after it."""
    return adapted_run


@pytest.fixture(scope="module")
def config(done):
    """Flags of the config that the run has."""
    flags = [f"--config.{name}={value}" for name, value in CHANGES.items()]
    return ["--config=tests/tiny_config.py", f"--config.warm_start.cache={done.workdir.parent / 'warm'}", *flags]


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command in this process: (exit status, what it printed, its errors)."""
    monkeypatch.chdir(ROOT)

    def call(*flags):
        status = 0
        try:
            evaluate_lib.main([str(flag) for flag in flags])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def lines(folder, name="eval"):
    """The outcomes of a benchmark by uid, without clock times."""
    rows = [json.loads(line) for line in (folder / f"rollouts-{name}.jsonl").read_text().splitlines()]
    assert len({row["uid"] for row in rows}) == len(rows)
    return {row["uid"]: {k: v for k, v in row.items() if k != "elapsed"} for row in rows}


def results(folder):
    """results.json without clock times."""
    found = json.loads((folder / "results.json").read_text())
    for figures in found["benchmarks"].values():
        assert figures.pop("seconds") > 0
    return found


def same_as_run(figures, row):
    """Whether figures are those of a run's own evaluation."""
    assert figures["avg"] == row["eval/success"] and figures["standard_error"] == row["eval/standard_error"]
    assert figures["by_group"] == {"1": row["eval/success_1"]}
    assert figures["generated_tokens"] == row["eval/generated_tokens"]
    assert (figures["prompts"], figures["samples"], figures["errors"]) == (8, 2, 0)
    return True


@pytest.fixture(scope="module")
def untrained(done, config, tmp_path_factory):
    """An evaluation that nobody stopped."""
    os.chdir(ROOT)
    folder = tmp_path_factory.mktemp("evaluations") / "untrained"
    evaluate_lib.main([*config, f"--folder={folder}"])
    return folder


def test_the_untrained_model_is_where_the_run_began(done, untrained):
    found = results(untrained)
    assert same_as_run(found["benchmarks"]["eval"], done.rows[0])
    assert found["step"] == 0 and found["policy"] == "arithmetic, untrained"


def test_a_checkpoint_and_its_export_are_where_the_run_ended(done, config, command, untrained, tmp_path):
    """Other parameters than before training, the same whichever way they are read."""
    assert command(f"--workdir={done.workdir}", f"--folder={tmp_path / 'run'}")[0] == 0
    found, before = results(tmp_path / "run"), results(untrained)
    assert same_as_run(found["benchmarks"]["eval"], done.rows[1])
    assert found["policy"] == "run, step 1" and found["model"] != before["model"]
    assert lines(tmp_path / "run") != lines(untrained) and 0 < found["benchmarks"]["eval"]["avg"] < 1
    export(done.workdir, tmp_path / "model", "float32")
    assert command(*config, f"--model={tmp_path / 'model'}", f"--folder={tmp_path / 'exported'}")[0] == 0
    exported = results(tmp_path / "exported")
    assert lines(tmp_path / "exported") == lines(tmp_path / "run") and exported["model"] == found["model"]
    assert exported["benchmarks"] == found["benchmarks"] and exported["policy"] == "model"
    assert not (done.workdir / "weights").exists() and not (tmp_path / "run" / "warm_start").exists()


def test_figures_follow_from_the_lines(untrained):
    """Recounted from the file, by the definitions."""
    rows, found = lines(untrained).values(), results(untrained)["benchmarks"]["eval"]
    samples = [s for row in rows for s in row["successes"]]
    assert found["avg"] == pytest.approx(sum(samples) / len(samples)) and 0 < found["avg"] < 1
    assert found["pass_at_k"] == {
        "1": pytest.approx(sum(samples) / len(samples)),
        "2": pytest.approx(sum(any(row["successes"]) for row in rows) / 8),
    }
    assert found["mean_turns"] == sum(sum(row["turns"]) for row in rows) / 16
    answered = sum(row["finish"].count("answer") for row in rows)
    assert found["finish_shares"]["answer"] == answered / 16 and sum(found["finish_shares"].values()) == 1
    low, high = found["interval"]
    assert low < found["avg"] < high


def test_stopped_by_a_signal_and_torn_by_a_kill_it_goes_on_bit_by_bit(
    config, command, untrained, monkeypatch, tmp_path
):
    real = OutcomesFile.add

    def add(file, found):
        real(file, found)
        if len(file.outcomes) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    slow = ("--config.sampling.concurrency=1", f"--folder={tmp_path}")  # one sample after the other
    with monkeypatch.context() as patch:
        patch.setattr(OutcomesFile, "add", add)
        status, out, err = command(*config, *slow)
    assert status == 0 and "of 8 prompts of eval; the same command goes on from here" in out
    assert "Traceback" not in err and not (tmp_path / "results.json").exists()
    kept = lines(tmp_path)
    assert 3 <= len(kept) < 8
    with open(tmp_path / "rollouts-eval.jsonl", "a") as file:
        file.write('{"uid": "arithmetic/eval/7", "succ')  # a line that a kill tore
    status, out, _ = command(*config, *slow)
    assert status == 0 and "eval" in out
    assert lines(tmp_path) == lines(untrained) and results(tmp_path) == results(untrained)
    before = (tmp_path / "rollouts-eval.jsonl").read_bytes()
    assert command(*config, *slow)[0] == 0  # all is there: nothing is sampled
    assert (tmp_path / "rollouts-eval.jsonl").read_bytes() == before


def test_a_kill_loses_only_what_was_not_finished(config, command, untrained, tmp_path):
    """Killed among many more prompts, one sample after the other, so that it is far from its end."""
    many = ["--config.sampling.concurrency=1", "--config.eval.prompts=400", f"--folder={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trace_jax.evaluate", *config, *many],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    path, limit = tmp_path / "rollouts-eval.jsonl", time.monotonic() + 120
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "results.json").exists()
    assert command(*config, f"--folder={tmp_path}")[0] == 0
    assert lines(untrained).items() <= lines(tmp_path).items() and results(tmp_path) == results(untrained)


def test_a_part_of_the_prompts_then_all(config, command, untrained, tmp_path):
    assert command(*config, f"--folder={tmp_path}", "--prompts=3", "--k=2")[0] == 0
    first = results(tmp_path)["benchmarks"]["eval"]
    assert first["prompts"] == 3 and list(first["pass_at_k"]) == ["2"]
    assert lines(tmp_path) == {f"arithmetic/eval/{i}": lines(untrained)[f"arithmetic/eval/{i}"] for i in range(3)}
    assert command(*config, f"--folder={tmp_path}")[0] == 0
    assert results(tmp_path) == results(untrained)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.sampling.temperature=0.5"], "config.sampling.temperature 1.0, here it is 0.5"),
        (["--seed=3"], "--seed 0, here it is 3"),
        (["--samples=4"], "arithmetic/eval/0 was sampled 2 times in this folder, --samples is 4 now"),
        (["--config.task=lookup"], "config.task 'arithmetic', here it is 'lookup'"),
    ],
)
def test_a_folder_of_other_settings_is_refused(config, command, untrained, monkeypatch, tmp_path, flags, message):
    """Before any parameters are made."""
    shutil.copytree(untrained, tmp_path / "there")
    monkeypatch.setattr(evaluation, "assemble_sampler", None)
    one_line(command(*config, *flags, f"--folder={tmp_path / 'there'}"), message)
    assert lines(tmp_path / "there") == lines(untrained)


def test_a_folder_of_another_model_is_refused(done, command, untrained, tmp_path):
    shutil.copytree(untrained, tmp_path / "there")
    ended = command(f"--workdir={done.workdir}", f"--folder={tmp_path / 'there'}")
    one_line(ended, "was begun with model '")


def one_line(ended, message):
    """An error in one line, and no traceback."""
    status, out, err = ended
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 1 and len(told) == 1 and message in told[0] and "Traceback" not in err, err


def test_mistakes_are_told_in_one_line(done, config, command, untrained, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "early").mkdir()
    shutil.copy(done.workdir / "config.json", tmp_path / "early")
    here, run = f"--folder={tmp_path / 'new'}", f"--workdir={done.workdir}"
    cases = [
        ([*config, here, "--benchmarks=aime24"], "--benchmarks names 'aime24'; this task has eval"),
        ([*config, here, "--k=1,4"], "--k asks for pass@4, but eval has 2 samples of a prompt"),
        ([f"--workdir={tmp_path / 'early'}", here], "holds no checkpoint yet; train first"),
        ([f"--workdir={tmp_path / 'none'}", here], "holds no run that can be read"),
        ([run, "--model=x", here], "--workdir names a run, which has its own config and model; leave --model out"),
        ([run, *config[:1], here], "leave --config out"),
        ([run, here, "--config.model.hidden_size=64"], "--config.model.hidden_size is 64, but this run's checkpoint has 32"),
        ([run, here, "--config.task=lookup"], "this run's small model reads 'arithmetic' only"),
        ([run, here, f"--config.warm_start.cache={tmp_path}"], "the model that the adapters belong to; restore it"),
        ([*config], "the following arguments are required: --folder"),
        ([*config, here, "--benchmarks=,"], "argument --benchmarks: ',' names none"),
        ([*config, here, "--samples=0"], "argument --samples: '0' is no number of at least 1"),
        ([*config, here, "--k=1,x"], "argument --k: 'x' is no number of at least 1"),
        ([*config, here, "--seed=-1"], "argument --seed: '-1' is no number of at least 0"),
        ([*config, here, "--sample=3"], "Unknown command line flag 'sample'"),
        ([here], "give --config=configs/quickstart.py, or --workdir=FOLDER of a run"),
        ([*config, f"--folder={tmp_path / 'file' / 'x'}"], "cannot be written"),
        ([*config, f"--folder={done.workdir}"], "holds a run or a model; choose another folder"),
        ([*config, here, "--config.samples=3"], "--config.samples is not a setting"),
        ([*config, here, "--config.sampling.temperature=0"], "config.sampling.temperature is 0.0, must be above 0"),
        ([*config, here, f"--model={tmp_path / 'none'}"], "config.model.path"),
        ([*config, here, "--config.model.context_length=5"], "but prompt arithmetic/eval/"),
    ]
    for flags, message in cases:
        one_line(command(*flags), message)
    assert not (tmp_path / "early" / "checkpoints").exists()


def test_a_checkpoint_on_servers_that_are_given_now(done, command, tmp_path):
    """The run was sampled in its process; its weights go through the evaluation's folder."""
    server = StandIn(vocab_size=20)
    with serving(server):
        flags = ("--config.engine=sglang", f"--config.sglang.urls={server.url}", f"--folder={tmp_path / 'served'}")
        assert command(f"--workdir={done.workdir}", *flags)[0] == 0
    assert server.version == "1" and server.model_path == str(tmp_path / "served" / "weights" / "version-1")
    assert not (tmp_path / "served" / "weights").exists() and len(lines(tmp_path / "served")) == 8


def test_servers_that_are_gone(done, command, monkeypatch, tmp_path):
    monkeypatch.setattr(sglang_pool, "RETRY_FIRST", 0.02)
    monkeypatch.setattr(sglang_pool, "RETRY_MOST", 0.1)
    urls = "--config.sglang.urls=http://127.0.0.1:9"
    flags = ("--config.engine=sglang", urls, "--config.sglang.outage_timeout=0.5", f"--folder={tmp_path}")
    one_line(command(f"--workdir={done.workdir}", *flags), "no SGLang server")


def test_a_model_folder_on_a_real_server(sglang_server, command, tmp_path):
    """Random weights: what is proved is that prompts, turns and outcomes pass through."""
    flags = ["--config=tests/tiny_config.py", "--config.engine=sglang", f"--config.sglang.urls={sglang_server.url}"]
    ended = command(*flags, f"--model={sglang_server.model}", f"--folder={tmp_path}", "--prompts=4", "--samples=2")
    sglang_server.restore()
    assert ended[0] == 0, ended[2]
    found = results(tmp_path)["benchmarks"]["eval"]
    assert (found["prompts"], found["samples"], found["errors"]) == (4, 2, 0)
    assert found["finish_shares"]["engine_error"] == 0 and found["generated_tokens"] > 0


def decided(**changes):
    """The settings that decide the numbers of an evaluation with these changes."""
    return evaluate_lib.decisive(config_arguments.with_settings(RunConfig(), [f"--config.{k}={v}" for k, v in changes.items()]))


def test_settings_that_decide_numbers():
    """What changes nothing may change between two calls; the folder keeps the rest."""
    idle = {"sampling.concurrency": 3, "steps": 9, "lookup.seed": 1, "local.slots": 3, "budget.roots": 4, "seed": 5}
    assert decided(**idle) == decided() and "config.chat.thinking" not in decided()
    for name, value in {"sampling.top_k": 3, "arithmetic.max_number": 3, "engine": "sglang", "model.dtype": "bfloat16"}.items():
        assert decided(**{name: value}) == decided() | {f"config.{name}": value}
    math = {"task": "math", "math.eval_sets": "('amc23',)", "math.python_workers": 1, "data.folder": "x"}
    assert decided(**math) == decided(task="math") and "config.chat.thinking" in decided(**math)
    searched = {"multihop_qa.eval_sets": "('musique',)", "task": "multihop_qa"}
    assert decided(**searched) != decided(task="multihop_qa")  # the records are what is searched
    served = {"task": "multihop_qa", "multihop_qa.search_url": "http://a:1"}
    assert decided(**(searched | served)) == decided(**served)
    moved = served | {"multihop_qa.search_url": "http://b:2"}
    assert decided(**moved) == decided(**served)  # a service may move, but it is not the records
    name = "config.multihop_qa.search_url"
    assert (decided(**served)[name], decided(task="multihop_qa")[name]) == ("of a service", None)


def test_only_the_data_sets_that_are_asked_for_are_loaded(command, monkeypatch, tmp_path):
    seen = []

    def prepare(config, *, training):
        seen.append((config, training))
        raise ConfigError("that is far enough")

    monkeypatch.setattr(evaluation, "prepare", prepare)
    flags = ("--config=tests/tiny_config.py", "--model=x", f"--folder={tmp_path}", "--config.model.context_length=4096")
    flags += ("--config.loss.row_length=4096",)
    for task, names in (("math", "gpqa_diamond,aime24"), ("bfcl", "bfcl_miss_func"), ("multihop_qa", "musique")):
        one_line(command(*flags, f"--config.task={task}", f"--benchmarks={names}"), "that is far enough")
    (math, _), (bfcl, _), (searched, _) = seen
    assert [training for _, training in seen] == [False, False, True]  # the last one searches the training records too
    assert math.math.eval_sets == ("gpqa_diamond", "aime24") and bfcl.bfcl.categories == ("miss_func",)
    assert searched.multihop_qa == RunConfig().multihop_qa
    one_line(command(*flags, "--config.task=math", "--benchmarks=musique"), "'musique'; this task has aime24, aime25, amc23")
