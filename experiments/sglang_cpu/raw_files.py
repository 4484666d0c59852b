"""Measurements in files: JSON lines that grow while a part runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def read(path: Path) -> Any:
    """The rows of a .jsonl file, the content of a .json file; no rows where there is no file."""
    if not path.exists():
        return []
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


class Kept:
    """Measurements in a .jsonl file; what is there need not be measured again."""

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: Rows = read(path)

    def has(self, **name: Any) -> bool:
        """Whether there is a row with these values."""
        return any(all(row.get(key) == value for key, value in name.items()) for row in self.rows)

    def add(self, rows: Rows) -> None:
        """Writes rows that belong together at once, so that they are there as a whole or not at all."""
        self.rows += rows
        with self._path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        for row in rows:
            print(" ".join(f"{name}={_short(value)}" for name, value in row.items()), flush=True)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
