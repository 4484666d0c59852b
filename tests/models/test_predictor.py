"""The three predictors: what they may read, where their gradient goes, where they start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from trace_jax.models import decoder, predictor
from trace_jax.models.config import DecoderConfig

POLICY = DecoderConfig(
    vocab_size=23,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_size=24,
    tie_embeddings=False,
)
CRITIC = dataclasses.replace(POLICY, hidden_size=12)
MODELS = {
    "critic": predictor.critic(CRITIC),
    "policy_head": predictor.policy_head(POLICY, mlp_size=10),
    "both": predictor.both(CRITIC, POLICY, mlp_size=10),
}
LENGTH = 20  # one row length everywhere: one compilation for each predictor


@dataclasses.dataclass(frozen=True)
class Case:
    """A predictor with its params, fresh and as after some training (nothing zero), and its jitted logits."""

    name: str
    model: predictor.PredictorModel
    fresh: Any
    trained: Any
    logits: Callable


@pytest.fixture(scope="module")
def policy_params():
    return jax.jit(lambda key: decoder.init_params(POLICY, key))(jax.random.key(1))


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    model = MODELS[request.param]
    fresh = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(2)
    trained = jax.tree.map(lambda x: np.asarray(x + 0.3 * rng.normal(size=x.shape), np.float32), fresh)
    return Case(request.param, model, fresh, trained, jax.jit(model.logits))


def _row(*segments):
    """One row [1, T] of histories laid one after the other, then padding: token, pos, end."""
    token, pos, end = np.zeros((3, 1, LENGTH), np.int32)
    at = 0
    for s in segments:
        stop = at + len(s)
        token[0, at:stop], pos[0, at:stop], end[0, at:stop] = s, np.arange(len(s)), stop
        at = stop
    return token, pos, end


def _tokens(n, seed):
    return np.random.default_rng(seed).integers(1, POLICY.vocab_size, size=n).astype(np.int32)


def test_every_score_starts_at_one_half(case, policy_params):
    logit = case.logits(case.fresh, policy_params, *_row(_tokens(9, 0)))
    assert logit.shape == (1, LENGTH) and logit.dtype == jnp.float32
    np.testing.assert_array_equal(jax.nn.sigmoid(logit), 0.5)


def test_a_fresh_predictor_learns(case, policy_params):
    # Its last layer is zero, but the gradient of that layer is not: two steps of descent bring two histories nearer to
    # their targets 1 and 0, from the squared error (1/2)^2 of a score of one half.
    row, target, at = _row(_tokens(5, 0), _tokens(4, 1)), jnp.array([1.0, 0.0]), np.array([4, 8])

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return jnp.mean(jnp.square(jax.nn.sigmoid(case.model.logits(params, policy_params, *row)[0, at]) - target))

    params, seen = case.fresh, []
    for _ in range(3):
        value, grad = loss(params)
        seen.append(float(value))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grad)
    assert seen[0] == 0.25 and seen[0] > seen[1] > seen[2]


def test_no_gradient_reaches_the_policy(case, policy_params):
    row = _row(_tokens(9, 0))
    scalar = lambda p, q: jnp.sum(jnp.square(case.model.logits(p, q, *row)))
    grad, grad_policy = jax.jit(jax.grad(scalar, (0, 1)))(case.trained, policy_params)
    for leaf in jax.tree.leaves(grad_policy):
        np.testing.assert_array_equal(leaf, 0.0)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grad))  # while every parameter of its own does learn


def test_all_but_the_critic_read_the_policy(case, policy_params):
    row = _row(_tokens(9, 0))
    other = jax.tree.map(lambda x: 0.5 * x, policy_params)
    a, b = (np.asarray(case.logits(case.trained, p, *row)) for p in (policy_params, other))
    assert np.array_equal(a, b) == (case.name == "critic")


def test_tokens_after_the_prefix_change_nothing(case, policy_params):
    # The predictor scores H_t; what was sampled after H_t, and with it the outcome, must not reach the score.
    tokens = _tokens(12, 0)
    shuffled = tokens.copy()
    shuffled[6:] = tokens[6:][::-1]
    a, b = (np.asarray(case.logits(case.trained, policy_params, *_row(t))[0, :12]) for t in (tokens, shuffled))
    np.testing.assert_array_equal(a[:6], b[:6])
    assert np.all(a[6:] != b[6:])  # and the score does depend on what it may read


def test_histories_in_one_row_score_as_if_alone(case, policy_params):
    # Two prefixes that share their first five tokens, and a stranger, in one row: each is a segment of its own.
    long = _tokens(8, 0)
    histories = [long[:5], long, _tokens(3, 1)]
    packed = np.asarray(case.logits(case.trained, policy_params, *_row(*histories))[0])
    assert np.all(np.isfinite(packed))  # the padding behind them included
    alone = [np.asarray(case.logits(case.trained, policy_params, *_row(h))[0, len(h) - 1]) for h in histories]
    ends = np.cumsum([len(h) for h in histories]) - 1
    np.testing.assert_allclose(packed[ends], alone, rtol=2e-5, atol=2e-6)
    # The short prefix scores as the same five tokens do inside the longer history, where nothing later is visible.
    np.testing.assert_allclose(packed[4], packed[5 + 4], rtol=2e-5, atol=2e-6)


def test_all_padding_is_finite(case, policy_params):
    assert np.all(np.isfinite(case.logits(case.trained, policy_params, *_row())))


def test_param_axes_match_the_params(case):
    axes, is_spec = case.model.param_axes(), lambda x: isinstance(x, PartitionSpec)
    assert jax.tree.structure(case.fresh) == jax.tree.structure(axes, is_leaf=is_spec)
    for leaf, spec in zip(jax.tree.leaves(case.fresh), jax.tree.leaves(axes, is_leaf=is_spec), strict=True):
        assert len(spec) == leaf.ndim and leaf.dtype == jnp.float32


def _normed(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def _mlp(p, x):
    """Affine, tanh-GELU, affine."""
    x = x @ p["hidden"]["kernel"] + p["hidden"]["bias"]
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return (x @ p["score"]["kernel"] + p["score"]["bias"])[..., 0]


def _states(cfg, params, row):
    return np.asarray(jax.jit(lambda q: decoder.hidden_states(cfg, q, *row))(params), np.float64)


def test_policy_head_equals_numpy(policy_params):
    # The head written out in float64: RMSNorm, affine, tanh-GELU, affine.
    model, row, rng = MODELS["policy_head"], _row(_tokens(9, 0)), np.random.default_rng(4)
    p = jax.tree.map(lambda x: rng.normal(size=x.shape), jax.eval_shape(model.init, jax.random.key(0)))
    want = _mlp(p, _normed(_states(POLICY, policy_params, row), p["norm"]["scale"]))
    got = jax.jit(model.logits)(jax.tree.map(jnp.float32, p), policy_params, *row)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_both_equals_numpy(policy_params):
    # Its hidden layer has a row of weights for each of 12 states of its own decoder, then for the policy's 16.
    model, row, rng = MODELS["both"], _row(_tokens(9, 0)), np.random.default_rng(4)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert "lm_head" not in shapes["decoder"] and shapes["head"]["hidden"]["kernel"].shape == (12 + 16, 10)
    p = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    head, tied = p["head"], dataclasses.replace(CRITIC, tie_embeddings=True)
    own = _normed(_states(tied, p["decoder"], row), head["critic_norm"]["scale"])
    policys = _normed(_states(POLICY, policy_params, row), head["policy_norm"]["scale"])
    want = _mlp(head, np.concatenate([own, policys], axis=-1))
    np.testing.assert_allclose(jax.jit(model.logits)(p, policy_params, *row), want, rtol=1e-4, atol=1e-4)


def test_critic_is_a_linear_read_out_of_its_own_decoder():
    model, row, rng = MODELS["critic"], _row(_tokens(9, 0)), np.random.default_rng(4)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert "lm_head" not in shapes["decoder"]  # though the config asks for an untied one
    p = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    tied = dataclasses.replace(CRITIC, tie_embeddings=True)
    x = np.asarray(jax.jit(lambda q: decoder.hidden_states(tied, q, *row))(p["decoder"]), np.float64)
    want = (x @ p["head"]["score"]["kernel"] + p["head"]["score"]["bias"])[..., 0]
    np.testing.assert_allclose(jax.jit(model.logits)(p, None, *row), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["critic", "both"])
def test_params_around_a_backbone(name):
    backbone = {"any": "thing"}
    params = MODELS[name].around(backbone, jax.random.key(0))
    assert params["decoder"] is backbone and not np.any(params["head"]["score"]["kernel"])
    fresh = jax.eval_shape(MODELS[name].init, jax.random.key(0))
    assert jax.tree.structure(params["head"]) == jax.tree.structure(fresh["head"])
    assert MODELS["policy_head"].around is None


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ValueError, match="mlp_size=0 must be >= 1"):
        predictor.policy_head(POLICY, mlp_size=0)
    with pytest.raises(ValueError, match="members=0 must be >= 1"):
        predictor.critic(CRITIC, members=0)
    with pytest.raises(ValueError, match="members=2 need an mlp_size"):
        predictor.critic(CRITIC, members=2)
    with pytest.raises(ValueError, match="its decoder has 22 tokens, the policy 23"):
        predictor.both(dataclasses.replace(CRITIC, vocab_size=22), POLICY, mlp_size=10)
