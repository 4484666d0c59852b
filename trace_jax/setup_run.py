"""From settings to the parts of a run: task, tokenizer, environment, model, engine, strategy.

This is the one place where a name in the config becomes a function or a class.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.budget import contrast
from trace_jax.budget.grpo import Grpo
from trace_jax.budget.pcl import Pcl
from trace_jax.budget.strategy import Strategy
from trace_jax.budget.trace import Trace
from trace_jax.budget.treepo import TreePo
from trace_jax.config import FLAT, ConfigError, RunConfig, split_urls
from trace_jax.config_allocation import BudgetConfig, explored_roots
from trace_jax.config_tasks import DATA_TASKS
from trace_jax.engines.base import Engine
from trace_jax.engines.local import LocalEngine, LocalEngineConfig
from trace_jax.engines.sglang import Settings, SglangEngine
from trace_jax.engines.weight_folders import WeightFolders
from trace_jax.models import folder as model_folder
from trace_jax.models import gguf_import
from trace_jax.models.config import DecoderConfig
from trace_jax.models.lora import LoraConfig
from trace_jax.models.state_features import StateFeatures
from trace_jax.rollout.agent import Limits
from trace_jax.rollout.environment import Environment, make_environment
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.tasks.arithmetic.task import Arithmetic
from trace_jax.tasks.base import SmallTask, Task
from trace_jax.tasks.demonstrations import demonstrate
from trace_jax.tasks.few_shot import FewShot, check_borders
from trace_jax.tasks.lookup.task import Lookup
from trace_jax.train import optimizer as optimizers
from trace_jax.tree import advantage


_CHECKED_DEMONSTRATIONS = 8
_OBJECTIVES = {"any_contrast": None, "advantage_mass": contrast.advantage_mass, "pairs": contrast.pairs}
_PACKAGE = "package:"  # a path that names a Python package with a GGUF file in it


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
        task = makers[config.task](settings, levels(weights))
    except ValueError as error:
        raise ConfigError(f"config.{config.task}: {error}") from error
    if not settings.shots:
        return task
    shots = levels(settings.shots)
    try:
        examples = makers[config.task](settings, {level: float(count > 0) for level, count in shots.items()})
        return FewShot(task, examples, {str(level): int(count) for level, count in shots.items()})
    except ValueError as error:
        raise ConfigError(f"config.{config.task}.shots: {error}") from error


def with_model_folders(config: RunConfig) -> RunConfig:
    """The config with each `path` of a pretrained model as a model folder; GGUF files are converted, once.

    Raises ConfigError for a file or a package that cannot be used.
    """
    changed = {}
    for name in ("model", "predictor"):
        settings = getattr(config, name)
        try:
            changed[name] = dataclasses.replace(settings, path=_model_folder(settings.path, config.model.gguf_cache))
        except (ValueError, OSError) as error:
            raise ConfigError(f"config.{name}.path: {error}") from error
    return dataclasses.replace(config, **changed)


def _model_folder(path: str | None, cache: str | None) -> str | None:
    if path is None or not (path.startswith(_PACKAGE) or path.endswith(".gguf")):
        return path
    file = gguf_import.packaged(path.removeprefix(_PACKAGE)) if path.startswith(_PACKAGE) else Path(path)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(gguf_import.cached(file, Path(cache) if cache else home / "trace_jax"))


def make_tokenizer(config: RunConfig, task: SmallTask | None) -> Any:
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
    names = ("scan_layers", "remat", "fuse_projections", "dtype", "param_dtype")
    execution = {name: getattr(model, name) for name in names}
    try:
        if model.path is not None:
            cfg = model_folder.load_config(model.path, **execution)
            cfg = _with_vocabulary(cfg, vocab_size, model.path)
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


def _with_vocabulary(cfg: DecoderConfig, tokenizer_size: int, folder: str) -> DecoderConfig:
    """The decoder without logits for padding of its vocabulary, of which a line is shown."""
    try:
        notice = model_folder.check_vocabulary(cfg, tokenizer_size)
    except ValueError as error:
        raise ValueError(f"model folder {folder}: {error}") from error
    if notice is None:
        return cfg
    print(notice)
    return dataclasses.replace(cfg, sampled_vocab=tokenizer_size)


def take_devices(config: RunConfig) -> None:
    """Limits the accelerators of this process to the config's; has an effect only before jax has looked for any."""
    devices = config.devices
    if devices.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.visible
    if devices.memory_fraction is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{devices.memory_fraction:.4f}"
    if devices.on_demand:
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"


def make_engine(
    config: RunConfig,
    model: DecoderConfig,
    environment: Environment,
    workdir: Path,
    features: StateFeatures | None = None,
) -> Engine:
    """What samples: the in-process engine with the config's static shapes, or a client of the config's servers.

    `features`: what the former keeps of each history; the latter cannot.
    """
    makers = {
        "local": lambda: _local_engine(config, model, environment, features),
        "sglang": lambda: _sglang_engine(config, model, workdir),
    }
    return makers[config.engine]()


def _local_engine(
    config: RunConfig, model: DecoderConfig, environment: Environment, features: StateFeatures | None
) -> LocalEngine:
    shapes = dataclasses.asdict(config.local) | {"max_stop_ids": len(environment.stop_ids)}
    shapes |= {"context_length": config.model.context_length}
    return LocalEngine(model, LocalEngineConfig(**shapes), features=features)


def _sglang_engine(config: RunConfig, model: DecoderConfig, workdir: Path) -> SglangEngine:
    settings = dataclasses.asdict(config.sglang)
    urls, router, shared = settings.pop("urls"), settings.pop("router"), settings.pop("weights_folder")
    workdir = Path(workdir).absolute()
    if shared is None:
        home = workdir / "weights"
    else:  # runs that share a folder must not meet in it
        home = Path(shared) / f"{workdir.name}-{hashlib.blake2b(str(workdir).encode(), digest_size=4).hexdigest()}"
    token_ids = model_folder.load_token_ids(config.model.path) if config.model.path else None

    def save(folder: Path, params: Any) -> None:
        model_folder.save(folder, model, params, dtype=model.dtype, token_ids=token_ids)

    return SglangEngine(
        split_urls(urls),
        router=router,
        context_length=config.model.context_length,
        vocab_size=model.vocab_size,
        sampled_vocab=model.sampled_vocab or model.vocab_size,
        weights=WeightFolders(home, save),
        settings=Settings(**settings),
    )


def make_limits(config: RunConfig, task: Task) -> Limits:
    """What bounds an episode."""
    return Limits(
        max_turns=task.max_turns,
        max_turn_tokens=config.sampling.max_turn_tokens,
        context_length=config.model.context_length,
        max_observation_tokens=config.sampling.max_observation_tokens,
        deadline=config.sampling.deadline,
        max_response_tokens=config.sampling.max_response_tokens,
    )


def make_strategy(config: RunConfig, budget: BudgetConfig) -> Strategy:
    """The allocation strategy that the config names, with `budget` for this step."""
    units = budget.roots + budget.roots * budget.continuations_per_root // 2
    flat, roots = budget.rollouts_per_prompt, budget.roots_per_prompt
    makers = {
        "grpo": lambda: Grpo(flat, _whole_groups(units, flat, budget.pool)),
        "pcl": lambda: Pcl(flat, _whole_groups(units, flat, budget.pool)),
        "treepo": lambda: TreePo(
            rollouts_per_prompt=roots,
            root_budget=_whole_groups(budget.roots, roots, budget.pool),
            continuations_per_root=budget.continuations_per_root,
        ),
        "trace": lambda: Trace(
            root_budget=budget.roots,
            continuations_per_root=budget.continuations_per_root,
            max_per_prompt=budget.max_per_prompt,
            min_per_prompt=budget.min_per_prompt,
            objective=_OBJECTIVES[budget.objective],
            explore_roots=explored_roots(budget),
        ),
    }
    return makers[config.strategy]()


def _whole_groups(total: int, size: int, pool: int) -> int:
    """`total` rounded down to groups of `size`, 1 to `pool` of them: a token budget need not divide."""
    return min(max(total // size, 1), pool) * size


def make_advantage(config: RunConfig):
    """tree -> Credit. A flat strategy has no tree to speak of and always uses GRPO's own advantage, or Dr. GRPO's."""
    ddof = config.loss.std_ddof
    estimators = {
        "grpo": functools.partial(advantage.grpo, ddof=ddof),
        "dr_grpo": advantage.dr_grpo,
        "tree_rpo": functools.partial(advantage.tree_rpo, ddof=ddof),
        "tree_grpo": functools.partial(advantage.tree_grpo, ddof=ddof),
        "tree_rloo": functools.partial(advantage.tree_rloo, prior=config.loss.value_prior),
    }
    name = config.loss.advantage
    if config.strategy in FLAT and name != "dr_grpo":
        name = "grpo"
    return estimators[name]


def make_lora(config: RunConfig) -> LoraConfig | None:
    """The adapters that train in place of the parameters, None without them."""
    return LoraConfig(config.lora.rank, config.lora.alpha).validate() if config.lora.rank else None


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


def end_ids(config: RunConfig, tokenizer: Any) -> tuple[int, ...]:
    """Ids beside the task's stop that end a turn: those that end a text for the tokenizer or the model folder."""
    named = model_folder.load_token_ids(config.model.path) if config.model.path else {}
    return tokenizers.end_ids(tokenizer, named.get("eos_token_id"))


def environment_of(
    task: Task, tokenizer: Any, end_ids: tuple[int, ...] = (), *, stop_texts: bool = False
) -> Environment:
    """The task read with the tokenizer; `stop_texts`: the engine knows stops of several tokens.

    ConfigError if a turn's end is not one token of it, or if the border of two blocks of text is no border of tokens.
    """
    try:
        environment = make_environment(task, tokenizer, end_ids, stop_texts=stop_texts)
        for index in range(_CHECKED_DEMONSTRATIONS):
            played = demonstrate(task, task.instance("demo", index), np.random.default_rng(index), slip_rate=0.5)
            turns = (block for turn in played.turns for block in turn)
            blocks = [task.preamble, played.prompt.removeprefix(task.preamble), *turns]
            check_borders(environment.encode, [block for block in blocks if block])
        return environment
    except ValueError as error:
        raise ConfigError(f"config.model.path: {error}") from error


def check_trunk(config: RunConfig, environment: Environment) -> None:
    """Raises ConfigError where the solved examples that all prompts share leave no room for a question and its answer,
    or make a head on the policy's states blind, which reads them too."""
    shared, limit = environment.trunk.size, config.model.context_length
    advice = f"lower config.{'chat' if config.task in DATA_TASKS else config.task}.shots"
    if shared >= limit:
        raise ConfigError(
            f"config.model.context_length is {limit}, but the examples alone have {shared} tokens; raise it or {advice}"
        )
    reads = config.predictor.max_tokens or config.loss.row_length
    scores = make_strategy(config, config.budget).needs_predictor
    if shared and scores and config.predictor.kind == "policy_head" and reads < limit:
        raise ConfigError(
            f"config.predictor.max_tokens is {reads}, but a policy_head reads the {shared} tokens of the examples "
            f"first; set it to model.context_length {limit} or more, or take kind 'critic'"
        )


def warm_start_folder(config: RunConfig, workdir: Path) -> Path:
    """Where the warm-started model of this task is cached."""
    root = Path(config.warm_start.cache) if config.warm_start.cache else workdir / "warm_start"
    return root / config.task
