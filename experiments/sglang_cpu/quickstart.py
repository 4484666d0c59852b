"""The quickstart's policy trained by TRACE through a real server and with the in-process engine, same seeds.

    python -m experiments.sglang_cpu.quickstart --seeds 0,1,2

One process a run, and a server of its own for each run that needs one; finished runs are not run again, a stopped one
goes on from its checkpoint. Everything is as in configs/quickstart.py:paper but for the predictor's warm-up and the number
of steps.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from experiments.runs import run_one
from experiments.sglang_cpu import common, report

STEPS, EVAL_EVERY = 40, 20
ENGINES = ("local", "sglang")


def main() -> None:
    """Runs what is missing, one engine after the other for each seed, and reports."""
    arguments = common.parse(__doc__, seeds="0,1,2")
    for seed in map(int, arguments.seeds.split(",")):
        for engine in ENGINES:
            name = f"quickstart-{engine}-{seed}"
            if (arguments.raw / f"{name}.jsonl").exists():
                continue
            with contextlib.ExitStack() as stack:
                urls = stack.enter_context(common.serve(arguments.workdir, seed=seed)) if engine == "sglang" else []
                run_one(arguments.workdir, arguments.raw, name, flags(arguments.workdir, seed, urls))
    report.write(arguments.raw, arguments.raw.parent)


def flags(workdir: Path, seed: int, urls: list[str]) -> list[str]:
    """Of `trace_jax.main` for one run; without URLs the in-process engine samples."""
    found = [
        "--config=configs/quickstart.py:paper",
        "--config.predictor.warmup_prompts=128",
        f"--config.seed={seed}",
        f"--config.steps={STEPS}",
        f"--config.eval.every={EVAL_EVERY}",
        "--config.logging.tensorboard=False",
        f"--config.warm_start.cache={workdir / 'warm_start'}",
    ]
    if urls:
        found += ["--config.engine=sglang", f"--config.sglang.urls={','.join(urls)}"]
    return found


if __name__ == "__main__":
    main()
