"""How far the README's first command raises held-out success, on three seeds.

    python -m experiments.quickstart.rise                    # seeds of data and noise; the default warm start
    python -m experiments.quickstart.rise --own-warm-start   # every seed warm-starts a policy of its own, too

Writes results.json and keeps the raw metrics beside it, in rise/ or rise_own_warm_start/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments import results as results_lib
from experiments.quickstart.run import HERE
from experiments.runs import run_one
from trace_jax.train.metrics import read_jsonl


def main() -> None:
    """Runs what is missing and summarises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,6,7")
    parser.add_argument("--own-warm-start", action="store_true")
    parser.add_argument("--workdir", default="runs/experiments", help="relative to the repository")
    arguments = parser.parse_args()
    raw = HERE / ("rise_own_warm_start" if arguments.own_warm_start else "rise")
    workdir = Path(arguments.workdir) / raw.name
    for seed in arguments.seeds.split(","):
        flags = ["--config=configs/quickstart.py", f"--config.seed={seed}"]
        if arguments.own_warm_start:
            flags.append(f"--config.warm_start.seed={seed}")
        else:
            flags.append(f"--config.warm_start.cache={workdir / 'warm_start'}")
        run_one(workdir, raw, f"seed-{seed}", flags)
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
