"""A whole run: evaluate, train, evaluate, and say what came of it. It can be stopped and started at any time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from trace_jax import config as config_lib
from trace_jax import loop, saving
from trace_jax.assemble import assemble
from trace_jax.config import ConfigError, RunConfig
from trace_jax.engines.base import EngineDown
from trace_jax.eval.evaluate import Evaluation
from trace_jax.interruption import Interruption
from trace_jax.loop import Run
from trace_jax.report import closing, console
from trace_jax.rollout.scheduler import Progress
from trace_jax.setup_run import take_devices
from trace_jax.train.checkpoint import Checkpointer
from trace_jax.train.metrics import JsonlWriter, TensorBoardWriter, WandbWriter, Writers, read_jsonl

Row = dict[str, Any]  # metrics of one step

_ROLLOUT_SHARE = 0.7  # of a step's time, for the progress bar only


def run(config: RunConfig, workdir: str | os.PathLike[str]) -> None:
    """Trains to `config.steps`, from the newest checkpoint of `workdir` if there is one.

    Writes config.json, metrics.jsonl (one object a step; step 0 holds the evaluation before training), tensorboard/,
    checkpoints/ and warm_start/ there. Raises ConfigError and CheckpointError, one line each. SIGTERM and Ctrl-C raise
    KeyboardInterrupt before training starts, and end it with a checkpoint from then on.
    """
    workdir = Path(workdir).absolute()
    take_devices(config)
    with Interruption() as interruption, contextlib.closing(_open(config, workdir)) as checkpoints:
        rows = _rows(workdir)
        parts = assemble(config, workdir)
        resumed = saving.restore(parts, checkpoints)
        if resumed:
            print(f"resumed after step {parts.step}")
        pending = _pending(config, rows, parts.step) if resumed else None
        with contextlib.closing(_writers(config, workdir, parts.step + (resumed and pending is None))) as writers:
            asyncio.run(_train(parts, checkpoints, writers, interruption, resumed, pending))
    if parts.step >= config.steps and not interruption.asked:
        _close(config, workdir)


def _open(config: RunConfig, workdir: Path) -> Checkpointer:
    """The workdir's checkpoints; writes config.json only if they are of this config, so that it stays true."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        checkpoints = saving.open_checkpoints(config, workdir / "checkpoints")
        (workdir / "config.json").write_text(config_lib.to_json(config))
    except OSError as error:
        raise ConfigError(f"--workdir: {error}") from error
    return checkpoints


def _rows(workdir: Path) -> list[Row]:
    """What metrics.jsonl says so far; [] if there is none."""
    path = workdir / "metrics.jsonl"
    try:
        return read_jsonl(path) if path.exists() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"--workdir: {error}") from error


async def _train(
    run: Run,
    checkpoints: Checkpointer,
    writers: Writers,
    interruption: Interruption,
    resumed: bool,
    pending: Row | None,
) -> None:
    """The run's one event loop. Ends early, with a checkpoint, when a signal asks for it.

    There is none of step 0 then: what comes before the first step is done again.
    """
    work = asyncio.create_task(_steps(run, checkpoints, writers, resumed, pending))
    with interruption.calls(asyncio.get_running_loop(), work.cancel):
        try:
            await work
            checkpoints.save(saving.snapshot(run))
        except (asyncio.CancelledError, EngineDown) as error:
            stopped = isinstance(error, asyncio.CancelledError)
            if stopped and not interruption.asked:
                raise
            if run.step > 0:  # first of all: what was learnt so far is kept
                checkpoints.save(saving.snapshot(run))
            if not stopped:
                raise
            print(f"\nstopped after step {run.step}; the same command goes on from here")
        finally:
            await run.engine.close()


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
    drift = console.DriftAlarm(config.loss.max_logprob_gap)
    while run.step < config.steps:
        start = run.step
        metrics = await loop.train_step(run, lambda p: bar.to(start + _ROLLOUT_SHARE * _done(p), **notes))
        notes = console.step_notes(metrics)
        bar.to(run.step, **notes)
        if metrics["train/staleness"] == 0 and (warning := drift.check(metrics)):  # else the policy itself moved on
            bar.say(warning)
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


def _pending(config: RunConfig, rows: list[Row], step: int) -> Row | None:
    """The metrics of a finished step whose evaluation was interrupted."""
    for row in rows:
        if row["step"] == step and _evaluation_due(config, step) and "eval/success" not in row:
            return {name: value for name, value in row.items() if name != "step"}
    return None


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
    table = closing.summary(_rows(workdir), f"{config.eval.prompts} prompts x {config.eval.samples}")
    if not table:
        return
    command, here = "python -m trace_jax.main --config=configs/quickstart.py", os.path.relpath(workdir)
    more = [
        f"{command} --workdir=runs/grpo --config.strategy=grpo",
        f"{command} --workdir=runs/lookup --config.task=lookup",
    ]
    if config.model.path is not None:
        more = [f"python -m trace_jax.export --workdir={here} --folder=models/{workdir.name}"]
    more.append(f"pip install tensorboard && tensorboard --logdir={os.path.relpath(workdir.parent)}")
    print(f"\n{table}\n\nmetrics: {os.path.join(here, 'metrics.jsonl')}\n\ntry next:")
    print("\n".join(f"  {line}" for line in more))
