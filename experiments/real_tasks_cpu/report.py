"""results.json, the tables of README.md and figure.png, from the raw runs, trees and checks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from experiments import results as results_lib
from experiments.real_tasks_cpu import figure, tiny
from experiments.results import Summary, summarise
from trace_jax.train.metrics import read_jsonl

Results = dict[str, Summary]
Rows = list[dict[str, Any]]
BORDERS = ("<!-- from results.json -->", "<!-- end -->")  # of the tables in README.md

# A number of every step, by the name of its metric.
OF_STEPS = {
    "success": "rollout/success",
    "format_valid_share": "rollout/format_valid_share",
    "tool_calls": "rollout/tool_calls",
    "forks": "rollout/continuations",
    "effective_ratio": "rollout/effective_ratio",
    "prefix_hit_rate": "rollout/prefix_hit_rate",
    "logprob_gap_max": "train/logprob_gap_max",  # where an update was made
    "errors": "rollout/errors",
    "seconds_per_step": "time/step",
}
COLUMNS = ("steps", "success_start", "success_last", *OF_STEPS)
DIGITS = {
    "steps": 0, "success_start": 3, "success_last": 3, "success": 3, "format_valid_share": 2, "tool_calls": 0,
    "forks": 0, "effective_ratio": 2, "prefix_hit_rate": 3, "errors": 0, "seconds_per_step": 0,
}  # fmt: skip


def write(raw: Path, folder: Path) -> None:
    """Reads what is in `raw`, and writes results.json and figure.png into `folder`, and the tables into its README."""
    results = of_runs(raw) | of_checks(raw)
    results_lib.write(folder / "results.json", results)
    figure.draw(load(raw), trees(raw), folder / "figure.png")
    readme = folder / "README.md"
    if readme.exists():
        readme.write_text(with_tables(readme.read_text(), tables(results)))


def load(raw: Path) -> dict[tuple[str, str], Rows]:
    """Metrics by (task, engine), of the runs that are there."""
    paths = {(task, engine): raw / f"{task}-{engine}.jsonl" for task in tiny.TASKS for engine in tiny.STEPS}
    return {key: read_jsonl(path) for key, path in paths.items() if path.exists()}


def trees(raw: Path) -> dict[str, list[dict[str, Any]]]:
    """Rollout trees by task."""
    paths = {task: raw / f"{task}.trees.json" for task in tiny.TASKS}
    return {task: json.loads(path.read_text()) for task, path in paths.items() if path.exists()}


def of_runs(raw: Path) -> Results:
    """TASK/ENGINE/NAME, over the steps of a run, and TASK/NAME, over those of both engines' runs."""
    runs, found = load(raw), {}
    for task in tiny.TASKS:
        own = {engine: rows for (name, engine), rows in runs.items() if name == task}
        for engine, rows in own.items():
            found |= {f"{task}/{engine}/{name}": summarise(values(rows, name)) for name in COLUMNS}
        for name in COLUMNS if own else ():
            found[f"{task}/{name}"] = summarise([value for rows in own.values() for value in values(rows, name)])
    return found


def values(rows: Rows, name: str) -> list[float | None]:
    """One number of each step, or one of the run."""
    evaluated = [row["eval/success"] for row in rows if "eval/success" in row]
    of_run = {"steps": [rows[-1]["step"]], "success_start": evaluated[:1], "success_last": evaluated[-1:]}
    return of_run[name] if name in of_run else [row.get(OF_STEPS[name]) for row in rows if row["step"] > 0]


def of_checks(raw: Path) -> Results:
    """What was measured beside the runs; n says over how many entries, attempts or calls."""
    found: Results = {}
    for name, (file, measure) in CHECKS.items():
        path = raw / f"{file}.json"
        if path.exists():
            found[name] = measure(json.loads(path.read_text()))
    return found


def _share(name: str, count: str) -> Callable[[Mapping[str, Any]], Summary]:
    return lambda figures: {key: figures[name] for key in ("mean", "low", "high")} | {"n": figures[count]}


def _all(refused: Mapping[str, bool]) -> Summary:
    return summarise([float(fine) for fine in refused.values()])


def _milliseconds(taken: list[float]) -> Summary:
    return summarise(taken) | {"median": statistics.median(taken)}


CHECKS: dict[str, tuple[str, Callable[[Any], Summary]]] = {
    "bfcl/ground_truth_valid_share": ("bfcl_replay", _share("ground_truth_valid_share", "entries")),
    "bfcl/mutated_agreement_share": ("bfcl_replay", _share("mutated_agreement_share", "mutated")),
    "bfcl/hostile_calls_refused": ("hostile_calls", _all),
    "sandbox/escapes_refused": ("escapes", _all),
    "sandbox/warm_call_ms": ("warm_call_ms", _milliseconds),
}


def tables(results: Results) -> str:
    """Markdown: a column for each run, and a row for each check."""
    runs = [(task, engine) for task in tiny.TASKS for engine in tiny.STEPS if f"{task}/{engine}/steps" in results]
    rows = [
        [name.replace("_", " ")] + [_cell(name, results[f"{task}/{engine}/{name}"]) for task, engine in runs]
        for name in COLUMNS
    ]
    headers = ["", *(f"{task}, {engine}" for task, engine in runs)]
    first = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    checks = [
        [name, f"{results[name].get('median', results[name]['mean']):.4g}", str(results[name]["n"])]
        for name in CHECKS
        if name in results
    ]
    second = tabulate(checks, headers=("check", "value", "of"), tablefmt="github", disable_numparse=True)
    return f"{first}\n\n{second}"


def _cell(name: str, summary: Summary) -> str:
    if name not in DIGITS:
        return "-" if summary["mean"] is None else f"{summary['high']:.1e}"
    if summary["low"] == summary["high"] and summary["mean"] is not None:
        return f"{summary['mean']:.{DIGITS[name]}f}"
    return results_lib.cell(summary, DIGITS[name])


def with_tables(text: str, made: str) -> str:
    """README.md with new tables between its two borders."""
    begin, end = BORDERS
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end, 1)[1]}"
