"""The figure of what the predictor's forms cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.results import Summary

GOAL = 0.03  # of a step


def draw(
    results: Mapping[str, Summary],
    path: Path,
    forms: Sequence[str],
    models: Sequence[str],
    lengths: Sequence[int],
    *,
    default: str,
) -> None:
    """Bars: scoring and update as a share of a step, medians, with the least and greatest share; for the default form
    also the share without what rollouts reuse. Lines: seconds and milliseconds per 1,000 tokens of scoring, and seconds
    of a fit, over the length of histories."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, (bars, *lines) = plt.subplots(1, 4, figsize=(19, 4.6), width_ratios=(1.5, 1, 1, 1))
    middle = lambda name: results[f"cost/{name}"]["median"]
    step = middle("step_seconds")
    left = [0.0] * len(forms)
    for part, color in (("score", "tab:blue"), ("update", "tab:orange")):
        widths = [100 * middle(f"{form}/{part}_seconds") / step for form in forms]
        bars.barh(forms, widths, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for form in forms:
        share = results[f"cost/{form}/share_of_step"]
        bars.plot([100 * share["low"], 100 * share["high"]], [form, form], color="black", linewidth=1)
    own = 100 * middle(f"{default}/share_not_reused")
    bars.plot(own, default, "kD", markersize=4, label="without prompts that were opened")
    bars.axvline(100 * GOAL, color="tab:red", linestyle="--", label=f"{100 * GOAL:.0f} %")
    bars.invert_yaxis()
    bars.set(xlabel="% of a step", title=f"scoring and update, of a step of {step:.2f} s")
    bars.set_xlim(right=1.7 * bars.get_xlim()[1])  # room for the legend
    bars.legend(loc="lower right", frameon=False)
    names = {
        "score_seconds": "seconds of scoring",
        "score_ms_per_1000_tokens": "ms of scoring per 1,000 tokens",
        "update_seconds": "seconds of a pass of the fit",
    }
    for axis, (measure, title) in zip(lines, names.items(), strict=True):
        for form in models:
            axis.plot(lengths, [middle(f"growth/{form}/tokens={n}/{measure}") for n in lengths], marker="o", label=form)
        axis.set(xlabel="tokens of a history", title=title, ylim=(0, None), xticks=lengths)
        axis.grid(alpha=0.3)
    lines[0].legend(frameon=False, fontsize="small")
    fig.tight_layout()
    fig.savefig(path, dpi=100)
    plt.close(fig)
