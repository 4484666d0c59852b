"""Every rule has a case that breaks it and nothing else, and a neighbour that does not."""

from __future__ import annotations

import ast
import inspect
import sys

import pytest

from trace_jax import config as config_lib
from trace_jax import config_checks
from trace_jax.config import ConfigError

CHAT = {"task": "math", "model.path": "m", "model.context_length": 4096, "loss.row_length": 4096}
SERVED = {"engine": "sglang", "sglang.urls": "http://127.0.0.1:30000"}
LEAST = {"budget.min_per_prompt": 2}
# (settings, what the one line says)
BROKEN = [
    ({"task": ""}, "config.task is ''; choose one of arithmetic, lookup"),
    ({"engine": "vllm"}, "config.engine is 'vllm'; choose one of local, sglang"),
    ({"engine": "sglang"}, "config.sglang.urls is empty, but config.engine is 'sglang'; start servers with"),
    (SERVED | {"sglang.urls": "http://a:1,b:2"}, "config.sglang names 'b:2'; a server's URL is http://HOST:PORT"),
    (SERVED | {"sglang.router": "http://a:1/x"}, "config.sglang names 'http://a:1/x'"),
    (SERVED | {"sglang.urls": "http://a:1,http://a:1/"}, "name every server once"),
    ({"sglang.request_timeout": 0.0}, "config.sglang.request_timeout is 0.0, must be above 0"),
    ({"sglang.update_timeout": 0.0}, "config.sglang.update_timeout is 0.0, must be above 0"),
    ({"sglang.outage_timeout": -1.0}, "config.sglang.outage_timeout is -1.0, must be above 0"),
    ({"devices.memory_fraction": 1.5}, r"config.devices.memory_fraction is 1.5, must be in \(0, 1\] or left unset"),
    ({"devices.memory_fraction": 0.5, "devices.on_demand": True}, "memory_fraction is 0.5, but with on_demand nothing"),
    ({"devices.visible": "gpu0"}, "config.devices.visible is 'gpu0'; give numbers of GPUs with commas between"),
    ({"task": "math"}, "config.model.path is not set, but config.task 'math' is read as a chat; give a model fo"),
    (CHAT | {"chat.max_prompt_tokens": 4096}, "max_prompt_tokens is 4096, must be below model.context_length 4096"),
    (CHAT | {"chat.thinking": True, "chat.template": "llama3"}, "chat.thinking is set, but chat format llama3 has no"),
    ({"model.path": "m", "lora.rank": 4, "model.fuse_projections": False, "model.param_dtype": "bfloat16",
      "warm_start.pretrained": True}, "pretrained trains all parameters, but config.model.param_dtype is 'bfloat16'"),
    ({"math.eval_sets": ()}, r"config.math.eval_sets is \(\); name at least one data set, and each once"),
    ({"multihop_qa.eval_sets": ("musique", "musique")}, "config.multihop_qa.eval_sets is"),
    ({"bfcl.categories": ("base", "parallel")}, "name some of base, long_context, miss_func, miss_param"),
    ({"bfcl.categories": ()}, r"config.bfcl.categories is \(\)"),
    ({"math.python_url": "localhost:8080"}, "config.math.python_url is 'localhost:8080'; a service's URL is http://H"),
    ({"multihop_qa.search_url": "http://a:1/retrieve"}, "config.multihop_qa.search_url is 'http://a:1/retrieve'"),
    ({"math.python_timeout": 0.0}, "config.math.python_timeout is 0.0, must be above 0"),
    ({"math.check_timeout": -1.0}, "config.math.check_timeout is -1.0, must be above 0"),
    ({"strategy": "ppo"}, "config.strategy is 'ppo'; choose one of grpo, pcl, treepo, trace"),
    ({"budget.unit": "seconds"}, "config.budget.unit is 'seconds'"),
    ({"optimizer.name": "adam"}, "config.optimizer.name is 'adam'; choose one of adamw, sgd"),
    ({"optimizer.schedule": "cosine"}, "choose one of constant, warmup_cosine"),
    ({"loss.advantage": "gae"}, "choose one of grpo, dr_grpo, tree_rpo, tree_grpo, tree_rloo"),
    ({"loss.std_ddof": 2}, "config.loss.std_ddof is 2; choose one of 0, 1"),
    ({"loss.aggregation": "mean"}, "config.loss.aggregation is 'mean'"),
    ({"loss.prompt_weight": "leaves"}, "choose one of equal, sequences"),
    ({"predictor.kind": "none"}, "choose one of critic, policy_head, both, bayes, oracle"),
    ({"predictor.targets": "leaves"}, "config.predictor.targets is 'leaves'; choose one of backed_up, bare, direct"),
    ({"predictor.calibration": "platt"}, "choose one of none, temperature, isotonic"),
    ({"predictor.calibration": "isotonic"}, "calibration is 'isotonic' with held_share 0.0; a calibration needs both"),
    ({"predictor.held_share": 0.1}, "config.predictor.calibration is 'none' with held_share 0.1"),
    (
        {"predictor.calibration": "isotonic", "predictor.held_share": 0.1},
        "calibration is 'isotonic', but kind 'bayes' keeps no window",
    ),
    ({"predictor.held_share": 1.0}, r"config.predictor.held_share is 1.0, must be in \[0, 1\)"),
    ({"predictor.replay_decay": 0.0}, r"config.predictor.replay_decay is 0.0, must be in \(0, 1\]"),
    ({"predictor.replay_decay": 1.01}, "config.predictor.replay_decay is 1.01"),
    ({"predictor.replay_decay": 0.1, "predictor.replay_steps": 32}, "the oldest of 32 replay_steps would weigh 0.1.31, next to nothing; lower"),
    ({"predictor.update_steps": 0}, "config.predictor.update_steps is 0, must be above 0 or left unset"),
    ({"predictor.frozen_states": True, "predictor.kind": "critic"}, "frozen_states is set, but kind 'critic' does not read the policy's states"),
    ({"predictor.loss": "mse", "predictor.weighting": "equal"}, "'bayes' takes in each outcome once, by its likelihood, but loss is 'mse', weighting"),
    ({"predictor.replay_steps": 2},
     "weighting 'count' and replay_steps 2; set them to 'bce', 'count' and 1"),
    ({"predictor.max_tokens": 127},
     "max_tokens is 127, but kind 'bayes' reads whole histories; leave it unset, or take model.context_length 128"),
    ({"predictor.prior_precision": 0.0}, "config.predictor.prior_precision is 0.0, must be above 0"),
    ({"predictor.expected": True}, "config.predictor.expected needs config.predictor.members of 2 or more"),
    ({"predictor.shuffle": True, "predictor.kind": "oracle"}, "config.predictor.shuffle is set, but kind 'oracle' mea"),
    ({"budget.objective": "entropy"}, "config.budget.objective is 'entropy'; choose one of any_contrast, advantage_ma"),
    ({"budget.objective": "pairs"}, "'pairs' is linear in a prompt's rollouts: without a cap one prompt takes all; set"),
    ({"budget.explore_share": 1.0}, r"config.budget.explore_share is 1.0, must be in \[0, 1\)"),
    ({"budget.min_per_prompt": 5, "budget.max_per_prompt": 4}, "min_per_prompt is 5, above max_per_prompt 4; lower"),
    ({"budget.min_per_prompt": 130}, "config.budget.min_per_prompt is 130, above budget.roots 128; lower it"),
    (
        {"budget.min_per_prompt": 4, "budget.max_per_prompt": 6, "budget.unit": "tokens", "budget.tokens": 9},
        "every number of roots must be a sum of 4 or more each; raise it to 7 or lower min_per_prompt",
    ),
    # 10 = 5 + 5, but 8 or 9 is no sum of fives.
    (
        {"budget.roots": 10, "budget.min_per_prompt": 5, "budget.max_per_prompt": 5, "budget.explore_share": 0.2},
        r"8 root rollouts \(explore_share 0.2\) are no sum of 5 to 5 for each opened prompt; change roots",
    ),
    ({"predictor.loss": "mae"}, "choose one of mse, bce"),
    ({"predictor.weighting": "sqrt"}, "choose one of equal, count"),
    ({"model.dtype": "float16"}, "choose one of float32, bfloat16"),
    ({"optimizer.learning_rate": float("nan")}, "config.optimizer.learning_rate is nan, must be finite"),
    ({"sampling.deadline": float("inf")}, "config.sampling.deadline is inf, must be finite"),
    ({"arithmetic.difficulty": (1.0, float("inf"))}, "config.arithmetic.difficulty is inf, must be finite"),
    ({"sampling.temperature": 0.0}, "config.sampling.temperature is 0.0, must be above 0"),
    ({"optimizer.eps": 0.0}, "config.optimizer.eps is 0.0, must be above 0"),
    ({"optimizer.clip_norm": 0.0}, "config.optimizer.clip_norm is 0.0, must be above 0"),
    ({"model.rope_theta": 0.0}, "config.model.rope_theta is 0.0, must be above 0"),
    ({"sampling.deadline": 0.0}, "config.sampling.deadline is 0.0, must be above 0 or left unset"),
    ({"optimizer.max_update_norm": -1.0}, "config.optimizer.max_update_norm is -1.0, must be above 0 or left unset"),
    ({"loss.tis_cap": 0.0}, "config.loss.tis_cap is 0.0, must be above 0"),
    ({"loss.max_logprob_gap": 0.0}, "config.loss.max_logprob_gap is 0.0, must be above 0"),
    ({"loss.tis": "always"}, "config.loss.tis is 'always'; choose one of auto, on, off"),
    ({"sampling.max_response_tokens": 0}, "config.sampling.max_response_tokens is 0, must be above 0 or left unset"),
    ({"predictor.max_tokens": 0}, "config.predictor.max_tokens is 0, must be above 0 or left unset"),
    ({"warm_start.slip_rate": 1.0}, r"config.warm_start.slip_rate is 1.0, must be in \[0, 1\)"),
    ({"predictor.prefix_share": 1.0}, r"config.predictor.prefix_share is 1.0, must be in \[0, 1\)"),
    ({"optimizer.b1": 1.0}, "config.optimizer.b1 is 1.0"),
    ({"optimizer.b2": -0.1}, "config.optimizer.b2 is -0.1"),
    ({"optimizer.momentum": 1.0}, "config.optimizer.momentum is 1.0"),
    ({"loss.clip_low": 1.0}, "config.loss.clip_low is 1.0"),
    # M = 1: a lone rollout has no contrast.
    ({"budget.roots": 1}, "config.budget.roots is 1, must be at least 2"),
    (LEAST | {"budget.max_per_prompt": 1}, "config.budget.max_per_prompt is 1, must be at least 2: a group of one"),
    # M > pool * cap: 5 prompts with at most 3 rollouts hold 15.
    (LEAST | {"budget.pool": 5, "budget.max_per_prompt": 3, "budget.roots": 16}, r"pool \* max_per_prompt = 5 \* 3 = 15"),
    (LEAST | {"budget.pool": 9, "budget.max_per_prompt": 2, "budget.roots": 7}, r"config.budget: 7 root rollouts \(explore_share 0.0\) are no sum of 2 to 2 for each"),
    # 7 root rollouts and 7 * 1 half units are 10.5 units.
    ({"budget.roots": 7, "budget.continuations_per_root": 1}, "roots . continuations_per_root = 7 is odd"),
    # N < 0
    ({"budget.continuations_per_root": -1}, "config.budget.continuations_per_root is -1, must be at least 0"),
    # 12 + 12 * 2 / 2 = 24 units in groups of 5
    (
        {"strategy": "grpo", "budget.roots": 12, "budget.rollouts_per_prompt": 5},
        "the budget of 24 units .* is not a multiple of config.budget.rollouts_per_prompt 5",
    ),
    # 24 units in groups of 4 are 6 groups.
    (
        {"strategy": "grpo", "budget.roots": 12, "budget.rollouts_per_prompt": 4, "budget.pool": 5},
        "config.budget.pool is 5, but 24 units in groups of 4 need 6 prompts",
    ),
    ({"strategy": "pcl", "budget.roots": 12, "budget.rollouts_per_prompt": 5}, "of config.budget.rollouts_per_prompt 5"),
    # TreePO: 12 root rollouts, whatever follows them
    (
        {"strategy": "treepo", "budget.roots": 12, "budget.roots_per_prompt": 5},
        "config.budget.roots 12 is not a multiple of config.budget.roots_per_prompt 5",
    ),
    (
        {"strategy": "treepo", "budget.roots": 12, "budget.roots_per_prompt": 4, "budget.pool": 2},
        "config.budget.pool is 2, but 12 root rollouts in groups of 4 need 3 prompts",
    ),
    ({"budget.unit": "tokens"}, "config.budget.tokens is 0 with unit 'tokens'"),
    ({"budget.tokens": 9}, "config.budget.tokens is 9 with unit 'rollouts'"),
    ({"model.context_length": 64, "loss.row_length": 63}, "loss.row_length is 63, below model.context_length 64"),
    ({"mesh.data": 2, "mesh.fsdp": 3, "loss.micro_rows": 8, "predictor.batch_rows": 6, "warm_start.micro_rows": 6},
     r"config.loss.micro_rows is 8, must be a multiple of mesh.data \* mesh.fsdp = 6"),
    ({"mesh.fsdp": 4, "predictor.batch_rows": 6}, "config.predictor.batch_rows is 6, must be a multiple"),
    ({"mesh.fsdp": 4, "warm_start.micro_rows": 6}, "config.warm_start.micro_rows is 6, must be a multiple"),
    # an empty task
    ({"arithmetic.difficulty": ()}, r"config.arithmetic.difficulty is \(\); give at least one positive weight"),
    ({"lookup.difficulty": (0.0, 0.0)}, "config.lookup.difficulty is"),
    ({"arithmetic.demo_difficulty": (1.0, -1.0)}, "config.arithmetic.demo_difficulty is"),
    ({"lookup.demo_difficulty": ()}, "config.lookup.demo_difficulty is"),
    (
        {"predictor.path": "m", "predictor.kind": "policy_head"},
        "config.predictor.path is 'm', but kind 'policy_head' has no weights of its own; set config.predictor.kind",
    ),
    ({"lora.rank": 4}, "config.lora.rank needs config.model.fuse_projections=False"),
    ({"model.param_dtype": "bfloat16"}, "config.model.param_dtype is 'bfloat16', but an optimiser moves float32"),
    ({"model.param_dtype": "float16"}, "config.model.param_dtype is 'float16'; choose one of float32, bfloat16"),
    ({"lora.alpha": 0.0}, "config.lora.alpha is 0.0, must be above 0"),
    ({"arithmetic.shots": (1.0, 0.5)}, "config.arithmetic.shots holds 0.5; a number of examples is a whole number"),
    ({"arithmetic.shots": (-1.0,)}, "config.arithmetic.shots holds -1.0"),
    ({"overlap": True, "loss.tis": "off"}, "config.overlap trains on rollouts of weights one step old, but"),
    (SERVED | {"overlap": True, "sglang.release_memory": True}, "config.sglang.release_memory takes the servers' memo"),
    (SERVED | {"sampling.top_p": 0.0, "sampling.accept_truncation_bias": True},
     r"config.sampling.top_p is 0.0, must be in \(0, 1\]"),
    (SERVED | {"sampling.top_p": 1.01, "sampling.accept_truncation_bias": True}, "config.sampling.top_p is 1.01, must"),
    (SERVED | {"sampling.top_p": 0.95}, "top_p is 0.95 and top_k 0, but the trainer scores the full softmax, not the"),
    (SERVED | {"sampling.top_k": 5}, "is 1.0 and top_k 5, but the trainer .* is biased; set them to 1.0 and 0, or"),
    ({"sampling.top_p": 0.95, "sampling.accept_truncation_bias": True},
     "top_p is 0.95 and top_k 0, but the in-process engine draws from all tokens; take config.engine='sglang', or 1.0"),
    ({"steps": 0, "sampling.top_k": 5}, "is 1.0 and top_k 5, but the in-process engine"),
    # 3 steps of 2 epochs and 2 mini-batches are 12 optimiser steps.
    (
        {"steps": 3, "loss.epochs": 2, "loss.mini_batches": 2, "optimizer.schedule": "warmup_cosine",
         "optimizer.warmup_steps": 12},
        "config.optimizer.warmup_steps is 12, must be below 12, the run's optimiser steps",
    ),
]  # fmt: skip

FINE = [
    CHAT | {"chat.max_prompt_tokens": 4095, "math.python_url": "https://a:1", "bfcl.categories": ("miss_func",)},
    {},
    {"task": "lookup", "strategy": "grpo"},
    {"steps": 0, "warm_start.steps": 0, "eval.every": 0, "checkpoint.every": 0},
    LEAST | {"budget.roots": 2, "budget.continuations_per_root": 0},
    LEAST | {"budget.pool": 5, "budget.max_per_prompt": 3, "budget.roots": 15},
    {"budget.roots": 7, "budget.continuations_per_root": 2},
    {"budget.objective": "pairs", "budget.max_per_prompt": 8, "budget.min_per_prompt": 8, "budget.explore_share": 0.0},
    {"budget.min_per_prompt": 4, "budget.max_per_prompt": 7, "budget.unit": "tokens", "budget.tokens": 9},
    {"strategy": "treepo", "budget.min_per_prompt": 130},
    {"predictor.kind": "critic", "predictor.calibration": "temperature", "predictor.held_share": 0.2},
    {"predictor.kind": "both", "predictor.frozen_states": True, "predictor.members": 2, "predictor.expected": True},
    {"predictor.shuffle": True, "predictor.update_steps": 1},
    {"predictor.kind": "critic", "predictor.loss": "mse", "predictor.weighting": "equal", "predictor.replay_steps": 9},
    {"predictor.frozen_states": True, "predictor.max_tokens": 128},
    {"strategy": "grpo", "budget.roots": 12, "budget.rollouts_per_prompt": 4, "budget.pool": 6},
    {"strategy": "pcl", "budget.roots": 12, "budget.rollouts_per_prompt": 4, "budget.pool": 6},
    {"strategy": "treepo", "budget.roots": 12, "budget.rollouts_per_prompt": 5, "budget.pool": 3},
    {"strategy": "trace", "budget.roots": 13, "budget.rollouts_per_prompt": 5, "budget.pool": 2},
    {"strategy": "treepo", "budget.unit": "tokens", "budget.tokens": 9, "budget.roots_per_prompt": 5},
    {"sampling.max_response_tokens": 1},
    {"budget.unit": "tokens", "budget.tokens": 9},
    {"strategy": "grpo", "budget.unit": "tokens", "budget.tokens": 9, "budget.rollouts_per_prompt": 5},
    {"arithmetic.difficulty": (0.0, 1.0)},
    {"model.context_length": 64, "loss.row_length": 64},
    {"loss.rescore": True, "loss.tis": "on", "loss.tis_cap": 0.5},
    {"overlap": True},
    {"overlap": True, "loss.tis": "on"},
    SERVED | {"sglang.urls": " http://a:1/, http://b:1 ,", "sglang.router": "http://c:1"},
    {"devices.visible": "0,12", "devices.memory_fraction": 1.0},
    SERVED | {"loss.tis": "off", "sglang.release_memory": True},
    SERVED | {"sampling.top_p": 0.95, "sampling.top_k": 50, "sampling.accept_truncation_bias": True},
    SERVED | {"sampling.top_p": 0.95, "steps": 0},
    {"sampling.accept_truncation_bias": True},
    {"predictor.path": "m", "predictor.max_tokens": 1, "predictor.kind": "critic"},
    {"lora.rank": 4, "model.fuse_projections": False, "arithmetic.shots": (0.0, 3.0)},
    {"lora.rank": 4, "model.fuse_projections": False, "model.path": "m", "model.param_dtype": "bfloat16"},
    {"sampling.deadline": 1.5, "optimizer.max_update_norm": 0.1, "optimizer.momentum": 0.0, "loss.clip_low": 0.0},
    {"mesh.data": 2, "mesh.fsdp": 4, "loss.micro_rows": 8, "predictor.batch_rows": 8, "warm_start.micro_rows": 16},
    {"steps": 3, "loss.epochs": 2, "loss.mini_batches": 2, "optimizer.schedule": "warmup_cosine",
     "optimizer.warmup_steps": 11},
]  # fmt: skip

# Numbers with a lower limit: (limit, fields).
AT_LEAST = {
    0: "seed steps eval.every eval.seed checkpoint.every warm_start.steps warm_start.seed predictor.warmup_prompts"
    " predictor.warmup_steps budget.continuations_per_root loss.kl_coef loss.clip_high loss.value_prior"
    " optimizer.learning_rate optimizer.warmup_steps optimizer.weight_decay predictor.learning_rate warm_start.learning_rate lora.rank"
    " sampling.top_k data.seed chat.shots",
    1: "budget.pool sampling.max_turn_tokens sampling.max_observation_tokens sampling.concurrency local.slots"
    " local.cache_rows local.prefill_rows local.prefill_chunk local.decode_steps sglang.attempts eval.prompts eval.samples"
    " checkpoint.keep loss.epochs"
    " loss.mini_batches loss.micro_rows loss.logit_chunk predictor.epochs predictor.batch_rows"
    " predictor.warmup_rollouts predictor.replay_steps predictor.oracle_rollouts predictor.oracle_continuations"
    " predictor.hidden_size predictor.num_layers predictor.num_heads predictor.mlp_size predictor.members predictor.state_layers predictor.feature_size warm_start.demonstrations"
    " warm_start.distinct warm_start.micro_rows chat.max_prompt_tokens math.max_turns math.python_workers"
    " math.check_workers multihop_qa.max_turns multihop_qa.document_characters bfcl.max_turns mesh.data mesh.fsdp mesh.tensor",
    2: "budget.roots budget.rollouts_per_prompt budget.roots_per_prompt budget.min_per_prompt model.context_length",
}
LIMITS = [(limit, name) for limit, names in AT_LEAST.items() for name in names.split()]


def with_settings(changes):
    """The defaults with some fields changed by their dotted names."""
    config = config_lib.default_config()
    for name, value in changes.items():
        *sections, field = name.split(".")
        section = config
        for part in sections:
            section = section[part]
        section[field] = value
    return config_lib.parse(config)


@pytest.mark.parametrize("changes, message", BROKEN, ids=lambda value: str(value)[:60])
def test_a_broken_rule_is_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        config_checks.check(with_settings(changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit, name", LIMITS)
def test_one_below_a_lower_limit(limit, name):
    with pytest.raises(ConfigError, match=f"config.{name} is {limit - 1}(.0)?, must be at least {limit}$"):
        config_checks.check(with_settings({name: limit - 1}))


@pytest.mark.parametrize("changes", FINE, ids=str)
def test_what_works_is_returned(changes):
    config = with_settings(changes)
    assert config_checks.check(config) is config


def test_every_rule_has_a_case():
    """Breaks each rule once under a tracer: no line that yields a problem stays unseen."""
    nodes = ast.walk(ast.parse(inspect.getsource(config_checks)))
    rules = {node.lineno for node in nodes if isinstance(node, ast.Yield)}
    cases = [with_settings(changes) for changes, _ in BROKEN] + [with_settings({"seed": -1})]
    seen, before = set(), sys.gettrace()

    def tracer(frame, event, argument):
        if frame.f_code.co_filename == config_checks.__file__:
            seen.add(frame.f_lineno)
            return tracer

    sys.settrace(tracer)
    try:
        for config in cases:
            with pytest.raises(ConfigError):
                config_checks.check(config)
    finally:
        sys.settrace(before)
    assert rules <= seen, f"config_checks.py: no case breaks the rules of lines {sorted(rules - seen)}"
