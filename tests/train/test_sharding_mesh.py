"""Rules on an abstract mesh, and whole updates on eight pretended devices against one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.train import sharding


def _abstract(data, fsdp, tensor):
    return AbstractMesh((data, fsdp, tensor), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def _shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_rules_by_hand():
    params = {"embed": _shape(12, 8), "q": _shape(8, 4, 6), "k": _shape(8, 1, 6)}
    params |= {"square": _shape(8, 8), "scale": _shape(7)}
    axes = {
        "embed": PartitionSpec("vocab", "embed"),
        "q": PartitionSpec("embed", "heads", "head_dim"),
        "k": ("embed", "kv_heads", "head_dim"),  # one kv head cannot be split in two: stays whole
        "square": PartitionSpec("embed", "embed"),  # a mesh axis serves one axis of an array
        "scale": PartitionSpec(None),
    }
    got = {name: s.spec for name, s in sharding.param_shardings(_abstract(1, 2, 2), params, axes).items()}
    assert got == {
        "embed": PartitionSpec("tensor", "fsdp"),
        "q": PartitionSpec("fsdp", "tensor", None),
        "k": PartitionSpec("fsdp", None, None),
        "square": PartitionSpec("fsdp", None),
        "scale": PartitionSpec(None),
    }


def test_unknown_logical_axis_is_named():
    with pytest.raises(ValueError, match="logical axis 'experts' is unknown; add it to RULES"):
        sharding.param_shardings(_abstract(1, 1, 1), [_shape(3)], [("experts",)])


@pytest.mark.parametrize("scan", [False, True])
def test_rules_know_every_axis_of_the_decoder(scan):
    cfg = DecoderConfig(
        vocab_size=8, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2, mlp_size=8,
        scan_layers=scan, tie_embeddings=False, qkv_bias=True,
    )  # fmt: skip
    params = jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))
    specs = sharding.param_shardings(_abstract(1, 2, 2), params, decoder.param_axes(cfg))
    matrices = [
        spec.spec for spec, p in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True)
        if len(p.shape) - scan * (p.shape[0] == 2) >= 2 and p.size > 16
    ]  # fmt: skip
    assert matrices and all("fsdp" in spec and "tensor" in spec for spec in matrices)


def test_moments_live_with_their_parameters():
    params = {"w": _shape(8, 4), "b": _shape(4)}
    axes = {"w": PartitionSpec("embed", "mlp"), "b": PartitionSpec("mlp")}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1.0)))
    got = sharding.state_shardings(_abstract(2, 2, 2), tx, params, axes)
    assert got.params["w"].spec == PartitionSpec("fsdp", "tensor") and got.step.spec == PartitionSpec()
    shapes = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(shapes) == jax.tree.structure(got.opt_state)
    by_shape = {(8, 4): PartitionSpec("fsdp", "tensor"), (4,): PartitionSpec("tensor"), (): PartitionSpec()}
    pairs = list(zip(jax.tree.leaves(shapes), jax.tree.leaves(got.opt_state), strict=True))
    assert len(pairs) == 6 and all(sharding_.spec == by_shape[x.shape] for x, sharding_ in pairs)  # mu, nu, two counts


def test_mesh_sizes():
    one = jax.devices()[:1]
    mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1, devices=one)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1} and mesh.axis_types == (AxisType.Auto,) * 3
    with pytest.raises(ValueError, match=r"2x1x1 \(data x fsdp x tensor\) needs 2 devices, there are 1"):
        sharding.make_mesh(data=2, fsdp=1, tensor=1, devices=one)
    with pytest.raises(ValueError, match="must be >= 1, at most one of them -1"):
        sharding.make_mesh(data=-1, fsdp=-1, tensor=1, devices=one)
    with pytest.raises(ValueError, match="must be >= 1"):
        sharding.make_mesh(data=0, fsdp=1, tensor=1, devices=one)


def test_rows_go_to_the_mesh():
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    got = sharding.put_rows(mesh, {"token": np.arange(6, dtype=np.int32).reshape(3, 2)})
    assert got["token"].sharding == sharding.row_sharding(mesh) and got["token"].tolist() == [[0, 1], [2, 3], [4, 5]]


_FAST_COMPILE = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
_SCRIPT = """
import functools, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from trace_jax.models import predictor
from trace_jax.models.config import DecoderConfig
from trace_jax.objectives import policy, value
from trace_jax.train import checkpoint, optimizer, replay, sharding
from trace_jax.train.policy_step import Plan, PolicyTrainer
from trace_jax.train.predictor_step import PredictorTrainer
from trace_jax.types import PackedBatch

CFG = DecoderConfig(vocab_size=12, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_size=16,
                    scan_layers=True, remat=True)
B, T = 8, 10
rng = np.random.default_rng(0)
pos = np.tile(np.arange(T, dtype=np.int32), (B, 1))
weight = np.where(pos >= 3, np.float32(1 / 56), np.float32(0))
advantage = rng.normal(size=(B, 1)).astype(np.float32) * weight
behaviour = np.full((B, T), -2.48, np.float32)
zeros = np.zeros((B, T), np.float32)
batch = PackedBatch(token=rng.integers(0, 12, (B, T)).astype(np.int32), pos=pos, prev=pos - 1, end=np.full_like(pos, T),
                    is_action=pos >= 3, weight=weight,
                    adv_pos=np.maximum(advantage, 0), adv_neg=np.minimum(advantage, 0),
                    old_logprob=behaviour, behaviour_logprob=behaviour, value_target=zeros, value_weight=zeros)
examples = replay.Examples(tuple(batch.token), rng.random(B).astype(np.float32), np.ones(B, np.int32), np.ones(B, bool))
# Adam blows rounding errors of small gradients up to whole steps; momentum has moments to shard too, and does not
tx = optimizer.build(optimizer.sgd(optimizer.constant(0.2), momentum=0.9), clip_norm=1.0, max_update_norm=0.1)
loss = functools.partial(policy.policy_loss, tis_cap=2.0)


def run(mesh):
    trainer = PolicyTrainer(CFG, tx, loss, mesh, temperature=1.0, chunk=4, micro_rows=4, rescore=True)
    critic = PredictorTrainer(predictor.critic(CFG), tx, value.squared_error, replay.equal_weight, mesh, batch_rows=4,
                              row_length=T)
    backbone = jax.device_get(critic.init(jax.random.key(1)).params["decoder"])
    state, fitted, logs = trainer.init(jax.random.key(0)), critic.adopt(backbone, jax.random.key(1)), []
    for _ in range(2):
        state, a = trainer.update(state, batch, Plan(measure_kl=True), np.random.default_rng(0))
        # Adam blows rounding up where a gradient is next to nothing, more with each step: one pass leaves room
        fitted, b = critic.fit(fitted, None, examples, np.random.default_rng(0), epochs=1)
        logs.append(a | b)
    scores = critic.score(fitted.params, None, dict(token=batch.token, pos=batch.pos, end=batch.end))
    for owner, value_ in ((trainer, state), (critic, fitted)):
        for leaf, wanted in zip(jax.tree.leaves(value_), jax.tree.leaves(owner.shardings), strict=True):
            assert leaf.sharding == wanted, (leaf.sharding, wanted)
        assert set(owner.compiles().values()) == {1}, owner.compiles()
    return state, fitted, logs, scores, trainer.abstract_state()


*one, _ = run(sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]))
*many, template = run(sharding.make_mesh(data=2, fsdp=2, tensor=2))
for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * np.abs(b).max())  # measured: up to 3.4e-6 of the leaf's scale
assert one[2][-1]["train/update_norm"] > 1e-3
assert 0 < one[2][0]["train/logprob_gap_p99"] <= one[2][0]["train/logprob_gap_max"]
split = [leaf for leaf in jax.tree.leaves(many[0].params) if leaf.addressable_shards[0].data.size == leaf.size // 4]
share = sum(leaf.size for leaf in split) / sum(leaf.size for leaf in jax.tree.leaves(many[0].params))
assert share > 0.9, share
trace = many[0].opt_state[1][0].trace["layers"]["mlp"]["gate"]["kernel"]
assert trace.addressable_shards[0].data.size == trace.size // 4
try:
    sharding.put_rows(sharding.make_mesh(data=2, fsdp=2, tensor=2), {"token": np.zeros((6, 3))})
except ValueError as error:
    assert "token has 6 rows, not a multiple of data x fsdp = 4" in str(error), error
else:
    raise AssertionError("six rows on four devices went through")

# what one device saved, eight restore, split as their own trainer wants it
saver = checkpoint.Checkpointer(sys.argv[1], fingerprint={}, keep=1)
saver.save(checkpoint.Snapshot(step=3, arrays=one[0], host={}, document={}))
saver.wait()
restored = saver.restore_latest(template).arrays
saver.close()
for a, b, wanted in zip(*map(jax.tree.leaves, (restored, one[0], template)), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert a.sharding == wanted.sharding
print("equal")
"""


def test_eight_devices_equal_one(tmp_path):
    command = [sys.executable, "-W", "default", "-c", _SCRIPT, str(tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | _FAST_COMPILE)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
    assert "Warning" not in done.stderr, done.stderr[-3000:]  # such as jax's about donated buffers that were not used


_VOCABULARY_SCRIPT = """
import dataclasses
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.objectives.logprob import token_logprobs
from trace_jax.train import sharding

CFG = DecoderConfig(vocab_size=24, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=4, mlp_size=16)
rng = np.random.default_rng(0)
token, pos, end = rng.integers(0, 17, (2, 9)), np.tile(np.arange(9), (2, 1)), np.full((2, 9), 9)
weight = rng.normal(size=(2, 2, 9)).astype(np.float32)


def objective(cfg, params):
    hidden_BTD = decoder.hidden_states(cfg, params, token, pos, end)
    rows = token_logprobs(hidden_BTD, decoder.unembed(cfg, params), np.roll(token, -1, 1), temperature=0.7, chunk=4)
    return (weight * jax.numpy.stack(rows)).sum(), rows


def run(cfg, devices):
    params = decoder.init_params(cfg, jax.random.key(0))
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=len(devices), devices=devices)
    where = sharding.param_shardings(mesh, params, decoder.param_axes(cfg))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = jax.jit(
        lambda params: jax.value_and_grad(lambda p: objective(cfg, p), has_aux=True)(params),
        in_shardings=(where,), out_shardings=((whole, whole), where),
    )
    out = step(jax.device_put(params, where))
    got = out[1]["embed"]["embedding"].T if cfg.tie_embeddings else out[1]["lm_head"]["kernel"]
    assert got.addressable_shards[0].data.shape[1] == 24 // len(devices)
    return jax.device_get(out), np.asarray(got)


for tied, sampled in ((True, 17), (False, 18)):  # inside a device's six columns, and at their end
    cfg = dataclasses.replace(CFG, tie_embeddings=tied, sampled_vocab=sampled)
    (one, _), (four, kernel) = run(cfg, jax.devices()[:1]), run(cfg, jax.devices())
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * abs(a).max())  # measured: 1e-6 of the leaf's scale
    padding = np.arange(24) >= sampled
    assert not kernel[:, padding].any() and (abs(kernel[:, ~padding]).max(0) > 1e-4).all()
print("equal")
"""

_ADAPTERS_SCRIPT = """
import dataclasses
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from tests.train import test_lora_step as case
from trace_jax.train import sharding

case.MODEL = dataclasses.replace(case.MODEL, scan_layers=True)
results = []
for sizes, count in (({"data": 1, "fsdp": 1, "tensor": 1}, 1), ({"data": 1, "fsdp": 2, "tensor": 2}, 4)):
    trainer = case.make_trainer(mesh=sharding.make_mesh(**sizes, devices=jax.devices()[:count]))
    state = trainer.adopt(case.base(), seed=3)
    start = jax.device_get(state.params)
    for _ in range(2):  # a moves in the second one: its gradient is a multiple of b, which is 0 at first
        state, metrics = trainer.update(state, case.make_batch(), case.Plan(), None)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(trainer.shardings), strict=True):
        assert leaf.sharding == wanted, (leaf.sharding, wanted)
    moved = jax.tree.map(lambda new, old: float(abs(np.asarray(new) - old).max()), state.params, start)
    assert min(jax.tree.leaves(moved)) > 1e-5, moved
    up = state.params["layers"]["mlp"]["up"]
    specs = [tuple(up[name].sharding.spec) for name in ("a", "b")]
    arrays = jax.device_get((state.params, trainer.full_params(state.params)))
    results.append((metrics["train/grad_norm"], arrays, specs))
(norm, one, _), (sharded_norm, four, specs) = results
np.testing.assert_allclose(norm, sharded_norm, rtol=1e-5)
jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=5e-6), one, four)
assert specs == [(None, "fsdp", None), (None, None, "tensor")], specs
print("equal")
"""


@pytest.mark.parametrize("script", [_VOCABULARY_SCRIPT, _ADAPTERS_SCRIPT], ids=["sampled vocabulary", "adapters"])
def test_four_devices_equal_one(script):
    """A vocabulary that is cut where no device's part ends; adapters of stacked layers."""
    root = Path(__file__).parents[2]
    command, env = [sys.executable, "-c", script], os.environ | _FAST_COMPILE
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
