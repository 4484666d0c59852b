"""Where faults are tried: real servers that can be killed and hung, a proxy before each, one small step of rollouts."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.sglang_proxy import Proxy
from trace_jax.budget.account import fallback_roots
from trace_jax.budget.trace import Trace
from trace_jax.engines.base import EngineDown
from trace_jax.engines.sglang import Settings, SglangEngine
from trace_jax.engines.weight_folders import WeightFolders
from trace_jax.loop import Run
from trace_jax.models import folder as model_folder
from trace_jax.rollout import keys
from trace_jax.rollout.collect import Collected
from trace_jax.rollout.scheduler import Progress, collect_batch
from trace_jax.serving import command, process
from trace_jax.tree import query
from trace_jax.types import Finish

POOL, ROOTS, CONTINUATIONS, CONCURRENCY = 16, 32, 2, 64
SETTINGS = Settings(
    request_timeout=60.0, attempts=6, update_timeout=60.0, outage_timeout=60.0, release_memory=False
)  # the defaults of the config but for shorter waits
_START_TIMEOUT, _CLOSING = 300.0, 30.0  # seconds


class RealServer:
    """A real server on a port of its own."""

    def __init__(self, model: Path, python: Path, context_length: int, log: Path, seed: int):
        spec = command.ServerSpec(
            model=model, port=process.free_port(), python=python, context_length=context_length, seed=seed, cpu=True
        )
        self.program = process.Program(
            command=tuple(command.arguments(command.validate(spec))),
            environment=command.environment(spec, os.environ),
            host=spec.host,
            port=spec.port,
            url=command.url(spec),
            log=log,
        )
        self._process: process.ServerProcess | None = None

    def start(self) -> None:
        """Starts it if it does not run, and waits until it is healthy."""
        if self._process is not None and self._process.exit_status is None:
            return
        end = time.monotonic() + _CLOSING
        while True:
            try:
                self._process = process.ServerProcess(self.program)
                break
            except process.ServerError:  # the port of one that was killed just now is still closing
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
        process.wait_until_healthy(self._process, _START_TIMEOUT)

    def kill(self) -> None:
        """SIGKILL to all of it."""
        if self._process is not None:
            self._process.kill()

    def hang(self) -> None:
        """All of it stops where it is: connections are taken by the kernel, and nobody answers."""
        self._process.signal_group(signal.SIGSTOP)

    def wake(self) -> None:
        """Goes on after `hang`."""
        self._process.signal_group(signal.SIGCONT)


class RandomPredictor:
    """Values that only decide where forks go."""

    async def score_prompts(self, prompts: Sequence[Any]) -> np.ndarray:
        """float [B]."""
        return np.array([_uniform(prompt.uid, 1)[0] for prompt in prompts])

    async def score_anchors(self, tree: Any, anchors: np.ndarray) -> np.ndarray:
        """float [A]."""
        return _uniform(tree.prompt_uid, len(anchors))


def _uniform(uid: str, count: int) -> np.ndarray:
    return np.random.default_rng(keys.prompt_key(uid)).uniform(0.05, 0.95, count)


class Lab:
    """One drill: an engine on some of the servers, through their proxies."""

    def __init__(self, run: Run, servers: Sequence[RealServer], folder: Path, *, direct: bool = False, **settings: float):
        """
        Args:
          run: whose policy, task and limits are used.
          servers: of this drill.
          folder: for the weights.
          direct: whether the engine talks to the servers themselves, not to their proxies.
          settings: that differ from `SETTINGS`.
        """
        self.servers, self.proxies = list(servers), [Proxy(server.program.url) for server in servers]
        self.disk_full, self.folder = False, folder
        self.collected: list[Collected] = []
        self.rollouts = np.zeros(POOL, np.int64)
        self._run, self._direct = run, direct
        self._settings = dataclasses.replace(SETTINGS, **settings)
        self._params = run.trainer.full_params(run.policy.params)
        self._quarter = asyncio.Event()

    async def open(self) -> None:
        """All servers are up, and their proxies listen."""
        for server in self.servers:
            await asyncio.to_thread(server.start)
        for proxy in self.proxies:
            await proxy.start()
        self.engine = SglangEngine(
            [proxy.upstream if self._direct else proxy.url for proxy in self.proxies],
            router=None,
            context_length=self._run.limits.context_length,
            vocab_size=self._run.trainer.model.vocab_size,
            sampled_vocab=self._run.trainer.model.vocab_size,
            weights=WeightFolders(self.folder, self._save),
            settings=self._settings,
        )

    async def close(self) -> None:
        """Ends the engine and the proxies."""
        await self.engine.close()
        for proxy in self.proxies:
            await proxy.stop()

    def _save(self, folder: Path, params: Any) -> None:
        if self.disk_full:
            (folder / "model.safetensors.part").write_bytes(bytes(1000))
            raise OSError(28, "No space left on device", str(folder))
        model_folder.save(folder, self._run.trainer.model, params)

    async def publish(self, version: int) -> None:
        """The policy's weights as `version`."""
        await self.engine.set_weights(self._params, version)
        self._run.version = version

    async def some_done(self) -> None:
        """Returns when a quarter of the step's units is done: others are in the middle of their episodes."""
        await self._quarter.wait()

    async def step(self, beside: Callable[[Lab], Awaitable[None]] | None = None) -> None:
        """A step's rollouts; `beside` runs at the same time."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._collect())
                if beside:
                    both.create_task(beside(self))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _collect(self) -> None:
        strategy = Trace(root_budget=ROOTS, continuations_per_root=CONTINUATIONS)
        prompts, predictor = self._run.training_prompts(POOL, 0), RandomPredictor()
        scores = await predictor.score_prompts(prompts)
        self.rollouts = strategy.roots(scores, POOL, np.random.default_rng(0))

        def look(progress: Progress) -> None:
            if 4 * progress.units_done >= progress.units:
                self._quarter.set()

        self.collected = await collect_batch(
            self.engine,
            self._run.environment,
            strategy,
            predictor,
            prompts,
            self.rollouts,
            sampling=self._run.sampling(keys.Stream.TRAIN),
            concurrency=CONCURRENCY,
            on_progress=look,
        )

    def counts(self) -> dict[str, Any]:
        """What the step was to bring, and what is in its trees; zeros where no step was finished."""
        count = {"leaves_expected": 0, "leaves": 0, "units_planned": 0.0, "units": 0.0, "engine_error_leaves": 0}
        count["wrong_version_leaves"] = 0
        starts = [int(m) for m in self.rollouts if m > 0]
        for rollouts, found in zip(starts, self._by_start() if self.collected else [], strict=False):
            extra = rollouts * CONTINUATIONS
            count["leaves_expected"] += rollouts + (fallback_roots(extra) if found.fallback_rollouts else extra)
            count["units_planned"] += rollouts * (1 + CONTINUATIONS / 2)
            leaves = query.leaves(found.tree.validate())
            count["leaves"] += len(leaves)
            count["units"] += found.counts.units
            count["engine_error_leaves"] += int(np.sum(found.tree.finish[leaves] == Finish.ENGINE_ERROR))
            sampled = found.tree.action_counts() > 0
            count["wrong_version_leaves"] += int(np.sum(sampled & (found.tree.weight_version != self._run.version)))
        return count

    def _by_start(self) -> list[Collected]:
        """In the order of the prompts that were given rollouts; `collect_batch` sorts by uid."""
        found = {collected.tree.prompt_uid: collected for collected in self.collected}
        prompts = self._run.training_prompts(POOL, 0)
        return [found[prompt.uid] for prompt, m in zip(prompts, self.rollouts, strict=True) if m > 0]


Drill = Callable[[Lab], Awaitable[None]]


async def record(lab: Lab, name: str, drill: Drill, expected: str, limit: float) -> dict[str, Any]:
    """Runs a drill: what came of it, in how many seconds, and whether anything is lost."""
    await lab.open()
    begin, message = time.monotonic(), ""
    try:
        async with asyncio.timeout(limit):
            await drill(lab)
        outcome = "completed"
    except EngineDown as error:
        outcome, message = "run ends with EngineDown", str(error).replace(str(lab.folder), "WEIGHTS")
    except TimeoutError:
        outcome = f"not over after {limit:g} s"
    seconds, counts, stats = time.monotonic() - begin, lab.counts(), lab.engine.stats()
    await lab.close()
    # a leaf that the engine gave up on is in its tree and paid for, but nothing was learnt from it
    counts["leaves_lost"] = counts["leaves_expected"] - counts["leaves"] + counts["engine_error_leaves"]
    counts["units_lost"] = counts["units_planned"] - counts["units"]
    head = {"fault": name, "outcome": outcome, "expected": expected, "message": message, "seconds": round(seconds, 2)}
    return head | {"limit_seconds": limit} | counts | stats
