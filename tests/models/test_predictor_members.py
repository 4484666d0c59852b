"""Members: read-outs of their own on shared states, fixed priors beside them, and what a fit does to either."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from trace_jax.models import decoder, predictor, predictor_heads
from trace_jax.models.config import DecoderConfig
from trace_jax.objectives import value
from trace_jax.train import optimizer, replay, sharding
from trace_jax.train.predictor_step import PredictorTrainer

POLICY = DecoderConfig(
    vocab_size=23, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=24
)
CRITIC = dataclasses.replace(POLICY, hidden_size=12)
FORMS = {
    "critic": lambda members: predictor.critic(CRITIC, members=members, mlp_size=10),
    "policy_head": lambda members: predictor.policy_head(POLICY, members=members, mlp_size=10),
    "both": lambda members: predictor.both(CRITIC, POLICY, members=members, mlp_size=10),
}
LENGTH, MEMBERS = 12, 3


@functools.cache
def _policy_params():
    """Norms and kernels of about the size that they start with, without a compilation."""
    rng, shapes = np.random.default_rng(1), jax.eval_shape(lambda: decoder.init_params(POLICY, jax.random.key(0)))
    return jax.tree.map(lambda x: (rng.normal(size=x.shape) * 0.25 + (len(x.shape) == 1)).astype(np.float32), shapes)


def _row(tokens):
    """One row [1, T]: a history, then padding."""
    token, pos, end = np.zeros((3, 1, LENGTH), np.int32)
    token[0, : len(tokens)], pos[0, : len(tokens)], end[0, : len(tokens)] = tokens, np.arange(len(tokens)), len(tokens)
    return token, pos, end


def _tokens(n, seed):
    return np.random.default_rng(seed).integers(1, POLICY.vocab_size, size=n).astype(np.int32)


def _trained(model):
    """Params in which nothing is zero."""
    shapes, rng = jax.eval_shape(model.init, jax.random.key(0)), np.random.default_rng(2)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def _states(cfg, params, row):
    return np.asarray(jax.jit(lambda q: decoder.hidden_states(cfg, q, *row))(params), np.float64)


def _head(p, *states):
    """Norms, affine, tanh-GELU, affine of one member in float64; norms are told apart by their size."""
    by_size = {v["scale"].size: v["scale"] for k, v in p.items() if k.endswith("norm")}
    normed = [x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * by_size[x.shape[-1]] for x in states]
    x = np.concatenate(normed, axis=-1)
    x = x @ p["hidden"]["kernel"] + p["hidden"]["bias"]
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return (x @ p["score"]["kernel"] + p["score"]["bias"])[..., 0]


def _members(heads, *states):
    """Each member's logits [S, B, T]: its trained head and its prior on the same states."""
    one = lambda part, s: _head(jax.tree.map(lambda x: x[s], heads[part]), *states)
    return np.stack([one("trained", s) + one("prior", s) for s in range(MEMBERS)])


@pytest.mark.parametrize("form", ["critic", "policy_head"])
def test_each_member_is_its_head_and_its_prior_on_shared_states(form):
    model, row = FORMS[form](MEMBERS), _row(_tokens(9, 0))
    params = _trained(model)
    if form == "critic":
        want = _members(params["head"], _states(CRITIC, params["decoder"], row))
    else:
        want = _members(params, _states(POLICY, _policy_params(), row))
    got = jax.jit(model.logits)(params, _policy_params(), *row)
    assert got.dtype == jnp.float32 and np.all(np.isfinite(got))  # also of three tokens of padding
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_members_of_both_their_gradients_and_what_they_read():
    model, tokens = FORMS["both"](MEMBERS), _tokens(LENGTH, 0)
    params, row = _trained(model), _row(tokens)

    @jax.jit
    def graded(p, q, row):
        def total(p, q):
            logit = model.logits(p, q, *row)
            return jnp.sum(jnp.square(logit)), logit

        return jax.grad(total, (0, 1), has_aux=True)(p, q)

    (grad, grad_policy), logit = graded(params, _policy_params(), row)
    states = _states(CRITIC, params["decoder"], row), _states(POLICY, _policy_params(), row)
    np.testing.assert_allclose(logit, _members(params["head"], *states), rtol=2e-4, atol=2e-4)
    for leaf in jax.tree.leaves((grad["head"].pop("prior"), grad_policy)):
        np.testing.assert_array_equal(leaf, 0.0)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grad))
    # tokens of the future change nothing, those of the past do
    later = graded(params, _policy_params(), _row(np.append(tokens[:6], tokens[6:][::-1])))[1]
    np.testing.assert_array_equal(logit[:, :, :6], later[:, :, :6])
    assert np.all(logit[:, :, 6:] != later[:, :, 6:])


def test_priors_leave_no_gradient_in_the_states():
    """With its last layer at zero a trained head passes none on, so what reaches the states came through the prior."""
    head, rng = predictor_heads.read_out((4,), mlp_size=3, members=2), np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape).astype(np.float32)
    params = jax.tree.map(draw, jax.eval_shape(head.init, jax.random.key(0)))
    params["trained"]["score"]["kernel"] *= 0
    states = rng.normal(size=(1, 5, 4)).astype(np.float32)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(head.logits(params, x)))))(states)
    np.testing.assert_array_equal(grad, 0.0)


def test_param_axes_leave_members_whole():
    is_spec = lambda x: isinstance(x, PartitionSpec)
    for form in FORMS.values():
        shapes, axes = jax.eval_shape(form(MEMBERS).init, jax.random.key(0)), form(MEMBERS).param_axes()
        assert jax.tree.structure(shapes) == jax.tree.structure(axes, is_leaf=is_spec)
        for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=is_spec), strict=True):
            assert len(spec) == len(leaf.shape) and leaf.dtype == jnp.float32
    heads = FORMS["both"](MEMBERS).param_axes()["head"]
    for part in ("trained", "prior"):
        assert heads[part]["hidden"]["kernel"] == PartitionSpec(None, "embed", "mlp")
    assert heads["trained"]["policy_norm"]["scale"] == PartitionSpec(None, "embed")


def _examples(seed, n, low, high, target):
    """Histories of 6 tokens from [low, high)."""
    rng = np.random.default_rng(seed)
    return replay.Examples(
        prefixes=tuple(rng.integers(low, high, 6).astype(np.int32) for _ in range(n)),
        target=np.full(n, target, np.float32),
        count=np.ones(n, np.int32),
        is_root=np.ones(n, bool),
    )


@functools.cache
def _trainer():
    adam = optimizer.adamw(optimizer.constant(3e-2), b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0)
    tx = optimizer.build(adam, clip_norm=1.0, max_update_norm=None)
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    model = predictor.policy_head(POLICY, members=8, mlp_size=10)
    return PredictorTrainer(model, tx, value.squared_error, replay.equal_weight, mesh, batch_rows=4, row_length=LENGTH)


def _scores(params, examples):
    """Members' scores [S, n] at the ends of histories of 6 tokens."""
    rows = [np.concatenate(parts) for parts in zip(*map(_row, examples.prefixes), strict=True)]
    score_SbT = _trainer().score(params, _policy_params(), dict(zip(("token", "pos", "end"), rows, strict=True)))
    assert score_SbT.shape == (8, examples.size, LENGTH) and score_SbT.dtype == np.float32
    return score_SbT[:, :, 5]


def test_untrained_members_say_what_their_priors_say():
    # gelu of a standard normal has the second moment .425 (by quadrature below), which the score's weights keep.
    examples = _examples(5, 3, 1, 23, 0.0)
    states = [_trainer().init(jax.random.key(seed)).params for seed in range(50)]
    trained = states[0]["trained"]
    assert not np.any(trained["score"]["kernel"])
    assert np.ptp(trained["hidden"]["kernel"], axis=0).min() > 0  # members start apart here too
    score = np.concatenate([_scores(params, examples) for params in states]).astype(np.float64)  # [400, 3]
    x = np.linspace(-8, 8, 4001)
    gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    variance = np.sum(gelu**2 * np.exp(-x * x / 2)) / np.sum(np.exp(-x * x / 2)) * predictor_heads.PRIOR_SCALE**2
    np.testing.assert_allclose(np.mean(np.log(score / (1 - score)) ** 2), variance, rtol=0.15)
    np.testing.assert_allclose(score.std(axis=0), 0.15, atol=0.02)
    np.testing.assert_allclose(score.mean(axis=0), 0.5, atol=4 * 0.15 / np.sqrt(400))


def test_a_fit_unites_the_members_where_there_are_data():
    """Histories of low tokens succeed in 7 of 10 cases; none of high tokens is ever seen."""
    trainer, seen, unseen = _trainer(), _examples(0, 10, 1, 12, 0.7), _examples(1, 10, 12, 23, 0.7)
    state = trainer.init(jax.random.key(0))
    before, loss = jax.device_get(state.params), []
    spread = lambda: [_scores(state.params, x).std(axis=0).mean() for x in (seen, unseen)]
    first = spread()
    for _ in range(2):
        state, metrics = trainer.fit(state, _policy_params(), seen, np.random.default_rng(0), epochs=30)
        loss.append(metrics["predictor/loss"])
    in_data, elsewhere = spread()
    assert in_data < 0.25 * min(first) and elsewhere > 3 * in_data and loss[1] < loss[0]
    np.testing.assert_allclose(_scores(state.params, seen).mean(axis=0), 0.7, atol=0.03)
    assert trainer.compiles() == {"score": 1, "update": 1}
    for new, old in zip(*(jax.tree.leaves(p["prior"]) for p in (state.params, before)), strict=True):
        np.testing.assert_array_equal(new, old)  # sixty epochs of Adam with a gradient of exactly zero
    for new, old in zip(*(jax.tree.leaves(p["trained"]) for p in (state.params, before)), strict=True):
        assert np.all(np.any(np.asarray(new) != old, axis=tuple(range(1, new.ndim))))  # of every member


def test_the_loss_is_the_mean_over_members():
    """By hand in float64, from the scores of the untrained members, before the only step."""
    examples = dataclasses.replace(_examples(3, 4, 1, 23, 0.0), target=np.array([0.1, 0.9, 0.4, 1.0], np.float32))
    state = _trainer().init(jax.random.key(3))
    score = _scores(state.params, examples).astype(np.float64)
    _, metrics = _trainer().fit(state, _policy_params(), examples, np.random.default_rng(0), epochs=1)
    want = np.mean([np.mean((row - examples.target) ** 2) for row in score])
    np.testing.assert_allclose(metrics["predictor/loss"], want, rtol=1e-5)
    assert metrics["predictor/optimizer_steps"] == 1


_SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np
from trace_jax.models.predictor import PredictorModel
from trace_jax.models.predictor_heads import read_out
from trace_jax.objectives import value
from trace_jax.train import optimizer, replay, sharding
from trace_jax.train.predictor_step import PredictorTrainer

head = read_out((12, 8), mlp_size=6, members=3, norms=("critic_norm", "policy_norm"))
states = [np.random.default_rng(d).normal(size=(9, d)).astype(np.float32) for d in (12, 8)]  # of each token
model = PredictorModel(head.init, lambda p, _, token, *row: head.logits(p, *(jnp.asarray(x)[token] for x in states)),
                       head.param_axes, around=lambda params, key: params)
tx = optimizer.build(optimizer.sgd(optimizer.constant(0.2), momentum=0.9), clip_norm=1.0, max_update_norm=None)
rng = np.random.default_rng(0)
token, pos = rng.integers(0, 9, (6, 5)).astype(np.int32), np.tile(np.arange(5, dtype=np.int32), (6, 1))
examples = replay.Examples(tuple(token), rng.random(6).astype(np.float32), np.ones(6, np.int32), np.ones(6, bool))
shapes = jax.eval_shape(head.init, jax.random.key(0))
start = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
results = []
for sizes, count in (({"data": 1, "fsdp": 1, "tensor": 1}, 1), ({"data": 1, "fsdp": 2, "tensor": 2}, 4)):
    mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:count])
    trainer = PredictorTrainer(model, tx, value.squared_error, replay.equal_weight, mesh, batch_rows=4, row_length=5)
    state = trainer.adopt(start, jax.random.key(0))
    state, metrics = trainer.fit(state, None, examples, np.random.default_rng(0), epochs=3)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(trainer.shardings), strict=True):
        assert leaf.sharding == wanted, (leaf.sharding, wanted)
    scores = trainer.score(state.params, None, dict(token=token, pos=pos, end=np.full_like(pos, 5)))
    assert scores.shape == (3, 6, 5) and set(trainer.compiles().values()) == {1}
    moved = jax.tree.map(lambda new, old: float(abs(np.asarray(new) - old).max()), state.params, start)
    assert min(jax.tree.leaves(moved["trained"])) > 1e-4 and max(jax.tree.leaves(moved["prior"])) == 0, moved
    spec = tuple(state.params["trained"]["hidden"]["kernel"].sharding.spec)
    results.append((jax.device_get(state.params), scores, metrics["predictor/loss"], spec))
(*one, _), (*four, spec) = results
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), one, four)
assert spec == (None, "fsdp", "tensor"), spec
print("equal")
"""


def test_members_on_four_devices_equal_one():
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
