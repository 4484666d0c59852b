"""One step of TRACE (paper Algorithm 1), and the run around it.

A step reads: hand the weights to the engine, draw a pool, score the prompts, allocate roots, roll out and fork, update
the predictor, update the policy. All noise is derived from (seed, step), never from a generator that is
carried along, so a checkpoint needs no generator state and an interrupted step is simply run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.budget.account import BudgetCount
from trace_jax.budget.expected import ExpectedTokens
from trace_jax.budget.strategy import Strategy
from trace_jax.config import ConfigError, RunConfig
from trace_jax.engines.base import Engine, EngineDown
from trace_jax.eval.benchmarks import make_prompts
from trace_jax.eval.evaluate import Evaluation, evaluate
from trace_jax.learned import Learned
from trace_jax.rollout import keys
from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.metrics import rollout_metrics, staleness
from trace_jax.rollout.oracle import OraclePredictor
from trace_jax.rollout.runner import Sampling
from trace_jax.rollout.scheduler import OnProgress, collect_batch, sample_batch
from trace_jax.rollout.shuffled import ShuffledPredictor
from trace_jax.setup_run import make_advantage, make_strategy
from trace_jax.train.policy_step import Plan, PolicyTrainer
from trace_jax.train.predictor import allocation_metrics
from trace_jax.train.state import TrainState
from trace_jax.train.state_record import StateRecord
from trace_jax.tree import aggregate, grow, metrics, pack
from trace_jax.tree.failed import without_failed
from trace_jax.types import PackedBatch, Prompt, RolloutTree, Stage

_log = logging.getLogger(__name__)
_PROMPTS_PER_SEED = 10_000_000  # far more than a run draws
_WARM_UP_CURSOR = _PROMPTS_PER_SEED // 2  # of the warm-up: strategies with and without one draw the same pools


@dataclasses.dataclass
class Run:
    """The parts of a run and everything that a step changes."""

    config: RunConfig
    environment: Environment
    limits: Limits
    engine: Engine
    trainer: PolicyTrainer
    reference: Any  # parameters of the warm-started policy where the loss has a KL term, else None
    policy: TrainState
    learned: Learned | None  # None for strategies without one, and for the oracle
    base: str = ""  # digest of the model folder that adapters belong to; "" without adapters
    served: Any = None  # parameters of the whole policy as the engine has them, None where it is behind; see `publish`
    version: int = 0  # of what the engine serves: the step that made it
    costs: ExpectedTokens = ExpectedTokens()
    cursor: int = 0  # training prompts drawn so far
    step: int = 0  # steps finished
    ahead: Gathered | None = None  # with `config.overlap`: the next step's rollouts
    counted: dict[str, float] = dataclasses.field(default_factory=dict)  # the engine's counts at the last rollouts

    def sampling(self, stream: keys.Stream, *, seed: int | None = None, step: int | None = None) -> Sampling:
        """How episodes of `step` (this one, if not given) are sampled from what the engine serves."""
        step = self.step if step is None else step
        return Sampling(
            limits=self.limits,
            temperature=self.config.sampling.temperature,
            seed=self.config.seed if seed is None else seed,
            stream=stream,
            step=step if stream != keys.Stream.EVAL else 0,
            salt=str(self.version),
            top_p=self.config.sampling.top_p,
            top_k=self.config.sampling.top_k,
        )

    def training_prompts(self, count: int, cursor: int) -> list[Prompt]:
        """`count` training prompts from `cursor` on; every seed has a stretch of the data of its own."""
        return self.prompts("train", self.config.seed * _PROMPTS_PER_SEED + cursor, count)

    def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        """Prompts start .. start + count - 1 of a split, or up to its end.

        ConfigError for one that leaves no room for an answer.
        """
        end, size = start + count, self.environment.task.size(split)
        numbers = range(start, end if size is None else min(end, size))
        try:
            return make_prompts(self.environment, self.limits, split, numbers)
        except ValueError as error:
            raise ConfigError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A step's rollouts, before anything is learnt from them."""

    trees: list[RolloutTree]
    pool: int  # prompts that were drawn
    scored: bool  # whether a predictor saw them
    costs: ExpectedTokens  # with this step's token counts in it
    metrics: dict[str, float]
    record: StateRecord | None = None  # the policy's states at their turns, for a predictor that reads these


async def train_step(run: Run, on_progress: OnProgress | None = None) -> dict[str, float]:
    """Runs one step, changes `run` at its end only, and returns the step's metrics.

    With `config.overlap` the next step's rollouts are sampled from the present weights while this step trains; the
    policy that learns from them is then one step older than they are.
    """
    clock = _Clock()
    await publish(run)
    clock.lap("publish")
    gathered, run.ahead = run.ahead or await gather(run, run.step, run.cursor, on_progress), None
    clock.lap("gather")
    if run.config.overlap and run.step + 1 < run.config.steps:
        metrics = await _learn_and_sample_ahead(run, gathered, clock, on_progress)
    else:
        await run.engine.release()
        metrics = learn(run, gathered)
        clock.lap("learn")
    return gathered.metrics | metrics | clock.metrics()


async def _learn_and_sample_ahead(
    run: Run, gathered: Gathered, clock: _Clock, on_progress: OnProgress | None
) -> dict[str, float]:
    """`learn`, and the rollouts of the next step meanwhile; the step is whole even if those come to nothing.

    Cancelled, it ends the step first, because the update's thread cannot be stopped; the caller's next await raises.
    Where no server is left, the next step samples its rollouts itself, or finds out that the run must end.
    """
    ahead = asyncio.create_task(gather(run, run.step + 1, run.cursor + gathered.pool, on_progress))
    await asyncio.sleep(0)  # it reads what it needs of `run` before the update changes it
    learning, cancelled = asyncio.create_task(asyncio.to_thread(learn, run, gathered)), False
    try:
        await asyncio.shield(learning)
        clock.lap("learn")
        with contextlib.suppress(EngineDown, ConfigError):  # the next step meets them itself
            run.ahead = await ahead
        clock.lap("wait")
    except asyncio.CancelledError:
        cancelled = True
    finally:
        ahead.cancel()
        while not (learning.done() and ahead.done()):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([learning, ahead])
    if cancelled:
        asyncio.current_task().cancel()
    return learning.result()


async def gather(run: Run, step: int, cursor: int, on_progress: OnProgress | None = None) -> Gathered:
    """Allocates and collects the rollouts of `step` from the weights that the engine serves; changes nothing in `run`
    but the engine and its counts, which include what happened to it since the step before."""
    config, clock, engine = run.config, _Clock(), run.engine
    prompts = run.training_prompts(config.budget.pool, cursor)
    sampling = run.sampling(keys.Stream.TRAIN, step=step)
    strategy, predictor, costs = _strategy(run), _predictor(run, step), run.costs
    scores = None
    if strategy.needs_predictor:
        scores = await predictor.score_prompts(prompts)
    rollouts = strategy.roots(scores, len(prompts), keys.host_rng(config.seed, step, "roots"))
    clock.lap("score")
    collected = await collect_batch(
        engine,
        run.environment,
        strategy,
        predictor,
        prompts,
        rollouts,
        sampling=sampling,
        concurrency=config.sampling.concurrency,
        on_progress=on_progress,
    )
    clock.lap("rollout")
    trees = [c.tree for c in collected]
    if scores is not None:
        mean = np.atleast_2d(scores).mean(axis=0)  # over draws, where the predictor hands out some
        value = {prompt.uid: score for prompt, score in zip(prompts, mean, strict=True)}
        trees = [grow.with_values(tree, np.array([0]), np.array([value[tree.prompt_uid]])) for tree in trees]
    planned = int(rollouts.sum())
    report = rollout_metrics(collected, trees, len(prompts))
    report["rollout/expected_tokens"] = costs.expected(planned, planned * strategy.continuations_per_root)
    report["rollout/preloaded_tokens"] = run.environment.trunk.size  # once, before the step; they count as cached then
    stats = engine.stats()
    report |= {f"rollout/{name}": count - run.counted.get(name, 0) for name, count in stats.items()}
    run.counted = stats
    errors = [error for c in collected for error in c.errors]
    if errors:
        _log.warning("step %d: %d rollouts ended with an error, the first: %s", step + 1, len(errors), errors[0])
    if isinstance(predictor, OraclePredictor):
        report["rollout/oracle_tokens"] = predictor.counts.generated_tokens
    return Gathered(
        trees=trees,
        pool=len(prompts),
        scored=scores is not None,
        costs=_updated_costs(costs, trees),
        metrics=report | clock.metrics(),
        record=_record(run),
    )


def learn(run: Run, gathered: Gathered) -> dict[str, float]:
    """Predictor update, then policy update, from a step's rollouts; `run` is one step further then."""
    config, clock, trees = run.config, _Clock(), gathered.trees
    report = allocation_metrics(trees) if gathered.scored else {}
    if run.learned is not None:
        rng = keys.host_rng(config.seed, run.step, "predictor")
        report |= run.learned.update(config.predictor, gathered.record or run.served, trees, rng)
    clock.lap("predictor_update")
    run.policy, policy_report = run.trainer.update(
        run.policy,
        make_batch(config, trees, run.environment.trunk),
        Plan(config.loss.epochs, config.loss.mini_batches, config.loss.measure_kl),
        keys.host_rng(config.seed, run.step, "policy"),
        ref_params=run.reference,
    )
    late = staleness(trees, run.step)
    run.costs, run.served = gathered.costs, None
    run.cursor += gathered.pool
    run.step += 1
    clock.lap("policy_update")
    return report | policy_report | {"train/staleness": late} | clock.metrics()


async def publish(run: Run) -> None:
    """Hands the current policy to the engine and to a predictor that reads its states, if they do not have it yet."""
    if run.served is not None:
        return
    merged = bool(run.config.lora.rank)
    params, learned = _kept(run, run.trainer.full_params(run.policy.params), own=merged), run.learned
    await run.engine.set_weights(params, run.step)
    await run.engine.preload(run.environment.trunk)
    run.served, run.version = params, run.step
    if learned is not None:
        learned.publish(params, _kept(run, learned.state.params))


def _kept(run: Run, params: Any, *, own: bool = False) -> Any:
    """`params`, or a copy where they are read while an update, which takes its state's buffers, is running.

    `own`: they are in no state's buffers already.
    """
    return jax.tree.map(jnp.copy, params) if run.config.overlap and not own else params


def make_batch(config: RunConfig, trees: list[RolloutTree], trunk: np.ndarray) -> PackedBatch:
    """Trees to static rows: every tree of the step is trained in this step (filled, padded, nothing carried over).

    Rollouts that the engine gave up on are left out, and trees of nothing else.
    `trunk` is what every prompt begins with; a row holds it once.
    """
    estimate = make_advantage(config)
    trees = [tree for tree in map(without_failed, trees) if tree.num_nodes > 1]
    credits = [estimate(tree) for tree in trees]
    weights = aggregate.token_weights(
        trees,
        credits,
        mode=config.loss.aggregation,
        prompt_weight=config.loss.prompt_weight,
        max_tokens=config.model.context_length,
    )
    return pack.pack_paths(
        trees,
        credits,
        weights,
        row_length=config.loss.row_length,
        rows_multiple=config.loss.micro_rows,
        skip_untrained=config.loss.kl_coef == 0,
        trunk=trunk,
    )


async def evaluate_run(run: Run, on_progress: OnProgress | None = None) -> Evaluation:
    """Success on the held-out prompts, with the same prompts and noise whenever it is called.

    Afterwards the engine's prefix cache is empty again, so that the next step counts the same cached tokens whether it
    follows an evaluation or a restart.
    """
    settings = run.config.eval
    await publish(run)
    result = await evaluate(
        run.engine,
        run.environment,
        run.prompts("eval", 0, settings.prompts),
        settings.samples,
        sampling=run.sampling(keys.Stream.EVAL, seed=settings.seed),
        concurrency=run.config.sampling.concurrency,
        on_progress=on_progress,
    )
    run.served = None
    return result


async def warm_up_predictor(run: Run) -> dict[str, float]:
    """Fits the predictor to rollouts of the first policy, outside the budget (ours; off in the paper)."""
    settings = run.config.predictor
    await publish(run)
    prompts = run.training_prompts(settings.warmup_prompts, _WARM_UP_CURSOR)
    collected = await sample_batch(
        run.engine,
        run.environment,
        prompts,
        settings.warmup_rollouts,
        sampling=run.sampling(keys.Stream.WARM_UP),
        concurrency=run.config.sampling.concurrency,
    )
    rng = keys.host_rng(run.config.seed, run.step, "warm_up")
    report = run.learned.warm_up(settings, _record(run) or run.served, [c.tree for c in collected], rng)
    run.learned.publish(run.served, _kept(run, run.learned.state.params))
    counts = sum((c.counts for c in collected), BudgetCount())
    return report | {"predictor/warmup_tokens": counts.generated_tokens}


def _record(run: Run) -> StateRecord | None:
    """What the engine has on record under its present weights; it starts another record with the next ones."""
    return StateRecord(run.engine.state_record) if run.learned and run.learned.recorded else None


def _strategy(run: Run) -> Strategy:
    budget = run.config.budget
    if budget.unit == "tokens":
        roots = run.costs.roots(budget.tokens, budget.continuations_per_root, default=budget.roots)
        if budget.max_per_prompt is not None:
            roots = min(roots, budget.pool * budget.max_per_prompt // 2 * 2)
        least = -(-budget.min_per_prompt // 2) * 2  # a group, and an even number
        budget = dataclasses.replace(budget, roots=max(roots, least))
    return make_strategy(run.config, budget)


def _predictor(run: Run, step: int):
    """The learned predictor, its scores shuffled where asked for; or a fresh oracle, which belongs to one policy."""
    settings = run.config.predictor
    if settings.kind == "oracle":
        return OraclePredictor(
            run.engine,
            run.environment,
            sampling=run.sampling(keys.Stream.ORACLE, step=step),
            rollouts_per_prompt=settings.oracle_rollouts,
            continuations_per_anchor=settings.oracle_continuations,
            concurrency=run.config.sampling.concurrency,
        )
    if run.learned is None:
        return None
    scorer = run.learned.scorer
    return ShuffledPredictor(scorer, run.config.seed, step) if settings.shuffle else scorer


def _updated_costs(costs: ExpectedTokens, trees: list[RolloutTree]) -> ExpectedTokens:
    mean = {}
    for name, stage in (("root", Stage.ROOT_ROLLOUT), ("continuation", Stage.CONTINUATION)):
        count = metrics.num_rollouts(trees, stage)
        mean[name] = metrics.action_tokens(trees, stage) / count if count else None
    return costs.updated(**mean)


class _Clock:
    """Seconds between laps, as `time/` metrics."""

    def __init__(self):
        self._last, self._laps = time.perf_counter(), {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        report = {f"time/{name}": seconds for name, seconds in self._laps.items()}
        return report | {"time/step": sum(self._laps.values())}
