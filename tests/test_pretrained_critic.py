"""Runs whose critic comes from a model folder with a tokenizer of its own: what it reads, resuming, bad folders."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_run import bits, go, restored, settings, timeless
from trace_jax import run as run_lib
from trace_jax import setup_run
from trace_jax.config import ConfigError
from trace_jax.models import decoder
from trace_jax.models import folder as model_folder
from trace_jax.models.config import DecoderConfig
from trace_jax.setup_predictor import make_learned
from trace_jax.tasks import tokenizer as tokenizers
from trace_jax.train import sharding

LIMIT = 12  # tokens that the critic reads: a question has 6, a turn 8, so every history with a turn is cut
# Of Llama's kind and with a language-model head, unlike the policy; room for 64 positions.
SHAPE = {
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_size": 32,
    "max_positions": 64,
    "qk_norm": False,
    "tie_embeddings": False,
}


def number_tokenizer() -> PreTrainedTokenizerFast:
    """One token a number below 100, one any other character: the policy spells numbers digit by digit."""
    vocabulary = {text: i for i, text in enumerate(["?!", *"\n?)(*-+=< ", *map(str, range(100))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[0-9]{1,2}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?!", split_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Work folders of this module, the warm start's cache among them."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def critic(folder):
    """(model folder, its decoder, its parameters)."""
    tokenizer = number_tokenizer()
    cfg = DecoderConfig(vocab_size=len(tokenizer), **SHAPE)
    params = jax.jit(lambda key: decoder.init_params(cfg, key))(jax.random.key(11))
    model_folder.save(folder / "critic", cfg, params)
    tokenizers.save_tokenizer(tokenizer, folder / "critic")
    return folder / "critic", cfg, params


def tiny(folder: Path, path: Path, changes=()):
    paths = {"warm_start.cache": str(folder / "warm"), "predictor.path": str(path)}
    fit = {"predictor.max_tokens": LIMIT, "predictor.replay_steps": 2, "predictor.prefix_share": 0.5}
    return settings(paths | fit | dict(changes))


@pytest.fixture(scope="module")
def done(folder, critic):
    return go(tiny(folder, critic[0]), folder / "done")


def learned_of(config, skip=0):
    """The predictor alone: no warm start, no engine."""
    tokenizer = setup_run.make_tokenizer(config, setup_run.make_task(config))
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    return make_learned(config, setup_run.make_model(config, len(tokenizer)), mesh, tokenizer, skip=skip)


@pytest.mark.parametrize("scan, fuse", [(False, True), (True, False)])
def test_it_starts_as_the_folder_has_it(folder, critic, scan, fuse):
    """Every weight but the unused head's, in the policy's layout; the read-out is zero."""
    path, cfg, params = critic
    learned = learned_of(tiny(folder, path, {"model.scan_layers": scan, "model.fuse_projections": fuse}))
    got = dict(learned.state.params["decoder"])
    want = {name: value for name, value in params.items() if name != "lm_head"}
    if fuse:
        want = decoder.engine_params(cfg, want)
    if scan:
        layers = [want.pop(f"layer_{i}") for i in range(cfg.num_layers)]
        want["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(learned.state.params["head"]))
    assert int(learned.state.step) == 0 and learned.trainer.row_length == LIMIT
    template = learned.trainer.abstract_state()
    assert jax.tree.structure(template) == jax.tree.structure(learned.state)
    for leaf, abstract in zip(jax.tree.leaves(learned.state), jax.tree.leaves(template), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (abstract.shape, abstract.dtype, abstract.sharding)


def test_what_prompts_share_is_left_out_for_a_critic_only(folder, critic):
    config = tiny(folder, critic[0])
    assert learned_of(config, skip=2).scorer.view.skip == 2
    scratch = {"predictor.path": None}
    assert learned_of(tiny(folder, "", scratch), skip=2).scorer.view.skip == 2
    assert learned_of(tiny(folder, "", scratch | {"predictor.kind": "policy_head"}), skip=2).scorer.view.skip == 0
    for changes in ({"predictor.kind": "oracle"}, {"strategy": "grpo"}):
        assert learned_of(tiny(folder, "", scratch | changes)) is None


def test_it_is_fitted(done, critic):
    """The backbone moves; the scores of later steps are no longer all 1/2; every shape is compiled once."""
    steps = [row for row in done.rows if row["step"] > 0]
    assert len(steps) == 4 and all(np.isfinite(row["predictor/loss"]) for row in steps)
    before, after = critic[2]["embed"]["embedding"], done.parts.learned.state.params["decoder"]["embed"]["embedding"]
    assert np.max(np.abs(before - after)) > 1e-4
    assert steps[0]["predictor/brier"] == pytest.approx(0.25)
    assert steps[-1]["predictor/brier"] != pytest.approx(0.25, abs=1e-4)
    assert done.parts.learned.trainer.compiles() == {"score": 1, "update": 1}


def test_what_it_reads(done):
    """The window holds the task's text in the critic's tokens: whole questions, and the newest end of turns.

    A question such as "(1+2)" has 6 tokens with its line end, half of the limit, so all of it stays. The 4 tokens of a
    turn "1+2" and the 4 of its answer "< 3" have a room of 6: the last 6 stay.
    """
    tokenizer, parts = number_tokenizer(), done.parts
    examples = parts.learned.window.examples()
    questions = {parts.environment.decode(prompt.tokens) for prompt in parts.prompts("train", 0, 32)}
    assert 0 < np.sum(examples.is_root) < examples.size
    for tokens, is_root in zip(examples.prefixes, examples.is_root, strict=True):
        text = tokenizers.decode(tokenizer, tokens)
        assert tokens.tolist() == tokenizers.encode(tokenizer, text).tolist() and "?!" not in text
        question, _, rest = text.partition("\n")
        assert question + "\n" in questions
        assert (rest == "" and tokens.size == 6) if is_root else (rest[-1] == "\n" and tokens.size == LIMIT)


def test_two_steps_and_two_more_are_four(done, folder, critic):
    halves = folder / "halves"
    go(tiny(folder, critic[0], {"steps": 2}), halves)
    again = go(done.config, halves)
    assert timeless(again.rows) == timeless(done.rows) and bits(again.parts) == bits(done.parts)
    assert bits(restored(done.config, halves)) == bits(done.parts)


def test_the_policys_tokenizer_is_recognised(folder, done):
    """The critic from the policy's own folder reads the policy's ids; its limit is then the rows' length."""
    config = tiny(folder, folder / "warm" / "arithmetic", {"predictor.max_tokens": None})
    learned = learned_of(config)
    assert learned.scorer.view.recode is None
    assert learned.scorer.view.max_tokens == learned.trainer.row_length == config.loss.row_length


@pytest.mark.parametrize("kind", ["critic", "policy_head"])
def test_a_limit_without_a_folder(folder, done, kind):
    learned = learned_of(tiny(folder, "", {"predictor.path": None, "predictor.kind": kind}))
    assert learned.scorer.view.max_tokens == learned.trainer.row_length == LIMIT < done.parts.limits.context_length
    learned.scorer.set_params(learned.state.params, done.parts.policy.params)
    prompts = done.parts.prompts("train", 0, 3)
    assert asyncio.run(learned.scorer.score_prompts(prompts)).tolist() == [0.5] * 3


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "damage, changes, message",
    [
        (shutil.rmtree, {}, "model folder .* does not exist"),
        (lambda f: [path.unlink() for path in f.glob("tokenizer*")], {}, "holds no tokenizer"),
        (lambda f: (f / "config.json").unlink(), {}, "config.json cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), {}, "safetensors"),
        (lambda f: os.truncate(f / "model.safetensors", 4000), {}, "safetensors cannot be read"),
        (lambda f: edit(f, vocab_size=5), {}, r"the tokenizer has \d+ tokens, the model 5"),
        (lambda f: edit(f, intermediate_size=16), {}, "config and weights must belong together"),
        (
            lambda f: None,
            {"predictor.max_tokens": 65},
            r"the critic reads up to 65 tokens \(config.predictor.max_tokens\), but .* made for 64; set config.pred",
        ),
        (
            lambda f: edit(f, max_position_embeddings=31),
            {"predictor.max_tokens": None},
            r"the critic reads up to 32 tokens \(config.loss.row_length\), but .* made for 31; set config.predictor.m",
        ),
    ],
    ids=["folder", "tokenizer", "config", "weights", "truncated", "vocabulary", "shapes", "limit", "rows"],
)
def test_folders_that_cannot_be_used(folder, critic, tmp_path, damage, changes, message):
    path = tmp_path / "critic"
    shutil.copytree(critic[0], path)
    damage(path)
    with pytest.raises(ConfigError, match=f"config.predictor.path: .*{message}") as error:
        learned_of(tiny(folder, path, changes))
    assert "\n" not in str(error.value)


def test_a_run_ends_in_that_line(folder, done, tmp_path):
    with pytest.raises(ConfigError, match="config.predictor.path: model folder .*nowhere does not exist"):
        run_lib.run(tiny(folder, tmp_path / "nowhere"), tmp_path / "run")
