"""Runs of an experiment: one training in a process of its own, its metrics kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from trace_jax.train.metrics import read_jsonl

ROOT = Path(__file__).resolve().parent.parent


def run_one(workdir: Path, raw: Path, name: str, flags: list[str]) -> None:
    """Runs one training in a process of its own, unless its metrics are there already, and keeps them as raw/NAME."""
    kept = raw / f"{name}.jsonl"
    if kept.exists():
        return
    here, workdir = workdir, ROOT / workdir  # the process runs in ROOT and sees relative paths only
    workdir.mkdir(parents=True, exist_ok=True)
    raw.mkdir(parents=True, exist_ok=True)
    folder, begin = workdir / name, time.time()
    command = [sys.executable, "-m", "trace_jax.main", f"--workdir={here / name}", *flags]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(workdir / "compiled")}
    print(f"{name} ...", flush=True)
    with (workdir / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
    rows = read_jsonl(folder / "metrics.jsonl")
    shutil.copy(folder / "config.json", raw / f"{name}.config.json")
    shutil.copy(folder / "metrics.jsonl", kept)
    print(f"{name}: success {rows[0]['eval/success']:.3f} -> {rows[-1]['eval/success']:.3f}, {time.time() - begin:.0f} s")
