"""GRPO and TRACE on SmolLM2-135M-Instruct, few-shot, on two CPU cores: runs, results.json, table and figure.

    python -m experiments.smollm2_cpu.run --seeds 1,2

One process a run; a run that is finished is not run again, one that was stopped goes on from its checkpoint. Raw metrics
are kept in raw/. `--only-report` makes results.json, table.md and figure.png from what is there.
"""

from __future__ import annotations

from pathlib import Path

from experiments import runs
from experiments.smollm2_cpu import report

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Parses the command line, runs what is missing, reports."""
    arguments = runs.parse(__doc__.splitlines()[0], HERE, seeds="1,2", strategies=("grpo", "trace"))

    def flags(task: str, strategy: str, seed: str) -> list[str]:
        own = {"task": task, "strategy": strategy, "seed": seed}
        return ["--config=configs/smollm2.py", *(f"--config.{name}={value}" for name, value in own.items())]

    runs.run_all(arguments, flags)
    report.write(arguments.raw, arguments.raw.parent)


if __name__ == "__main__":
    main()
