"""What a better predictor is worth: seven strategies at equal budget, eight paired seeds, `arithmetic` and `lookup`.

    python -m experiments.predictor.run --jobs 2

A finished run is not run again, a stopped one goes on from its checkpoint. raw/ keeps the metrics of each, of which
`--only-report` makes results.json, table.md and figure.png. cost.json (experiments/predictor/cost.py) and bias.json
(experiments/predictor/bias.py) become part of results.json.
"""

from __future__ import annotations

from pathlib import Path

from experiments import runs
from experiments.predictor import report
from experiments.predictor.config import STRATEGIES

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Parses the command line, runs what is missing, reports."""
    seeds = ",".join(map(str, range(8)))
    arguments = runs.parse(__doc__.splitlines()[0], HERE, seeds=seeds, strategies=STRATEGIES)
    cache = arguments.workdir / "warm_start"

    def flags(task: str, strategy: str, seed: str) -> list[str]:
        config = f"--config=experiments/predictor/config.py:{task},{strategy}"
        return [config, f"--config.seed={seed}", f"--config.warm_start.cache={cache}"]

    runs.run_all(arguments, flags)
    report.write(arguments.raw, arguments.raw.parent)


if __name__ == "__main__":
    main()
