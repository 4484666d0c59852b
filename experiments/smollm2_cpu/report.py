"""results.json, table.md and figure.png of the SmolLM2 experiment, from its raw metrics."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from experiments import results as results_lib
from experiments.quickstart.report import METRICS, figure, load

COLUMNS = ("success_start", "success_last", "effective_ratio", "generated_tokens", "seconds_per_step")
LABELS = {"grpo": "GRPO", "trace": "TRACE"}


def write(raw: Path, folder: Path) -> None:
    """Reads raw/TASK-STRATEGY-SEED.jsonl and writes the three files into `folder`; `speed/...` in results.json stays."""
    runs, path = load(raw), folder / "results.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    results = {name: value for name, value in known.items() if name.startswith("speed/")}
    for (task, strategy), seeds in runs.items():
        for metric in COLUMNS:
            results[f"{task}/{strategy}/{metric}"] = results_lib.summarise([measure(metric, r) for r in seeds.values()])
    results_lib.write(path, results)
    (folder / "table.md").write_text(table(results))
    figure(runs, folder / "figure.png")


def measure(metric: str, rows: list[dict]) -> float | None:
    """One number of one run; all but these two are the quickstart experiment's."""
    if metric == "success_start":
        return rows[0]["eval/success"]
    if metric == "seconds_per_step":  # of the median step: the first one compiles. Evaluations are not in it
        return statistics.median(row["time/step"] for row in rows if "time/step" in row)
    return METRICS[metric](rows)


def table(results: dict[str, results_lib.Summary]) -> str:
    """Markdown: one row per task and strategy."""
    return results_lib.table(results, LABELS, COLUMNS, {"generated_tokens": 0, "seconds_per_step": 1})
