"""Where a run's numbers go: a JSON-lines file always, TensorBoard and Weights & Biases if asked.

Names are flat (`rollout/success`); a step is one training step of the loop and is written once.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tensorboardX import SummaryWriter

Value = float | int | np.number | None


class Writer(Protocol):
    """One destination of metrics."""

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Takes all numbers of one step."""

    def close(self) -> None:
        """Flushes and lets go of files."""


class JsonlWriter:
    """One JSON object per step and line, flushed at once: {"step": 3, "rollout/success": 0.5, ...}.

    A number that is not finite is written as null (JSON has no NaN). On opening, lines of steps >= `resume_step` are
    cut off, because those steps run again, and so is a last line that was not finished.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int):
        """Opens `path` for appending. `resume_step` is the next step to be written: 0 starts the file anew.

        Raises ValueError if a line other than the last is not such an object.
        """
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_jsonl(self._path) if row["step"] < resume_step] if self._path.exists() else []
        self._last = resume_step - 1
        _replace(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends one line. Raises ValueError for a step not after the last one, or a value that is no number."""
        if step <= self._last:
            raise ValueError(
                f"metrics: step {step} after step {self._last} in {self._path}; a step is written once, in order"
            )
        row = {"step": int(step)} | {name: _plain(name, value) for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._last = step

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardWriter:
    """Event files for TensorBoard. Values that are not finite are left out."""

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int):
        """Writes into `folder`; TensorBoard hides what earlier files say about steps >= `resume_step`."""
        self._writer = SummaryWriter(str(folder), purge_step=resume_step if resume_step else None)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds one scalar per finite value."""
        for name, value in values.items():
            number = _plain(name, value)
            if number is not None:
                self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run. The package is imported here and nowhere else."""

    def __init__(self, project: str, *, name: str, config: Mapping[str, Any], folder: str | os.PathLike[str]):
        """Starts or, for a known `name`, resumes a run. Raises ImportError that names the extra if wandb is absent."""
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError("metrics: wandb is not installed; run `pip install 'trace_jax[wandb]'`") from error
        self._run = wandb.init(
            project=project, name=name, id=name, resume="allow", config=dict(config), dir=str(folder)
        )

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs the finite values of one step."""
        numbers = {name: _plain(name, value) for name, value in values.items()}
        self._run.log({name: number for name, number in numbers.items() if number is not None}, step=step)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class Writers:
    """Several destinations as one."""

    def __init__(self, writers: Iterable[Writer]):
        """Takes over `writers`; they are called in order."""
        self._writers = tuple(writers)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Hands the step to every writer."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Closes every writer."""
        for writer in self._writers:
            writer.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics file, in order. A last line that was cut off by a kill is dropped.

    Raises ValueError, with the line's number, for any other line that is not an object with a "step".
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    torn = lines.pop()  # what follows the last newline: empty unless a write was interrupted
    rows = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is None:
            raise ValueError(
                f"metrics: line {number} of {path} is not an object with a step: {line[:80]!r}; move the file away"
            )
        rows.append(row)
    last = _parse(torn)
    return rows if last is None else [*rows, last]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _plain(name: str, value: Value) -> float | int | None:
    """A Python number, or None where the value is absent or not finite."""
    if value is None:
        return None
    if isinstance(value, (bool, str)) or np.ndim(value) != 0:
        raise ValueError(f"metrics: {name} is {value!r}, must be a number")
    number = value.item() if hasattr(value, "item") else value
    return number if math.isfinite(number) else None


def _replace(path: Path, text: str) -> None:
    """Writes a file so that a kill leaves either the old text or the new one."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
