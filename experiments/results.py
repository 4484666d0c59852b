"""What every experiment does with raw metrics: summarise seeds, keep results.json, write a table.

`results.json` is one flat object, `name: {"mean", "low", "high", "n"}`: mean, least and greatest over n seeds. Where an
experiment asks for it there are `ci_low` and `ci_high` beside them, a 95 % interval of the mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats
from tabulate import tabulate

Summary = dict[str, float | int | None]
CONFIDENCE = 0.95


def summarise(values: Sequence[float | None]) -> Summary:
    """Mean, least and greatest of the values that are there, and how many they are; None where there is none."""
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not known:
        return {"mean": None, "low": None, "high": None, "n": 0}
    return {"mean": sum(known) / len(known), "low": min(known), "high": max(known), "n": len(known)}


def with_interval(values: Sequence[float | None]) -> Summary:
    """`summarise`; of two values or more also Student's 95 % interval of the mean as `ci_low` and `ci_high`:
    `mean -+ t(0.975, n - 1) s / sqrt(n)`, s with ddof 1."""
    summary = summarise(values)
    if summary["n"] < 2:
        return summary
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    half = _quantile(len(known)) * float(np.std(known, ddof=1)) / math.sqrt(len(known))
    return summary | {"ci_low": summary["mean"] - half, "ci_high": summary["mean"] + half}


def ratio_of_means(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Mean of the numerators over the mean of the denominators, n >= 1 pairs, with Fieller's 95 % interval.

    For pairs whose denominators may be near 0 one by one, where a mean of ratios says nothing. `low` and `high` are the
    least and the greatest ratio of means with one pair left out (of one pair: its ratio). The interval holds every r
    for which the mean of `numerator - r denominator` is no further from 0 than t(0.975, n - 1) standard errors. Where
    the denominators' mean is itself that near to 0 such r have no bounds, and `ci_low` and `ci_high` are None. Where
    it is 0 there is no ratio, as of no values.
    """
    pairs = np.array([numerators, denominators], np.float64)
    n = pairs.shape[1]
    ratio = lambda kept: float(kept[0].sum() / kept[1].sum()) if kept[1].sum() else None
    mean = ratio(pairs)
    if mean is None:
        return summarise([])
    if n == 1:
        return summarise([mean])
    left_out = summarise([ratio(np.delete(pairs, i, axis=1)) for i in range(n)])
    summary = left_out | {"mean": mean, "n": n}
    (var_a, cov), (_, var_b) = np.cov(pairs) * _quantile(n) ** 2 / n
    a, b = pairs.mean(axis=1)
    if b**2 <= var_b:
        return summary | {"ci_low": None, "ci_high": None}
    # (a - r b)^2 = var_a - 2 r cov + r^2 var_b, a quadratic equation in r
    middle, width = a * b - cov, math.sqrt(max((a * b - cov) ** 2 - (a**2 - var_a) * (b**2 - var_b), 0.0))
    ends = ((middle - width) / (b**2 - var_b), (middle + width) / (b**2 - var_b))
    return summary | {"ci_low": float(ends[0]), "ci_high": float(ends[1])}


def _quantile(n: int) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))


def write(path: Path, results: Mapping[str, Summary]) -> None:
    """Writes results.json, names sorted, numbers to 6 significant digits."""
    rounded = {
        name: {key: value if value is None or key == "n" else float(f"{value:.6g}") for key, value in summary.items()}
        for name, summary in sorted(results.items())
    }
    path.write_text(json.dumps(rounded, indent=1) + "\n")


def table(
    results: Mapping[str, Summary],
    labels: Mapping[str, str],
    columns: Sequence[str],
    digits: Mapping[str, int],
    show: Callable[[Summary, int], str] | None = None,
) -> str:
    """Markdown: one row per task and strategy of TASK/STRATEGY/METRIC, `mean (least-greatest)` over seeds, or as `show`
    writes a summary."""
    show = show or cell
    keys = sorted({tuple(name.split("/")[:2]) for name in results if name.split("/")[1] in labels})
    lines = [
        [task, labels[strategy]]
        + [show(results[f"{task}/{strategy}/{column}"], digits.get(column, 3)) for column in columns]
        for task, strategy in keys
    ]
    headers = ["task", "strategy", *(column.replace("_", " ") for column in columns)]
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True) + "\n"


def cell(summary: Summary, digits: int = 3) -> str:
    """`mean (low-high)`, or a dash where nothing was measured."""
    if not summary["n"]:
        return "-"
    return f"{summary['mean']:.{digits}f} ({summary['low']:.{digits}f}-{summary['high']:.{digits}f})"


def interval_cell(summary: Summary, digits: int = 3) -> str:
    """`mean [ci_low, ci_high]`; without brackets for a single value, with a word where the interval has no bounds."""
    if not summary["n"]:
        return "-"
    mean = f"{summary['mean']:.{digits}f}"
    if "ci_low" not in summary:
        return mean
    if summary["ci_low"] is None:
        return f"{mean} [unbounded]"
    return f"{mean} [{summary['ci_low']:.{digits}f}, {summary['ci_high']:.{digits}f}]"
