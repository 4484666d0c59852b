"""figure.png: success of both engines, the servers' prefill, hit rates of the two routings, and log-prob gaps."""

from __future__ import annotations

from pathlib import Path

from experiments.sglang_cpu.raw_files import Rows, read


def draw(raw: Path, path: Path) -> None:
    """Four panels; one stays empty where its part was not run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, ((success, tokens), (hits, gaps)) = plt.subplots(2, 2, figsize=(12, 8))
    _success(success, raw)
    _tokens(tokens, read(raw / "prefill.jsonl"))
    _hits(hits, read(raw / "cache.jsonl"))
    _gaps(gaps, read(raw / "logprobs.jsonl"))
    for axis in (success, tokens, hits, gaps):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize="small", loc="center" if axis is gaps else "best")
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _success(axis, raw: Path) -> None:
    axis.set(title="quickstart: held-out success", xlabel="step")
    for engine, label, color in (("local", "in process", "tab:gray"), ("sglang", "SGLang server", "tab:blue")):
        runs = [read(path) for path in sorted(raw.glob(f"quickstart-{engine}-*.jsonl"))]
        curves = [[(row["step"], row["eval/success"]) for row in rows if "eval/success" in row] for rows in runs]
        for curve in curves:
            axis.plot(*zip(*curve, strict=True), color=color, alpha=0.35, linewidth=1)
        if curves:
            steps = [step for step, _ in curves[0]]
            columns = list(zip(*([value for _, value in curve] for curve in curves), strict=True))
            axis.plot(steps, [sum(c) / len(c) for c in columns], color=color, marker="o", linewidth=2, label=label)


def _tokens(axis, rows: Rows) -> None:
    axis.set(title="history tokens of 256 units", ylabel="thousand tokens")
    cases = [(shape, reuse) for shape in ("flat", "tree") for reuse in (False, True)] if rows else []
    for place, (shape, reuse) in enumerate(cases):
        own = [row for row in rows if row["shape"] == shape and row["reuse"] is reuse]
        computed = [row["prefilled_tokens"] / 1000 for row in own]
        cached = sum(row["cached_tokens"] for row in own) / len(own) / 1000
        middle = sum(computed) / len(computed)
        spread = [[max(middle - min(computed), 0.0)], [max(max(computed) - middle, 0.0)]]  # rounding of the mean
        named = {"label": "computed"} if place == 0 else {}
        axis.bar(place, middle, yerr=spread, color="tab:blue", capsize=4, **named)
        named = {"label": "from the cache"} if place == 0 else {}
        axis.bar(place, cached, bottom=middle, color="tab:blue", alpha=0.25, **named)
    axis.set_xticks(range(len(cases)), [f"{shape}\n{'reuse' if reuse else 'no reuse'}" for shape, reuse in cases])


def _hits(axis, rows: Rows) -> None:
    axis.set(title="prefix tokens of forks from the cache, two servers", xlabel="step")
    for routing, color in (("sticky", "tab:blue"), ("random", "tab:orange")):
        own = [row for row in rows if row["routing"] == routing]
        axis.plot([r["step"] for r in own], [r["prefix_hit_rate"] for r in own], "o", color=color, label=routing)
    best = [(row["step"], 1 - row["forks"] / row["prefix_tokens"]) for row in rows if row["routing"] == "sticky"]
    if best:
        axis.plot(*zip(*best, strict=True), "_", color="black", markersize=14, label="attainable (n - 1 of n tokens)")
        axis.axhline(0.95, color="black", linestyle=":", linewidth=1)
        axis.set_xticks(sorted({row["step"] for row in rows}))
        axis.set_ylim(bottom=axis.get_ylim()[0] - 0.02)  # room for the legend


def _gaps(axis, rows: Rows) -> None:
    axis.set(title="|trainer - server|, greatest of a step (blue T = 1, orange T = 0.7)", xlabel="weight updates")
    axis.set(ylabel="nats", yscale="log")
    rows = [row for row in rows if "version" in row]
    named = (
        ("one_update_late_max_gap", "control: weights one update late", "x"),
        ("max_gap", "rollouts", "o"),
        ("cold_max_gap", "fixed histories, empty cache", "v"),
        ("warm_max_gap", "fixed histories, filled cache", "^"),
    )
    for name, label, marker in named if rows else ():
        axis.plot([], [], marker, color="black", fillstyle="none", label=label)
        for temperature, color in ((1.0, "tab:blue"), (0.7, "tab:orange")):
            own = [row for row in rows if row["temperature"] == temperature and name in row]
            versions, values = [row["version"] for row in own], [row[name] for row in own]
            axis.plot(versions, values, marker, color=color, markersize=5, fillstyle="none")
    if rows:
        axis.axhline(1e-4, color="black", linestyle=":", linewidth=1)
