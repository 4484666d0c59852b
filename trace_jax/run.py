"""A whole run: evaluate, train, evaluate, and say what came of it. It can be stopped and started at any time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trace_jax import config as config_lib
from trace_jax import loop, saving
from trace_jax.assemble import assemble
from trace_jax.config import ConfigError, RunConfig
from trace_jax.eval.evaluate import Evaluation
from trace_jax.loop import Run
from trace_jax.report import console
from trace_jax.rollout.scheduler import Progress
from trace_jax.train.checkpoint import Checkpointer
from trace_jax.train.metrics import JsonlWriter, TensorBoardWriter, WandbWriter, Writers, read_jsonl

Row = dict[str, Any]  # metrics of one step

_ROLLOUT_SHARE = 0.7  # of a step's time, for the progress bar only


def run(config: RunConfig, workdir: str | os.PathLike[str]) -> None:
    """Trains to `config.steps`, from the newest checkpoint of `workdir` if there is one.

    Writes config.json, metrics.jsonl (one object a step; step 0 holds the evaluation before training), tensorboard/,
    checkpoints/ and warm_start/ there. Raises ConfigError and CheckpointError, one line each.
    """
    workdir = Path(workdir).absolute()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "config.json").write_text(config_lib.to_json(config))
    except OSError as error:
        raise ConfigError(f"--workdir: {error}") from error
    parts = assemble(config, workdir)
    checkpoints = saving.open_checkpoints(parts, workdir / "checkpoints")
    resumed = saving.restore(parts, checkpoints)
    if resumed:
        print(f"resumed after step {parts.step}")
    pending = _pending(config, workdir, parts.step) if resumed else None
    writers = _writers(config, workdir, resume_step=parts.step + (resumed and pending is None))
    try:
        asyncio.run(_train(parts, checkpoints, writers, resumed, pending))
    finally:
        writers.close()
        checkpoints.close()
    if parts.step >= config.steps:
        _close(config, workdir)


async def _train(run: Run, checkpoints: Checkpointer, writers: Writers, resumed: bool, pending: Row | None) -> None:
    """The run's one event loop. Ends early, with a checkpoint, when a signal asks for it."""
    with _Interruption() as interruption:
        work = asyncio.create_task(_steps(run, checkpoints, writers, resumed, pending))
        interruption.on_signal = work.cancel
        try:
            await work
        except asyncio.CancelledError:
            if not interruption.asked:
                raise
            print(f"\nstopped after step {run.step}; the same command goes on from here")
        checkpoints.save(saving.snapshot(run))


async def _steps(run: Run, checkpoints: Checkpointer, writers: Writers, resumed: bool, pending: Row | None) -> None:
    config = run.config
    await loop.publish(run)
    if not resumed:
        first = _evaluation_metrics(await _evaluate(run, "evaluate before"))
        if run.learned is not None and config.predictor.warmup_prompts:
            first |= await loop.warm_up_predictor(run)
        writers.write(0, first)
    if pending is not None:
        await _finish_step(run, writers, pending)
    bar = console.Bar(f"{config.strategy} on {config.task}", config.steps, "step", initial=run.step)
    notes: dict[str, str] = {}
    while run.step < config.steps:
        start = run.step
        metrics = await loop.train_step(run, lambda p: bar.to(start + _ROLLOUT_SHARE * _done(p), **notes))
        notes = console.step_notes(metrics)
        bar.to(run.step, **notes)
        if run.step == config.steps:
            bar.close()
        await _finish_step(run, writers, metrics)
        if config.checkpoint.every and run.step % config.checkpoint.every == 0:
            checkpoints.save(saving.snapshot(run))


async def _finish_step(run: Run, writers: Writers, metrics: Row) -> None:
    """Evaluates if it is time to, and writes the step's metrics in any case."""
    try:
        if _evaluation_due(run.config, run.step):
            label = "evaluate after" if run.step == run.config.steps else "evaluate"
            metrics = metrics | _evaluation_metrics(await _evaluate(run, label))
    finally:
        writers.write(run.step, metrics)


def _evaluation_due(config: RunConfig, step: int) -> bool:
    return step == config.steps or bool(config.eval.every and step % config.eval.every == 0)


def _pending(config: RunConfig, workdir: Path, step: int) -> Row | None:
    """The metrics of a finished step whose evaluation was interrupted."""
    rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["step"] == step]
    if not rows or not _evaluation_due(config, step) or "eval/success" in rows[0]:
        return None
    return {name: value for name, value in rows[0].items() if name != "step"}


async def _evaluate(run: Run, label: str) -> Evaluation:
    total = run.config.eval.prompts * run.config.eval.samples
    bar = console.Bar(label, total, "rollout")
    result = await loop.evaluate_run(run, lambda p: bar.to(p.units_done))
    bar.to(total, success=f"{result.success:.3f}")
    bar.close()
    return result


def _done(progress: Progress) -> float:
    return progress.units_done / max(progress.units, 1)


def _evaluation_metrics(result: Evaluation) -> dict[str, float]:
    metrics = {
        "eval/success": result.success,
        "eval/standard_error": result.standard_error,
        "eval/mixed": result.mixed,
        "eval/generated_tokens": result.counts.generated_tokens,
    }
    return metrics | {f"eval/success_{group}": value for group, value in result.by_group.items()}


def _writers(config: RunConfig, workdir: Path, resume_step: int) -> Writers:
    writers = [JsonlWriter(workdir / "metrics.jsonl", resume_step=resume_step)]
    if config.logging.tensorboard:
        writers.append(TensorBoardWriter(workdir / "tensorboard", resume_step=resume_step))
    if config.logging.wandb_project:
        settings = json.loads(config_lib.to_json(config))
        try:
            writers.append(
                WandbWriter(config.logging.wandb_project, name=workdir.name, config=settings, folder=workdir)
            )
        except ImportError as error:
            raise ConfigError(f"config.logging.wandb_project: {error}") from error
    return Writers(writers)


def _close(config: RunConfig, workdir: Path) -> None:
    """The closing table and the commands to try next."""
    rows = read_jsonl(workdir / "metrics.jsonl")
    before, steps = rows[0], [row for row in rows if "rollout/success" in row]
    if not steps:
        return
    first, last = steps[0], steps[-1]
    mean = lambda name, part: sum(row[name] for row in part) / len(part)
    third = max(len(steps) // 3, 1)
    table = [
        (
            f"held-out success ({config.eval.prompts} prompts x {config.eval.samples})",
            f"{before['eval/success']:.3f} ± {before['eval/standard_error'] or 0:.3f}",
            f"{last['eval/success']:.3f} ± {last['eval/standard_error'] or 0:.3f}",
        ),
        (
            f"effective ratio (first and last {third} steps)",
            f"{mean('rollout/effective_ratio', steps[:third]):.2f}",
            f"{mean('rollout/effective_ratio', steps[-third:]):.2f}",
        ),
        ("tokens generated in training", f"{first['rollout/generated_tokens']:,}",
         f"{sum(row['rollout/generated_tokens'] for row in steps):,}"),
        ("seconds in training steps", f"{first['time/step']:.1f}", f"{sum(row['time/step'] for row in steps):.1f}"),
    ]  # fmt: skip
    print("\n" + console.closing_table(table))
    command = "python -m trace_jax.main --config=configs/quickstart.py"
    print(
        f"\nmetrics: {os.path.relpath(workdir / 'metrics.jsonl')}\n\ntry next:\n"
        f"  {command} --workdir=runs/grpo --config.strategy=grpo\n"
        f"  {command} --workdir=runs/lookup --config.task=lookup\n"
        f"  tensorboard --logdir={os.path.relpath(workdir.parent)}"
    )


class _Interruption:
    """SIGTERM and Ctrl-C call `on_signal` once; after that they have their usual effect again."""

    def __init__(self):
        self.asked = False
        self.on_signal: Callable[[], object] = lambda: None
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Interruption:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        self._loop = asyncio.get_running_loop()
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _handle(self, number, frame) -> None:
        del number, frame
        self.asked = True
        self._restore()
        self._loop.call_soon_threadsafe(self.on_signal)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
