"""What is measured beside the runs: BFCL's right and changed calls, attacks on tools, the speed of a call."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments.real_tasks_cpu import bfcl_replay, escapes, hostile_calls, sandbox_speed
from trace_jax.sandbox.pool import PythonPool

BFCL_RECORDS = 200  # of each category: all
WARM_CALLS = 300


def run_all(raw: Path) -> None:
    """Measures what is not in `raw` yet; every check is one file there."""
    for name, measure in CHECKS.items():
        path = raw / f"{name}.json"
        if not path.exists():
            print(f"{name} ...", flush=True)
            found = measure()
            path.write_text(json.dumps(found, indent=1) + "\n")


def _refused(tried: Iterable[tuple[str, bool, str]]) -> dict[str, bool]:
    """By name; what the system said of an attempt names places of this machine and is not kept."""
    return {name: fine for name, fine, _ in tried}


def _warm_call_ms() -> list[float]:
    with contextlib.closing(PythonPool(workers=2)) as pool:
        sandbox_speed.warm_call_ms(pool, calls=10)
        return [round(taken, 3) for taken in sandbox_speed.warm_call_ms(pool, calls=WARM_CALLS)]


CHECKS: dict[str, Callable[[], Any]] = {
    "bfcl_replay": lambda: bfcl_replay.measure(BFCL_RECORDS),
    "escapes": lambda: _refused(escapes.refused()),
    "hostile_calls": lambda: _refused(hostile_calls.refused()),
    "warm_call_ms": _warm_call_ms,
}
