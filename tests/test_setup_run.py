"""Names in the config become the right functions: each is compared with what it should do, by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.tiny_run import settings
from tests.tree.tree_oracle import worked_case
from trace_jax import loop, setup_run
from trace_jax.config import ConfigError
from trace_jax.models.lora import LoraConfig
from trace_jax.tasks.tokenizer import build_tokenizer
from trace_jax.tree import advantage, grow
from trace_jax.types import Finish, NodeKind


def test_levels_count_from_one():
    assert setup_run.levels((0.5, 0.0, 2.0)) == {1: 0.5, 2: 0.0, 3: 2.0}


def test_tasks_and_the_difficulty_of_their_demonstrations():
    changes = {"arithmetic.difficulty": (0.0, 0.0, 1.0), "arithmetic.demo_difficulty": (0.0, 1.0)}
    config = settings(changes | {"lookup.difficulty": (0.0, 1.0), "lookup.demo_difficulty": (1.0,)})
    for task, groups in (("arithmetic", ("3", "2")), ("lookup", ("2", "1"))):
        config = dataclasses.replace(config, task=task)
        for demonstrations in (False, True):
            made = setup_run.make_task(config, demonstrations=demonstrations)
            assert made.name == task and made.instance("train", 0).group == groups[demonstrations]
    other = dataclasses.replace(config, lookup=dataclasses.replace(config.lookup, seed=1))
    texts = [[setup_run.make_task(c).instance("train", i).text for i in range(3)] for c in (config, other)]
    assert texts[0] != texts[1]


def test_limits_of_an_episode():
    changes = {"sampling.max_observation_tokens": 7, "sampling.deadline": 2.0, "sampling.max_response_tokens": 11}
    config = settings(changes)
    limits = setup_run.make_limits(config, setup_run.make_task(config))
    # One operation, the answer, and two turns to spare.
    assert dataclasses.astuple(limits) == (4, 8, 32, 7, 2.0, 11)


@pytest.mark.parametrize(
    "strategy, name, estimate",
    [
        ("trace", "grpo", advantage.grpo),
        ("trace", "dr_grpo", advantage.dr_grpo),
        ("trace", "tree_rpo", advantage.tree_rpo),
        ("trace", "tree_grpo", advantage.tree_grpo),
        ("treepo", "tree_rloo", lambda tree, ddof: advantage.tree_rloo(tree, prior=0.5)),
        ("pcl", "tree_rloo", advantage.grpo),
        ("grpo", "tree_rpo", advantage.grpo),
        ("grpo", "dr_grpo", advantage.dr_grpo),
        ("pcl", "tree_grpo", advantage.grpo),
        ("treepo", "tree_grpo", advantage.tree_grpo),
    ],
)
@pytest.mark.parametrize("ddof", [0, 1])
def test_advantages(strategy, name, estimate, ddof):
    config = settings({"strategy": strategy, "loss.advantage": name, "loss.std_ddof": ddof, "loss.value_prior": 0.5})
    tree = grow.with_values(worked_case().tree, np.array([0, 1, 2, 4]), np.array([0.7, 0.6, 0.9, 0.3]))
    got = setup_run.make_advantage(config)(tree)
    want = estimate(tree) if estimate is advantage.dr_grpo else estimate(tree, ddof=ddof)
    for field in dataclasses.fields(want):
        np.testing.assert_array_equal(getattr(got, field.name), getattr(want, field.name))


def test_strategies_and_their_budget():
    config = settings({"budget.roots": 8, "budget.continuations_per_root": 2, "budget.max_per_prompt": 5})
    trace = setup_run.make_strategy(config, config.budget)
    assert (trace.name, trace.root_budget, trace.continuations_per_root, trace.max_per_prompt) == ("trace", 8, 2, 5)
    grpo = setup_run.make_strategy(dataclasses.replace(config, strategy="grpo"), config.budget)
    assert (grpo.name, grpo.total_rollouts, grpo.rollouts_per_prompt) == ("grpo", 16, 4)  # 8 + 8 * 2 / 2 units
    pcl = setup_run.make_strategy(dataclasses.replace(config, strategy="pcl"), config.budget)
    assert (pcl.name, pcl.total_rollouts, pcl.rollouts_per_prompt) == ("pcl", 16, 4)
    budget = dataclasses.replace(config.budget, roots_per_prompt=2)
    treepo = setup_run.make_strategy(dataclasses.replace(config, strategy="treepo"), budget)
    assert dataclasses.astuple(treepo) == (2, 8, 2) and treepo.name == "treepo"


def test_budgets_that_groups_do_not_divide():
    """Of a token budget: whole groups of 4, at least one and no more than the pool of 8 has prompts for."""
    config = settings({})
    for roots, groups, trees in ((2, 1, 1), (11, 5, 2), (100, 8, 8)):  # 4, 22, 200 units
        budget = dataclasses.replace(config.budget, roots=roots)
        strategy = {name: setup_run.make_strategy(dataclasses.replace(config, strategy=name), budget) for name in
                    ("grpo", "pcl", "treepo")}  # fmt: skip
        assert strategy["grpo"].total_rollouts == strategy["pcl"].total_rollouts == 4 * groups
        assert strategy["treepo"].root_budget == 4 * trees


def updates(config, steps):
    """What the optimiser does to a parameter of 1 with gradients of 0.5."""
    optimizer = setup_run.make_optimizer(config)
    params = {"w": jnp.ones(1)}
    state, moves = optimizer.init(params), []
    for _ in range(steps):
        change, state = optimizer.update({"w": jnp.full(1, 0.5)}, state, params)
        moves.append(float(change["w"][0]))
    return moves


def test_sgd_with_momentum_by_hand():
    config = settings({"optimizer.name": "sgd", "optimizer.learning_rate": 0.1, "optimizer.momentum": 0.5})
    # u = 0.5, then 0.5 + 0.5 * 0.5
    np.testing.assert_allclose(updates(config, 2), [-0.05, -0.075], rtol=1e-6)
    clipped = dataclasses.replace(config.optimizer, clip_norm=0.2, max_update_norm=0.025)
    # The gradient is cut to 0.2: u = 0.2, 0.3; the second update 0.03 is cut to 0.025.
    np.testing.assert_allclose(updates(dataclasses.replace(config, optimizer=clipped), 2), [-0.02, -0.025], rtol=1e-5)


def test_adamw_by_hand():
    config = settings({"optimizer.learning_rate": 0.1, "optimizer.weight_decay": 0.3, "optimizer.eps": 0.5})
    # Bias-corrected moments of a constant gradient are 0.5 and 0.25: 0.5 / (0.5 + 0.5) + 0.3 * 1.
    np.testing.assert_allclose(updates(config, 2), [-0.08, -0.08], rtol=1e-5)


def test_the_schedule_counts_optimiser_steps():
    """4 steps of 2 epochs and 3 mini-batches: the cosine ends at 24 optimiser steps, after a linear rise over 4."""
    changes = {"optimizer.name": "sgd", "optimizer.learning_rate": 1.0, "optimizer.schedule": "warmup_cosine"}
    config = settings(changes | {"optimizer.warmup_steps": 4, "loss.epochs": 2, "loss.mini_batches": 3})
    moves = updates(config, 26)
    np.testing.assert_allclose(moves[:5], [0, -0.125, -0.25, -0.375, -0.5], atol=1e-6)
    np.testing.assert_allclose(moves[14], -0.25, atol=1e-6)  # half of the way down
    np.testing.assert_allclose(moves[24:], 0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("model", "package:no_such_package", "config.model.path: package no_such_package is not installed"),
        ("model", "/nowhere/model.gguf", "config.model.path: /nowhere/model.gguf cannot be read"),
        ("predictor", "/nowhere/model.gguf", "config.predictor.path: /nowhere/model.gguf cannot be read"),
    ],
)
def test_gguf_files_that_are_not_there(name, path, message):
    with pytest.raises(ConfigError, match=message) as error:
        setup_run.with_model_folders(settings({f"{name}.path": path}))
    assert "\n" not in str(error.value)


def test_gguf_files_become_folders_in_the_cache_and_folders_stay(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(setup_run.gguf_import, "cached", lambda path, root: seen.append((path, root)) or tmp_path)
    changes = {"model.path": "a/b.gguf", "model.gguf_cache": "c", "predictor.path": "folder"}
    config = setup_run.with_model_folders(settings(changes))
    assert (config.model.path, config.predictor.path) == (str(tmp_path), "folder")
    assert seen == [(Path("a/b.gguf"), Path("c"))]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    setup_run.with_model_folders(settings({"model.path": "a/b.gguf"}))
    assert seen[1][1] == tmp_path / "home" / "trace_jax"


def test_adapters_that_the_config_asks_for():
    assert setup_run.make_lora(settings({})) is None
    changes = {"lora.rank": 8, "lora.alpha": 4.0, "model.fuse_projections": False}
    assert setup_run.make_lora(settings(changes)) == LoraConfig(8, 4.0)


def test_a_task_with_solved_examples():
    config = settings({"arithmetic.shots": (2.0,), "arithmetic.difficulty": (1.0, 1.0)})
    task = setup_run.make_task(config)
    assert task.preamble.count("Question: ") == 2 and task.instance("train", 0).text.startswith(task.preamble)
    with pytest.raises(ConfigError, match="config.arithmetic.shots: arithmetic: all difficulty weights are 0"):
        setup_run.make_task(settings({"arithmetic.shots": (0.0,)}))


def test_borders_that_are_no_tokens_are_refused_at_the_start():
    """A tokenizer in which the line end and the next line's first digit are one token."""
    task = setup_run.make_task(settings({}))
    small = build_tokenizer(task.symbols(), task.word_level)
    backend = json.loads(small.backend_tokenizer.to_str())
    vocabulary = backend["model"]["vocab"] | {"\n7": len(backend["model"]["vocab"])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["\n", "7"]]}
    merged = backend | {"model": model, "pre_tokenizer": None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(merged)), unk_token=small.unk_token)
    with pytest.raises(ConfigError, match="config.model.path: the border between .* is no border of tokens"):
        setup_run.environment_of(task, tokenizer)


def test_a_stop_that_is_no_token_is_named():
    config = settings({})
    with pytest.raises(ConfigError, match="config.model.path: the stop text"):
        setup_run.environment_of(setup_run.make_task(config), build_tokenizer(("a",), False))


def test_rows_without_contrast_are_left_out_unless_the_loss_has_a_kl_term():
    """All rollouts of the worked tree fail: nothing to train, but a KL term still wants every action token."""
    tree = worked_case().tree
    flat = dataclasses.replace(tree, reward=np.where(np.isnan(tree.reward), np.nan, 0).astype(np.float32))
    trunk = np.zeros(0, np.int32)
    configs = (settings({"loss.kl_coef": c, "loss.advantage": "grpo"}) for c in (0.0, 0.1))
    plain, kl = (loop.make_batch(config, [flat], trunk) for config in configs)
    assert not np.any(plain.weight) and not np.any(plain.end)
    assert np.any(kl.weight) and not np.any(kl.adv_pos) and not np.any(kl.adv_neg)
    assert kl.weight.sum() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("advantage", ["grpo", "tree_rpo", "tree_rloo"])
def test_rollouts_that_the_engine_gave_up_on_are_not_trained(advantage):
    """A tree of which only failed rollouts are left is no tree: the batch is that of the other one, or of none."""
    tree, trunk = worked_case().tree, np.zeros(0, np.int32)
    lost = dataclasses.replace(tree, finish=np.where(tree.kind == NodeKind.LEAF, Finish.ENGINE_ERROR, tree.finish).astype(np.int8))
    config = settings({"loss.advantage": advantage})
    for left, trees in (([tree], [lost, tree]), ([], [lost, lost])):
        one, other = loop.make_batch(config, left, trunk), loop.make_batch(config, trees, trunk)
        for field in dataclasses.fields(one):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)
        assert np.any(other.weight) == bool(left)


def test_the_model_that_the_config_describes():
    config = settings({"model.scan_layers": True, "model.remat": True, "model.rope_theta": 5e3})
    model = setup_run.make_model(config, 17)
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.max_positions) == (17, 32, 1, 32)
    assert model.scan_layers and model.remat and model.fuse_projections and model.rope_theta == 5e3
    assert model.dtype == "float32"
