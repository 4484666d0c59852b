"""The three task families on real records with SmolLM2-135M: runs, checks, results.json, table and figure.

    python -m experiments.real_tasks_cpu.run

Every run is a process of its own; one that is finished is not run again, one that was stopped goes on from its
checkpoint. The warm start of a task is trained once. `--only-report` makes the results from what is in raw/.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from pathlib import Path

from experiments import runs
from experiments.real_tasks_cpu import checks, data, report, server, tiny

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Runs what is missing, task by task, and reports."""
    arguments = _arguments()
    if not arguments.only_report:
        data.prepare_all(data.samples(), runs.ROOT / arguments.workdir / "data")
        for task in arguments.tasks.split(","):
            for engine in arguments.engines.split(","):
                _run(arguments.workdir, arguments.raw, task, engine)
            _keep_trees(arguments.workdir, arguments.raw / f"{task}.trees.json", task)
        checks.run_all(arguments.raw)
    report.write(arguments.raw, arguments.raw.parent)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(tiny.TASKS))
    parser.add_argument("--engines", default=",".join(tiny.STEPS))
    workdir = f"runs/experiments/{HERE.name}"
    parser.add_argument("--workdir", default=workdir, type=Path, help="relative to the repository")
    parser.add_argument("--raw", default=HERE / "raw", type=Path, help="where measurements are kept")
    parser.add_argument("--only-report", action="store_true")
    return parser.parse_args()


def _run(workdir: Path, raw: Path, task: str, engine: str) -> None:
    """One run, on a server of its own where it needs one."""
    name, flags = f"{task}-{engine}", tiny.flags(workdir, task, engine)
    if (raw / f"{name}.jsonl").exists():
        return
    with contextlib.ExitStack() as stack:
        if engine == "sglang":
            url = stack.enter_context(server.serve(workdir / f"{name}-server", flags))
            flags += ["--config.engine=sglang", f"--config.sglang.urls={url}"]
        runs.run_one(workdir, raw, name, flags)


def _keep_trees(workdir: Path, path: Path, task: str) -> None:
    """Samples the trees of a run's first step in a process of its own, unless they are there."""
    if path.exists():
        return
    print(f"{path.stem} ...", flush=True)
    command = [sys.executable, "-m", "experiments.real_tasks_cpu.trees"]
    command += [f"--task={task}", f"--workdir={workdir}", f"--out={path.absolute()}"]
    with (runs.ROOT / workdir / f"{path.stem}.log").open("w") as log:
        subprocess.run(command, cwd=runs.ROOT, stdout=log, stderr=log, check=True)


if __name__ == "__main__":
    main()
