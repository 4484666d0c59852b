"""GRPO against TRACE at equal budget on `arithmetic` and `lookup`: runs, results.json, table and figure.

    python -m experiments.quickstart.run --seeds 0,1,2

One process a run; a run that is finished is not run again, one that was stopped goes on from its checkpoint. Raw metrics
are kept in raw/. `--only-report` makes results.json, table.md and figure.png from what is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from experiments.quickstart import report
from experiments.quickstart.config import STRATEGIES
from trace_jax.train.metrics import read_jsonl

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TASKS = ("arithmetic", "lookup")


def main() -> None:
    """Parses the command line, runs what is missing, reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--workdir", default="runs/experiments/quickstart", help="relative to the repository")
    parser.add_argument("--raw", default=str(HERE / "raw"), help="where finished runs' metrics are kept")
    parser.add_argument("--only-report", action="store_true")
    parser.add_argument("overrides", nargs="*", help="further flags for trace_jax.main, after --")
    arguments = parser.parse_args()
    raw = Path(arguments.raw)
    if not arguments.only_report:
        for seed in arguments.seeds.split(","):  # seeds outermost: an early stop leaves complete comparisons
            for task in arguments.tasks.split(","):
                for strategy in arguments.strategies.split(","):
                    name = f"{task}-{strategy}-{seed}"
                    flags = [
                        f"--config=experiments/quickstart/config.py:{task},{strategy}",
                        f"--config.seed={seed}",
                        f"--config.warm_start.cache={Path(arguments.workdir) / 'warm_start'}",
                    ]
                    run_one(Path(arguments.workdir), raw, name, [*flags, *arguments.overrides])
    report.write(raw, raw.parent)


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


if __name__ == "__main__":
    main()
