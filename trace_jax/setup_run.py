"""From settings to the parts of a run: task, tokenizer, environment, model, engine, strategy.

This is the one place where a name in the config becomes a function or a class.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from trace_jax.budget.grpo import Grpo
from trace_jax.budget.strategy import Strategy
from trace_jax.budget.trace import Trace
from trace_jax.config import BudgetConfig, ConfigError, RunConfig
from trace_jax.engines.local import LocalEngine, LocalEngineConfig
from trace_jax.models import folder as model_folder
from trace_jax.models.config import DecoderConfig
from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment, make_environment
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.arithmetic.task import Arithmetic
from trace_jax.tasks.base import Task
from trace_jax.tasks.lookup.task import Lookup
from trace_jax.train import optimizer as optimizers
from trace_jax.tree import advantage


def levels(weights: tuple[float, ...]) -> dict[int, float]:
    """(w1, w2, ...) -> {1: w1, 2: w2, ...}: weights of difficulty levels."""
    return {i + 1: weight for i, weight in enumerate(weights)}


def make_task(config: RunConfig, *, demonstrations: bool = False) -> Task:
    """The task family that the config names, with the difficulty of rollouts or of demonstrations."""
    makers = {
        "arithmetic": lambda c, difficulty: Arithmetic(c.seed, difficulty, max_number=c.max_number),
        "lookup": lambda c, difficulty: Lookup(c.seed, difficulty),
    }
    settings = getattr(config, config.task)
    weights = settings.demo_difficulty if demonstrations else settings.difficulty
    try:
        return makers[config.task](settings, levels(weights))
    except ValueError as error:
        raise ConfigError(f"config.{config.task}: {error}") from error


def make_tokenizer(config: RunConfig, task: Task) -> Any:
    """The tokenizer of the model folder, or a small one over the task's symbols. ConfigError if the folder has none."""
    if config.model.path is None:
        return tokenizers.build_tokenizer(task.symbols(), task.word_level)
    try:
        return tokenizers.load_tokenizer(config.model.path)
    except ValueError as error:
        raise ConfigError(f"config.model.path: {error}") from error


def make_model(config: RunConfig, vocab_size: int) -> DecoderConfig:
    """The decoder of the model folder, or the small one that the config describes."""
    model = config.model
    execution = {
        name: getattr(model, name) for name in ("scan_layers", "remat", "fuse_projections", "dtype")
    }
    try:
        if model.path is not None:
            cfg = model_folder.load_config(model.path, **execution)
            if vocab_size > cfg.vocab_size:
                raise ValueError(
                    f"model folder {model.path}: the tokenizer has {vocab_size} tokens, the model {cfg.vocab_size}; "
                    "they must belong together"
                )
            if model.context_length > cfg.max_positions:
                raise ValueError(
                    f"context_length is {model.context_length}, but model folder {model.path} was made for "
                    f"{cfg.max_positions} tokens; lower it"
                )
            return cfg
        sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "rope_theta")
        shape = {name: getattr(model, name) for name in sizes}
        return DecoderConfig(vocab_size=vocab_size, max_positions=model.context_length, **shape, **execution).validate()
    except ValueError as error:
        raise ConfigError(f"config.model: {error}") from error


def make_engine(config: RunConfig, model: DecoderConfig) -> LocalEngine:
    """The in-process engine with the config's static shapes."""
    shapes = dataclasses.asdict(config.engine)
    return LocalEngine(model, LocalEngineConfig(context_length=config.model.context_length, **shapes))


def make_limits(config: RunConfig, task: Task) -> Limits:
    """What bounds an episode."""
    return Limits(
        max_turns=task.max_turns,
        max_turn_tokens=config.sampling.max_turn_tokens,
        context_length=config.model.context_length,
        max_observation_tokens=config.sampling.max_observation_tokens,
        deadline=config.sampling.deadline,
    )


def make_strategy(config: RunConfig, budget: BudgetConfig) -> Strategy:
    """The allocation strategy that the config names, with `budget` for this step."""
    units = budget.roots + budget.roots * budget.continuations_per_root // 2
    groups = min(max(units // budget.rollouts_per_prompt, 1), budget.pool)  # a token budget need not divide
    makers = {
        "grpo": lambda: Grpo(
            rollouts_per_prompt=budget.rollouts_per_prompt,
            total_rollouts=groups * budget.rollouts_per_prompt,
        ),
        "trace": lambda: Trace(
            root_budget=budget.roots,
            continuations_per_root=budget.continuations_per_root,
            max_per_prompt=budget.max_per_prompt,
        ),
    }
    return makers[config.strategy]()


def make_advantage(config: RunConfig):
    """tree -> Credit. A flat strategy has no tree to speak of and always uses GRPO's own advantage, or Dr. GRPO's."""
    ddof = config.loss.std_ddof
    estimators = {
        "grpo": functools.partial(advantage.grpo, ddof=ddof),
        "dr_grpo": advantage.dr_grpo,
        "tree_rpo": functools.partial(advantage.tree_rpo, ddof=ddof),
        "tree_grpo": functools.partial(advantage.tree_grpo, ddof=ddof),
    }
    name = config.loss.advantage
    if config.strategy == "grpo" and name != "dr_grpo":
        name = "grpo"
    return estimators[name]


def make_optimizer(config: RunConfig):
    """The policy's optax chain."""
    o = config.optimizer
    total = max(config.steps, 1) * config.loss.epochs * config.loss.mini_batches
    arguments = {
        "constant": {},
        "warmup_cosine": {"warmup_steps": o.warmup_steps, "total_steps": total, "final_fraction": 0.0},
    }
    schedule = optimizers.SCHEDULES[o.schedule](o.learning_rate, **arguments[o.schedule])
    arguments = {
        "adamw": {"b1": o.b1, "b2": o.b2, "eps": o.eps, "weight_decay": o.weight_decay},
        "sgd": {"momentum": o.momentum},
    }
    base = optimizers.OPTIMIZERS[o.name](schedule, **arguments[o.name])
    return optimizers.build(base, clip_norm=o.clip_norm, max_update_norm=o.max_update_norm)


def environment_of(task: Task, tokenizer: Any) -> Environment:
    """The task read with the tokenizer. ConfigError if a turn's end is not one token of it."""
    try:
        return make_environment(task, tokenizer)
    except ValueError as error:
        raise ConfigError(f"config.model.path: {error}") from error


def warm_start_folder(config: RunConfig, workdir: Path) -> Path:
    """Where the warm-started model of this task is cached."""
    root = Path(config.warm_start.cache) if config.warm_start.cache else workdir / "warm_start"
    return root / config.task
