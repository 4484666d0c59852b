"""Runs of an experiment: its command line, and each training in a process of its own, its metrics kept."""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
    parser.add_argument("--jobs", default=1, type=int, help="runs at the same time; above 1 each has one core (Linux)")
    parser.add_argument("overrides", nargs="*", help="further flags for trace_jax.main, after --")
    return parser.parse_args()


def run_all(arguments: argparse.Namespace, flags: Callable[[str, str, str], list[str]]) -> None:
    """Runs what is missing; `flags(task, strategy, seed)` are those of one run. Nothing with --only-report.

    With --jobs above 1 the first failure lets no further run start, and is raised when those under way are done.
    """
    if arguments.only_report:
        return
    runs = [  # seeds outermost: an early stop leaves complete comparisons
        (f"{task}-{strategy}-{seed}", flags(task, strategy, seed) + arguments.overrides)
        for seed in arguments.seeds.split(",")
        for task in arguments.tasks.split(",")
        for strategy in arguments.strategies.split(",")
    ]
    if arguments.jobs == 1:
        for name, own in runs:
            run_one(arguments.workdir, arguments.raw, name, own)
    else:
        _side_by_side(arguments, runs)


def _side_by_side(arguments: argparse.Namespace, runs: Sequence[tuple[str, list[str]]]) -> None:
    missing = [(name, own) for name, own in runs if not (arguments.raw / f"{name}.jsonl").exists()]
    for name, own in {name.split("-")[0]: (name, own) for name, own in reversed(missing)}.values():
        _warm_start(arguments.workdir, f"{name.split('-')[0]}-warm-start", own)
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    available = sorted(os.sched_getaffinity(0))
    for job in range(arguments.jobs):
        cores.put(available[job % len(available)])
    # Linux: the affinity is the calling thread's, and that of the processes which it starts
    pin = lambda: os.sched_setaffinity(0, {cores.get()})
    with ThreadPoolExecutor(arguments.jobs, initializer=pin) as pool:
        futures = [pool.submit(run_one, arguments.workdir, arguments.raw, name, own) for name, own in missing]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            future.result()


def _warm_start(workdir: Path, name: str, flags: list[str]) -> None:
    """Makes or finds the cached policy that a task's runs begin with: they would all make it at once."""
    print(f"{name} ...", flush=True)
    shutil.rmtree(ROOT / workdir / name, ignore_errors=True)  # its checkpoint may be of other settings
    short = ("steps=0", "eval.prompts=1", "eval.samples=1", "predictor.warmup_prompts=0")
    _train(workdir, name, [*flags, *(f"--config.{setting}" for setting in short)])


def run_one(workdir: Path, raw: Path, name: str, flags: list[str]) -> None:
    """Runs one training in a process of its own, unless its metrics are there already, and keeps them as raw/NAME.

    Raises RuntimeError for one that was stopped, CalledProcessError for one that failed.
    """
    kept = raw / f"{name}.jsonl"
    if kept.exists():
        return
    raw.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    print(f"{name} ...", flush=True)
    folder = _train(workdir, name, flags)
    rows, settings = read_jsonl(folder / "metrics.jsonl"), json.loads((folder / "config.json").read_text())
    if not rows or rows[-1]["step"] < settings["steps"]:  # a signal ends a run with a checkpoint and without an error
        raise RuntimeError(f"{name} was stopped before its last step; the same command goes on")
    shutil.copy(folder / "config.json", raw / f"{name}.config.json")
    shutil.copy(folder / "metrics.jsonl", kept)
    success = [row["eval/success"] for row in (rows[0], rows[-1])]
    print(f"{name}: success {success[0]:.3f} -> {success[1]:.3f}, {time.time() - begin:.0f} s", flush=True)


def _train(workdir: Path, name: str, flags: list[str]) -> Path:
    """The finished process' folder. It runs in ROOT and sees relative paths only. CalledProcessError for a failure."""
    home = ROOT / workdir
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "trace_jax.main", f"--workdir={workdir / name}", *flags]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(home / "compiled")}
    with (home / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
    return home / name
