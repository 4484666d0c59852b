"""How much of the forked prefixes two real servers have in their caches, with sticky and with random routing.

    python -m experiments.sglang_cpu.cache --seeds 0,1,2 --steps 4

Steps of TRACE at the quickstart's budget through `loop.gather`: a warmed-up critic allocates, the policy learns from
each step. Every step is gathered twice from the same weights and empty caches: as it is, and with a random server for
each turn.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import re
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.sglang_cpu import common, report
from experiments.sglang_cpu.raw_files import Kept
from trace_jax import loop
from trace_jax.loop import Run
from trace_jax.tree import query
from trace_jax.types import GenerateRequest, Generation, RolloutTree, Stage

ROUTINGS = ("sticky", "random")
_GROUPS = 64  # each has a server of its own, half of them the first, so a random group is a random server
_COUNTERS = {
    "requests": "num_requests_total",
    "prompt_tokens": "prompt_tokens_total",
    "cached_tokens": "cached_tokens_total",
}


class Scattered:
    """An engine over servers whose requests say nothing about what they share."""

    def __init__(self, engine: Any, rng: np.random.Generator):
        self._engine, self._rng = engine, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the engine's, on a random server."""
        group = f"random/{self._rng.integers(_GROUPS)}"
        return await self._engine.generate(dataclasses.replace(request, group=group))


def main() -> None:
    """Measures the seeds that are missing and reports."""
    arguments = common.parse(__doc__, seeds="0,1,2", steps=4)
    kept = Kept(arguments.raw / "cache.jsonl")
    todo = [seed for seed in map(int, arguments.seeds.split(",")) if not kept.has(seed=seed)]
    if todo:
        with common.serve(arguments.workdir, [["--enable-metrics"]] * 2) as urls:
            for seed in todo:
                run = common.make_run(arguments.workdir, f"cache-{seed}", urls, seed=seed)
                kept.add([{"seed": seed} | row for row in asyncio.run(_seed(run, urls, arguments.steps))])
    report.write(arguments.raw, arguments.raw.parent)


async def _seed(run: Run, urls: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """One row for each step and routing."""
    sticky, rows = run.engine, []
    scattered = Scattered(sticky, np.random.default_rng(run.config.seed))
    engines = {"sticky": sticky, "random": scattered}
    try:
        await loop.warm_up_predictor(run)
        for step in range(steps):
            for routing in ROUTINGS if step % 2 else ROUTINGS[::-1]:
                run.engine, run.served = engines[routing], None
                await loop.publish(run)  # caches are empty again
                gathered, row = await _gather(run, urls)
                rows.append({"step": step, "routing": routing} | row)
                if routing == "sticky":
                    train_on = gathered
            loop.learn(run, train_on)
    finally:
        await sticky.close()
    return sorted(rows, key=lambda row: (row["step"], row["routing"] == "random"))


async def _gather(run: Run, urls: Sequence[str]) -> tuple[loop.Gathered, dict[str, Any]]:
    before = [counters(url) for url in urls]
    gathered = await loop.gather(run, run.step, run.cursor)
    servers = [subtract(counters(url), old) for url, old in zip(urls, before, strict=True)]
    forks, tokens = forked(gathered.trees)
    measured = gathered.metrics
    return gathered, {
        "prefix_hit_rate": measured["rollout/prefix_hit_rate"],
        "forks": forks,
        "prefix_tokens": tokens,
        "prefilled_tokens": measured["rollout/prefilled_tokens"],
        "cached_tokens": measured["rollout/cached_tokens"],
        "budget_units": measured["rollout/budget_units"],
        "moved_groups": measured["rollout/moved_groups"],
        "errors": measured["rollout/errors"],
        "servers": servers,
    }


def forked(trees: Sequence[RolloutTree]) -> tuple[int, int]:
    """(continuations, tokens of the prefixes that they were forked from)."""
    forks = tokens = 0
    for tree in trees:
        bare = tree.stage == Stage.ROOT_ROLLOUT
        starts = np.flatnonzero((tree.stage == Stage.CONTINUATION) & bare[tree.parent])
        forks += starts.size
        tokens += sum(query.prefix_tokens(tree, node).size for node in tree.parent[starts].tolist())
    return forks, tokens


def counters(url: str) -> dict[str, float]:
    """What a server says that it has done since it was started."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60.0) as reply:
        return read_counters(reply.read().decode())


def read_counters(text: str) -> dict[str, float]:
    """Sums of the counters in a Prometheus page over their labels."""
    total: dict[str, float] = collections.defaultdict(float)
    for name, value in re.findall(r"^sglang:(\w+)(?:\{[^\n]*\})? (\S+)$", text, re.MULTILINE):
        total[name] += float(value)
    return {ours: total[theirs] for ours, theirs in _COUNTERS.items()}


def subtract(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What was added."""
    return {name: now[name] - before[name] for name in now}


if __name__ == "__main__":
    main()
