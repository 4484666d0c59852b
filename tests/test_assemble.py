"""Settings of the loss and of sampling reach the trainer and the requests: each is seen in what comes out."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.tiny_run import settings
from trace_jax import assemble, loop
from trace_jax.models.config import DecoderConfig
from trace_jax.rollout import keys
from trace_jax.train import sharding
from trace_jax.train.policy_step import Plan
from trace_jax.types import PackedBatch

MODEL = DecoderConfig(
    vocab_size=11, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=16
)
SERVED = {"engine": "sglang", "sglang.urls": "http://127.0.0.1:30000"}


def batch(behaviour):
    """Eight rows of 6 tokens, of which the last 3 are trained; the engine's log-probs are given."""
    rng = np.random.default_rng(0)
    pos = np.tile(np.arange(6, dtype=np.int32), (8, 1))
    weight = np.where(pos >= 3, np.float32(1 / 24), np.float32(0))
    zeros = np.zeros((8, 6), np.float32)
    return PackedBatch(
        token=rng.integers(0, 11, (8, 6)).astype(np.int32),
        pos=pos,
        prev=pos - 1,
        end=np.full_like(pos, 6),
        is_action=pos >= 3,
        weight=weight,
        adv_pos=weight,
        adv_neg=zeros,
        old_logprob=behaviour,
        behaviour_logprob=behaviour,
        value_target=zeros,
        value_weight=zeros,
    )


@pytest.mark.parametrize(
    "changes, weight, capped",
    [
        ({}, None, None),
        ({"loss.rescore": True}, None, None),
        ({"loss.tis": "on"}, 2.0, 1.0),
        ({"loss.tis": "on", "loss.tis_cap": 5.0}, 4.0, 0.0),
        ({"overlap": True, "loss.tis_cap": 3.0}, 3.0, 1.0),
        (SERVED, 2.0, 1.0),
        (SERVED | {"loss.tis": "off"}, None, None),
    ],
    ids=str,
)
def test_importance_weights_that_the_config_asks_for(changes, weight, capped):
    """The engine's log-probs lie log 4 below the trainer's: weights of 4 before the cap.

    With the trainer's own log-probs the ratio is 1 and nothing is clipped; against the engine's it is 4, beyond 1.28.
    """
    config = settings(changes)
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    trainer = assemble.policy_trainer(config, MODEL, mesh)
    state = trainer.init(jax.random.key(0))
    own = trainer.logprobs(state.params, batch(np.zeros((8, 6), np.float32)))
    _, metrics = trainer.update(state, batch(own - np.float32(np.log(4))), Plan(), np.random.default_rng(0))
    rescored = weight is not None or config.loss.rescore
    assert metrics["train/ratio_max"] == pytest.approx(1.0 if rescored else 4.0, rel=1e-4)
    assert metrics["train/clip_high"] == (0.0 if rescored else 1.0)
    assert ("train/behaviour_gap" in metrics) == rescored
    assert metrics.get("train/tis_weight") == (pytest.approx(weight, rel=1e-4) if weight else None)
    assert metrics.get("train/tis_capped") == capped


def test_requests_draw_from_what_the_config_says():
    parts = ("environment", "limits", "engine", "trainer", "reference", "policy", "learned")
    cut = SERVED | {"sampling.top_p": 0.95, "sampling.top_k": 20, "sampling.accept_truncation_bias": True}
    for changes, want in ((cut, (0.95, 20)), ({}, (1.0, 0))):
        run = loop.Run(config=settings(changes), **dict.fromkeys(parts))
        for stream in (keys.Stream.TRAIN, keys.Stream.EVAL):
            sampling = run.sampling(stream)
            assert (sampling.top_p, sampling.top_k) == want


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, ""),
        ({"sampling.accept_truncation_bias": True}, ""),
        (SERVED | {"sampling.top_p": 0.5, "steps": 0}, ""),  # nothing is trained
        (SERVED | {"sampling.top_p": 0.5, "sampling.accept_truncation_bias": True}, "top_p 0.5 and top_k 0 cut"),
        (SERVED | {"sampling.top_k": 3, "sampling.accept_truncation_bias": True}, "top_p 1.0 and top_k 3 cut"),
    ],
    ids=str,
)
def test_a_bias_that_was_accepted_is_named(capsys, changes, said):
    assemble._name_bias(settings(changes))
    printed = capsys.readouterr().out
    assert said in printed and printed.count("\n") == bool(said) == ("the gradient is biased" in printed)
