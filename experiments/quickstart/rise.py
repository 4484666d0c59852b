"""How far the README's first command raises held-out success, on three seeds, warm start included.

    python -m experiments.quickstart.rise

Writes rise/results.json and keeps the raw metrics beside it. Each seed has its own warm start, data and noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments import results as results_lib
from experiments.quickstart.run import HERE, run_one
from trace_jax.train.metrics import read_jsonl


def main() -> None:
    """Runs what is missing and summarises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="3,4,5")
    parser.add_argument("--workdir", default="runs/experiments/rise", help="relative to the repository")
    parser.add_argument("--raw", default=str(HERE / "rise"), help="where finished runs' metrics are kept")
    arguments = parser.parse_args()
    raw = Path(arguments.raw)
    for seed in arguments.seeds.split(","):
        flags = ["--config=configs/quickstart.py", f"--config.seed={seed}"]
        run_one(Path(arguments.workdir), raw, f"seed-{seed}", [*flags, f"--config.warm_start.seed={seed}"])
    results_lib.write(raw / "results.json", summarise(raw))


def summarise(raw: Path) -> dict[str, results_lib.Summary]:
    """Success before and after, the difference, and the seconds of the training steps, over the seeds in `raw`."""
    runs = [read_jsonl(path) for path in sorted(raw.glob("seed-*.jsonl"))]
    before, after = ([rows[i]["eval/success"] for rows in runs] for i in (0, -1))
    return {
        "arithmetic/trace/success_warm_start": results_lib.summarise(before),
        "arithmetic/trace/success_last": results_lib.summarise(after),
        "arithmetic/trace/success_rise": results_lib.summarise([b - a for a, b in zip(before, after, strict=True)]),
        "arithmetic/trace/seconds": results_lib.summarise([sum(r.get("time/step", 0) for r in rows) for rows in runs]),
    }


if __name__ == "__main__":
    main()
