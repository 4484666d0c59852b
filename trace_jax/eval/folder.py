"""The folder of an evaluation: what decides its numbers, the outcomes of each benchmark, the figures and tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_jax.eval.outcomes import OutcomesFile

SETTINGS, RESULTS, TABLE = "settings.json", "results.json", "results.md"


class EvaluationFolder:
    """One evaluation's files. What is in them belongs to the settings of `settings.json`, and to no others."""

    def __init__(self, path: Path):
        """Makes the folder where it is missing. ValueError, one line, for one that cannot be used."""
        self.path = path
        if (path / "config.json").exists():
            raise ValueError(f"{path} holds a run or a model; choose another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            _replace(path / ".writable", "")
            (path / ".writable").unlink()
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}); choose another folder") from error
        self._settings = _read(path / SETTINGS)
        if self._settings is None and any(path.glob("rollouts-*.jsonl")):
            raise ValueError(f"{path} holds rollouts, but no {SETTINGS} that says of what; choose another folder")

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError for the first of `settings` that is another one in the folder."""
        if self._settings is None:
            return
        for name, here in _plain(settings).items():
            there = self._settings.get(name, "absent")
            if there != here:
                raise ValueError(
                    f"{self.path} was begun with {name} {there!r}, here it is {here!r}; put it back or choose another "
                    "folder"
                )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Checks `settings`, and keeps them if they are the first ones."""
        self.check(settings)
        if self._settings is None:
            self._settings = _plain(settings)
            _replace(self.path / SETTINGS, json.dumps(self._settings, indent=2) + "\n")

    def outcomes(self, benchmark: str) -> OutcomesFile:
        """The file of a benchmark's outcomes, made where it is missing. ValueError for one that cannot be read."""
        return OutcomesFile(self._file(benchmark))

    def has_outcomes(self, benchmark: str) -> bool:
        """Whether a benchmark was begun here."""
        return self._file(benchmark).exists()

    def _file(self, benchmark: str) -> Path:
        return self.path / f"rollouts-{benchmark}.jsonl"

    def figures(self) -> dict[str, Any]:
        """The figures of the benchmarks that were finished before, by name."""
        return (_read(self.path / RESULTS) or {}).get("benchmarks", {})

    def write(self, results: Mapping[str, Any], table: str) -> None:
        """Puts figures and tables in the place of those before."""
        _replace(self.path / RESULTS, json.dumps(results, indent=2, allow_nan=False) + "\n")
        _replace(self.path / TABLE, table + "\n")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(dict(settings)))


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a file, None if there is no file."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); choose another folder") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no object; choose another folder")
    return document


def _replace(path: Path, text: str) -> None:
    """Writes a file so that a kill leaves either the old text or the new one."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
