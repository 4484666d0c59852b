"""The figure of the predictor experiment: a row a task, curves over steps and tokens, a line a strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments import results as results_lib

Rows = list[dict]
Runs = dict[tuple[str, str], dict[int, Rows]]
LABELS = {
    "grpo": "GRPO",
    "pcl": "PCL",
    "treepo": "TreePO",
    "trace": "TRACE",
    "trace_oracle": "TRACE, oracle",
    "trace_shuffled": "TRACE, shuffled",
    "trace_paper": "TRACE, paper's recipe",
}
# Colour and line of each strategy; the controls of TRACE are broken lines.
_STYLES = {
    "grpo": ("tab:gray", "-"),
    "pcl": ("tab:orange", "-"),
    "treepo": ("tab:purple", "-"),
    "trace": ("tab:blue", "-"),
    "trace_oracle": ("tab:green", "--"),
    "trace_shuffled": ("tab:red", "--"),
    "trace_paper": ("tab:brown", ":"),
}
BAND = (0.3, 0.7)  # where the success of active prompts is to stay
TOKENS = ("rollout/generated_tokens", "predictor/warmup_tokens")
_TITLES = (
    ("effective ratio", "step"),
    ("success of active prompts", "step"),
    ("held-out success", "step"),
    ("held-out success", "thousand generated tokens, warm-up included"),
)


def draw(runs: Runs, path: Path) -> None:
    """Effective ratio and success of active prompts per step, held-out success per step and per token. Lines are means
    over seeds, bands their 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = sorted({task for task, _ in runs}) or ["no runs yet"]
    fig, grid = plt.subplots(len(tasks), 4, figsize=(19, 4.1 * len(tasks) + 0.5), squeeze=False)
    for row, task in zip(grid, tasks, strict=True):
        for strategy, label in LABELS.items():
            seeds = list(runs.get((task, strategy), {}).values())
            if seeds:
                _strategy(row, seeds, label, _STYLES[strategy])
        for axis, (title, unit) in zip(row, _TITLES, strict=True):
            axis.set(title=f"{task}: {title}", xlabel=unit)
            axis.grid(alpha=0.3)
        row[1].axhspan(*BAND, color="tab:green", alpha=0.08, zorder=0)
        row[0].set_ylim(0, 1)
        row[1].set_ylim(0, 1)
    handles, labels = grid[0][0].get_legend_handles_labels()
    fig.tight_layout(rect=(0, 0, 1, 1 - 0.45 / fig.get_figheight()))
    if handles:
        fig.legend(handles, labels, loc="upper center", ncols=len(LABELS), frameon=False, fontsize=12)
    fig.savefig(path, dpi=100)
    plt.close(fig)


def _strategy(row, seeds: list[Rows], label: str, style: tuple[str, str]) -> None:
    """One line in each axis of a task's row."""
    steps = lambda rows, name: ([r["step"] for r in rows if name in r], [r[name] for r in rows if name in r])
    curves: tuple[Callable[[Rows], tuple[list, list]], ...] = (
        lambda rows: steps(rows, "rollout/effective_ratio"),
        lambda rows: steps(rows, "rollout/success"),
        lambda rows: steps(rows, "eval/success"),
        success_by_tokens,
    )
    for axis, curve in zip(row, curves, strict=True):
        _band(axis, [curve(rows) for rows in seeds], label, style)


def success_by_tokens(rows: Rows) -> tuple[list[float], list[float]]:
    """(thousand tokens generated so far, held-out success) at each evaluation; a warm-up comes before the first."""
    spent, x, y = 0.0, [], []
    for row in rows:
        spent += sum(row.get(name) or 0 for name in TOKENS)
        if "eval/success" in row:
            x.append(spent / 1000)
            y.append(row["eval/success"])
    return x, y


def _band(axis, curves: list[tuple[list, list]], label: str, style: tuple[str, str]) -> None:
    """Mean over seeds and its 95 % interval, where every seed has a number; positions are averaged over seeds."""
    xs, ys = zip(*curves, strict=True)
    places = [sum(x) / len(x) for x in zip(*xs, strict=True)]
    points = [results_lib.with_interval(y) for y in zip(*ys, strict=True)]
    kept = [(x, p) for x, p in zip(places, points, strict=True) if p["n"]]
    x, color = [x for x, _ in kept], style[0]
    axis.plot(x, [p["mean"] for _, p in kept], color=color, linestyle=style[1], label=label)
    bounds = [[p.get(name, p["mean"]) for _, p in kept] for name in ("ci_low", "ci_high")]
    axis.fill_between(x, *bounds, color=color, alpha=0.13, linewidth=0)
