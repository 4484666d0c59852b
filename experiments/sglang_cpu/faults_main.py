"""Faults that end a run, on `trace_jax.main` itself: a checkpoint, one line, and the same command goes on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.runs import ROOT
from experiments.sglang_cpu.faults_lab import RealServer
from tests import sglang_faults as behaviour
from tests.sglang_faults import InThread, serving
from tests.sglang_proxy import Proxy
from trace_jax.train.metrics import read_jsonl

STEPS, ROOTS, CONTINUATIONS = 4, 16, 2
UNITS = ROOTS * (1 + CONTINUATIONS / 2)  # of a step
LIMIT = 600.0  # seconds of one command, in which programs are compiled too
UPDATE = "/update_weights_from_disk"
# `trace_jax.main` whose third export of weights finds no space.
_FULL_DISK = """
import sys
from pathlib import Path
from trace_jax.models import folder
from trace_jax import main
real, exports = folder.save, []
def save(path, *arguments, **options):
    if ".unfinished" in str(path):
        exports.append(path)
        if len(exports) > 2:
            Path(path, "model.safetensors.part").write_bytes(bytes(1000))
            raise OSError(28, "No space left on device", str(path))
    return real(path, *arguments, **options)
folder.save = save
main.entry()
"""


def _refuse(proxy: Proxy, thread: InThread) -> None:
    """The third version of the weights is refused."""
    proxy.fail(behaviour.says({"success": False, "message": "Failed to load weights"}, 400), UPDATE, after=2)


def _die(proxy: Proxy, thread: InThread) -> None:
    """From the middle of the third step on nobody answers."""
    while proxy.paths().count(UPDATE) < 3:
        time.sleep(0.05)
    mark = len(proxy.paths())
    while proxy.paths()[mark:].count("/generate") < 5:
        time.sleep(0.05)
    thread.run(proxy.stop())


def _nothing(proxy: Proxy, thread: InThread) -> None:
    """The fault is in the program."""


# name: what to do to the proxy, the program
CASES: dict[str, tuple[Callable[[Proxy, InThread], None], list[str]]] = {
    "run: update refused": (_refuse, ["-m", "trace_jax.main"]),
    "run: no server for longer than the outage's time": (_die, ["-m", "trace_jax.main"]),
    "run: out of disk during export": (_nothing, ["-c", _FULL_DISK]),
}


def run_case(name: str, server: RealServer, workdir: Path) -> dict[str, Any]:
    """A run that meets the fault in its third step, and the same command again without it."""
    spoil, program = CASES[name]
    server.start()
    folder = workdir / "faults_main"
    shutil.rmtree(folder, ignore_errors=True)
    proxy = Proxy(server.program.url)
    with serving(proxy) as thread:
        flags = _flags(proxy.url, folder, workdir)
        begin = time.monotonic()
        process = _start([*program, *flags], workdir)
        spoil(proxy, thread)
        code, output, errors = _end(process)
        seconds = time.monotonic() - begin
        lines = re.findall(r"error: .*", errors)  # a bar that was being drawn may stand before it
        kept = sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
        leftovers = (folder / "weights").exists()
        proxy.faults.clear()
        thread.run(proxy.stop())
        thread.run(proxy.start())
        again, output, more = _end(_start(["-m", "trace_jax.main", *flags], workdir))
    steps = read_jsonl(folder / "metrics.jsonl") if again == 0 else []
    steps = [row for row in steps if row["step"]]
    ended = code == 1 and len(lines) == 1 and "Traceback" not in errors and not leftovers
    went_on = again == 0 and "resumed after step 2" in output and [row["step"] for row in steps] == [1, 2, 3, 4]
    outcome = "one line, a checkpoint, and the same command goes on"
    if not (ended and kept and kept[-1] == 2 and went_on):
        outcome = f"status {code} and {again}, checkpoints {kept}: {(errors + more)[-2000:]}"
    units = sum(row["rollout/budget_units"] for row in steps)
    leaves = sum(row["rollout/root_rollouts"] + row["rollout/continuations"] for row in steps)
    expected = sum(
        row["rollout/root_rollouts"] + 2 * (UNITS - row["rollout/root_rollouts"]) for row in steps
    )  # what is not spent on roots makes two continuations a unit
    return {
        "fault": name,
        "outcome": outcome,
        "expected": "one line, a checkpoint, and the same command goes on",
        "message": "; ".join(lines).replace(str(folder), "WORKDIR"),
        "seconds": round(seconds, 2),
        "limit_seconds": LIMIT,
        "leaves_expected": expected,
        "leaves": leaves,
        "units_planned": STEPS * UNITS,
        "units": units,
        "leaves_lost": expected - leaves,
        "units_lost": STEPS * UNITS - units,
        "checkpoint_step": kept[-1] if kept else None,
        "retries": sum(row["rollout/retries"] for row in steps),
    }


def _flags(url: str, folder: Path, workdir: Path) -> list[str]:
    settings = {
        "engine": "sglang",
        "sglang.urls": url,
        "sglang.outage_timeout": 10,
        "steps": STEPS,
        "budget.pool": 8,
        "budget.roots": ROOTS,
        "budget.continuations_per_root": CONTINUATIONS,
        "eval.prompts": 16,
        "predictor.warmup_prompts": 8,
        "predictor.warmup_steps": 2,
        "warm_start.cache": workdir / "warm_start",
        "checkpoint.every": 100,
        "logging.tensorboard": False,
    }
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    return ["--config=configs/quickstart.py:paper", f"--workdir={folder}", *flags]


def _start(arguments: list[str], workdir: Path) -> subprocess.Popen:
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(workdir / "compiled"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen) -> tuple[int, str, str]:
    """Status, stdout and stderr; a command that is not over in time is killed."""
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    return process.returncode, output, errors
