"""The policy's update with adapters: what moves, what stays, and that it is the chain rule of the full update."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from trace_jax.models import decoder, lora
from trace_jax.models.config import DecoderConfig
from trace_jax.models.lora import LoraConfig
from trace_jax.objectives.policy import policy_loss
from trace_jax.train import sharding
from trace_jax.train.policy_step import Plan, PolicyTrainer
from trace_jax.types import PackedBatch

MODEL = DecoderConfig(
    vocab_size=13, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=24, rope_theta=1e4
)
SETTINGS = LoraConfig(rank=2, alpha=3.0)
LOSS = functools.partial(policy_loss, clip_low=0.2, clip_high=0.28, kl_coef=0.0, tis_cap=None)


def make_trainer(settings=SETTINGS, mesh=None, **change):
    mesh = mesh or sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    arguments = {"temperature": 1.0, "chunk": 8, "micro_rows": 2, "rescore": False, "lora": settings} | change
    return PolicyTrainer(MODEL, optax.sgd(1.0), LOSS, mesh, **arguments)


def make_batch():
    """Two rows of one 8-token rollout each; the last four tokens are trained, one with and one against."""
    rng = np.random.default_rng(0)
    shape = (2, 8)
    weight = np.zeros(shape, np.float32)
    weight[:, 4:] = 1 / 8
    sign = np.array([[1.0], [-1.0]], np.float32)
    zeros = np.zeros(shape, np.float32)
    logprob = np.full(shape, -2.5, np.float32)
    return PackedBatch(
        token=rng.integers(0, 13, shape).astype(np.int32),
        pos=np.tile(np.arange(8, dtype=np.int32), (2, 1)),
        prev=np.tile(np.arange(-1, 7, dtype=np.int32), (2, 1)),
        end=np.full(shape, 8, np.int32),
        is_action=weight > 0,
        weight=weight,
        adv_pos=weight * np.maximum(sign, 0),
        adv_neg=weight * np.minimum(sign, 0),
        old_logprob=logprob,
        behaviour_logprob=logprob,
        value_target=zeros,
        value_weight=zeros,
    )


@functools.cache
def base():
    return jax.device_get(decoder.init_params(MODEL, jax.random.key(0)))


def test_a_step_is_the_full_step_through_the_chain_rule():
    # b = 0 at the start, so the merged kernel is W: with plain SGD of rate 1, b moves by scale * a^T (change of W)
    full, small = make_trainer(None), make_trainer()
    state, metrics = full.update(full.adopt(base()), make_batch(), Plan(), np.random.default_rng(0))
    adapted = small.adopt(base(), seed=5)
    before = jax.device_get(adapted.params)
    adapted, reported = small.update(adapted, make_batch(), Plan(), np.random.default_rng(0))
    assert reported["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-6)
    after, moved = flatten_dict(jax.device_get(adapted.params)), flatten_dict(jax.device_get(state.params))
    for path, a in flatten_dict(before).items():
        if path[-1] != "a":
            continue
        change = moved[(*path[:-1], "kernel")] - flatten_dict(base())[(*path[:-1], "kernel")]
        b = after[(*path[:-1], "b")]
        expected = 1.5 * a.reshape(-1, 2).T @ change.reshape(a.size // 2, -1)
        np.testing.assert_allclose(b, expected.reshape(b.shape), atol=2e-6)
        np.testing.assert_array_equal(after[path], a)  # its gradient goes through b, which was 0


def test_only_adapters_are_in_the_state():
    trainer = make_trainer()
    state = trainer.adopt(base())
    assert all(path[-1] in ("a", "b") for path in flatten_dict(state.params))
    template = trainer.abstract_state()
    assert jax.tree.structure(template) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(template)] == [x.shape for x in jax.tree.leaves(state)]
    trained, whole = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (state, base()))
    assert trained < whole


def test_full_params_are_the_merge_and_score_the_same():
    trainer, plain = make_trainer(), make_trainer(None)
    state, _ = trainer.update(trainer.adopt(base(), seed=1), make_batch(), Plan(), np.random.default_rng(0))
    whole = trainer.full_params(state.params)
    expected = lora.merge(MODEL, SETTINGS, base(), state.params)
    for got, want in zip(jax.tree.leaves(whole), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(
        trainer.logprobs(state.params, make_batch()), plain.logprobs(whole, make_batch()), atol=2e-5
    )
    assert plain.full_params(base()) is base()


def test_the_base_is_never_donated_and_compiles_stay_at_one():
    trainer = make_trainer(rescore=True)
    params = jax.tree.map(jax.numpy.asarray, base())
    state = trainer.adopt(params)
    for _ in range(3):
        state, _ = trainer.update(state, make_batch(), Plan(measure_kl=True), np.random.default_rng(0))
    assert trainer.compiles() == {"accumulate": 1, "apply": 1, "score": 1}
    for leaf, old in zip(jax.tree.leaves(params), jax.tree.leaves(base()), strict=True):
        np.testing.assert_array_equal(leaf, old)


def test_the_reference_of_a_kl_term_is_the_base():
    trainer, plain = make_trainer(), make_trainer(None)
    reference = trainer.adopt(base(), seed=4).params
    np.testing.assert_allclose(
        trainer.logprobs(reference, make_batch()), plain.logprobs(base(), make_batch()), atol=2e-5
    )
    state = trainer.adopt(base(), seed=4)
    for expected in (0.0, None):  # before the first step the policy is its reference, after it no longer
        state, metrics = trainer.update(
            state, make_batch(), Plan(), np.random.default_rng(0), ref_params=reference
        )
        kl = metrics["train/kl_ref"]
        assert kl == pytest.approx(0.0, abs=1e-6) if expected == 0.0 else kl > 1e-4


def test_the_seed_draws_the_adapters():
    trainer = make_trainer()
    one, same, other = (trainer.adopt(base(), seed=seed).params["layer_0"]["mlp"]["up"]["a"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.abs(np.asarray(one) - np.asarray(other)).max() > 0.1


def test_a_base_in_half_precision_stays_so_while_adapters_are_float32(monkeypatch):
    monkeypatch.setitem(globals(), "MODEL", dataclasses.replace(MODEL, param_dtype="bfloat16"))
    trainer = make_trainer()
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), base())
    state, _ = trainer.update(trainer.adopt(half), make_batch(), Plan(), np.random.default_rng(0))
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(trainer.full_params(state.params))} == {jnp.dtype("bfloat16")}


MESH_SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from tests.train import test_lora_step as case
from trace_jax.train import sharding
results = []
for sizes, count in (({"data": 1, "fsdp": 1, "tensor": 1}, 1), ({"data": 1, "fsdp": 2, "tensor": 2}, 4)):
    mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:count])
    trainer = case.make_trainer(mesh=mesh)
    state, metrics = trainer.update(trainer.adopt(case.base(), seed=3), case.make_batch(), case.Plan(), None)
    a = state.params["layer_0"]["mlp"]["up"]["a"]
    results.append((metrics["train/grad_norm"], jax.device_get(trainer.full_params(state.params)), a.sharding.spec))
(norm, one, _), (sharded_norm, four, spec) = results
np.testing.assert_allclose(norm, sharded_norm, rtol=1e-5)
jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), one, four)
print(tuple(spec))
"""


def test_adapters_on_a_mesh_are_split_like_their_kernels():
    root = Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", MESH_SCRIPT], cwd=root, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "('fsdp', None)"
