"""Adapters: applied on top of the parameters, merged into them, and left out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.models import decoder, lora
from trace_jax.models.config import DecoderConfig, Llama3Scaling
from trace_jax.models.lora import LoraConfig

QWEN3 = DecoderConfig(
    vocab_size=23, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, mlp_size=20, rope_theta=1e4
)
MODELS = {
    "qwen3": QWEN3,
    "qwen2": dataclasses.replace(QWEN3, qk_norm=False, qkv_bias=True, tie_embeddings=False),
    "llama": dataclasses.replace(QWEN3, qk_norm=False, o_bias=True, rope_scaling=Llama3Scaling()),
    "scanned": dataclasses.replace(QWEN3, scan_layers=True),
}
SETTINGS = LoraConfig(rank=3, alpha=5.0)
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 9))
ROW = (TOKENS, np.tile(np.arange(9), (2, 1)), np.full((2, 9), 9))


def trained(cfg, seed=1):
    """Adapters after some training: no leaf is at its initial value."""
    adapters = lora.init_adapters(cfg, SETTINGS, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape).astype(np.float32), adapters)


@pytest.mark.parametrize("name", MODELS)
def test_applied_equals_merged(name):
    cfg = MODELS[name]
    params, adapters = decoder.init_params(cfg, jax.random.key(0)), trained(cfg)
    bare = decoder.hidden_states(cfg, params, *ROW)
    applied = decoder.hidden_states(cfg, params, *ROW, lora=lora.collection(SETTINGS, adapters))
    merged = decoder.hidden_states(cfg, lora.merge(cfg, SETTINGS, params, adapters), *ROW)
    np.testing.assert_allclose(applied, merged, atol=2e-5)
    assert np.abs(applied - bare).max() > 0.1


def test_merge_adds_the_scaled_product_of_each_kernel():
    # numpy, kernel by kernel: o [N, H, D] is contracted over heads and head_dim, the others over their first axis
    params, adapters = decoder.init_params(QWEN3, jax.random.key(0)), trained(QWEN3)
    merged = lora.merge(QWEN3, SETTINGS, params, adapters)
    layer, old, adapter = merged["layer_1"], params["layer_1"], adapters["layer_1"]
    for part, name, formula in (
        ("attention", "q", "dr,rnh->dnh"),
        ("attention", "o", "nhr,rd->nhd"),
        ("mlp", "down", "fr,rd->fd"),
    ):
        a, b = (np.asarray(adapter[part][name][key], np.float64) for key in ("a", "b"))
        expected = np.asarray(old[part][name]["kernel"], np.float64) + 5.0 / 3 * np.einsum(formula, a, b)
        np.testing.assert_allclose(layer[part][name]["kernel"], expected, atol=1e-5)
    for untouched in ("embed", "final_norm"):
        assert merged[untouched] is params[untouched]
    assert layer["attention"]["q_norm"] is old["attention"]["q_norm"]


@pytest.mark.parametrize("name", MODELS)
def test_fresh_adapters_change_no_bit_and_cover_every_linear_map(name):
    cfg = MODELS[name]
    params = decoder.init_params(cfg, jax.random.key(0))
    adapters = lora.init_adapters(cfg, SETTINGS, jax.random.key(1))
    same = lora.merge(cfg, SETTINGS, params, adapters)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), params, same)))
    kernels = [path for path, _ in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "kernel"]
    kernels = [path for path in kernels if path[0].key != "lm_head"]
    assert len(jax.tree.leaves(adapters)) == 2 * len(kernels)


def test_initial_scale_and_independence():
    big = dataclasses.replace(QWEN3, hidden_size=400, num_layers=1)
    adapters = lora.init_adapters(big, LoraConfig(rank=50, alpha=1.0), jax.random.key(0))["layer_0"]
    q, k = adapters["attention"]["q"]["a"], adapters["attention"]["k"]["a"]
    assert np.std(q) == pytest.approx(400**-0.5, rel=0.03)
    assert abs(np.corrcoef(np.ravel(q), np.ravel(k))[0, 1]) < 0.03
    assert not np.any(adapters["mlp"]["down"]["b"])


def test_gradient_reaches_adapters_as_the_chain_rule_says():
    # dL/da = scale * dL/dW b^T and dL/db = scale * a^T dL/dW, with dL/dW taken at the merged kernel
    params, adapters = decoder.init_params(QWEN3, jax.random.key(0)), trained(QWEN3)

    def through_adapters(adapters):
        return jnp.sum(decoder.hidden_states(QWEN3, params, *ROW, lora=lora.collection(SETTINGS, adapters)) ** 3)

    def through_kernels(params):
        return jnp.sum(decoder.hidden_states(QWEN3, params, *ROW) ** 3)

    got = jax.grad(through_adapters)(adapters)["layer_0"]["mlp"]["up"]
    at = lora.merge(QWEN3, SETTINGS, params, adapters)
    kernel = np.asarray(jax.grad(through_kernels)(at)["layer_0"]["mlp"]["up"]["kernel"], np.float64)
    a, b = (np.asarray(adapters["layer_0"]["mlp"]["up"][key], np.float64) for key in ("a", "b"))
    np.testing.assert_allclose(got["a"], 5 / 3 * kernel @ b.T, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(got["b"], 5 / 3 * a.T @ kernel, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_axes_fit_the_adapters(name):
    cfg = MODELS[name]
    adapters = jax.eval_shape(lambda: lora.init_adapters(cfg, SETTINGS, jax.random.key(0)))
    axes = lora.adapter_axes(cfg)
    flat, tree = jax.tree.flatten(adapters)
    for leaf, names in zip(flat, tree.flatten_up_to(axes), strict=True):
        assert len(names) == leaf.ndim
        assert [size for size, axis in zip(leaf.shape, names, strict=True) if axis is None and size != 6] == [3]


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="rank 0"):
        LoraConfig(rank=0, alpha=1.0).validate()
    with pytest.raises(ValueError, match="alpha 0"):
        LoraConfig(rank=1, alpha=0.0).validate()
    fused = dataclasses.replace(QWEN3, fuse_projections=True)
    with pytest.raises(ValueError, match="fuse_projections=False"):
        lora.init_adapters(fused, SETTINGS, jax.random.key(0))
