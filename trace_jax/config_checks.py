"""Which combinations of settings can work. Each rule is one line that names the field, its value and the remedy."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from trace_jax.budget.root import is_feasible
from trace_jax.config import FLAT, ConfigError, RunConfig, split_urls
from trace_jax.config_allocation import explored_roots
from trace_jax.config_tasks import DATA_TASKS, SMALL_TASKS
from trace_jax.train.replay import LEAST_WEIGHT

TASKS = SMALL_TASKS + DATA_TASKS
BFCL_CATEGORIES = ("base", "long_context", "miss_func", "miss_param")
STRATEGIES = ("grpo", "pcl", "treepo", "trace")
ENGINES = ("local", "sglang")
PREDICTORS = ("critic", "policy_head", "both", "bayes", "oracle")
ADVANTAGES = ("grpo", "dr_grpo", "tree_rpo", "tree_grpo", "tree_rloo")
AGGREGATIONS = (
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_scale",
    "token_mean",
)


def check(config: RunConfig) -> RunConfig:
    """Returns `config`; raises ConfigError for the first rule that it breaks."""
    for problem in _problems(config):
        raise ConfigError(problem)
    return config


def _problems(config: RunConfig) -> Iterable[str]:
    yield from _choices(config)
    yield from _ranges(config)
    yield from _budget(config)
    yield from _shapes(config)
    yield from _servers(config)
    yield from _pretrained(config)
    yield from _data_tasks(config)
    yield from _predictor(config)
    yield from _training(config)
    yield from _sampling(config)


def _choices(config: RunConfig) -> Iterable[str]:
    choices = {
        "task": (config.task, TASKS),
        "strategy": (config.strategy, STRATEGIES),
        "engine": (config.engine, ENGINES),
        "budget.unit": (config.budget.unit, ("rollouts", "tokens")),
        "optimizer.name": (config.optimizer.name, ("adamw", "sgd")),
        "optimizer.schedule": (config.optimizer.schedule, ("constant", "warmup_cosine")),
        "loss.advantage": (config.loss.advantage, ADVANTAGES),
        "loss.std_ddof": (config.loss.std_ddof, (0, 1)),
        "loss.aggregation": (config.loss.aggregation, AGGREGATIONS),
        "loss.prompt_weight": (config.loss.prompt_weight, ("equal", "sequences")),
        "loss.tis": (config.loss.tis, ("auto", "on", "off")),
        "predictor.kind": (config.predictor.kind, PREDICTORS),
        "predictor.loss": (config.predictor.loss, ("mse", "bce")),
        "predictor.weighting": (config.predictor.weighting, ("equal", "count")),
        "predictor.targets": (config.predictor.targets, ("backed_up", "bare", "direct")),
        "predictor.calibration": (config.predictor.calibration, ("none", "temperature", "isotonic")),
        "budget.objective": (config.budget.objective, ("any_contrast", "advantage_mass", "pairs")),
        "model.dtype": (config.model.dtype, ("float32", "bfloat16")),
        "model.param_dtype": (config.model.param_dtype, ("float32", "bfloat16")),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            yield f"config.{name} is {value!r}; choose one of {', '.join(map(str, allowed))}"


def _ranges(config: RunConfig) -> Iterable[str]:
    for name, value in _floats("config", dataclasses.asdict(config)):
        if not math.isfinite(value):
            yield f"{name} is {value}, must be finite"
    at_least = {
        0: ("seed", "steps", "eval.every", "eval.seed", "checkpoint.every", "warm_start.steps", "warm_start.seed",
            "warm_start.learning_rate", "predictor.warmup_prompts", "predictor.warmup_steps", "predictor.learning_rate",
            "budget.continuations_per_root", "loss.kl_coef", "loss.clip_high", "loss.value_prior", "lora.rank",
            "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.weight_decay", "sampling.top_k",
            "data.seed", "chat.shots"),
        1: ("budget.pool", "sampling.max_turn_tokens", "sampling.max_observation_tokens", "sampling.concurrency",
            "local.slots", "local.cache_rows", "local.prefill_rows", "local.prefill_chunk", "local.decode_steps",
            "sglang.attempts", "eval.prompts", "eval.samples", "checkpoint.keep", "loss.epochs",
            "loss.mini_batches", "loss.micro_rows", "loss.logit_chunk", "predictor.epochs", "predictor.batch_rows",
            "predictor.warmup_rollouts", "predictor.replay_steps", "predictor.oracle_rollouts",
            "predictor.oracle_continuations", "predictor.hidden_size", "predictor.num_layers",
            "predictor.num_heads", "predictor.mlp_size", "predictor.members", "predictor.state_layers",
            "predictor.feature_size", "warm_start.demonstrations",
            "warm_start.distinct", "warm_start.micro_rows", "chat.max_prompt_tokens", "math.max_turns",
            "math.python_workers", "math.check_workers", "multihop_qa.max_turns", "multihop_qa.document_characters",
            "bfcl.max_turns", "mesh.data", "mesh.fsdp", "mesh.tensor"),
        2: ("budget.roots", "budget.rollouts_per_prompt", "budget.roots_per_prompt", "budget.min_per_prompt",
            "model.context_length"),
    }  # fmt: skip
    for limit, names in at_least.items():
        for name in names:
            if _get(config, name) < limit:
                yield f"config.{name} is {_get(config, name)}, must be at least {limit}"
    for name in ("sampling.temperature", "optimizer.eps", "optimizer.clip_norm", "model.rope_theta", "lora.alpha",
                 "predictor.prior_precision",
                 "loss.tis_cap", "loss.max_logprob_gap", "sglang.request_timeout", "sglang.update_timeout",
                 "sglang.outage_timeout", "math.python_timeout", "math.check_timeout"):  # fmt: skip
        if not _get(config, name) > 0:
            yield f"config.{name} is {_get(config, name)}, must be above 0"
    for name in ("sampling.deadline", "sampling.max_response_tokens", "optimizer.max_update_norm",
                 "predictor.max_tokens", "predictor.update_steps"):  # fmt: skip
        value = _get(config, name)
        if value is not None and not value > 0:
            yield f"config.{name} is {value}, must be above 0 or left unset"
    for name in ("warm_start.slip_rate", "predictor.prefix_share", "predictor.held_share", "budget.explore_share",
                 "optimizer.b1", "optimizer.b2", "optimizer.momentum",
                 "loss.clip_low"):  # fmt: skip
        if not 0 <= _get(config, name) < 1:
            yield f"config.{name} is {_get(config, name)}, must be in [0, 1)"


def _floats(name: str, value: Any) -> Iterable[tuple[str, float]]:
    """(path, number) of every float below `value`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _floats(f"{name}.{key}", inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from _floats(name, inner)
    elif isinstance(value, float):
        yield name, value


def _get(config: RunConfig, name: str):
    value = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _budget(config: RunConfig) -> Iterable[str]:
    budget = config.budget
    cap = budget.max_per_prompt
    if cap is not None and cap < 2:
        yield f"config.budget.max_per_prompt is {cap}, must be at least 2: a group of one has no contrast"
    if config.strategy == "trace":
        yield from _opened(config)
    if config.strategy == "trace" and cap is not None and budget.roots > budget.pool * cap:
        yield (
            f"config.budget.roots is {budget.roots}, but pool * max_per_prompt = {budget.pool} * {cap} = "
            f"{budget.pool * cap}; lower roots or raise the pool or the cap"
        )
    if budget.roots * budget.continuations_per_root % 2:
        yield (
            f"config.budget.roots * continuations_per_root = {budget.roots * budget.continuations_per_root} is odd; "
            "continuations cost half a unit, so make it even"
        )
    yield from _groups(config)
    if (budget.unit == "tokens") != (budget.tokens > 0):
        yield f"config.budget.tokens is {budget.tokens} with unit {budget.unit!r}; a token budget needs both"


def _opened(config: RunConfig) -> Iterable[str]:
    """How many root rollouts TRACE may give to a prompt."""
    budget = config.budget
    least, cap = budget.min_per_prompt, budget.max_per_prompt
    if cap is not None and least > cap:
        yield f"config.budget.min_per_prompt is {least}, above max_per_prompt {cap}; lower the one or raise the other"
    if least > budget.roots:
        yield f"config.budget.min_per_prompt is {least}, above budget.roots {budget.roots}; lower it"
    if cap is not None and 2 < least and cap < 2 * least - 1 and budget.unit == "tokens":  # M is even there
        yield (
            f"config.budget.max_per_prompt is {cap}, but with unit 'tokens' every number of roots must be a sum of "
            f"{least} or more each; raise it to {2 * least - 1} or lower min_per_prompt"
        )
    for total in (budget.roots, budget.roots - explored_roots(budget)):
        if least <= total <= budget.pool * (cap or total) and not is_feasible(budget.pool, total, cap, least):
            yield (
                f"config.budget: {total} root rollouts (explore_share {budget.explore_share}) are no sum of {least} to "
                f"{cap} for each opened prompt; change roots, min_per_prompt or max_per_prompt"
            )
    if budget.objective == "pairs" and cap is None:
        yield (
            "config.budget.objective 'pairs' is linear in a prompt's rollouts: without a cap one prompt takes all; set "
            "config.budget.max_per_prompt"
        )


def _groups(config: RunConfig) -> Iterable[str]:
    """Strategies that give all their prompts the same number of root rollouts."""
    budget = config.budget
    units = budget.roots + budget.roots * budget.continuations_per_root // 2
    if config.strategy == "trace":
        return
    if config.strategy in FLAT:
        field, total, kind = "rollouts_per_prompt", units, "units"
        what = f"the budget of {units} units (config.budget.roots * (1 + continuations_per_root / 2))"
    else:
        field, total, kind = "roots_per_prompt", budget.roots, "root rollouts"
        what = f"config.budget.roots {budget.roots}"
    size = getattr(budget, field)
    if total % size and budget.unit == "rollouts":
        yield f"{what} is not a multiple of config.budget.{field} {size}; change one of them"
    if total // size > budget.pool:
        yield (
            f"config.budget.pool is {budget.pool}, but {total} {kind} in groups of {size} need {total // size} "
            "prompts; enlarge the pool or the groups"
        )


def _shapes(config: RunConfig) -> Iterable[str]:
    if config.loss.row_length < config.model.context_length:
        yield (
            f"config.loss.row_length is {config.loss.row_length}, below model.context_length "
            f"{config.model.context_length}; an episode must fit a row"
        )
    data = config.mesh.data * config.mesh.fsdp
    for name in ("loss.micro_rows", "predictor.batch_rows", "warm_start.micro_rows"):
        if _get(config, name) % data:
            yield f"config.{name} is {_get(config, name)}, must be a multiple of mesh.data * mesh.fsdp = {data}"
    for name in SMALL_TASKS:
        for field in ("difficulty", "demo_difficulty"):
            weights = getattr(getattr(config, name), field)
            if not weights or min(weights) < 0 or not sum(weights) > 0:
                yield f"config.{name}.{field} is {weights}; give at least one positive weight and none below 0"


def _servers(config: RunConfig) -> Iterable[str]:
    urls = split_urls(config.sglang.urls)
    if config.engine == "sglang" and not urls:
        yield (
            "config.sglang.urls is empty, but config.engine is 'sglang'; start servers with "
            "python -m trace_jax.launch_sglang and give the URLs that it prints, or take config.engine='local'"
        )
    for url in (*urls, *([config.sglang.router] if config.sglang.router else [])):
        if not re.fullmatch(r"https?://[^/\s,]+", url):
            yield f"config.sglang names {url!r}; a server's URL is http://HOST:PORT, several have commas between"
    devices = config.devices
    if devices.memory_fraction is not None and not 0 < devices.memory_fraction <= 1:
        yield f"config.devices.memory_fraction is {devices.memory_fraction}, must be in (0, 1] or left unset"
    if devices.memory_fraction is not None and devices.on_demand:
        yield (
            f"config.devices.memory_fraction is {devices.memory_fraction}, but with on_demand nothing is reserved; "
            "leave one of them unset"
        )
    if devices.visible is not None and not re.fullmatch(r"\d+(,\d+)*", devices.visible):
        yield f"config.devices.visible is {devices.visible!r}; give numbers of GPUs with commas between, or none"
    if len(set(urls)) < len(urls):
        yield f"config.sglang.urls is {config.sglang.urls!r}; name every server once"


def _pretrained(config: RunConfig) -> Iterable[str]:
    if config.lora.rank and config.model.fuse_projections:
        yield "config.lora.rank needs config.model.fuse_projections=False: q, k and v have adapters of their own"
    if config.model.param_dtype != "float32" and not (config.lora.rank and config.model.path):
        yield (
            f"config.model.param_dtype is {config.model.param_dtype!r}, but an optimiser moves float32 parameters; "
            "train adapters (config.lora.rank) on a pretrained model (config.model.path), or leave it at float32"
        )
    if config.warm_start.pretrained and config.model.param_dtype != "float32":
        yield (
            f"config.warm_start.pretrained trains all parameters, but config.model.param_dtype is "
            f"{config.model.param_dtype!r}; leave it at float32"
        )
    for name in SMALL_TASKS:
        for count in getattr(config, name).shots:
            if count < 0 or count != int(count):
                yield f"config.{name}.shots holds {count}; a number of examples is a whole number, at least 0"


def _data_tasks(config: RunConfig) -> Iterable[str]:
    if config.task in DATA_TASKS:
        if config.model.path is None:
            yield (
                f"config.model.path is not set, but config.task {config.task!r} is read as a chat; give a model "
                "folder, a .gguf file or package:NAME"
            )
        if config.chat.max_prompt_tokens >= config.model.context_length:
            yield (
                f"config.chat.max_prompt_tokens is {config.chat.max_prompt_tokens}, must be below "
                f"model.context_length {config.model.context_length}: the answer needs room"
            )
        if config.chat.thinking and config.chat.template == "llama3":
            yield "config.chat.thinking is set, but chat format llama3 has no thoughts; unset it or take template qwen3"
    for name, sets in (("math", config.math.eval_sets), ("multihop_qa", config.multihop_qa.eval_sets)):
        if not sets or len(set(sets)) < len(sets):
            yield f"config.{name}.eval_sets is {sets}; name at least one data set, and each once"
    categories = config.bfcl.categories
    if not categories or len(set(categories)) < len(categories) or set(categories) - set(BFCL_CATEGORIES):
        yield f"config.bfcl.categories is {categories}; name some of {', '.join(BFCL_CATEGORIES)}, and each once"
    for name in ("math.python_url", "multihop_qa.search_url"):
        url = _get(config, name)
        if url is not None and not re.fullmatch(r"https?://[^/\s,]+", url):
            yield f"config.{name} is {url!r}; a service's URL is http://HOST:PORT"


def _predictor(config: RunConfig) -> Iterable[str]:
    predictor = config.predictor
    if predictor.path is not None and predictor.kind not in ("critic", "both"):
        yield (
            f"config.predictor.path is {predictor.path!r}, but kind {predictor.kind!r} has no weights of its own; set "
            "config.predictor.kind to 'critic' or 'both' or leave the path unset"
        )
    if not 0 < predictor.replay_decay <= 1:
        yield f"config.predictor.replay_decay is {predictor.replay_decay}, must be in (0, 1]"
    elif predictor.replay_decay ** (predictor.replay_steps - 1) < LEAST_WEIGHT:
        yield (
            f"config.predictor: the oldest of {predictor.replay_steps} replay_steps would weigh "
            f"{predictor.replay_decay}^{predictor.replay_steps - 1}, next to nothing; lower replay_steps or raise "
            "replay_decay"
        )
    if (predictor.calibration != "none") != (predictor.held_share > 0):
        yield (
            f"config.predictor.calibration is {predictor.calibration!r} with held_share {predictor.held_share}; a "
            "calibration needs both, a run without one neither"
        )
    if predictor.kind == "bayes" and predictor.calibration != "none":
        yield (
            f"config.predictor.calibration is {predictor.calibration!r}, but kind 'bayes' keeps no window of held-back "
            "roots to fit it to; set calibration to 'none' and held_share to 0, or take a critic"
        )
    fit = (predictor.loss, predictor.weighting, predictor.replay_steps)
    if predictor.kind == "bayes" and fit != ("bce", "count", 1):
        yield (
            "config.predictor.kind 'bayes' takes in each outcome once, by its likelihood, but loss is {!r}, weighting "
            "{!r} and replay_steps {}; set them to 'bce', 'count' and 1".format(*fit)
        )
    if predictor.kind == "bayes" and predictor.max_tokens and predictor.max_tokens < config.model.context_length:
        yield (
            f"config.predictor.max_tokens is {predictor.max_tokens}, but kind 'bayes' reads whole histories; leave it "
            f"unset, or take model.context_length {config.model.context_length}"
        )
    if predictor.frozen_states and predictor.kind not in ("policy_head", "both", "bayes"):
        yield (
            f"config.predictor.frozen_states is set, but kind {predictor.kind!r} does not read the policy's states; "
            "unset it or take kind 'policy_head', 'both' or 'bayes'"
        )
    if predictor.expected and predictor.members == 1:
        yield "config.predictor.expected needs config.predictor.members of 2 or more: a single one has no spread"
    if predictor.shuffle and predictor.kind == "oracle":
        yield "config.predictor.shuffle is set, but kind 'oracle' measures; shuffle a learned predictor's scores"


def _training(config: RunConfig) -> Iterable[str]:
    if config.overlap and config.loss.tis == "off":
        yield (
            "config.overlap trains on rollouts of weights one step old, but config.loss.tis is 'off'; set it to 'auto' "
            "so that importance weights correct for that, or config.overlap to False"
        )
    if config.overlap and config.sglang.release_memory:
        yield (
            "config.sglang.release_memory takes the servers' memory while the policy trains, but with config.overlap "
            "they sample then; switch one of the two off"
        )
    total = max(config.steps, 1) * config.loss.epochs * config.loss.mini_batches
    if config.optimizer.schedule == "warmup_cosine" and config.optimizer.warmup_steps >= total:
        yield (
            f"config.optimizer.warmup_steps is {config.optimizer.warmup_steps}, must be below {total}, the run's "
            "optimiser steps (steps * loss.epochs * loss.mini_batches)"
        )


def _sampling(config: RunConfig) -> Iterable[str]:
    sampling = config.sampling
    if not 0 < sampling.top_p <= 1:
        yield f"config.sampling.top_p is {sampling.top_p}, must be in (0, 1]"
    if sampling.top_p == 1 and sampling.top_k == 0:
        return
    values = f"config.sampling.top_p is {sampling.top_p} and top_k {sampling.top_k}"
    if config.engine == "local":
        yield f"{values}, but the in-process engine draws from all tokens; take config.engine='sglang', or 1.0 and 0"
    if config.steps and not sampling.accept_truncation_bias:
        yield (
            f"{values}, but the trainer scores the full softmax, not the truncated distribution that is drawn from: "
            "the gradient is biased; set them to 1.0 and 0, or config.sampling.accept_truncation_bias=True"
        )
