"""Layers' states against the whole decoder, and the features made of them against arithmetic on the states."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.models.state_features import of_policy, spaced_layers

CFG = DecoderConfig(
    vocab_size=11, hidden_size=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, mlp_size=12, rope_theta=1e4
)
SCANNED = dataclasses.replace(CFG, scan_layers=True, remat=True)
REMAT = dataclasses.replace(CFG, remat=True)
LENGTH = 7
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2], np.int32)

ALL = (0, 1, 2)


@functools.partial(jax.jit, static_argnums=0)
def states_and_hidden(cfg, params, *row):
    return decoder.layer_states(cfg, params, *row, ALL), decoder.hidden_states(cfg, params, *row)


def states_of(row):
    """float32 [T, 3, D] of the row, by the unrolled decoder."""
    return np.asarray(states_and_hidden(CFG, params_of(CFG), *row)[0][0])


@functools.cache
def params_of(cfg):
    """Random parameters, norms off 1; a scanned config gets those of the unrolled one, stacked."""
    shapes = jax.eval_shape(lambda: decoder.init_params(CFG, jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: (0.5 * rng.standard_normal(x.shape)).astype(np.float32), shapes)
    if not cfg.scan_layers:
        return params
    stacked = jax.tree.map(lambda *x: np.stack(x), *(params.pop(f"layer_{i}") for i in range(CFG.num_layers)))
    return params | {"layers": stacked}


def row(tokens=TOKENS):
    """One row that is one segment: token, pos, end."""
    return np.stack([tokens, np.arange(LENGTH), np.full(LENGTH, LENGTH)]).astype(np.int32)[:, None]


def norm(x, scale=1.0):
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + CFG.rms_norm_eps) * scale


@pytest.mark.parametrize("cfg", [CFG, SCANNED, REMAT], ids=["unrolled", "scanned", "remat"])
def test_states_of_layers_whatever_the_layout(cfg):
    """The last one under the final norm is the hidden state, and all are those of the plain layout."""
    params = params_of(cfg)
    states, hidden = states_and_hidden(cfg, params, *row())
    assert states.shape == (1, LENGTH, 3, 8) and states.dtype == jnp.float32
    last = norm(np.asarray(states[:, :, 2]), params["final_norm"]["scale"])
    np.testing.assert_allclose(last, hidden, atol=1e-5)
    np.testing.assert_allclose(states[0], states_of(row()), rtol=1e-5, atol=1e-5)


def test_the_first_tokens_first_state_by_hand():
    """Token 0 sees itself alone: attention hands on its value. x + o(v(norm x)), then + down(silu(gate) up)."""
    w, params = params_of(CFG)["layer_0"], params_of(CFG)
    x = params["embed"]["embedding"][TOKENS[0]].astype(np.float64)
    value = np.einsum("d,dkh->kh", norm(x, w["attention_norm"]["scale"]), w["attention"]["v"]["kernel"])[0]
    x = x + np.einsum("h,nhd->d", value, w["attention"]["o"]["kernel"])  # both heads read the one value head
    h = norm(x, w["mlp_norm"]["scale"])
    gate = h @ w["mlp"]["gate"]["kernel"]
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp"]["up"]["kernel"])) @ w["mlp"]["down"]["kernel"]
    np.testing.assert_allclose(states_of(row())[0, 0], x, rtol=1e-5, atol=1e-5)


def test_states_know_nothing_of_later_tokens_or_of_other_segments():
    states, other = states_of(row()), states_of(row(np.append(TOKENS[:4], [7, 7, 7])))
    np.testing.assert_array_equal(other[:4], states[:4])
    assert np.all(np.any(other != states, axis=-1)[4:])
    packed = row()
    packed[1:, 0] = [0, 1, 2, 3, 0, 1, 2], [4, 4, 4, 4, 7, 7, 7]
    apart = states_of(row(np.append(TOKENS[4:], [0] * 4)))
    np.testing.assert_allclose(states_of(packed)[4:], apart[:3], atol=1e-5)


@pytest.mark.parametrize("cfg", [CFG, SCANNED], ids=["unrolled", "scanned"])
def test_who_does_not_ask_for_states_compiles_what_a_decoder_without_them_does(monkeypatch, cfg):
    def program():
        return jax.jit(lambda *args: decoder.hidden_states(cfg, *args)).lower(params_of(cfg), *row()).as_text()

    kept = program()
    monkeypatch.setattr(decoder.Block, "sow", lambda *_: None)
    assert program() == kept


@functools.cache
def features_of(layers, max_size):
    made = of_policy(CFG, layers=layers, max_size=max_size)
    features, size = made.of_rows, made.size
    return jax.jit(features), size


def test_features_are_states_of_unit_mean_square():
    features, size = features_of(2, 16)
    got = features(params_of(CFG), *row())
    assert size == 16 and got.shape == (1, LENGTH, 16) and got.dtype == jnp.float32
    states = states_of(row())[:, [1, 2]].astype(np.float64)  # round(3 / 2) - 1 = 1
    np.testing.assert_allclose(np.mean(np.square(got.reshape(LENGTH, 2, 8)), -1), 1, atol=1e-4)
    want = states / np.sqrt(np.mean(states**2, -1, keepdims=True))
    np.testing.assert_allclose(got[0], want.reshape(LENGTH, 16), rtol=1e-4, atol=1e-5)
    made = of_policy(CFG, layers=2, max_size=16)  # and whoever has the states gets the same from them
    assert (made.layers, made.size) == ((1, 2), 16)
    np.testing.assert_allclose(made.of_states(states.astype(np.float32)), got[0], rtol=1e-5, atol=1e-5)


def test_a_projection_keeps_lengths_on_average_and_is_always_the_same():
    """16 numbers to 12 by a matrix R with entries N(0, 1/12), which is found by least squares.

    sum R^2 / 16 has mean 1 and standard deviation sqrt(2 / 192); so has, up to .02 or so, the mean over random vectors
    of what becomes of their squared length.
    """
    (whole, full), (features, size) = features_of(2, 16), features_of(2, 12)
    assert (full, size) == (16, 12)
    rows = [row(np.random.default_rng(i).integers(0, 11, LENGTH)) for i in range(6)]
    before, after = (np.concatenate([f(params_of(CFG), *r)[0] for r in rows]) for f in (whole, features))
    matrix, *_ = np.linalg.lstsq(before.astype(np.float64), after.astype(np.float64), rcond=None)
    np.testing.assert_allclose(before @ matrix, after, atol=1e-4)  # linear, and the same one for every token
    assert abs(np.mean(matrix)) < 3 / np.sqrt(12 * 192) and np.linalg.matrix_rank(matrix) == 12
    vectors = np.random.default_rng(1).standard_normal((2000, 16))
    ratio = np.sum((vectors @ matrix) ** 2, 1) / np.sum(vectors**2, 1)
    assert abs(np.mean(ratio) - 1) < 3 * np.sqrt(2 / 192)
    golden = [0.46842, 0.58464, -0.12517]  # the same in every process: a saved belief is about these features
    np.testing.assert_allclose(matrix[0, :3], golden, atol=1e-4)


def test_no_gradient_reaches_the_policy_and_its_weights_matter():
    features, _ = features_of(2, 12)
    params = params_of(CFG)
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(jnp.square(features(params, *row())))))(params)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, 0.0)
    other = params | {"layer_0": jax.tree.map(lambda x: 0.5 * x, params["layer_0"])}
    assert np.all(np.any(np.asarray(features(params, *row()) != features(other, *row())), axis=-1))


@pytest.mark.parametrize(
    "num_layers, wanted, layers",
    [(3, 3, (0, 1, 2)), (36, 3, (11, 23, 35)), (2, 5, (0, 1)), (5, 1, (4,)), (5, 2, (1, 4))],
)
def test_spaced_layers_by_hand(num_layers, wanted, layers):
    assert spaced_layers(num_layers, wanted) == layers


def test_spaced_layers_are_distinct_and_even():
    for num_layers in range(1, 41):
        for wanted in range(1, num_layers + 1):
            found = spaced_layers(num_layers, wanted)
            gaps = np.diff([-1, *found])
            assert len(found) == wanted and found[-1] == num_layers - 1 and gaps.min() >= 1
            assert np.ptp(gaps) <= 2 and np.all(np.abs(gaps - num_layers / wanted) <= 1)


@pytest.mark.parametrize("layers, max_size", [(0, 8), (2, 0)])
def test_features_of_nothing_are_refused(layers, max_size):
    with pytest.raises(ValueError, match=f"{layers} layers and at most {max_size} numbers; both must be at least 1"):
        of_policy(CFG, layers=layers, max_size=max_size)
