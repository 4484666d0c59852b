"""The figure of a predictor's report: its calibration, what the allocator buys with it, and the run's curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.eval.predictor_measures import ALLOCATIONS, DEEPEST, PREFIX_MEASURE, ROOT_MEASURES, Scored
from trace_jax.objectives import calibration

BAND = (0.3, 0.7)  # success rates at which a prompt's rollouts are likely to have contrast
_COLORS = dict(zip(ALLOCATIONS, ("tab:gray", "tab:orange", "tab:blue", "tab:green"), strict=True))
_DEPTH_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


def check_library() -> None:
    """Raises ValueError, one line, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("the figure needs matplotlib; pip install 'trace_jax[plots]'") from error


def draw(
    path: Path,
    title: str,
    figures: Mapping[str, float],
    roots: Scored,
    anchors: Scored,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Writes a PNG of nine panels.

    Args:
      path: of the file.
      title: what the figure is of.
      figures: flat names, as in report.json.
      roots, anchors: what the reliability diagrams show; anchors may be none.
      rows: the run's metrics, one a step.

    Raises ValueError as `check_library`.
    """
    check_library()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, grid = plt.subplots(3, 3, figsize=(15, 12.5), layout="constrained")
    fig.suptitle(title)
    _reliability(grid[0, 0], "reliability of prompts' scores", roots)
    _reliability(grid[0, 1], "reliability of anchors' scores", anchors)
    _bars(grid[0, 2], figures)
    _depths(grid[1, 0], figures)
    _success(grid[1, 1], rows)
    names = {"rollout/effective_ratio": "effective ratio", "rollout/useful_groups_per_unit": "useful groups per unit"}
    _curves(grid[1, 2], "what the budget bought", rows, names)
    grid[1, 2].set_ylim(bottom=0)
    names = {"spearman_prompt": "Spearman, prompts", "spearman_prefix": "Spearman, prefixes"}
    names = {f"predictor/{k}": v for k, v in (names | {"brier": "Brier", "ece": "ECE"}).items()}
    _curves(grid[2, 0], "scores of the run's own steps", rows, names)
    for axis, kind, what in ((grid[2, 1], "bias", "mean score - mean outcome"), (grid[2, 2], "mse", "squared error")):
        names = {f"predictor/{kind}_depth_{d}": _depth_label(d) for d in range(DEEPEST + 1)}
        _curves(axis, f"{what} by depth", rows, names)
    grid[2, 1].axhline(0, color="black", linewidth=0.8)
    fig.savefig(path, dpi=100, format="png")
    plt.close(fig)


def _reliability(axis: Any, title: str, items: Scored) -> None:
    """Measured against predicted rate in ten bins of scores; bars: how many items; whiskers: at most one error."""
    axis.set(title=f"{title} ({items.size})", xlabel="score", ylabel="measured success")
    axis.set(xlim=(0, 1), ylim=(-0.02, 1.02))
    axis.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    if not items.size:
        return _say(axis, "no anchors")
    score, rate, count = calibration.reliability(items.probability, items.measured.rate)
    share = count / count.sum()
    edges = np.arange(count.size) / count.size
    axis.bar(edges, share, width=1 / count.size, align="edge", color="tab:gray", alpha=0.25, label="share of items")
    there = count > 0
    error = np.sqrt(rate[there] * (1 - rate[there]) / count[there])
    axis.errorbar(score[there], rate[there], yerr=error, fmt="o-", color="tab:blue", capsize=2, label="learned")
    axis.legend(frameon=False, loc="upper left", fontsize="small")


def _bars(axis: Any, figures: Mapping[str, float]) -> None:
    """A cluster for each measure, a bar for each allocation; above the learned one: its share of the oracle's."""
    measures = [("root", name) for name in ROOT_MEASURES] + [("anchor", PREFIX_MEASURE)]
    width = 0.8 / len(ALLOCATIONS)
    for i, name in enumerate(ALLOCATIONS):
        heights = [figures.get(f"{place}/{measure}_{name}", np.nan) for place, measure in measures]
        bars = axis.bar(np.arange(len(measures)) + (i - 1.5) * width, heights, width, color=_COLORS[name], label=name)
        axis.bar_label(bars, [f"{h:.2f}" if np.isfinite(h) else "" for h in heights], fontsize="x-small", padding=1)
    labels = []
    for place, measure in measures:
        share = figures.get(f"{place}/{measure}_share_of_oracle", np.nan)
        said = f"\n{share:.0%} of oracle" if np.isfinite(share) else ""
        labels.append(measure.replace("_", " ").replace(" per ", "\nper ") + said)
    axis.set_xticks(range(len(measures)), labels, fontsize="small")
    count = figures.get("uniform_rollouts")
    said = f" (uniform: {count:.0f} each)" if count else ""
    axis.set(title=f"what the allocator buys{said}", ylim=(0, 1.15))
    axis.legend(frameon=False, ncols=4, loc="upper center", fontsize="small")


def _depths(axis: Any, figures: Mapping[str, float]) -> None:
    """Brier scores by depth: the class's rate, the learned score, the true rate."""
    depths = [d for d in range(DEEPEST + 1) if f"depth_{d}/brier" in figures]
    kinds = (("_class", "class rates", "gray"), ("", "learned", "blue"), ("_perfect", "true rates", "green"))
    for i, (name, label, color) in enumerate(kinds):
        heights = [figures[f"depth_{d}/brier{name}"] for d in depths]
        bars = axis.bar(np.arange(len(depths)) + (i - 1) * 0.27, heights, 0.27, color=f"tab:{color}", label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize="x-small", padding=1)
    axis.set_xticks(range(len(depths)), [f"{_depth_label(d)}\n({figures[f'depth_{d}/items']:.0f})" for d in depths])
    axis.axhline(0.25, color="black", linewidth=0.8, linestyle=":")  # of a constant 1/2
    axis.set(title="Brier by depth (lower is better; dotted: a constant 1/2)")
    axis.margins(y=0.15)
    axis.legend(frameon=False, ncols=3, loc="upper center", fontsize="small")


def _success(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    axis.axhspan(*BAND, color="tab:green", alpha=0.12, label=f"{BAND[0]}-{BAND[1]}")
    _curves(axis, "success of active prompts", rows, {"rollout/success": "bare rollouts"})
    axis.set_ylim(0, 1)


def _curves(axis: Any, title: str, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> None:
    """A line for each metric that the run has; dots where it has few steps."""
    drawn = False
    for (name, label), color in zip(names.items(), _DEPTH_COLORS, strict=False):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            drawn = True
            style = "o-" if len(points) < 12 else "-"
            axis.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=3)
    axis.set(title=title, xlabel="step")
    axis.grid(alpha=0.3)
    if not drawn:
        return _say(axis, "not in metrics.jsonl")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(framealpha=0.6, fontsize="small")


def _depth_label(depth: int) -> str:
    return "prompts" if depth == 0 else f"{depth}{'+' if depth == DEEPEST else ''} turn{'s' if depth > 1 else ''}"


def _say(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color="tab:gray")
