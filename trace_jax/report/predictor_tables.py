"""The figures of a predictor's report as two short tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from trace_jax.eval.predictor_measures import ALLOCATIONS, DEEPEST, PREFIX_MEASURE, ROOT_MEASURES

_NONE = "-"
_ORACLE = "The oracle knows each item by half of the rollouts that measure it, so it errs too: a share may exceed 1."
_SCORES = ("items", "bias", "brier", "brier_class", "brier_constant", "brier_perfect", "ece", "spearman")
_TITLES = ("items", "bias", "Brier", "of class rates", "of a constant", "of true rates", "ECE", "Spearman")


def tables(figures: Mapping[str, float], *, markdown: bool = False) -> str:
    """What the allocator buys with each kind of scores, then how good the scores are, at roots, anchors, each depth.

    `figures`: flat names as `predictor_quality` writes them; what is not there, or NaN, shows "-".
    `markdown`: as Markdown; else for a terminal.
    """
    measures = [("root", name) for name in ROOT_MEASURES] + [("anchor", PREFIX_MEASURE)]
    gains = [[name, *(_cell(figures, f"{place}/{m}_{name}") for place, m in measures)] for name in ALLOCATIONS]
    for control in ("oracle", "shuffled"):
        shares = (_cell(figures, f"{place}/{m}_share_of_{control}") for place, m in measures)
        gains.append([f"learned / {control}", *shares])
    places = {"prompts": "root", "anchors": "anchor"}
    places |= {f"depth {d}{'+' if d == DEEPEST else ''}": f"depth_{d}" for d in range(1, DEEPEST + 1)}
    scores = [
        [label, *(_cell(figures, f"{place}/{name}") for name in _SCORES)]
        for label, place in places.items()
        if figures.get(f"{place}/items")
    ]
    titles = ["allocated by", *(m.replace("_", " ") for _, m in measures)]
    parts = [
        _render(f"What the allocator buys{_uniform(figures)}", titles, gains, markdown),
        _render("How good the scores are", ["", *_TITLES], scores, markdown),
        _ORACLE,
        *_plugged_in(figures),
    ]
    return "\n\n".join(parts)


def _plugged_in(figures: Mapping[str, float]) -> list[str]:
    """A line for each stage whose contrast is judged by fewer rollouts than are spent (`eval/regret.py`)."""
    stages = {"root": ("prompts", "--rollouts"), "anchor": ("anchors", "--continuations")}
    return [
        f"{share:.0%} of the chosen {items} get more rollouts than judge them, so contrast looks too rare; raise {flag}"
        for place, (items, flag) in stages.items()
        if (share := figures.get(f"{place}/plugged_in", 0.0)) > 0
    ]


def _uniform(figures: Mapping[str, float]) -> str:
    count = figures.get("uniform_rollouts")
    return f" (uniform: {count:.0f} rollouts of each prompt)" if count else ""


def _cell(figures: Mapping[str, float], name: str) -> str:
    value = figures.get(name, math.nan)
    if not math.isfinite(value):
        return _NONE
    return f"{value:.0f}" if name.endswith("/items") else f"{value:.3f}"


def _render(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    body = tabulate(rows, headers=header, tablefmt="pipe" if markdown else "simple", disable_numparse=True)
    return f"**{title}**\n\n{body}" if markdown else f"{title}\n{body}"
