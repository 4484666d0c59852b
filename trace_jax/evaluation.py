"""An evaluation from its settings to its tables: what `python -m trace_jax.evaluate` does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trace_jax import saving
from trace_jax.assemble import Parts, Sampler, assemble_sampler, prepare
from trace_jax.config import ConfigError, RunConfig
from trace_jax.eval import benchmarks, outcomes, session
from trace_jax.eval.folder import RESULTS, EvaluationFolder
from trace_jax.eval.identity import params_digest
from trace_jax.eval.outcomes import Outcomes, OutcomesFile
from trace_jax.interruption import Interruption
from trace_jax.report import console, paper_table
from trace_jax.rollout import keys
from trace_jax.rollout.agent import Episode
from trace_jax.rollout.runner import Sampling
from trace_jax.setup_run import make_limits, take_devices
from trace_jax.train.checkpoint import Checkpointer
from trace_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be evaluated, how, and where to."""

    config: RunConfig
    decisive: Mapping[str, Any]  # of its settings, those that decide the numbers
    training: bool  # whether the task needs its training records too
    folder: Path
    workdir: Path | None  # of the run whose newest checkpoint is meant; None: the untrained model
    own: RunConfig | None  # config of that run
    benchmarks: Sequence[str] | None  # None: all of the task
    samples: int | None  # of a prompt; None: the paper's
    ks: Sequence[int] | None  # of pass@k; None: 1 and the samples
    prompts: int | None  # the first ones of each benchmark; None: all
    seed: int


@dataclasses.dataclass(frozen=True)
class _Benchmark:
    """One benchmark, ready to be sampled."""

    name: str
    prompts: list[Prompt]
    samples: int
    ks: tuple[int, ...]
    records: int  # of the whole benchmark
    too_long: int  # of them, those that no prompt is made of


@dataclasses.dataclass(frozen=True)
class _Work:
    """An evaluation that is ready to begin."""

    request: Request
    folder: EvaluationFolder
    settings: Mapping[str, Any]  # what the folder keeps
    parts: Parts
    sampler: Sampler
    plan: Sequence[_Benchmark]


def run(request: Request) -> None:
    """Samples what is missing, then writes and prints figures and tables.

    Raises ConfigError, CheckpointError and EngineDown, one line each. SIGTERM and Ctrl-C raise KeyboardInterrupt before
    the first prompt, and end the evaluation with one line from then on.
    """
    take_devices(request.config)
    settings = dict(request.decisive) | {"--seed": request.seed}
    with Interruption() as interruption, contextlib.ExitStack() as stack:
        with _one_line("--folder"):
            folder = EvaluationFolder(request.folder)
            folder.check(settings)
        checkpoints = stack.enter_context(_checkpoints(request)) if request.workdir else None
        parts = prepare(request.config, training=request.training)
        plan = _plan(request, parts)
        _check_begun(folder, plan)
        sampler = assemble_sampler(parts, request.folder, request.workdir, checkpoints)
        settings |= {"model": params_digest(sampler.params)}
        with _one_line("--folder"):
            folder.begin(settings)
        asyncio.run(_evaluate(_Work(request, folder, settings, parts, sampler, plan), interruption))


@contextlib.contextmanager
def _one_line(flag: str) -> Iterator[None]:
    """A ValueError of what knows no config becomes a ConfigError that begins with the flag it is about."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}" if flag else str(error)) from error


@contextlib.contextmanager
def _checkpoints(request: Request) -> Iterator[Checkpointer]:
    folder = request.workdir / "checkpoints"
    if not folder.is_dir():  # opening it would make it
        raise ConfigError(f"--workdir: {request.workdir} holds no checkpoint yet; train first")
    with contextlib.closing(saving.open_checkpoints(request.own, folder)) as checkpoints:
        yield checkpoints


def _plan(request: Request, parts: Parts) -> list[_Benchmark]:
    """The benchmarks that are asked for. Everything that can be wrong with them is said before anything is spent."""
    config, task = parts.config, parts.environment.task
    with _one_line(""):
        available = benchmarks.benchmarks(task, request.prompts or config.eval.prompts)
        chosen = benchmarks.select(available, request.benchmarks, request.prompts)
    papers, too_long = benchmarks.PAPER_SAMPLES.get(config.task, {}), benchmarks.too_long(task)
    limits, plan = make_limits(config, task), []
    for name, indices in chosen.items():
        samples = request.samples or papers.get(name, config.eval.samples)
        ks = tuple(request.ks or sorted({1, samples}))
        if max(ks) > samples:
            raise ConfigError(
                f"--k asks for pass@{max(ks)}, but {name} has {samples} samples of a prompt; lower it or raise "
                "--samples"
            )
        with _one_line(""):
            prompts = benchmarks.make_prompts(parts.environment, limits, "eval", indices)
        lost = too_long.get(name, 0)
        plan.append(_Benchmark(name, prompts, samples, ks, records=len(available[name]) + lost, too_long=lost))
    return plan


def _check_begun(folder: EvaluationFolder, plan: Sequence[_Benchmark]) -> None:
    """Raises ConfigError where the folder holds samples that cannot be added to: before a model is loaded."""
    for benchmark in plan:
        if folder.has_outcomes(benchmark.name):
            with _one_line("--folder"), contextlib.closing(folder.outcomes(benchmark.name)) as file:
                session.missing(benchmark.prompts, benchmark.samples, file)


async def _evaluate(work: _Work, interruption: Interruption) -> None:
    """The evaluation's one event loop; ends early, with a line, when a signal asks for it."""
    running = asyncio.create_task(_benchmarks(work))
    with interruption.calls(asyncio.get_running_loop(), running.cancel):
        try:
            await running
        except asyncio.CancelledError:
            if not interruption.asked:
                raise
        finally:
            await work.sampler.engine.close()


async def _benchmarks(work: _Work) -> None:
    """One benchmark after the other, figures and tables on disk after each."""
    folder, sampler = work.folder, work.sampler
    label, served, figures = _label(work.request, sampler), False, folder.figures()
    for benchmark in work.plan:
        with _one_line("--folder"):
            file = folder.outcomes(benchmark.name)
        with contextlib.closing(file):
            with _one_line("--folder"):
                left = session.missing(benchmark.prompts, benchmark.samples, file)
            if left and not served:
                await sampler.engine.set_weights(sampler.params, sampler.step)
                await sampler.engine.preload(work.parts.environment.trunk)
                served = True
            await _sample(work, benchmark, left, file)
            found = [file.outcomes[prompt.uid] for prompt in benchmark.prompts]
        whole = {"records": benchmark.records, "too_long": benchmark.too_long}
        figures[benchmark.name] = whole | outcomes.summary(found, benchmark.ks)
        _warn(benchmark.name, found)
        document = _about(work, label) | {"benchmarks": figures}
        folder.write(document, paper_table.tables(figures, label, markdown=True))
    print(f"\n{paper_table.tables(figures, label)}\n\nfigures: {os.path.relpath(folder.path / RESULTS)}")


async def _sample(work: _Work, benchmark: _Benchmark, left: Sequence[Prompt], file: OutcomesFile) -> None:
    """Samples the prompts that are left, with a progress bar."""
    sampler, config, bar = work.sampler, work.parts.config, _Bar(benchmark, left, file)
    sampling = Sampling(
        limits=sampler.limits,
        temperature=config.sampling.temperature,
        seed=work.request.seed,
        stream=keys.Stream.EVAL,
        step=0,
        salt=str(sampler.step),
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
    )
    try:
        with contextlib.closing(bar):
            await session.sample(
                sampler.engine,
                work.parts.environment,
                left,
                benchmark.samples,
                file,
                sampling=sampling,
                concurrency=config.sampling.concurrency,
                on_episode=bar.episode,
                on_prompt=bar.prompt,
            )
    except asyncio.CancelledError:
        done, total = bar.prompts_done, len(benchmark.prompts)
        print(f"\nstopped after {done} of {total} prompts of {benchmark.name}; the same command goes on from here")
        raise


class _Bar:
    """A benchmark's progress in samples, what is in its file included; shows the success so far."""

    def __init__(self, benchmark: _Benchmark, left: Sequence[Prompt], file: OutcomesFile):
        missing = {prompt.uid for prompt in left}
        found = [file.outcomes[prompt.uid] for prompt in benchmark.prompts if prompt.uid not in missing]
        self.prompts_done = len(found)
        self._successes, self._samples = sum(sum(o.successes) for o in found), benchmark.samples
        self._done = len(found) * benchmark.samples
        total = len(benchmark.prompts) * benchmark.samples
        self._bar = console.Bar(benchmark.name, total, "rollout", initial=self._done)

    def episode(self, episode: Episode) -> None:
        """One sample more is finished."""
        del episode
        self._done += 1
        self._bar.to(self._done)

    def prompt(self, found: Outcomes) -> None:
        """One prompt more is finished."""
        self.prompts_done += 1
        self._successes += sum(found.successes)
        self._bar.to(self._done, success=f"{self._successes / (self.prompts_done * self._samples):.3f}")

    def close(self) -> None:
        """Leaves the last state on the screen."""
        self._bar.close()


def _label(request: Request, sampler: Sampler) -> str:
    """What the tables call the policy."""
    if request.workdir is not None:
        return f"{request.workdir.name}, step {sampler.step}"
    path = request.config.model.path
    return Path(path).name if path else f"{request.config.task}, untrained"


def _about(work: _Work, label: str) -> dict[str, Any]:
    """What the figures are figures of."""
    content = json.dumps(work.request.decisive, sort_keys=True)
    return {
        "policy": label,
        "step": work.sampler.step,
        "model": work.settings["model"],
        "seed": work.request.seed,
        "config_digest": hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
        "settings": dict(work.settings),
    }


def _warn(name: str, found: Sequence[Outcomes]) -> None:
    errors = [error for o in found for error in o.errors]
    if errors:
        print(f"{name}: {len(errors)} samples ended with an error and count as failures, the first: {errors[0]}")
