"""What a better predictor is worth: seven strategies at equal budget, eight paired seeds, `arithmetic` and `lookup`.

    python -m experiments.predictor.run --jobs 2

A finished run is not run again, a stopped one goes on from its checkpoint. raw/ keeps the metrics of each, of which
`--only-report` makes results.json, table.md and figure.png. The predictor that a run of "trace" ends with is measured on
prompts that it never saw (`trace_jax.predictor_report`), kept as raw/NAME.predictor.json. cost.json
(experiments/predictor/cost.py) and bias.json (experiments/predictor/bias.py) become part of results.json.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from experiments import runs
from experiments.predictor import report
from experiments.predictor.config import STRATEGIES

HERE = Path(__file__).resolve().parent
SEEDS = range(8, 16)  # nobody had seen them when the settings were frozen; 0-2 are before/raw


def main() -> None:
    """Parses the command line, runs what is missing, reports."""
    seeds = ",".join(map(str, SEEDS))
    arguments = runs.parse(__doc__.splitlines()[0], HERE, seeds=seeds, strategies=STRATEGIES)
    cache = arguments.workdir / "warm_start"

    def flags(task: str, strategy: str, seed: str) -> list[str]:
        config = f"--config=experiments/predictor/config.py:{task},{strategy}"
        return [config, f"--config.seed={seed}", f"--config.warm_start.cache={cache}"]

    runs.run_all(arguments, flags)
    if not arguments.only_report and "trace" in arguments.strategies.split(","):
        for seed in arguments.seeds.split(","):
            for task in arguments.tasks.split(","):
                measure(arguments, f"{task}-trace-{seed}")
    report.write(arguments.raw, arguments.raw.parent)


def measure(arguments: argparse.Namespace, name: str) -> None:
    """Measures the predictor of a finished run, unless that is done or its folder is gone."""
    folder, kept = runs.ROOT / arguments.workdir / name, arguments.raw / f"{name}.predictor.json"
    if kept.exists() or not (folder / "checkpoints").exists():
        return
    print(f"{name}: predictor ...", flush=True)
    command = [sys.executable, "-m", "trace_jax.predictor_report", f"--workdir={arguments.workdir / name}"]
    with (folder.parent / f"{name}.predictor.log").open("w") as log:
        subprocess.run(command, cwd=runs.ROOT, stdout=log, stderr=log, check=True)
    shutil.copy(folder / "predictor" / "report.json", kept)


if __name__ == "__main__":
    main()
