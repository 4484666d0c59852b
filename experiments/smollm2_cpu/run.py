"""GRPO and TRACE on SmolLM2-135M-Instruct, few-shot, on two CPU cores: runs, results.json, table and figure.

    python -m experiments.smollm2_cpu.run --seeds 1,2

One process a run; a run that is finished is not run again, one that was stopped goes on from its checkpoint. Raw metrics
are kept in raw/. `--only-report` makes results.json, table.md and figure.png from what is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.runs import run_one
from experiments.smollm2_cpu import report

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Parses the command line, runs what is missing, reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--tasks", default="arithmetic,lookup")
    parser.add_argument("--strategies", default="grpo,trace")
    parser.add_argument("--workdir", default="runs/experiments/smollm2_cpu", help="relative to the repository")
    parser.add_argument("--raw", default=str(HERE / "raw"), help="where finished runs' metrics are kept")
    parser.add_argument("--only-report", action="store_true")
    parser.add_argument("overrides", nargs="*", help="further flags for trace_jax.main, after --")
    arguments = parser.parse_args()
    raw = Path(arguments.raw)
    if not arguments.only_report:
        for seed in arguments.seeds.split(","):  # seeds outermost: an early stop leaves complete comparisons
            for task in arguments.tasks.split(","):
                for strategy in arguments.strategies.split(","):
                    flags = [
                        "--config=configs/smollm2.py",
                        f"--config.task={task}",
                        f"--config.strategy={strategy}",
                        f"--config.seed={seed}",
                    ]
                    run_one(Path(arguments.workdir), raw, f"{task}-{strategy}-{seed}", flags + arguments.overrides)
    report.write(raw, raw.parent)


if __name__ == "__main__":
    main()
