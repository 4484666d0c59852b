"""The configs of the three task families: the paper's numbers, typed in from it here, and the budget they all spend."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

from configs import paper
from trace_jax import config as config_lib
from trace_jax import config_checks, setup_run
from trace_jax.config import ConfigError

# ml_collections loads config files with it.
pytestmark = pytest.mark.filterwarnings(r"ignore:the load_module\(\) method is deprecated:DeprecationWarning")
CONFIGS = Path(__file__).parents[1] / "configs"
FAMILIES = {name: importlib.import_module(f"configs.{name}") for name in ("math", "multihop_qa", "bfcl")}
MODELS = ("qwen3_8b", "qwen3_14b", "llama32_3b", "qwen3_0p6b", "tiny")
STRATEGIES = ("grpo", "pcl", "treepo", "trace")
RUNS = [(family, model, strategy) for family in FAMILIES for model in MODELS for strategy in STRATEGIES]
LARGE = MODELS[:4]

# Appendix E.3, every family
SHARED = {
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.0,
    "optimizer.learning_rate": 1e-6,
    "optimizer.clip_norm": 1.0,
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "loss.kl_coef": 0.0,
    "loss.aggregation": "sequence_mean_token_mean",
    "budget.continuations_per_root": 2,
    "budget.rollouts_per_prompt": 8,
    "budget.roots_per_prompt": 4,
    "budget.max_per_prompt": None,
    "budget.unit": "rollouts",
    "predictor.kind": "critic",
    "predictor.path": "models/Qwen3-0.6B",
    "predictor.loss": "mse",
    "predictor.replay_steps": 1,
    "predictor.warmup_prompts": 0,
}
# B, M | prompt, response, turns | temperature, top-p | advantage | critic's rate and epochs | evaluation every, samples
NUMBERS = {
    "math": (256, 512, 2048, 14336, 5, 0.6, 0.95, "tree_rpo", 1.5e-5, 4, 5, None),
    "multihop_qa": (512, 1024, 2048, 6144, 5, 1.0, 1.0, "tree_rpo", 3e-5, 2, 5, 1),
    "bfcl": (256, 512, 12800, 8192, 40, 0.9, 1.0, "tree_grpo", 3e-5, 2, 2, 4),
}
# units of a step | prompts of GRPO and PCL | prompts of TreePO
BUDGETS = {"math": (1024, 128, 128), "multihop_qa": (2048, 256, 256), "bfcl": (1024, 128, 128)}
TINY = {"math": (16, 4, 2), "multihop_qa": (16, 4, 2), "bfcl": (8, 2, 1)}
# heads and key/value heads of the models that a mesh divides
HEADS = {"qwen3_8b": (32, 8), "qwen3_14b": (40, 8), "llama32_3b": (24, 8), "qwen3_0p6b": (16, 8)}


def resolved(family: str, model: str, strategy: str):
    """The checked settings of a run."""
    return config_checks.check(config_lib.parse(FAMILIES[family].get_config(f"{model},{strategy}")))


def value(config, name: str):
    """A field by its dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def spent(strategy, pool: int, rng):
    """(root rollouts of each prompt, units) of a step whose rollouts have 0 to 3 anchors, at least one a prompt."""
    scores = rng.random(pool) if strategy.needs_predictor else None
    roots = strategy.roots(scores, pool, rng)
    units = float(roots.sum())
    for m in roots[roots > 0].tolist():
        rollout = np.sort(np.append(rng.integers(m, size=m), rng.permutation(m)[: m // 2]))
        success, score = rng.integers(0, 2, m).astype(float)[rollout], rng.random(rollout.size)
        total = m * strategy.continuations_per_root
        forks = strategy.forks(success, score if strategy.needs_predictor else None, rollout, total, rng)
        units += 0.5 * forks.sum()
    return roots, units


@pytest.mark.parametrize("family, model, strategy", RUNS)
def test_every_run_resolves_and_spends_the_same_budget(family, model, strategy):
    config = resolved(family, model, strategy)
    assert (config.task, config.strategy) == (family, strategy)
    units, flat, trees = TINY[family] if model == "tiny" else BUDGETS[family]
    budget = config.budget
    assert budget.roots * (1 + budget.continuations_per_root / 2) == units == flat * budget.rollouts_per_prompt
    assert trees * budget.roots_per_prompt == budget.roots
    made = setup_run.make_strategy(config, budget)
    roots, used = spent(made, budget.pool, np.random.default_rng(0))
    assert used == units and made.name == strategy
    group = 4 if model == "tiny" or strategy == "treepo" else 8
    if strategy in ("grpo", "pcl"):
        assert sorted(set(roots)) == [0, group] and np.count_nonzero(roots) == flat
    elif strategy == "treepo":
        assert set(roots) == {0, 4} and np.count_nonzero(roots) == trees


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", LARGE)
def test_numbers_of_the_paper(family, model):
    config = resolved(family, model, "trace")
    pool, roots, prompt, response, turns, temperature, top_p, advantage, rate, epochs, every, samples = NUMBERS[family]
    want = SHARED | {
        "budget.pool": pool,
        "budget.roots": roots,
        "chat.max_prompt_tokens": prompt,
        "sampling.max_response_tokens": response,
        f"{family}.max_turns": turns,
        "sampling.temperature": temperature,
        "sampling.top_p": top_p,
        "loss.advantage": advantage,
        "predictor.learning_rate": rate,
        "predictor.epochs": epochs,
        "predictor.prefix_share": 0.06,
        "eval.every": every,
        "steps": 30 if model == "llama32_3b" else 90,
    }
    if samples is not None:
        want["eval.samples"] = samples
    assert {name: value(config, name) for name in want} == want


def test_data_sets_of_the_paper():
    math, qa, bfcl = (resolved(family, "qwen3_14b", "grpo") for family in FAMILIES)
    assert math.math.train == "deepscaler" and math.math.python_timeout == 12.0
    assert set(math.math.eval_sets) - {"aime25"} == {"aime24", "amc23", "math500", "minerva", "olympiadbench"}
    assert qa.multihop_qa.train == "hotpotqa"
    assert set(qa.multihop_qa.eval_sets) == {"hotpotqa", "2wikimultihopqa", "musique", "bamboogle"}
    assert set(bfcl.bfcl.categories) == {"base", "long_context", "miss_func", "miss_param"}
    assert bfcl.eval.prompts == 4 * 200 / 5


@pytest.mark.parametrize("family", FAMILIES)
def test_strategies_differ_in_nothing_else(family):
    """But for PCL, whose predictor is asked about prompts only and learns from prompts only."""
    runs = {strategy: FAMILIES[family].get_config(f"qwen3_8b,{strategy}").to_dict() for strategy in STRATEGIES}
    for strategy, run in runs.items():
        assert run.pop("strategy") == strategy
        assert run["predictor"].pop("prefix_share") == (0.0 if strategy == "pcl" else 0.06)
        assert run == runs["grpo"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", MODELS)
def test_lengths_and_machines_fit_together(family, model):
    config = resolved(family, model, "trace")
    limits, mesh = config.sampling, config.mesh
    assert config.model.context_length == config.chat.max_prompt_tokens + limits.max_response_tokens
    assert config.loss.row_length == config.model.context_length
    assert limits.max_turn_tokens <= limits.max_response_tokens
    assert config.model.path == paper.MODELS[model].path
    assert config.chat.template == ("llama3" if model == "llama32_3b" else "qwen3")
    assert config.chat.thinking == (model != "llama32_3b")
    if model == "tiny":
        assert config.engine == "local" and config.lora.rank and limits.top_p == 1.0 and config.predictor.path is None
        assert mesh.data * mesh.fsdp * mesh.tensor == 1
        return
    assert config.engine == "sglang" and not config.lora.rank and config.model.param_dtype == "float32"
    assert all(heads % mesh.tensor == 0 for heads in (*HEADS[model], *HEADS["qwen3_0p6b"]))
    one_gpu = model == "qwen3_0p6b"
    assert (mesh.data * mesh.fsdp * mesh.tensor == 1) == config.sglang.release_memory == one_gpu


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", ["", "qwen3", "qwen3_8b,ppo", "qwen3_8b,trace,1", "trace"])
def test_a_wrong_name_lists_the_choices(family, arguments):
    with pytest.raises(ConfigError) as error:
        FAMILIES[family].get_config(arguments)
    message = str(error.value)
    assert message.startswith(f"configs/{family}.py:{arguments} is none of its runs") and "\n" not in message
    assert all(name in message for name in (*MODELS, *STRATEGIES))


def test_the_strategy_may_be_left_out():
    assert resolved("bfcl", "tiny", "") == resolved("bfcl", "tiny", "trace") == resolved("bfcl", " tiny ", " trace")


@pytest.mark.parametrize("family", FAMILIES)
def test_flags_override_and_docstrings_name_every_run(family):
    argv = ["prog", f"--config={CONFIGS / family}.py:llama32_3b,pcl", "--config.model.path=elsewhere"]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=argv)
    values(argv)
    config = config_checks.check(config_lib.parse(holder.value))
    assert (config.task, config.strategy, config.model.path) == (family, "pcl", "elsewhere")
    words = FAMILIES[family].__doc__
    assert all(name in words for name in (*MODELS, *STRATEGIES, f"configs/{family}.py", "trace_jax.data prepare"))
