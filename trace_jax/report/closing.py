"""What a finished run says of itself: a table of before and after, what it cost, what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.report.console import closing_table

Row = Mapping[str, Any]  # metrics of one step, as in metrics.jsonl


def summary(rows: Sequence[Row], evaluation: str) -> str:
    """Held-out success before and after, in all and by difficulty class; effective ratio early and late; the cost.

    Args:
      rows: metrics of all steps, step 0 first.
      evaluation: what the success was measured on, e.g. "512 prompts x 4".

    Returns "" for a run that took no step or was never evaluated.
    """
    evaluated = [row for row in rows if "eval/success" in row]
    steps = [row for row in rows if "rollout/success" in row]
    if not steps or not evaluated:
        return ""
    first, last = evaluated[0], evaluated[-1]
    table = [(f"held-out success ({evaluation})", _success(first), _success(last))]
    for name in sorted(name for name in first if name.startswith("eval/success_")):
        group = name.removeprefix("eval/success_")
        table.append((f"  difficulty {group}", f"{first[name]:.3f}", f"{last.get(name, float('nan')):.3f}"))
    third = max(len(steps) // 3, 1)
    ratio = [_mean("rollout/effective_ratio", part) for part in (steps[:third], steps[-third:])]
    table.append((f"effective ratio (first and last {third} steps)", *(f"{value:.2f}" for value in ratio)))
    return f"{closing_table(table)}\n\n{_cost(steps)}"


def _success(row: Row) -> str:
    error = row["eval/standard_error"]
    return f"{row['eval/success']:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _cost(steps: Sequence[Row]) -> str:
    total = lambda name: sum(row[name] for row in steps)
    generated, seconds = total("rollout/generated_tokens"), total("time/step")
    cached, prefilled = total("rollout/cached_tokens"), total("rollout/prefilled_tokens")
    return (
        f"{len(steps)} steps in {seconds:.0f} s: {total('rollout/budget_units'):,.0f} budget units, "
        f"{generated:,} tokens generated,\n"
        f"{cached / max(cached + prefilled, 1):.0%} of the histories' tokens served from the prefix cache"
    )


def _mean(name: str, rows: Sequence[Row]) -> float:
    return sum(row[name] for row in rows) / len(rows)
