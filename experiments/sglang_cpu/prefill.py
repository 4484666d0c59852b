"""What the servers compute for equal budgets: flat against tree rollouts, with and without prefix reuse.

    python -m experiments.sglang_cpu.prefill --pairs 6

256 units of the warm-started quickstart policy: 32 prompts x 8 rollouts, or the first 16 of these prompts x 8 with 16
continuations each from uniformly drawn turns. No predictor takes part, so both have the same kind of prompt. Two
servers, one of them with --disable-radix-cache; the four cases take turns, in an order that rotates from one
repetition to the next.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from typing import Any, ClassVar

import numpy as np

from experiments.sglang_cpu import common, report
from experiments.sglang_cpu.raw_files import Kept
from trace_jax.budget.account import BudgetCount
from trace_jax.budget.strategy import flat_roots
from trace_jax.engines.base import Engine
from trace_jax.loop import Run
from trace_jax.rollout import keys
from trace_jax.rollout.scheduler import collect_batch
from trace_jax.setup_run import make_engine
from trace_jax.types import Prompt

SHAPES, REUSE = ("flat", "tree"), (True, False)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Groups of the same size from a random part of the pool, continuations from uniformly drawn turns."""

    prompts: int
    rollouts_per_prompt: int
    continuations_per_root: int

    name: ClassVar[str] = "uniform"
    needs_predictor: ClassVar[bool] = False

    def roots(self, success_probability: None, pool_size: int, rng: np.random.Generator) -> np.ndarray:
        """m int64 [pool_size]; the prompts that come first in a random order."""
        each = self.rollouts_per_prompt
        return flat_roots(rng.permutation(pool_size), self.prompts * each, each)

    def forks(
        self, success: np.ndarray, value: None, rollout: np.ndarray, total: int, rng: np.random.Generator
    ) -> np.ndarray:
        """K int64 [A]."""
        return rng.multinomial(total, np.full(len(success), 1 / len(success)))


STRATEGIES = {"flat": Uniform(32, 8, 0), "tree": Uniform(16, 8, 2)}  # 256 units each


def main() -> None:
    """Measures the repetitions that are missing and reports."""
    arguments = common.parse(__doc__, pairs=6)
    kept = Kept(arguments.raw / "prefill.jsonl")
    todo = [i for i in range(arguments.pairs) if not kept.has(pair=i)]
    if todo:
        with common.serve(arguments.workdir, [[], ["--disable-radix-cache"]]) as urls:
            run = common.make_run(arguments.workdir, "prefill", urls[:1])
            other = dataclasses.replace(run.config.sglang, urls=urls[1])
            folder = common.ROOT / arguments.workdir / "prefill-without-reuse"
            config = dataclasses.replace(run.config, sglang=other)
            without = make_engine(config, run.trainer.model, run.environment, folder)
            asyncio.run(_measure(run, {True: run.engine, False: without}, todo, kept))
    report.write(arguments.raw, arguments.raw.parent)


async def _measure(run: Run, engines: dict[bool, Engine], todo: list[int], kept: Kept) -> None:
    cases = [(shape, reuse) for shape in SHAPES for reuse in REUSE]
    try:
        for engine in engines.values():
            await _collect(run, engine, "flat", pair=1000)  # the first requests of a server are slow
        for pair in todo:
            turn = pair % len(cases)
            measured = [
                {"pair": pair, "shape": shape, "reuse": reuse} | await _collect(run, engines[reuse], shape, pair)
                for shape, reuse in cases[turn:] + cases[:turn]
            ]
            kept.add(measured)
    finally:
        for engine in engines.values():
            await engine.close()


async def _collect(run: Run, engine: Engine, shape: str, pair: int) -> dict[str, Any]:
    """One batch from an empty cache: what it took."""
    await engine.set_weights(run.policy.params, 0)
    pool, strategy = _pool(run, pair), STRATEGIES[shape]
    rollouts = strategy.roots(None, len(pool), keys.host_rng(run.config.seed, pair, "roots"))
    load, begin = os.getloadavg()[0], time.perf_counter()
    collected = await collect_batch(
        engine,
        run.environment,
        strategy,
        None,
        pool,
        rollouts,
        sampling=run.sampling(keys.Stream.TRAIN, step=pair),
        concurrency=run.config.sampling.concurrency,
    )
    seconds = time.perf_counter() - begin
    counts = sum((c.counts for c in collected), BudgetCount())
    return {"seconds": seconds, "load": load} | dataclasses.asdict(counts)


def _pool(run: Run, pair: int) -> list[Prompt]:
    size = run.config.budget.pool
    return run.training_prompts(size, pair * size)


if __name__ == "__main__":
    main()
