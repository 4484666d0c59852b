"""Runs of an experiment: its command line, and each training in a process of its own, its metrics kept."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trace_jax.train.metrics import read_jsonl

ROOT = Path(__file__).resolve().parent.parent


def parse(description: str, folder: Path, *, seeds: str, strategies: Sequence[str]) -> argparse.Namespace:
    """The command line of an experiment in `folder` over seeds, tasks and strategies."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", default=seeds)
    parser.add_argument("--tasks", default="arithmetic,lookup")
    parser.add_argument("--strategies", default=",".join(strategies))
    workdir = f"runs/experiments/{folder.name}"
    parser.add_argument("--workdir", default=workdir, type=Path, help="relative to the repository")
    parser.add_argument("--raw", default=folder / "raw", type=Path, help="where finished runs' metrics are kept")
    parser.add_argument("--only-report", action="store_true")
    parser.add_argument("overrides", nargs="*", help="further flags for trace_jax.main, after --")
    return parser.parse_args()


def run_all(arguments: argparse.Namespace, flags: Callable[[str, str, str], list[str]]) -> None:
    """Runs what is missing; `flags(task, strategy, seed)` are those of one run. Nothing with --only-report."""
    if arguments.only_report:
        return
    for seed in arguments.seeds.split(","):  # seeds outermost: an early stop leaves complete comparisons
        for task in arguments.tasks.split(","):
            for strategy in arguments.strategies.split(","):
                own = flags(task, strategy, seed) + arguments.overrides
                run_one(arguments.workdir, arguments.raw, f"{task}-{strategy}-{seed}", own)


def run_one(workdir: Path, raw: Path, name: str, flags: list[str]) -> None:
    """Runs one training in a process of its own, unless its metrics are there already, and keeps them as raw/NAME.

    Raises RuntimeError for one that was stopped, CalledProcessError for one that failed.
    """
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
    rows, settings = read_jsonl(folder / "metrics.jsonl"), json.loads((folder / "config.json").read_text())
    if not rows or rows[-1]["step"] < settings["steps"]:  # a signal ends a run with a checkpoint and without an error
        raise RuntimeError(f"{name} was stopped before its last step; the same command goes on")
    shutil.copy(folder / "config.json", raw / f"{name}.config.json")
    shutil.copy(folder / "metrics.jsonl", kept)
    print(f"{name}: success {rows[0]['eval/success']:.3f} -> {rows[-1]['eval/success']:.3f}, {time.time() - begin:.0f} s")
