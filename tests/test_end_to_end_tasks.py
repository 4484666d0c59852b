"""Whole runs of the task families of public data sets: real prompts, tools, rewards and forks on a tiny policy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests import tiny_tasks
from tests.tiny_run import bits, go, recording, timeless
from trace_jax import config_checks, evaluate
from trace_jax import run as run_lib
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_tasks import DATA_TASKS
from trace_jax.data import bfcl as bfcl_data
from trace_jax.data import prepare

READ: set[str] = set()  # settings that the runs of this file looked at
UNITS = 16.0  # 8 root rollouts and 16 continuations of half a unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared data, the policy before its warm start, and the runs."""
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def data(folder):
    return tiny_tasks.prepare_data(folder)


@pytest.fixture(scope="module")
def model(folder):
    return tiny_tasks.make_policy(folder / "model")


@pytest.fixture(scope="module")
def finished(folder, data, model):
    """`finished(TASK, NAME, changes)`: a run, whose warm start other runs of the task find."""

    def run(task, name, changes=(), model=model):
        config = tiny_tasks.settings(task, model, data, **{"warm_start.cache": str(folder / "warm")} | dict(changes))
        return go(recording(config, READ), folder / name)

    return run


@pytest.fixture(scope="module")
def math(finished):
    return finished("math", "math")


@pytest.fixture(scope="module")
def multihop_qa(finished):
    return finished("multihop_qa", "multihop_qa")


@pytest.fixture(scope="module")
def bfcl(finished, folder, data):
    pytest.importorskip("bfcl_eval", reason="BFCL: pip install --no-deps bfcl-eval==2026.3.23")
    prepare.prepare("bfcl_base", data)
    documents = (bfcl_data.installed_folder() / "multi_turn_func_doc" / "trading_bot.json").read_text()
    model = tiny_tasks.make_policy(folder / "bfcl_model", documents=documents)
    return finished("bfcl", "bfcl", tiny_tasks.BFCL, model)


@pytest.fixture(scope="module", params=DATA_TASKS)
def done(request):
    """Each family in turn."""
    return request.getfixturevalue(request.param)


def test_the_whole_loop_on_a_family(done):
    """The budget is spent to the unit, tools are called, forks are made at their turns, nothing goes wrong."""
    first, *steps = done.rows
    assert [row["step"] for row in done.rows] == [0, 1, 2] and 0 <= first["eval/success"] <= 1
    for row in steps:
        assert row["rollout/budget_units"] == UNITS and row["rollout/root_rollouts"] >= 8
        assert row["rollout/errors"] == row["rollout/finish_environment_error"] == 0
        assert row["rollout/continuations"] / 2 + row["rollout/fallback_rollouts"] == UNITS / 2
    assert sum(row["rollout/continuations"] for row in steps) > 0
    tried = [row["rollout/tool_calls"] > 0 or row["rollout/format_valid_share"] < 1 for row in steps]
    assert any(tried) and all(0 <= row["rollout/format_valid_share"] <= 1 for row in steps)
    # all prompts share the system message and the tools, which the engine computes once
    assert done.parts.environment.trunk.size > 200 and all(row["rollout/prefix_hit_rate"] > 0.9 for row in steps)


def test_an_observation_is_what_the_tool_said(math):
    """A rollout's tokens read as the chat that they were: the code of a call was run, its output is behind it."""
    parts = math.parts
    action = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call><|im_end|>'
    instance = parts.environment.task.instance("eval", 0)
    result = parts.environment.task.step(instance.state, action)
    assert result.observation.startswith("\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>")
    assert (result.tool_calls, result.failed_calls, result.done) == (1, 0, False)
    final = parts.environment.task.step(result.state, r"It is \boxed{2}.<|im_end|>")
    assert final.done and parts.environment.task.score(final.state).success == 1.0  # 1 + 1


def test_a_search_finds_the_records_own_paragraphs(multihop_qa):
    task = multihop_qa.parts.environment.task
    action = '<tool_call>\n{"name": "local_search", "arguments": {"query": "roofs of town 13", "top_k": 1}}\n</tool_call><|im_end|>'
    assert "Town 13 has blue roofs." in task.step(task.instance("eval", 0).state, action).observation


def test_calls_of_the_tiny_policy_are_carried_out(math, multihop_qa):
    for rows in (math.rows, multihop_qa.rows):
        assert sum(row["rollout/tool_calls"] for row in rows[1:]) > 0


def test_user_turns_follow_each_other(bfcl):
    task = bfcl.parts.environment.task
    instance = task.instance("eval", 0)
    called = task.step(instance.state, task.expert(instance.state))
    assert called.tool_calls > 0 and called.failed_calls == 0 and "<tool_response>" in called.observation
    result = task.step(instance.state, "Done.<|im_end|>")
    assert not result.done and result.observation.startswith("\n<|im_start|>user\n") and result.tool_calls == 0
    assert instance.group == "bfcl_base" and instance.uid.startswith("bfcl/bfcl_base/multi_turn_base_")


def test_one_step_and_one_more_are_two(math, folder):
    """Tools run in threads and processes, and yet a run that was stopped ends with the same bits."""
    workdir = folder / "halves"
    go(dataclasses.replace(math.config, steps=1), workdir)
    again = go(math.config, workdir)
    # the evaluation after the first half's last step is one more than the straight run has
    assert timeless(again.rows[2:]) == timeless(math.rows[2:]) and bits(again.parts) == bits(math.parts)


def test_a_checkpoint_is_evaluated_by_its_command(multihop_qa, tmp_path):
    """As the run itself did it at its end, with the paper's one sample of a prompt."""
    evaluate.main([f"--workdir={multihop_qa.workdir}", f"--folder={tmp_path}", "--prompts=9"])
    found = json.loads((tmp_path / "results.json").read_text())["benchmarks"]
    figures, last = found["hotpotqa"], multihop_qa.rows[-1]
    assert list(found) == ["hotpotqa"] and [figures[name] for name in ("records", "too_long", "prompts")] == [4, 0, 4]
    assert (figures["samples"], figures["avg"]) == (1, last["eval/success"])
    assert figures["generated_tokens"] == last["eval/generated_tokens"]
    table = (tmp_path / "results.md").read_text()
    assert "2Wiki" in table and "| multihop_qa, step 2 |" in table and "†" not in table


def test_every_setting_of_the_families_is_read(math, multihop_qa, bfcl):
    names = {
        f"{section}.{field.name}"
        for section in ("data", "chat", *DATA_TASKS)
        for field in dataclasses.fields(getattr(RunConfig(), section))
    }
    assert names | {"warm_start.pretrained"} <= READ


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.folder": "/nowhere"}, "config.data.folder: deepscaler is not prepared in /nowhere: run `python -m"),
        ({"math.train": "math500"}, "config.data.folder: math500 has no split 'train'; it has test"),
        ({"math.eval_sets": ("gsm9k",)}, "config.data.folder: .*gsm9k"),
        ({"math.train": "hotpotqa"}, "config.math: math record q0"),
        ({"chat.template": "chatml"}, "config.chat.template: 'chatml' is neither qwen3, llama3 nor a chat template"),
        ({"chat.max_prompt_tokens": 100}, "config.math: no record of data set deepscaler can be used; raise chat.max"),
        ({"chat.shots": 9}, "config.math: math has 2 solved conversations, not 9"),
        ({"math.python_timeout": 31.0}, "config.math: python's time limit is 31.0 s; it must be above 0 and at most 30"),
    ],
)
def test_a_mistake_is_one_line(data, model, tmp_path, changes, message):
    config = tiny_tasks.settings("math", model, data, **changes)
    with pytest.raises(ConfigError, match=message) as error:
        run_lib.run(config_checks.check(config), tmp_path)
    assert "\n" not in str(error.value)


def test_llamas_format_runs_the_same_loop(finished):
    """Another template, another stop, another syntax of calls; the expert's turns are read and carried out."""
    done = finished("math", "llama3", {"chat.template": "llama3", "chat.thinking": False, "steps": 1})
    row, environment = done.rows[1], done.parts.environment
    assert row["rollout/budget_units"] == UNITS and row["rollout/tool_calls"] > 0 and row["rollout/continuations"] > 0
    prompt = environment.decode(done.parts.prompts("eval", 0, 1)[0].tokens)
    assert prompt.startswith("<|begin_of_text|><|start_header_id|>system") and prompt.endswith("<|end_header_id|>\n\n")
    assert environment.decode(np.array(environment.stop_ids[:1])) == "<|eot_id|>"


def test_the_same_loop_on_a_real_server(math, finished, start_server):
    """Chat prompts, stops, tools and forks through SGLang."""
    server = start_server(model=Path(math.config.model.path), context_length=math.config.model.context_length)
    done = finished("math", "served", {"engine": "sglang", "sglang.urls": server.url})
    for row in done.rows[1:]:
        assert row["rollout/budget_units"] == UNITS and row["rollout/errors"] == 0
        assert row["rollout/continuations"] > 0 and row["rollout/prefix_hit_rate"] > 0.9
        assert row.get("train/logprob_gap_max", 0.0) < 1e-3  # measured in steps with contrast; draws are the server's own
    assert sum(row["rollout/tool_calls"] for row in done.rows[1:]) > 0
