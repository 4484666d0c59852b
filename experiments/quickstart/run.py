"""GRPO against TRACE at equal budget on `arithmetic` and `lookup`: runs, results.json, table and figure.

    python -m experiments.quickstart.run --seeds 0,1,2

One process a run; a run that is finished is not run again, one that was stopped goes on from its checkpoint. Raw metrics
are kept in raw/. `--only-report` makes results.json, table.md and figure.png from what is there.
"""

from __future__ import annotations

from pathlib import Path

from experiments import runs
from experiments.quickstart import report
from experiments.quickstart.config import STRATEGIES

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Parses the command line, runs what is missing, reports."""
    arguments = runs.parse(__doc__.splitlines()[0], HERE, seeds="0,1,2", strategies=STRATEGIES)

    def flags(task: str, strategy: str, seed: str) -> list[str]:
        return [
            f"--config=experiments/quickstart/config.py:{task},{strategy}",
            f"--config.seed={seed}",
            f"--config.warm_start.cache={arguments.workdir / 'warm_start'}",
        ]

    runs.run_all(arguments, flags)
    report.write(arguments.raw, arguments.raw.parent)


if __name__ == "__main__":
    main()
