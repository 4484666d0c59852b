"""The terminal during and after a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from tabulate import tabulate
from tqdm import tqdm


class Bar:
    """A progress bar with time left; on something that is no terminal it prints a line every few seconds."""

    def __init__(self, label: str, total: float, unit: str, initial: float = 0):
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=label,
            unit=unit,
            file=sys.stderr,
            mininterval=0.2 if sys.stderr.isatty() else 10,
            dynamic_ncols=True,
            bar_format="{desc} {percentage:3.0f}%|{bar:16}| {n:.0f}/{total:.0f} [{elapsed}<{remaining}{postfix}]",
        )
        self._shown = 0.0

    def to(self, done: float, **notes: str) -> None:
        """Moves to `done` of the total and shows `notes` behind the bar."""
        if notes:
            self._bar.set_postfix_str(", ".join(f"{k} {v}" for k, v in notes.items()), refresh=False)
        self._bar.n = done
        now = time.monotonic()
        if now - self._shown >= self._bar.mininterval:
            self._bar.refresh()
            self._shown = now

    def say(self, line: str) -> None:
        """Shows a line above the bar, which stays."""
        self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Draws the last state and leaves it on the screen."""
        self._bar.refresh()
        self._bar.close()


def step_notes(metrics: Mapping[str, float]) -> dict[str, str]:
    """What the training bar shows of the last step."""
    seconds = max(metrics["time/rollout"] + metrics["time/score"], 1e-9)
    return {
        "effective": f"{metrics['rollout/effective_ratio']:.2f}",
        "success": f"{metrics['rollout/success']:.2f}",
        "tok/s": f"{metrics['rollout/generated_tokens'] / seconds:,.0f}",
    }


class DriftAlarm:
    """Notices once in a run that sampler and trainer no longer agree on log-probs (the rule and its limit are ours)."""

    def __init__(self, limit: float):
        """`limit`: the largest harmless mean |trainer - sampler| of a step's trained tokens, in nats."""
        self._limit, self._raised = limit, False

    def check(self, metrics: Mapping[str, float]) -> str | None:
        """The warning for a step with these metrics, one line; None if all is well or it was given before."""
        gap = metrics.get("train/logprob_gap_mean", 0.0)  # a step without trained tokens has none
        if self._raised or gap <= self._limit:
            return None
        self._raised = True
        return (
            f"warning: train/logprob_gap_mean is {gap:.3g} nats, above config.loss.max_logprob_gap {self._limit:g}: "
            "sampler and trainer disagree on log-probs (stale weights, another precision, another temperature?)"
        )


def closing_table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Three columns: what, before, after."""
    return tabulate(rows, headers=("", "before", "after"), tablefmt="simple", disable_numparse=True)
