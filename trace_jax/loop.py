"""One step of TRACE (paper Algorithm 1), and the run around it.

A step reads: draw a pool, score the prompts, allocate roots, roll out and fork, update the predictor, update the
policy, hand the new weights to the engine. All noise is derived from (seed, step), never from a generator that is
carried along, so a checkpoint needs no generator state and an interrupted step is simply run again.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from trace_jax.budget.account import BudgetCount
from trace_jax.budget.expected import ExpectedTokens
from trace_jax.budget.strategy import Strategy
from trace_jax.config import ConfigError, RunConfig
from trace_jax.engines.local import LocalEngine
from trace_jax.eval.evaluate import Evaluation, evaluate
from trace_jax.rollout import keys
from trace_jax.rollout.agent import Limits
from trace_jax.rollout.collect import Collected
from trace_jax.rollout.environment import Environment
from trace_jax.rollout.oracle import OraclePredictor
from trace_jax.rollout.runner import Sampling
from trace_jax.rollout.scheduler import OnProgress, collect_batch, sample_batch
from trace_jax.setup_run import make_advantage, make_strategy
from trace_jax.train.policy_step import Plan, PolicyTrainer
from trace_jax.train.predictor import LearnedPredictor, allocation_metrics
from trace_jax.train.predictor_step import PredictorTrainer
from trace_jax.train.replay import ReplayWindow, examples_from_trees
from trace_jax.train.state import TrainState
from trace_jax.tree import aggregate, grow, metrics, pack
from trace_jax.types import PackedBatch, Prompt, RolloutTree, Stage

_PROMPTS_PER_SEED = 10_000_000  # far more than a run draws


@dataclasses.dataclass
class Learned:
    """A predictor that is fitted while the policy learns."""

    trainer: PredictorTrainer
    state: TrainState
    scorer: LearnedPredictor
    window: ReplayWindow


@dataclasses.dataclass
class Run:
    """The parts of a run and everything that a step changes."""

    config: RunConfig
    environment: Environment
    limits: Limits
    engine: LocalEngine
    trainer: PolicyTrainer
    reference: Any  # parameters of the warm-started policy where the loss has a KL term, else None
    policy: TrainState
    learned: Learned | None  # None for strategies without one, and for the oracle
    base: str = ""  # digest of the model folder that adapters belong to; "" without adapters
    served: Any = None  # parameters of the whole policy as the engine has them; see `publish`
    costs: ExpectedTokens = ExpectedTokens()
    cursor: int = 0  # training prompts drawn so far
    step: int = 0  # steps finished; also the weight version that the engine serves

    def sampling(self, stream: keys.Stream, seed: int | None = None) -> Sampling:
        """How episodes are sampled now."""
        return Sampling(
            limits=self.limits,
            temperature=self.config.sampling.temperature,
            seed=self.config.seed if seed is None else seed,
            stream=stream,
            step=self.step if stream != keys.Stream.EVAL else 0,
            salt=str(self.step),
        )

    def training_prompts(self, count: int) -> list[Prompt]:
        """The next `count` training prompts; every seed has a stretch of the data of its own."""
        return self.prompts("train", self.config.seed * _PROMPTS_PER_SEED + self.cursor, count)

    def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        """Prompts start .. start + count - 1 of a split.

        ConfigError for one that leaves no room for an answer, or that does not begin with the tokens that all share.
        """
        task, limit, trunk = self.environment.task, self.limits.context_length, self.environment.trunk
        prompts = [self.environment.prompt(task.instance(split, start + i)) for i in range(count)]
        for prompt in prompts:
            if prompt.tokens.shape[0] >= limit:
                raise ConfigError(
                    f"config.model.context_length is {limit}, but prompt {prompt.uid} alone has "
                    f"{prompt.tokens.shape[0]} tokens; raise it or lower the task's difficulty"
                )
            if not np.array_equal(prompt.tokens[: trunk.size], trunk):
                raise ConfigError(
                    f"config.model.path: prompt {prompt.uid} does not begin with the {trunk.size} tokens of the "
                    "examples: this tokenizer joins their end with the question"
                )
        return prompts


async def train_step(run: Run, on_progress: OnProgress | None = None) -> dict[str, float]:
    """Runs one step, changes `run` at its end only, and returns the step's metrics."""
    config, clock = run.config, _Clock()
    prompts = run.training_prompts(config.budget.pool)
    strategy, predictor = _strategy(run), _predictor(run)
    evictions, scores = run.engine.evictions, None
    if strategy.needs_predictor:
        scores = await predictor.score_prompts(prompts)
    rollouts = strategy.roots(scores, len(prompts), keys.host_rng(config.seed, run.step, "roots"))
    clock.lap("score")

    collected = await collect_batch(
        run.engine,
        run.environment,
        strategy,
        predictor,
        prompts,
        rollouts,
        sampling=run.sampling(keys.Stream.TRAIN),
        concurrency=config.sampling.concurrency,
        on_progress=on_progress,
    )
    trees = [c.tree for c in collected]
    if scores is not None:
        value = {prompt.uid: score for prompt, score in zip(prompts, scores, strict=True)}
        trees = [grow.with_values(tree, np.array([0]), np.array([value[tree.prompt_uid]])) for tree in trees]
    clock.lap("rollout")

    predictor_report = allocation_metrics(trees) if scores is not None else {}
    if run.learned is not None:
        predictor_report |= _update_predictor(run, trees)
    clock.lap("predictor_update")

    batch = make_batch(config, trees, run.environment.trunk)
    run.policy, policy_report = run.trainer.update(
        run.policy,
        batch,
        Plan(config.loss.epochs, config.loss.mini_batches, config.loss.measure_kl),
        keys.host_rng(config.seed, run.step, "policy"),
        ref_params=run.reference,
    )
    planned = int(rollouts.sum())
    expected_tokens = run.costs.expected(planned, planned * strategy.continuations_per_root)
    run.costs = _updated_costs(run.costs, trees)
    run.cursor += len(prompts)
    run.step += 1
    await publish(run)
    clock.lap("policy_update")
    report = _rollout_metrics(collected, trees, len(prompts), strategy)
    if isinstance(predictor, OraclePredictor):
        report |= {"rollout/oracle_tokens": predictor.counts.generated_tokens}
    report |= {
        "rollout/expected_tokens": expected_tokens,
        "rollout/cache_evictions": run.engine.evictions - evictions,
        "rollout/preloaded_tokens": run.environment.trunk.size,  # once, before the step; they count as cached then
    }
    return report | predictor_report | policy_report | clock.metrics()


async def publish(run: Run) -> None:
    """Hands the current policy to the engine and to a predictor that reads its states."""
    run.served = run.trainer.full_params(run.policy.params)
    await run.engine.set_weights(run.served, run.step)
    await run.engine.preload(run.environment.trunk)
    if run.learned is not None:
        run.learned.scorer.set_params(run.learned.state.params, run.served)


def make_batch(config: RunConfig, trees: list[RolloutTree], trunk: np.ndarray) -> PackedBatch:
    """Trees to static rows: every tree of the step is trained in this step (filled, padded, nothing carried over).

    `trunk` is what every prompt begins with; a row holds it once.
    """
    estimate = make_advantage(config)
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
    result = await evaluate(
        run.engine,
        run.environment,
        run.prompts("eval", 0, settings.prompts),
        settings.samples,
        sampling=run.sampling(keys.Stream.EVAL, seed=settings.seed),
        concurrency=run.config.sampling.concurrency,
        on_progress=on_progress,
    )
    await publish(run)
    return result


async def warm_up_predictor(run: Run) -> dict[str, float]:
    """Fits the predictor to rollouts of the first policy, outside the budget (ours; off in the paper)."""
    settings = run.config.predictor
    prompts = run.training_prompts(settings.warmup_prompts)
    run.cursor += len(prompts)
    collected = await sample_batch(
        run.engine,
        run.environment,
        prompts,
        settings.warmup_rollouts,
        sampling=run.sampling(keys.Stream.WARM_UP),
        concurrency=run.config.sampling.concurrency,
    )
    rng = keys.host_rng(run.config.seed, run.step, "warm_up")
    learned = run.learned
    flat = [c.tree for c in collected]  # no branches: roots only
    examples = examples_from_trees(flat, learned.scorer.view, prefix_share=0.0, rng=rng)
    learned.state, report = learned.trainer.fit_steps(
        learned.state, run.served, examples, rng, steps=settings.warmup_steps
    )
    learned.scorer.set_params(learned.state.params, run.served)
    counts = sum((c.counts for c in collected), BudgetCount())
    return report | {"predictor/warmup_tokens": counts.generated_tokens}


def _update_predictor(run: Run, trees: list[RolloutTree]) -> dict[str, float]:
    """Eq. 19 on this step's trees, and on those of the replay window if it is longer than one step."""
    learned, settings = run.learned, run.config.predictor
    rng = keys.host_rng(run.config.seed, run.step, "predictor")
    fresh = examples_from_trees(trees, learned.scorer.view, prefix_share=settings.prefix_share, rng=rng)
    learned.window = learned.window.push(fresh)
    learned.state, report = learned.trainer.fit(
        learned.state, run.served, learned.window.examples(), rng, epochs=settings.epochs
    )
    return report


def _strategy(run: Run) -> Strategy:
    budget = run.config.budget
    if budget.unit == "tokens":
        roots = run.costs.roots(budget.tokens, budget.continuations_per_root, default=budget.roots)
        if budget.max_per_prompt is not None:
            roots = min(roots, budget.pool * budget.max_per_prompt // 2 * 2)
        budget = dataclasses.replace(budget, roots=roots)
    return make_strategy(run.config, budget)


def _predictor(run: Run):
    """The learned predictor, or a fresh oracle: it belongs to one policy."""
    settings = run.config.predictor
    if settings.kind != "oracle":
        return run.learned.scorer if run.learned else None
    return OraclePredictor(
        run.engine,
        run.environment,
        sampling=run.sampling(keys.Stream.ORACLE),
        rollouts_per_prompt=settings.oracle_rollouts,
        continuations_per_anchor=settings.oracle_continuations,
        concurrency=run.config.sampling.concurrency,
    )


def _updated_costs(costs: ExpectedTokens, trees: list[RolloutTree]) -> ExpectedTokens:
    mean = {}
    for name, stage in (("root", Stage.ROOT_ROLLOUT), ("continuation", Stage.CONTINUATION)):
        count = metrics.num_rollouts(trees, stage)
        mean[name] = metrics.action_tokens(trees, stage) / count if count else None
    return costs.updated(**mean)


def _rollout_metrics(
    collected: list[Collected], trees: list[RolloutTree], pool: int, strategy: Strategy
) -> dict[str, float]:
    counts = sum((c.counts for c in collected), BudgetCount())
    useful = metrics.useful_groups(trees)
    report = {
        "effective_ratio": metrics.effective_ratio(trees),
        "useful_groups": useful,
        "useful_groups_per_unit": useful / max(counts.units, 1),
        "active_prompts": len(trees),
        "skipped_prompts": pool - len(trees),
        "budget_units": counts.units,
        "generated_tokens": counts.generated_tokens,
        "prefilled_tokens": counts.prefilled_tokens,
        "cached_tokens": counts.cached_tokens,
        "tool_calls": counts.tool_calls,
        "success": metrics.success_rate(trees),
        "root_rollouts": metrics.num_rollouts(trees, Stage.ROOT_ROLLOUT),
        "continuations": metrics.num_rollouts(trees, Stage.CONTINUATION),
        "fallback_rollouts": sum(c.fallback_rollouts for c in collected),
        "errors": sum(len(c.errors) for c in collected),
    }
    report |= {f"finish_{name}": count for name, count in metrics.finish_counts(trees).items()}
    return {f"rollout/{name}": value for name, value in report.items()}


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
