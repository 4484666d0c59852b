"""Summaries by hand, and every published number made again from its raw metrics."""

import json
from pathlib import Path

import pytest

from experiments import results
from experiments.quickstart import report, rise

FOLDER = Path(report.__file__).parent


def rows(success, ratios):
    """Two steps with evaluations before and after."""
    middle = [{"step": i + 1, "rollout/effective_ratio": r, "rollout/generated_tokens": 10} for i, r in enumerate(ratios)]
    middle[-1]["eval/success"] = success[1]
    return [{"step": 0, "eval/success": success[0]}, *middle]


def test_summaries_by_hand():
    assert results.summarise([1.0, None, 3.0, float("nan")]) == {"mean": 2.0, "low": 1.0, "high": 3.0, "n": 2}
    assert results.summarise([None])["n"] == 0
    assert results.cell(results.summarise([0.25, 0.75])) == "0.500 (0.250-0.750)"
    assert results.cell(results.summarise([])) == "-"


def test_a_report_from_raw_files(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for strategy, ratios in (("grpo", (0.2, 0.4)), ("trace", (0.6, 0.6))):
        text = "".join(json.dumps(row) + "\n" for row in rows((0.1, 0.3), ratios))
        (raw / f"arithmetic-{strategy}-0.jsonl").write_text(text)
    report.write(raw, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["arithmetic/grpo/effective_ratio"] == {"mean": 0.3, "low": 0.3, "high": 0.3, "n": 1}
    assert found["arithmetic/trace/effective_ratio_over_grpo"]["mean"] == 2.0
    assert found["arithmetic/trace/success_last"]["mean"] == 0.3
    assert found["arithmetic/grpo/generated_tokens"]["mean"] == 20
    assert found["arithmetic/grpo/brier"]["n"] == 0
    assert "| arithmetic | TRACE" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["results.json", "table.md"])
def test_the_published_numbers_follow_from_the_raw_metrics(tmp_path, name):
    report.write(FOLDER / "raw", tmp_path)
    assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


@pytest.mark.parametrize("name", ["rise", "rise_own_warm_start"])
def test_the_published_rise_follows_from_the_raw_metrics(tmp_path, name):
    results.write(tmp_path / "results.json", rise.summarise(FOLDER / name))
    assert (tmp_path / "results.json").read_text() == (FOLDER / name / "results.json").read_text()
