"""results.json, table.md and figure.png of the quickstart experiment, from its raw metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments import results as results_lib
from trace_jax.train.metrics import read_jsonl

Rows = list[dict]
LABELS = {"grpo": "GRPO", "trace": "TRACE", "trace_oracle": "TRACE, oracle"}
COLUMNS = (
    "effective_ratio",
    "useful_groups_per_unit",
    "success_warm_start",
    "success_last",
    "success_best",
    "generated_tokens",
    "seconds",
)


def write(raw: Path, folder: Path) -> None:
    """Reads raw/TASK-STRATEGY-SEED.jsonl and writes the three files into `folder`."""
    runs = load(raw)
    results = {
        f"{task}/{strategy}/{metric}": results_lib.summarise([measure(rows) for rows in seeds.values()])
        for (task, strategy), seeds in runs.items()
        for metric, measure in METRICS.items()
    }
    results |= _ratios(runs)
    results_lib.write(folder / "results.json", results)
    (folder / "table.md").write_text(table(results))
    figure(runs, folder / "figure.png")


def load(raw: Path) -> dict[tuple[str, str], dict[int, Rows]]:
    """Metrics by (task, strategy) and seed."""
    runs: dict[tuple[str, str], dict[int, Rows]] = {}
    for path in sorted(raw.glob("*.jsonl")):
        task, strategy, seed = path.stem.split("-")
        runs.setdefault((task, strategy), {})[int(seed)] = read_jsonl(path)
    return runs


def _mean(name: str) -> Callable[[Rows], float | None]:
    def measure(rows: Rows) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    return measure


def _total(name: str) -> Callable[[Rows], float]:
    return lambda rows: sum(row.get(name) or 0 for row in rows)


def _evaluations(rows: Rows) -> list[float]:
    return [row["eval/success"] for row in rows if "eval/success" in row]


METRICS: dict[str, Callable[[Rows], float | None]] = {
    "effective_ratio": _mean("rollout/effective_ratio"),
    "useful_groups_per_unit": _mean("rollout/useful_groups_per_unit"),
    "active_success": _mean("rollout/success"),
    "success_warm_start": lambda rows: _evaluations(rows)[0],
    "success_last": lambda rows: _evaluations(rows)[-1],
    "success_best": lambda rows: max(_evaluations(rows)),
    "generated_tokens": _total("rollout/generated_tokens"),
    "prefilled_tokens": _total("rollout/prefilled_tokens"),
    "cached_tokens": _total("rollout/cached_tokens"),
    "tool_calls": _total("rollout/tool_calls"),
    "oracle_tokens": _total("rollout/oracle_tokens"),
    "warmup_tokens": _total("predictor/warmup_tokens"),
    "seconds": _total("time/step"),
    "spearman_prompt": _mean("predictor/spearman_prompt"),
    "spearman_prefix": _mean("predictor/spearman_prefix"),
    "brier": _mean("predictor/brier"),
    "kl_after": _mean("train/kl_after"),
    "update_norm": _mean("train/update_norm"),
}


def _ratios(runs: dict[tuple[str, str], dict[int, Rows]]) -> dict[str, results_lib.Summary]:
    """Effective ratio over GRPO's, paired by seed."""
    ratios = {}
    measure = METRICS["effective_ratio"]
    for (task, strategy), seeds in runs.items():
        base = runs.get((task, "grpo"), {})
        if strategy != "grpo" and base:
            pairs = [measure(rows) / measure(base[seed]) for seed, rows in seeds.items() if seed in base]
            ratios[f"{task}/{strategy}/effective_ratio_over_grpo"] = results_lib.summarise(pairs)
    return ratios


def table(results: dict[str, results_lib.Summary]) -> str:
    """Markdown: one row per task and strategy."""
    return results_lib.table(results, LABELS, COLUMNS, {"generated_tokens": 0, "seconds": 0})


def figure(runs: dict[tuple[str, str], dict[int, Rows]], path: Path) -> None:
    """A row per task: effective ratio per step; held-out success per step, per token and per second. Bands: seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = sorted({task for task, _ in runs})
    fig, grid = plt.subplots(len(tasks), 4, figsize=(17, 3.6 * len(tasks)), squeeze=False)
    for row, task in zip(grid, tasks, strict=True):
        for color, (strategy, label) in zip(("tab:gray", "tab:blue", "tab:green"), LABELS.items(), strict=True):
            seeds = list(runs.get((task, strategy), {}).values())
            if seeds:
                _draw(row, seeds, label, color)
        titles = ("effective ratio", "held-out success", "held-out success", "held-out success")
        for axis, title, unit in zip(row, titles, ("step", "step", "thousand generated tokens", "seconds of steps")):
            axis.set(title=f"{task}: {title}", xlabel=unit)
            axis.grid(alpha=0.3)
        row[0].set_ylim(0, 1.12)
        row[0].legend(frameon=False, loc="upper center", ncols=3, fontsize="small")
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _draw(row, seeds: list[Rows], label: str, color: str) -> None:
    steps = [r["step"] for r in seeds[0] if "rollout/effective_ratio" in r]
    _band(row[0], [steps] * len(seeds), [_series(rows, "rollout/effective_ratio") for rows in seeds], label, color)
    success = [_evaluations(rows) for rows in seeds]
    axes = (
        lambda rows: [r["step"] for r in rows if "eval/success" in r],
        lambda rows: _cumulative(rows, "rollout/generated_tokens", 1e-3),
        lambda rows: _cumulative(rows, "time/step", 1.0),
    )
    for axis, x in zip(row[1:], axes, strict=True):
        _band(axis, [x(rows) for rows in seeds], success, label, color)


def _series(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _cumulative(rows: Rows, name: str, scale: float) -> list[float]:
    """The running total of `name` at each evaluation."""
    total, out = 0.0, []
    for row in rows:
        total += row.get(name) or 0
        if "eval/success" in row:
            out.append(total * scale)
    return out


def _band(axis, x: list[list[float]], y: list[list[float]], label: str, color: str) -> None:
    """Mean line over seeds with a band from the least to the greatest; x positions are averaged over seeds."""
    columns = lambda values: list(zip(*values, strict=True))
    middle = [sum(c) / len(c) for c in columns(x)]
    axis.plot(middle, [sum(c) / len(c) for c in columns(y)], color=color, label=label)
    axis.fill_between(middle, [min(c) for c in columns(y)], [max(c) for c in columns(y)], color=color, alpha=0.18)
