"""What every experiment does with raw metrics: summarise seeds, keep results.json, write a table.

`results.json` is one flat object, `name: {"mean", "low", "high", "n"}`: mean, least and greatest over n seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

Summary = dict[str, float | int | None]


def summarise(values: Sequence[float | None]) -> Summary:
    """Mean, least and greatest of the values that are there, and how many they are; None where there is none."""
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not known:
        return {"mean": None, "low": None, "high": None, "n": 0}
    return {"mean": sum(known) / len(known), "low": min(known), "high": max(known), "n": len(known)}


def write(path: Path, results: Mapping[str, Summary]) -> None:
    """Writes results.json, names sorted, numbers to 6 significant digits."""
    rounded = {
        name: {key: value if value is None or key == "n" else float(f"{value:.6g}") for key, value in summary.items()}
        for name, summary in sorted(results.items())
    }
    path.write_text(json.dumps(rounded, indent=1) + "\n")


def table(
    results: Mapping[str, Summary], labels: Mapping[str, str], columns: Sequence[str], digits: Mapping[str, int]
) -> str:
    """Markdown: one row per task and strategy of TASK/STRATEGY/METRIC, `mean (least-greatest)` over seeds."""
    keys = sorted({tuple(name.split("/")[:2]) for name in results if name.split("/")[1] in labels})
    lines = [
        [task, labels[strategy]]
        + [cell(results[f"{task}/{strategy}/{column}"], digits.get(column, 3)) for column in columns]
        for task, strategy in keys
    ]
    headers = ["task", "strategy", *(column.replace("_", " ") for column in columns)]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True) + "\n"


def cell(summary: Summary, digits: int = 3) -> str:
    """`mean (low-high)`, or a dash where nothing was measured."""
    if not summary["n"]:
        return "-"
    return f"{summary['mean']:.{digits}f} ({summary['low']:.{digits}f}-{summary['high']:.{digits}f})"
