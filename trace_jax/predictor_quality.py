"""How good a run's predictor is where it counts: what `python -m trace_jax.predictor_report` does.

The newest checkpoint's policy rolls out training prompts that the run will not see, outside of any budget; what came of
them judges the scores and what the allocator would have bought with them (`eval/predictor_measures.py`). The prompts
are those from position 9,000,000 of the seed's stretch of 10,000,000 on, which no run gets to: the same ones at every
checkpoint. A data set of finite size is in a later epoch there: its records may have been trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax import loop, saving
from trace_jax.assemble import assemble
from trace_jax.config import ConfigError, RunConfig
from trace_jax.eval import predictor_measures as measures
from trace_jax.eval.predictor_measures import Scored
from trace_jax.eval.regret import Allocate, Measured
from trace_jax.interruption import Interruption
from trace_jax.loop import Run
from trace_jax.report import console, predictor_figure, predictor_tables
from trace_jax.rollout import keys, replay
from trace_jax.rollout.agent import Episode
from trace_jax.rollout.runner import Runner
from trace_jax.rollout.scheduler import sample_batch
from trace_jax.rollout.slots import EpisodeSlots, run_all
from trace_jax.setup_run import make_strategy, take_devices
from trace_jax.train.metrics import read_jsonl
from trace_jax.tree import query
from trace_jax.types import Finish, NodeKind, Prompt, RolloutTree

FOLDER, FIGURES, TABLES, PICTURE = "predictor", "report.json", "report.md", "predictor.png"
DEFAULT_PROMPTS = 256
_FIRST_PROMPT = 9_000_000  # of the seed's stretch
_BARE = 2  # rollouts of a prompt whose anchors are measured

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be measured, and of which run."""

    workdir: Path
    own: RunConfig  # the run's config
    config: RunConfig  # the same, sampled elsewhere or not
    prompts: int | None  # None: DEFAULT_PROMPTS, or a pool if that is more
    rollouts: int  # of each prompt, at least 2
    anchors: int  # at most; at least 2
    continuations: int  # of each anchor, at least 2
    seed: int  # of rollouts, halves and permutations


@dataclasses.dataclass(frozen=True)
class _Anchors:
    """Measured anchors, and what stage 2 knows of each."""

    items: Scored
    outcome: np.ndarray  # float [A]; of the bare rollout that it lies on
    prompt: np.ndarray  # int [A]


def run(request: Request) -> None:
    """Measures, writes WORKDIR/predictor/ and prints the tables.

    Raises ConfigError, CheckpointError and EngineDown, one line each. SIGTERM and Ctrl-C raise KeyboardInterrupt;
    nothing is written then.
    """
    take_devices(request.config)
    with Interruption() as interruption:
        request = dataclasses.replace(request, prompts=_checked_prompts(request))
        rows = _rows(request.workdir)
        folder = _folder(request.workdir)
        parts = _restored(request, folder)
        measuring = _measure(parts, request, _root_budget(rows, parts.step))
        figures, roots, anchors = asyncio.run(_interruptible(parts, measuring, interruption))
        _write(folder, request, figures, roots, anchors, rows)


def _checked_prompts(request: Request) -> int:
    """How many prompts; ConfigError for a run that has nothing to report, or too few of them."""
    config = request.own
    learns = make_strategy(config, config.budget).needs_predictor
    if not learns or config.predictor.kind == "oracle":
        why = f"strategy {config.strategy!r}" if not learns else "predictor.kind 'oracle'"
        raise ConfigError(f"--workdir: {request.workdir} has no learned predictor to report on ({why})")
    pool = config.budget.pool
    prompts = max(DEFAULT_PROMPTS, pool) if request.prompts is None else request.prompts
    if prompts < pool:
        raise ConfigError(f"--prompts is {prompts}, less than a pool of this run, {pool}; ask for at least that")
    return prompts


def _rows(workdir: Path) -> list[Row]:
    try:
        return read_jsonl(workdir / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--workdir: {workdir} holds no metrics of a run ({error})") from error


def _folder(workdir: Path) -> Path:
    """Where the report goes. ConfigError where it cannot be written, or drawn: before anything is spent."""
    if not (workdir / "checkpoints").is_dir():  # opening it would make it
        raise ConfigError(f"--workdir: {workdir} holds no checkpoint yet; train first")
    folder = workdir / FOLDER
    try:
        predictor_figure.check_library()
        folder.mkdir(exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"--workdir: {folder} cannot be written ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return folder


def _restored(request: Request, folder: Path) -> Run:
    """The run at its newest checkpoint. Its engine has `folder` as home: the run itself may be under way."""
    cache = request.config.warm_start.cache or str(request.workdir / "warm_start")
    config = dataclasses.replace(
        request.config, warm_start=dataclasses.replace(request.config.warm_start, cache=cache)
    )
    with contextlib.closing(saving.open_checkpoints(request.own, request.workdir / "checkpoints")) as checkpoints:
        if checkpoints.latest_step() is None:
            raise ConfigError(f"--workdir: {request.workdir} holds no checkpoint yet; train first")
        parts = assemble(config, folder)
        saving.restore(parts, checkpoints)
    return parts


async def _interruptible(parts: Run, measuring: Coroutine, interruption: Interruption) -> tuple:
    """The one event loop: `measuring`, ended by KeyboardInterrupt when a signal asks for it."""
    running = asyncio.create_task(measuring)
    with interruption.calls(asyncio.get_running_loop(), running.cancel):
        try:
            return await running
        except asyncio.CancelledError:
            if interruption.asked:
                raise KeyboardInterrupt from None
            raise
        finally:
            await parts.engine.close()


async def _measure(run: Run, request: Request, root_budget: int) -> tuple[dict[str, float], Scored, Scored]:
    """(figures by name, prompts, anchors)."""
    budget = run.config.budget
    await loop.publish(run)
    prompts = run.training_prompts(request.prompts, _FIRST_PROMPT)
    scores = await run.learned.scorer.score_prompts(prompts)
    trees, errors = await _bare(run, request, prompts)
    roots = _roots(prompts, scores, trees)
    if roots.size < budget.pool:
        raise ConfigError(f"{errors} rollouts failed; the {roots.size} prompts left are less than a pool")
    rng = keys.host_rng(request.seed, 0, "predictor report")
    continuations = make_strategy(run.config, budget).continuations_per_root
    anchors, more = await _anchors(run, request, prompts, trees if continuations else [], rng)
    figures = {"step": run.step, "errors": errors + more, "root_budget": root_budget}
    figures |= {"uniform_rollouts": budget.rollouts_per_prompt}
    figures |= _named("root", measures.quality(roots)) | _named("anchor", measures.quality(anchors.items))
    figures |= measures.by_depth(roots, anchors.items)
    gains = measures.root_gains(
        roots,
        pool=budget.pool,
        root_budget=root_budget,
        allocate=_allocator(run.config),
        uniform_rollouts=budget.rollouts_per_prompt,
        rng=rng,
    )
    figures |= _named("root", gains)
    if anchors.items.size:
        total = _BARE * continuations
        gains = measures.prefix_gains(anchors.items, anchors.outcome, anchors.prompt, total, rng)
        figures |= _named("anchor", gains)
    return figures, roots, anchors.items


def _allocator(config: RunConfig) -> Allocate | None:
    """TRACE's as the run has it; of a run with another strategy, None: the paper's."""
    if config.strategy != "trace":
        return None

    def allocate(scores: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
        strategy = make_strategy(config, dataclasses.replace(config.budget, roots=total))
        return strategy.roots(scores, scores.shape[-1], rng)

    return allocate


def _named(place: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{place}/{name}": value for name, value in figures.items()}


def _root_budget(rows: Sequence[Row], step: int) -> int:
    """Bare rollouts that the newest step up to `step` planned. ConfigError where no such step is in the rows."""
    planned = [
        int(row["rollout/root_rollouts"] - row["rollout/fallback_rollouts"])
        for row in rows
        if row["step"] <= step and "rollout/root_rollouts" in row
    ]
    if not planned:
        raise ConfigError(f"--workdir: its metrics.jsonl says nothing of the steps up to {step}; put it back")
    return planned[-1]


async def _bare(run: Run, request: Request, prompts: Sequence[Prompt]) -> tuple[list[RolloutTree], int]:
    """(a flat tree of each prompt, in their order; rollouts that ended with an error)."""
    total = len(prompts) * request.rollouts
    with contextlib.closing(console.Bar("rollouts", total, "rollout")) as bar:
        collected = await sample_batch(
            run.engine,
            run.environment,
            prompts,
            request.rollouts,
            sampling=run.sampling(keys.Stream.ORACLE, seed=request.seed, step=0),
            concurrency=run.config.sampling.concurrency,
            on_progress=lambda p: bar.to(p.units_done),
        )
    found = {c.tree.prompt_uid: c.tree for c in collected}
    return [found[prompt.uid] for prompt in prompts], sum(len(c.errors) for c in collected)


def _roots(prompts: Sequence[Prompt], scores: np.ndarray, trees: Sequence[RolloutTree]) -> Scored:
    """The prompts of which at least 2 rollouts were not given up by the engine."""
    valid = [(t.kind == NodeKind.LEAF) & (t.finish != Finish.ENGINE_ERROR) for t in trees]
    size = np.array([np.count_nonzero(v) for v in valid])
    wins = np.array([round(float(t.success[v].sum())) for t, v in zip(trees, valid, strict=True)])
    return _kept(scores, wins, size, [p.group for p in prompts], np.zeros(len(prompts), np.int64))[0]


def _kept(
    scores: np.ndarray, wins: np.ndarray, size: np.ndarray, group: Sequence[str], depth: np.ndarray
) -> tuple[Scored, np.ndarray]:
    """(the items with at least 2 rollouts, which they are)."""
    kept = np.flatnonzero(size >= 2)
    measured, group = Measured(wins[kept], size[kept]), np.asarray(group)[kept].tolist()
    return Scored(np.asarray(scores)[..., kept], measured, group, depth[kept]), kept


def _choose(
    trees: Sequence[RolloutTree], most: int, rng: np.random.Generator
) -> list[tuple[int, np.ndarray]]:
    """(prompt, its anchors) of prompts in random order: all anchors of their first rollouts, until there are `most`.

    Whole prompts, because stage 2 chooses among the anchors of one; only the last may be cut.
    """
    chosen, left = [], most
    for number in rng.permutation(len(trees)).tolist():
        tree = trees[number]
        nodes = query.anchors(tree)
        leaf = query.factual_leaf(tree, nodes)
        first = query.leaves(tree)[:_BARE]
        nodes = nodes[np.isin(leaf, first) & (tree.finish[leaf] != Finish.ENGINE_ERROR)][:left]
        if nodes.size:
            chosen.append((number, nodes))
            left -= nodes.size
        if not left:
            break
    return sorted(chosen, key=lambda pair: pair[0])


async def _anchors(
    run: Run, request: Request, prompts: Sequence[Prompt], trees: Sequence[RolloutTree], rng: np.random.Generator
) -> tuple[_Anchors, int]:
    """(anchors with their scores and fresh continuations; rollouts that ended with an error)."""
    chosen = _choose(trees, request.anchors, rng)
    scores = await asyncio.gather(*(run.learned.scorer.score_anchors(trees[i], nodes) for i, nodes in chosen))
    with contextlib.closing(_Count(sum(nodes.size for _, nodes in chosen) * request.continuations)) as count:
        slots = EpisodeSlots(run.config.sampling.concurrency)
        sampling = run.sampling(keys.Stream.ORACLE, seed=request.seed, step=0)
        runner = Runner(run.engine, run.environment, sampling, slots, count.episode)
        groups = await run_all(_continued(runner, request, prompts[i], trees[i], nodes) for i, nodes in chosen)
    empty = np.zeros((1, 0))
    ended = [[e.turns[-1] for e in each if e.turns[-1].finish != Finish.ENGINE_ERROR] for g in groups for each in g]
    depth = np.concatenate([np.zeros(0, np.int64), *(query.depth(trees[i])[nodes] for i, nodes in chosen)])
    outcome = [trees[i].success[query.factual_leaf(trees[i], nodes)] for i, nodes in chosen]
    group = [f"{prompts[i].group}/{d}" for (i, nodes) in chosen for d in query.depth(trees[i])[nodes].tolist()]
    items, kept = _kept(
        np.concatenate([np.atleast_2d(s) for s in scores], axis=1) if scores else empty,
        np.array([sum(turn.success for turn in turns) for turns in ended], np.int64),
        np.array([len(turns) for turns in ended], np.int64),
        group,
        depth,
    )
    number = np.concatenate([np.zeros(0, np.int64), *(np.full(nodes.size, i) for i, nodes in chosen)])
    outcome = np.concatenate([np.zeros(0), *outcome])
    return _Anchors(items, outcome[kept], number[kept]), count.errors


async def _continued(
    runner: Runner, request: Request, prompt: Prompt, tree: RolloutTree, nodes: np.ndarray
) -> list[list[Episode]]:
    """The fresh continuations of each of `nodes`."""
    states, _ = await replay.states_at(runner.environment, prompt, tree, nodes)
    copies, first = request.continuations, request.rollouts
    starts = replay.continuation_starts(prompt, tree, states, nodes, copies=copies, first_leaf=first)
    return await run_all(runner.run(prompt.uid, group) for group in starts)


class _Count:
    """Continuations that are finished, on a bar."""

    def __init__(self, total: int):
        self.errors = self._done = 0
        self._bar = console.Bar("continuations", total, "rollout") if total else None

    def episode(self, episode: Episode) -> None:
        """One more is finished."""
        self._done += 1
        self.errors += bool(episode.error)
        self._bar.to(self._done)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        if self._bar is not None:
            self._bar.close()


def _write(
    folder: Path, request: Request, figures: dict[str, float], roots: Scored, anchors: Scored, rows: Sequence[Row]
) -> None:
    """report.json, report.md, predictor.png, each replaced as a whole; then the tables to the terminal."""
    config = request.own
    title = (
        f"{request.workdir.name}, step {figures['step']:.0f}: predictor {config.predictor.kind!r} of "
        f"{config.strategy} on {config.task}; {request.rollouts} rollouts a prompt, {request.continuations} "
        f"continuations an anchor, pools of {config.budget.pool} with {figures['root_budget']:.0f} roots"
    )
    plain = {name: float(value) if math.isfinite(value) else None for name, value in figures.items()}
    try:
        _replace(folder / FIGURES, json.dumps(plain, indent=1, allow_nan=False) + "\n")
        _replace(folder / TABLES, f"{title}\n\n{predictor_tables.tables(figures, markdown=True)}\n")
        fresh = folder / (PICTURE + ".tmp")
        predictor_figure.draw(fresh, title, figures, roots, anchors, rows)
        os.replace(fresh, folder / PICTURE)
    except OSError as error:
        raise ConfigError(f"--workdir: {folder} cannot be written ({error.strerror})") from error
    if figures["errors"]:
        print(f"{figures['errors']} rollouts ended with an error")
    print(f"\n{title}\n\n{predictor_tables.tables(figures)}\n\nfigure: {os.path.relpath(folder / PICTURE)}")


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
