"""The experiment on the three task families: summaries by hand, published numbers made again from the raw files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.real_tasks_cpu import data, figure, report, tiny
from experiments.real_tasks_cpu.escape_list import ESCAPES

FOLDER = Path(report.__file__).parent
RUNS = [(task, engine) for task in tiny.TASKS for engine in tiny.STEPS]
ROWS = [
    {"step": 0, "eval/success": 0.25},
    {"step": 1, "rollout/success": 0.5, "rollout/tool_calls": 4, "rollout/errors": 0, "time/step": 30.0},
    {"step": 2, "rollout/success": 0.0, "rollout/tool_calls": 8, "rollout/errors": 0, "time/step": 10.0,
     "train/logprob_gap_max": 1e-5, "eval/success": 0.75},
]  # fmt: skip
# A prompt; a rollout of two turns; a fork of its first turn; a rollout of one turn.
TREE = {
    "parent": [-1, 0, 1, 1, 0],
    "stage": ["PROMPT", "ROOT_ROLLOUT", "ROOT_ROLLOUT", "CONTINUATION", "ROOT_ROLLOUT"],
    "call": [False, True, False, False, False],
    "success": [None, None, 0.0, 1.0, 0.0],
}


def published():
    return json.loads((FOLDER / "results.json").read_text())


def write_run(raw, name, rows):
    raw.mkdir(exist_ok=True)
    (raw / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_numbers_of_a_run_by_hand(tmp_path):
    write_run(tmp_path, "math-local", ROWS)
    write_run(tmp_path, "math-sglang", ROWS[:2] + [ROWS[2] | {"time/step": 80.0}])
    found = report.of_runs(tmp_path)
    assert found["math/local/seconds_per_step"] == {"mean": 20.0, "low": 10.0, "high": 30.0, "n": 2}
    assert found["math/seconds_per_step"] == {"mean": 37.5, "low": 10.0, "high": 80.0, "n": 4}
    assert found["math/local/success_start"]["mean"] == 0.25 and found["math/local/success_last"]["mean"] == 0.75
    assert found["math/sglang/steps"] == {"mean": 2.0, "low": 2.0, "high": 2.0, "n": 1}
    assert found["math/local/logprob_gap_max"]["n"] == 1  # of the step that trained
    assert not any(name.startswith(("bfcl", "multihop_qa")) for name in found)


def test_checks_by_hand(tmp_path):
    figures = {"ground_truth_valid_share": 1.0, "entries": 8, "mutated_agreement_share": 0.5, "mutated": 80}
    (tmp_path / "bfcl_replay.json").write_text(json.dumps(figures))
    (tmp_path / "escapes.json").write_text(json.dumps({"a": True, "b": False}))
    (tmp_path / "warm_call_ms.json").write_text("[1.0, 2.0, 9.0]")
    found = report.of_checks(tmp_path)
    assert found["bfcl/mutated_agreement_share"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 80}
    assert found["sandbox/escapes_refused"] == {"mean": 0.5, "low": 0.0, "high": 1.0, "n": 2}
    assert found["sandbox/warm_call_ms"] == {"mean": 4.0, "median": 2.0, "low": 1.0, "high": 9.0, "n": 3}
    assert set(found) == {name for name in report.CHECKS if "hostile" not in name}


def test_a_report_of_what_is_there(tmp_path):
    write_run(tmp_path / "raw", "math-local", [ROWS[0], *(row | {"rollout/continuations": 3} for row in ROWS[1:])])
    (tmp_path / "raw" / "math.trees.json").write_text(json.dumps([TREE]))
    (tmp_path / "README.md").write_text(f"before\n{report.BORDERS[0]}old{report.BORDERS[1]}\nafter\n")
    report.write(tmp_path / "raw", tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| seconds per step   | 20 (10-30)" in text and "math, local" in text and "sglang" not in text
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_nodes_of_a_drawn_tree_do_not_meet():
    # Leaves 2, 3 and 4 at heights 0, 1 and 2; node 1 between its two, the prompt between 0.5 and 2.
    assert figure.layout(TREE["parent"]) == [(0.0, 1.25), (1.0, 0.5), (2.0, 0.0), (2.0, 1.0), (1.0, 2.0)]
    assert figure.leaf_stages(TREE) == ["ROOT_ROLLOUT", "CONTINUATION", "ROOT_ROLLOUT"]
    plain = {"parent": [-1, 0, 0], "stage": ["PROMPT"] + ["ROOT_ROLLOUT"] * 2, "success": [None, 0.0, 0.0]}
    assert figure.richest([plain, TREE, plain]) is TREE


def test_the_engines_differ_in_the_number_of_steps_only():
    first, second = (tiny.settings(Path("w"), engine) for engine in ("local", "sglang"))
    assert {name for name in first if first[name] != second[name]} == {"steps"}
    assert tiny.flags(Path("w"), "math", "local")[:3] == [
        "--config=configs/math.py:tiny", "--config.steps=3", "--config.data.folder=w/data",
    ]  # fmt: skip
    assert tiny.config(Path("w"), "bfcl").warm_start.cache == "w/warm_start"


def test_questions_that_are_held_out_are_not_trained_on(tmp_path):
    sample = tmp_path / "sample.json"
    sample.write_text(json.dumps([{"_id": i} for i in range(60)]))
    folder = data.split_hotpotqa(sample, tmp_path / "parts")
    train, dev = (json.loads(path.read_text()) for path in sorted(folder.iterdir(), reverse=True))
    assert [row["_id"] for row in train] == list(range(10)) and [row["_id"] for row in dev] == list(range(10, 60))


def test_the_published_numbers_come_from_the_raw_files(tmp_path):
    (tmp_path / "README.md").write_text((FOLDER / "README.md").read_text())
    report.write(FOLDER / "raw", tmp_path)
    for name in ("results.json", "README.md"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_the_published_results_are_complete_and_clean():
    found = published()
    required = ("steps", "success", "format_valid_share", "tool_calls", "forks", "seconds_per_step")
    assert {f"{task}/{name}" for task in tiny.TASKS for name in required} <= set(found)
    assert {f"{task}/{engine}/{name}" for task, engine in RUNS for name in report.COLUMNS} <= set(found)
    assert set(report.CHECKS) <= set(found)
    for task, engine in RUNS:
        assert found[f"{task}/{engine}/steps"]["mean"] == tiny.STEPS[engine]
        assert found[f"{task}/{engine}/errors"]["high"] == 0
        assert found[f"{task}/{engine}/tool_calls"]["high"] > 0 and found[f"{task}/{engine}/forks"]["high"] > 0
    assert found["bfcl/ground_truth_valid_share"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 800}
    assert found["bfcl/mutated_agreement_share"]["low"] == 1.0
    assert found["sandbox/escapes_refused"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": len(ESCAPES)}
    assert found["bfcl/hostile_calls_refused"]["low"] == 1.0
    assert found["sandbox/warm_call_ms"]["median"] < 50


@pytest.mark.parametrize("task", tiny.TASKS)
def test_the_trees_are_those_of_the_first_step(task):
    """Sampled by a process of their own, they have the run's counts."""
    trees, row = report.trees(FOLDER / "raw")[task], report.load(FOLDER / "raw")[task, "local"][1]
    stages = [stage for tree in trees for stage in figure.leaf_stages(tree)]
    assert stages.count("CONTINUATION") == row["rollout/continuations"] and len(trees) == row["rollout/active_prompts"]
    assert sum(sum(tree["tokens"]) for tree in trees) == row["rollout/generated_tokens"]


def test_raw_files_name_no_place_of_a_machine():
    for path in (FOLDER / "raw").iterdir():
        assert '"/' not in path.read_text(), path  # an absolute path
