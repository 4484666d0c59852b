"""The figure: a real rollout tree of each family, and calls and forks of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Tree = Mapping[str, Any]  # as trees.describe
_KINDS = {  # what a node is: colour, marker, label
    "prompt": ("black", "s", "prompt"),
    "call": ("tab:blue", "o", "turn with a call"),
    "other": ("tab:purple", "o", "turn without one"),
    "right": ("tab:green", "D", "end: success"),
    "wrong": ("tab:red", "X", "end: no success"),
}
_TITLES = {"math": "math: python", "multihop_qa": "multi-hop QA: search", "bfcl": "BFCL: functions"}
_ENGINES = {"local": ("", "in process"), "sglang": ("///", "SGLang server")}
_COUNTS = {"tool_calls": ("tab:blue", "calls"), "continuations": ("tab:orange", "forks")}
_BAR = 0.2  # of the distance between two steps


def draw(runs: Mapping[tuple[str, str], list[dict]], trees: Mapping[str, Sequence[Tree]], path: Path) -> None:
    """Writes the figure; a family that was not run has empty axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, grid = plt.subplots(2, len(_TITLES), figsize=(15, 7.5), height_ratios=(2, 1), squeeze=False)
    for (task, title), above, below in zip(_TITLES.items(), *grid, strict=True):
        if trees.get(task):
            tree = richest(trees[task])
            _draw_tree(above, tree)
            title += f"\n{sum(s == 'CONTINUATION' for s in leaf_stages(tree))} forks of a prompt's first step"
        above.set_title(title)
        above.set_axis_off()
        bars = [(engine, name) for engine in _ENGINES for name in _COUNTS]
        for place, (engine, name) in enumerate(bars):
            steps = [row for row in runs.get((task, engine), []) if row["step"] > 0]
            (hatch, where), (color, what) = _ENGINES[engine], _COUNTS[name]
            x = [row["step"] + (place - 1.5) * _BAR for row in steps]
            y = [row[f"rollout/{name}"] for row in steps]
            below.bar(x, y, _BAR, color=color, hatch=hatch, edgecolor="white", label=f"{what}, {where}")
        below.set(xlabel="step", xticks=(1, 2, 3), xlim=(0.5, 3.5))
        below.grid(axis="y", alpha=0.3)
    handles = [
        plt.Line2D([], [], color=color, marker=marker, linestyle="", label=label)
        for color, marker, label in _KINDS.values()
    ] + [plt.Line2D([], [], color=color, label=label) for label, color in (("rollout", "gray"), ("fork", "tab:orange"))]
    fig.legend(handles=handles, loc="upper center", ncol=len(handles), frameon=False)
    fig.legend(*grid[1][0].get_legend_handles_labels(), loc="lower center", ncol=len(_ENGINES) * 2, frameon=False)
    fig.tight_layout(rect=(0, 0.05, 1, 0.95))
    fig.savefig(path, dpi=110)
    plt.close(fig)


def richest(trees: Sequence[Tree]) -> Tree:
    """The tree that shows most: leaves that differ in success, then forks, then nodes."""

    def score(tree: Tree) -> tuple[int, int, int]:
        ends = {s for s in tree["success"] if s is not None}
        return len(ends), sum(s == "CONTINUATION" for s in leaf_stages(tree)), len(tree["parent"])

    return max(trees, key=score)


def leaf_stages(tree: Tree) -> list[str]:
    """The stage of each leaf."""
    return [stage for stage, success in zip(tree["stage"], tree["success"]) if success is not None]


def layout(parent: Sequence[int]) -> list[tuple[float, float]]:
    """(depth, height) of each node: leaves on whole numbers in depth-first order, others between their children."""
    children: list[list[int]] = [[] for _ in parent]
    for node, above in enumerate(parent):
        if above >= 0:
            children[above].append(node)
    depth, order, stack = [0] * len(parent), [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += reversed(children[node])
        for child in children[node]:
            depth[child] = depth[node] + 1
    height, leaves = [0.0] * len(parent), 0
    for node in order:
        if not children[node]:
            height[node], leaves = float(leaves), leaves + 1
    for node in reversed(order):
        if children[node]:
            height[node] = sum(height[child] for child in children[node]) / len(children[node])
    return list(zip(map(float, depth), height))


def _draw_tree(axis: Any, tree: Tree) -> None:
    places = layout(tree["parent"])
    for node, above in enumerate(tree["parent"]):
        if above >= 0:
            fork = tree["stage"][node] == "CONTINUATION"
            x, y = zip(places[above], places[node])
            axis.plot(x, y, color="tab:orange" if fork else "gray", linewidth=1.4, zorder=1)
    for kind, (color, marker, _) in _KINDS.items():
        shown = [place for node, place in enumerate(places) if _kind(tree, node) == kind]
        if shown:
            axis.scatter(*zip(*shown), color=color, marker=marker, s=60, zorder=2)
    axis.invert_yaxis()


def _kind(tree: Tree, node: int) -> str:
    if node == 0:
        return "prompt"
    if tree["success"][node] is not None:
        return "right" if tree["success"][node] else "wrong"
    return "call" if tree["call"][node] else "other"
