"""The SmolLM2 experiment: summaries by hand, and every published number made again from its raw measurements."""

import json
import statistics
from pathlib import Path

import pytest

from experiments import results as results_lib
from experiments.quickstart.report import load
from experiments.smollm2_cpu import report, speed, speed_cases

FOLDER = Path(report.__file__).parent
SPEED = {
    "speed/decode_over_transformers_quickstart",
    "speed/decode_over_transformers_smollm2",
    "speed/torch_over_ours_train_step",
}


def run_rows():
    """Two steps of 3 and 5 seconds between two evaluations."""
    steps = [
        {"step": 1, "rollout/effective_ratio": 0.25, "rollout/generated_tokens": 10, "time/step": 3.0},
        {"step": 2, "rollout/effective_ratio": 0.75, "rollout/generated_tokens": 20, "time/step": 5.0},
    ]
    return [{"step": 0, "eval/success": 0.1}, steps[0], steps[1] | {"eval/success": 0.4}]


def test_measures_by_hand():
    expected = {
        "success_start": 0.1,
        "success_last": 0.4,
        "effective_ratio": 0.5,
        "generated_tokens": 30,
        "seconds_per_step": 4.0,
    }
    assert {name: report.measure(name, run_rows()) for name in report.COLUMNS} == expected


def test_a_report_keeps_the_speed_beside_it(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for seed in (1, 2):
        text = "".join(json.dumps(row) + "\n" for row in run_rows())
        (raw / f"lookup-trace-{seed}.jsonl").write_text(text)
    results_lib.write(tmp_path / "results.json", {"speed/x": results_lib.summarise([2.0])})
    report.write(raw, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["speed/x"]["mean"] == 2.0
    assert found["lookup/trace/success_last"] == {"mean": 0.4, "low": 0.4, "high": 0.4, "n": 2}
    assert "TRACE" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_case_is_kept_as_raw_pairs_and_their_median(tmp_path):
    pairs = [{"ours": 1.0, "theirs": t, "load": 0.1} for t in (2.0, 9.0, 3.0, 1.0, 4.0)]
    speed.keep(tmp_path, "decode_smollm2", {"pairs": pairs})
    speed.keep(tmp_path, "train_smollm2", {"pairs": pairs[:1]})
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["speed/decode_over_transformers_smollm2"] == {
        "mean": 3.8, "median": 3.0, "low": 1.0, "high": 9.0, "n": 5,
    }  # fmt: skip
    assert found["speed/torch_over_ours_train_step"]["mean"] == 2.0
    assert set(json.loads((tmp_path / "speed.json").read_text())) == {"decode_smollm2", "train_smollm2"}


def test_cases_are_the_same_for_both_sides():
    case = speed_cases.CASES["train_smollm2"]
    tokens = speed_cases.tokens(case, 100)
    assert tokens.shape == (case.rows, case.prompt + case.new) and tokens.min() >= 20 and tokens.max() < 100
    assert (tokens == speed_cases.tokens(case, 100)).all()
    assert speed_cases.advantages(case).sum() == 0 and set(speed_cases.CASES) == set(speed.KEYS)


def test_published_numbers_come_from_the_raw_runs(tmp_path):
    runs = load(FOLDER / "raw")
    assert set(runs) == {(task, strategy) for task in ("arithmetic", "lookup") for strategy in ("grpo", "trace")}
    assert all(rows[-1]["step"] == 20 for seeds in runs.values() for rows in seeds.values())
    (tmp_path / "results.json").write_text((FOLDER / "results.json").read_text())  # the speed in it stays
    report.write(FOLDER / "raw", tmp_path)
    for name in ("results.json", "table.md"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_the_readmes_quote_the_results():
    published = json.loads((FOLDER / "results.json").read_text())
    main, own = (path.read_text() for path in (FOLDER.parent.parent / "README.md", FOLDER / "README.md"))
    for name in SPEED:
        summary = published[name]
        assert f"{summary['median']:.2f}" in main
        assert f"{summary['median']:.2f} ({summary['low']:.2f}-{summary['high']:.2f})" in own
    for task, start in (("arithmetic", "0.18"), ("lookup", "0.05")):
        assert f"{published[f'{task}/grpo/success_start']['mean']:.2f}" == start and f"{start}" in main
        assert all(published[f"{task}/{s}/success_last"]["low"] > 2 * float(start) for s in ("grpo", "trace"))


def test_published_speed_comes_from_the_raw_pairs():
    published = json.loads((FOLDER / "results.json").read_text())
    raw = json.loads((FOLDER / "speed.json").read_text())
    assert SPEED <= set(published)
    for case, name in speed.KEYS.items():
        ratios = [pair["theirs"] / pair["ours"] for pair in raw[case]["pairs"]]
        assert len(ratios) >= 5
        assert published[name]["median"] == pytest.approx(statistics.median(ratios), rel=1e-5)
        assert (published[name]["low"], published[name]["high"]) == pytest.approx((min(ratios), max(ratios)), rel=1e-5)
