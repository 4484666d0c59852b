"""Four fits in a row equal two, a checkpoint, a fresh process's objects, and two more: bit by bit."""

from __future__ import annotations

import jax
import numpy as np

from trace_jax.models import predictor
from trace_jax.models.config import DecoderConfig
from trace_jax.objectives import value
from trace_jax.train import checkpoint, optimizer, replay, sharding
from trace_jax.train.predictor_step import PredictorTrainer

MODEL = DecoderConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_size=8)


def _new_trainer():
    schedule = optimizer.warmup_cosine(0.02, warmup_steps=3, total_steps=40, final_fraction=0.1)
    adam = optimizer.adamw(schedule, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01)
    return PredictorTrainer(
        predictor.critic(MODEL),
        optimizer.build(adam, clip_norm=1.0, max_update_norm=0.5),
        value.binary_cross_entropy,
        replay.count_weight,
        sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
        batch_rows=2,
        row_length=8,
    )


def _step(trainer, state, window, rng):
    """New examples from the generator, then one epoch over the window."""
    n = int(rng.integers(3, 7))
    fresh = replay.Examples(
        tuple(rng.integers(0, 9, rng.integers(1, 9)).astype(np.int32) for _ in range(n)),
        rng.random(n).astype(np.float32),
        rng.integers(1, 5, n).astype(np.int32),
        rng.random(n) < 0.5,
    )
    window = window.push(fresh)
    state, metrics = trainer.fit(state, None, window.examples(), rng, epochs=1)
    return state, window, metrics


def test_resumed_equals_uninterrupted(tmp_path):
    rng, trainer, window = np.random.default_rng(0), _new_trainer(), replay.ReplayWindow(3)
    state, logs = trainer.init(jax.random.key(0)), []
    saver = checkpoint.Checkpointer(tmp_path, fingerprint={"seed": 0}, keep=2)
    for i in range(4):
        if i == 2:
            document = {"rng": checkpoint.rng_state(rng)}
            saver.save(checkpoint.Snapshot(step=i, arrays=state, host=window.to_arrays(), document=document))
        state, window, metrics = _step(trainer, state, window, rng)
        logs.append(metrics)
    saver.close()

    trainer = _new_trainer()
    saver = checkpoint.Checkpointer(tmp_path, fingerprint={"seed": 0}, keep=2)
    found = saver.restore_latest(trainer.abstract_state())
    saver.close()
    again, rng2 = found.arrays, checkpoint.rng_from_state(found.document["rng"])
    window2 = replay.window_from_arrays(found.host, size=3)
    for i in range(found.step, 4):
        again, window2, metrics = _step(trainer, again, window2, rng2)
        assert metrics == logs[i]
    jax.tree.map(np.testing.assert_array_equal, again, state)
    assert rng2.bit_generator.state == rng.bit_generator.state
    assert int(again.step) > 4 and logs[3]["predictor/loss"] != logs[2]["predictor/loss"]
