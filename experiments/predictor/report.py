"""results.json, table.md and figure.png of the predictor experiment, from its raw metrics.

`TASK/STRATEGY/METRIC`: METRICS of one run, over seeds. `TASK/NAME/METRIC` for NAME in SHARES and DIFFERENCES: two
strategies on the same seeds. All have a 95 % interval over seeds where there are two or more. What cost.json and
bias.json beside them hold is part of results.json too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

from experiments import results as results_lib
from experiments.predictor import figure
from experiments.quickstart import report as quickstart

Rows = quickstart.Rows
Runs = dict[tuple[str, str], dict[int, Rows]]
Measure = Callable[[Rows], float | None]
WINDOW = 4  # steps of the moving mean whose extremes tell whether the success of active prompts drifts
COLUMNS = (
    "effective_ratio",
    "useful_groups_per_unit",
    "active_success",
    "active_success_lowest",
    "active_success_highest",
    "brier",
    "success_warm_start",
    "success_gain",
    "gain_per_100k_tokens",
    "gain_per_100k_tokens_with_warmup",
    "generated_tokens",
    "skipped_share",
)
DIGITS = {"generated_tokens": 0}
# A strategy as a share of another: TRACE of its upper and of its lower control.
SHARES = {"oracle_share": ("trace", "trace_oracle"), "shuffled_share": ("trace", "trace_shuffled")}
SHARE_METRICS = ("effective_ratio", "useful_groups_per_unit")
GAIN_SHARE = "oracle_share"  # also of the gain in success
# A strategy minus another.
DIFFERENCES = {f"over_{other}": ("trace", other) for other in ("grpo", "pcl", "treepo", "trace_paper")}
DIFFERENCE_METRICS = (
    "effective_ratio",
    "useful_groups_per_unit",
    "success_last",
    "success_gain",
    "gain_per_100k_tokens",
    "gain_per_100k_tokens_with_warmup",
)

# What predictor_report measures, by the name in results.json.
FRESH = {
    "brier": "root/brier",
    "brier_of_class_rates": "root/brier_class",
    "brier_of_true_rates": "root/brier_perfect",
    "spearman": "root/spearman",
    "effective_ratio_share_of_oracle": "root/effective_ratio_share_of_oracle",
    "effective_ratio_share_of_shuffled": "root/effective_ratio_share_of_shuffled",
    "groups_per_unit_share_of_oracle": "root/groups_per_unit_share_of_oracle",
    "groups_per_unit_share_of_shuffled": "root/groups_per_unit_share_of_shuffled",
    "anchor_brier": "anchor/brier",
    "anchor_brier_of_class_rates": "anchor/brier_class",
    "anchor_brier_of_true_rates": "anchor/brier_perfect",
    "anchor_flips_share_of_oracle": "anchor/flips_per_continuation_share_of_oracle",
    "anchor_flips_share_of_shuffled": "anchor/flips_per_continuation_share_of_shuffled",
}
COMPARED = tuple(name for name in DIFFERENCE_METRICS if name != "success_last")  # columns; the gain says the same
_NOTHING = results_lib.summarise([])


def write(raw: Path, folder: Path) -> None:
    """Reads raw/TASK-STRATEGY-SEED.jsonl and writes the three files into `folder`."""
    runs = quickstart.load(raw)
    results = {
        f"{task}/{strategy}/{metric}": results_lib.with_interval([measure(rows) for rows in seeds.values()])
        for (task, strategy), seeds in runs.items()
        for metric, measure in METRICS.items()
    }
    results |= comparisons(runs) | fresh(raw)
    (folder / "table.md").write_text(tables(results))
    results_lib.write(folder / "results.json", results | _beside(folder))
    figure.draw(runs, folder / "figure.png")


def _beside(folder: Path) -> dict[str, results_lib.Summary]:
    """What was measured without training runs; `write` rounds it again to the digits that it has."""
    paths = [folder / name for name in ("cost.json", "bias.json")]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    return {name: summary for document in found for name, summary in document.items()}


def fresh(raw: Path) -> dict[str, results_lib.Summary]:
    """`TASK/trace/fresh_NAME`: the last predictor of each run on prompts that no run has seen, over seeds."""
    found: dict[str, list[float]] = {}
    for path in sorted(raw.glob("*-trace-*.predictor.json")):
        task, document = path.name.split("-")[0], json.loads(path.read_text())
        for name, key in FRESH.items():
            found.setdefault(f"{task}/trace/fresh_{name}", []).append(document[key])
    return {name: results_lib.with_interval(values) for name, values in found.items()}


def success_gain(rows: Rows) -> float:
    """Held-out success after the last step minus that of the warm-started policy."""
    return quickstart.METRICS["success_last"](rows) - quickstart.METRICS["success_warm_start"](rows)


def gain_per_token(*, warmup: bool) -> Measure:
    """The gain in held-out success per 100,000 tokens that the budget bought; `warmup`: and the predictor's warm-up.

    What the oracle generates for its own measurements counts in neither.
    """

    def measure(rows: Rows) -> float:
        tokens = quickstart.METRICS["generated_tokens"](rows)
        return 1e5 * success_gain(rows) / (tokens + warmup * quickstart.METRICS["warmup_tokens"](rows))

    return measure


def _active(rows: Rows) -> list[float]:
    return [row["rollout/success"] for row in rows if row.get("rollout/success") is not None]


def _half(second: bool) -> Measure:
    """Mean success of the prompts that were rolled out, over the first or the second half of the steps."""

    def measure(rows: Rows) -> float | None:
        values = _active(rows)
        part = values[len(values) // 2 :] if second else values[: len(values) // 2]
        return sum(part) / len(part) if part else None

    return measure


def _extreme(choose: Callable[[list[float]], float]) -> Measure:
    """The least or greatest mean of WINDOW consecutive steps; of a shorter run the mean of all."""

    def measure(rows: Rows) -> float | None:
        values = _active(rows)
        size = min(WINDOW, len(values))
        return choose([sum(values[i : i + size]) / size for i in range(len(values) - size + 1)]) if size else None

    return measure


def skipped_share(rows: Rows) -> float | None:
    """The share of the drawn prompts that got no rollout, mean over steps."""
    steps = [row for row in rows if "rollout/skipped_prompts" in row]
    pools = [(row["rollout/skipped_prompts"], row["rollout/active_prompts"]) for row in steps]
    shares = [skipped / (skipped + active) for skipped, active in pools]
    return sum(shares) / len(shares) if shares else None


METRICS: dict[str, Measure] = quickstart.METRICS | {
    "success_gain": success_gain,
    "gain_per_100k_tokens": gain_per_token(warmup=False),
    "gain_per_100k_tokens_with_warmup": gain_per_token(warmup=True),
    "active_success_first_half": _half(second=False),
    "active_success_second_half": _half(second=True),
    "active_success_lowest": _extreme(min),
    "active_success_highest": _extreme(max),
    "skipped_share": skipped_share,
}


def comparisons(runs: Runs) -> dict[str, results_lib.Summary]:
    """Shares and differences on common seeds.

    A share of an effective ratio or of useful groups is the mean over seeds of each seed's own share. A single seed's
    gain may be next to nothing, so the share of the gain is the ratio of the means, with Fieller's interval
    (`results.ratio_of_means`): unlike a bootstrap's over eight seeds it is exact for normal gains, and it says so
    where the oracle's gain itself is not told from none.
    """
    found = {}
    for task in sorted({task for task, _ in runs}):
        for name, (one, other) in SHARES.items():
            for metric in SHARE_METRICS:
                pairs = _paired(runs, task, one, other, metric)
                if pairs:
                    found[f"{task}/{name}/{metric}"] = results_lib.with_interval([a / b for a, b in pairs if b])
        gains = _paired(runs, task, *SHARES[GAIN_SHARE], "success_gain")
        if gains:
            found[f"{task}/{GAIN_SHARE}/success_gain"] = results_lib.ratio_of_means(*zip(*gains, strict=True))
        for name, (one, other) in DIFFERENCES.items():
            for metric in DIFFERENCE_METRICS:
                pairs = _paired(runs, task, one, other, metric)
                if pairs:
                    found[f"{task}/{name}/{metric}"] = results_lib.with_interval([a - b for a, b in pairs])
    return found


def _paired(runs: Runs, task: str, one: str, other: str, metric: str) -> list[tuple[float, float]]:
    """The metric of both strategies on each seed that both have."""
    left, right, measure = runs.get((task, one), {}), runs.get((task, other), {}), METRICS[metric]
    return [(measure(left[seed]), measure(right[seed])) for seed in sorted(set(left) & set(right))]


def tables(results: dict[str, results_lib.Summary]) -> str:
    """Markdown: a row per task and strategy; a row per task and comparison; a row for each measure of the last predictor.

    Mean and 95 % interval over seeds.
    """
    strategies = results_lib.table(results, figure.LABELS, COLUMNS, DIGITS, results_lib.interval_cell)
    compared = {name: (pair, "as a share of") for name, pair in SHARES.items()}
    compared |= {name: (pair, "minus") for name, pair in DIFFERENCES.items()}
    lines = []
    for task in sorted({name.split("/")[0] for name in results}):
        for name, ((one, other), word) in compared.items():
            found = [results.get(f"{task}/{name}/{metric}", _NOTHING) for metric in COMPARED]
            if any(summary["n"] for summary in found):
                title = f"{figure.LABELS[one]} {word} {figure.LABELS[other]}"
                lines.append([task, title, *map(results_lib.interval_cell, found)])
    headers = ["task", "compared", *(metric.replace("_", " ") for metric in COMPARED)]
    compared = tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
    return f"{strategies}\n{compared}\n{_fresh_table(results)}"


def _fresh_table(results: dict[str, results_lib.Summary]) -> str:
    """The predictors on prompts that no run has seen, a column per task; nothing where none was measured."""
    tasks = sorted({name.split("/")[0] for name in results if "/trace/fresh_" in name})
    cells = lambda name: [results_lib.interval_cell(results[f"{task}/trace/fresh_{name}"]) for task in tasks]
    lines = [[name.replace("_", " "), *cells(name)] for name in FRESH] if tasks else []
    headers = ["predictor of TRACE after its last step", *tasks]
    return f"\n{tabulate(lines, headers=headers, tablefmt='github', disable_numparse=True)}\n" if tasks else ""
