"""The decoder against a float64 numpy transcription of the published architectures, one token pair at a time.

Rows have one length everywhere, so each function compiles once for each config.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig, Llama3Scaling

BASE = DecoderConfig(
    vocab_size=23, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, mlp_size=20, rope_theta=1e4
)
VARIANTS = {
    "qwen3": BASE,
    "qwen2": dataclasses.replace(BASE, qk_norm=False, qkv_bias=True, tie_embeddings=False),
    "llama": dataclasses.replace(
        BASE,
        qk_norm=False,
        qkv_bias=True,
        o_bias=True,
        rope_scaling=Llama3Scaling(factor=4.0, original_max_positions=16),
        tie_embeddings=False,
    ),
}


LENGTH = 9
forward = jax.jit(decoder.hidden_states, static_argnums=0)
extend = jax.jit(decoder.extend, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def gradient(cfg, params, token, pos, end):
    return jax.grad(lambda p: jnp.sum(decoder.hidden_states(cfg, p, token, pos, end) ** 2))(params)


def shapes_of(cfg):
    return jax.eval_shape(lambda: decoder.init_params(cfg, jax.random.key(0)))


def random_params(cfg, seed=0):
    """Parameters with every norm and bias off its neutral value, so that forgetting one shows."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        neutral = 1.0 if path[-1].key == "scale" else 0.0
        return (neutral + 0.4 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes_of(cfg))


def reference_forward(cfg, params, tokens):
    """Hidden states of one sequence by loops over heads and positions, float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    norm = lambda x, scale: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + cfg.rms_norm_eps) * scale
    inverse = np.array([cfg.rope_theta ** (-2 * i / cfg.head_dim) for i in range(cfg.head_dim // 2)])
    if cfg.rope_scaling:
        s, scaled = cfg.rope_scaling, []
        for f in inverse:
            wave = 2 * np.pi / f
            if wave < s.original_max_positions / s.high_freq_factor:
                scaled.append(f)
            elif wave > s.original_max_positions / s.low_freq_factor:
                scaled.append(f / s.factor)
            else:
                smooth = s.original_max_positions / wave - s.low_freq_factor
                smooth /= s.high_freq_factor - s.low_freq_factor
                scaled.append((1 - smooth) * f / s.factor + smooth * f)
        inverse = np.array(scaled)

    def rotate(x, t):
        half = cfg.head_dim // 2
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * t * inverse)
        return np.concatenate([z.real, z.imag])

    x = p["embed"]["embedding"][tokens]
    for layer in range(cfg.num_layers):
        w = p[f"layer_{layer}"]
        h = norm(x, w["attention_norm"]["scale"])
        heads = {n: np.einsum("td,dnh->tnh", h, w["attention"][n]["kernel"]) for n in ("q", "k", "v")}
        if cfg.qkv_bias:
            heads = {n: heads[n] + w["attention"][n]["bias"] for n in heads}
        if cfg.qk_norm:
            heads["q"] = norm(heads["q"], w["attention"]["q_norm"]["scale"])
            heads["k"] = norm(heads["k"], w["attention"]["k_norm"]["scale"])
        out = np.zeros_like(x)
        for t in range(len(tokens)):
            for n in range(cfg.num_heads):
                kv = n // (cfg.num_heads // cfg.num_kv_heads)
                q = rotate(heads["q"][t, n], t)
                score = np.array([q @ rotate(heads["k"][s, kv], s) for s in range(t + 1)]) / np.sqrt(cfg.head_dim)
                weight = np.exp(score - score.max())
                mixed = (weight / weight.sum()) @ heads["v"][: t + 1, kv]
                out[t] += mixed @ w["attention"]["o"]["kernel"][n]
        if cfg.o_bias:
            out = out + w["attention"]["o"]["bias"]
        x = x + out
        h = norm(x, w["mlp_norm"]["scale"])
        gate = h @ w["mlp"]["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp"]["up"]["kernel"])) @ w["mlp"]["down"]["kernel"]
    return norm(x, p["final_norm"]["scale"])


def one_row(tokens):
    """A row with one segment and padding behind it."""
    n, row = len(tokens), np.zeros((3, 1, LENGTH), np.int32)
    row[:, 0, :n] = tokens, np.arange(n), np.full(n, n)
    return tuple(row)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_equals_the_numpy_reference(name):
    cfg = VARIANTS[name]
    params = random_params(cfg)
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, LENGTH)
    got = forward(cfg, params, *one_row(tokens))[0]
    np.testing.assert_allclose(got, reference_forward(cfg, params, tokens), atol=2e-5)


def test_initial_parameters_have_the_promised_scales():
    """Kernels N(0, 1 / fan_in), embeddings N(0, 0.02^2), norms 1, biases 0; a standard deviation of n draws is within
    5 / sqrt(2 n) of the truth."""
    cfg = dataclasses.replace(VARIANTS["qwen2"], hidden_size=64, num_layers=1)
    params = jax.jit(decoder.init_params, static_argnums=0)(cfg, jax.random.key(0))
    fan_in = {"q": 64, "k": 64, "v": 64, "o": cfg.num_heads * cfg.head_dim, "gate": 64, "up": 64, "down": cfg.mlp_size}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *_, owner, kind = (key.key for key in path)
        if kind in ("scale", "bias"):
            np.testing.assert_array_equal(leaf, 1.0 if kind == "scale" else 0.0)
            continue
        want = 0.02 if kind == "embedding" else fan_in.get(owner, 64) ** -0.5
        assert abs(np.std(leaf) / want - 1) < 5 / np.sqrt(2 * leaf.size), path
        assert abs(np.mean(leaf)) < 5 * want / np.sqrt(leaf.size), path


def test_unembed_is_the_embedding_when_tied_and_the_head_otherwise():
    tied, untied = VARIANTS["qwen3"], VARIANTS["qwen2"]
    params = random_params(tied)
    np.testing.assert_array_equal(decoder.unembed(tied, params), params["embed"]["embedding"].T)
    params = random_params(untied)
    np.testing.assert_array_equal(decoder.unembed(untied, params), params["lm_head"]["kernel"])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_compute_what_unrolled_ones_do(name, remat):
    cfg = VARIANTS[name]
    params = random_params(cfg)
    scan_cfg = dataclasses.replace(cfg, scan_layers=True, remat=remat)
    scanned = {k: v for k, v in params.items() if not k.startswith("layer_")}
    scanned["layers"] = jax.tree.map(lambda *x: np.stack(x), *(params[f"layer_{i}"] for i in range(cfg.num_layers)))
    assert jax.tree.map(np.shape, shapes_of(scan_cfg)) == jax.tree.map(np.shape, scanned)
    row = one_row(np.arange(7) % cfg.vocab_size)
    want = forward(cfg, params, *row)[:, :7]
    np.testing.assert_allclose(forward(scan_cfg, scanned, *row)[:, :7], want, atol=1e-5)
    engine_cfg, engine_params = decoder.engine_config(scan_cfg), decoder.engine_params(scan_cfg, scanned)
    np.testing.assert_allclose(forward(engine_cfg, engine_params, *row)[:, :7], want, atol=1e-5)
    stacked, plain = gradient(scan_cfg, scanned, *row)["layers"], gradient(cfg, params, *row)
    for i in range(cfg.num_layers):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4), stacked, plain[f"layer_{i}"]
        )


def test_engine_params_have_the_shapes_that_its_config_would_initialise():
    for cfg in VARIANTS.values():
        engine_cfg, params = decoder.engine_config(cfg), decoder.engine_params(cfg, random_params(cfg))
        assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes_of(engine_cfg))


def test_segments_of_a_packed_row_do_not_see_each_other_or_padding():
    cfg = VARIANTS["qwen3"]
    params = random_params(cfg)
    a, b = np.array([3, 1, 4, 1]), np.array([5, 9, 2])
    token = np.concatenate([a, b, [7, 7]])[None]
    pos = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 0]])
    end = np.array([[4, 4, 4, 4, 7, 7, 7, 0, 0]])
    packed = forward(cfg, params, *(x.astype(np.int32) for x in (token, pos, end)))[0]
    np.testing.assert_allclose(packed[:4], forward(cfg, params, *one_row(a))[0, :4], atol=1e-5)
    np.testing.assert_allclose(packed[4:7], forward(cfg, params, *one_row(b))[0, :3], atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_extend_in_chunks_equals_one_forward(name):
    """Slot 0 gets 5 + 3 tokens, slot 1 gets 2 + 1 at other times; both then equal the whole-row forward."""
    cfg = VARIANTS[name]
    params = random_params(cfg)
    engine_cfg, engine_params = decoder.engine_config(cfg), decoder.engine_params(cfg, params)
    cache = decoder.init_cache(engine_cfg, rows=2, length=10)
    a, b = np.arange(9) % cfg.vocab_size, (np.arange(4) * 5 + 2) % cfg.vocab_size
    step = lambda token, start, count, cache: extend(
        engine_cfg, engine_params, np.asarray(token), np.asarray(start), np.asarray(count), cache
    )
    pad = lambda x: np.pad(x, (0, 5 - len(x)))
    _, cache = step(np.stack([pad(a[:5]), pad(b[:2])]), [0, 0], [5, 2], cache)
    hidden, cache = step(np.stack([pad(a[5:8]), pad(b[:0])]), [5, 2], [3, 0], cache)
    hidden_a, hidden_b = hidden[0, :3], None
    hidden, cache = step(np.stack([pad(a[:0]), pad(b[2:3])]), [8, 2], [0, 1], cache)
    hidden_b = hidden[1, :1]
    one, cache = step(np.array([[a[8]], [b[3]]]), [8, 3], [1, 1], cache)
    whole_a, whole_b = (forward(cfg, params, *one_row(tokens))[0] for tokens in (a, b))
    np.testing.assert_allclose(hidden_a, whole_a[5:8], atol=2e-5)
    np.testing.assert_allclose(hidden_b, whole_b[2:3], atol=2e-5)
    np.testing.assert_allclose(one[:, 0], jnp.stack([whole_a[8], whole_b[3]]), atol=2e-5)


def test_extend_refuses_scanned_layers():
    cfg = dataclasses.replace(BASE, scan_layers=True)
    with pytest.raises(ValueError, match="engine_params"):
        decoder.extend(cfg, {}, jnp.zeros((1, 1), int), jnp.zeros(1, int), jnp.ones(1, int), [])


def test_axes_name_every_parameter():
    for cfg in (BASE, dataclasses.replace(BASE, scan_layers=True)):
        shapes = shapes_of(cfg)
        axes = decoder.param_axes(cfg)
        is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)
        assert jax.tree.structure(shapes) == jax.tree.structure(axes, is_leaf=is_spec)
        for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=is_spec)):
            assert len(spec) == leaf.ndim


@pytest.mark.parametrize(
    "change, message",
    [({"num_kv_heads": 3}, "multiple"), ({"head_dim": 5}, "odd"), ({"num_layers": 0}, "num_layers")],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change).validate()
