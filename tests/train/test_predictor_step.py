"""The predictor's scores and fit against dense rows and steps written out by hand."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trace_jax.models import decoder, predictor
from trace_jax.models.config import DecoderConfig
from trace_jax.objectives import value
from trace_jax.train import optimizer, replay, sharding
from trace_jax.train.predictor_step import PredictorTrainer
from trace_jax.tree import pack

MODEL = DecoderConfig(
    vocab_size=13, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=32
)
ROWS, LENGTH = 4, 16


@functools.cache
def _trainer(kind="critic", loss=value.squared_error, weighting=replay.equal_weight):
    model = predictor.critic(MODEL) if kind == "critic" else predictor.policy_head(MODEL, mlp_size=8)
    tx = optimizer.build(optimizer.sgd(optimizer.constant(0.3), momentum=0.0), clip_norm=1e9, max_update_norm=None)
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    return PredictorTrainer(model, tx, loss, weighting, mesh, batch_rows=ROWS, row_length=LENGTH)


def _bumped(state):
    """A state whose last layer is not zero, so that scores differ."""
    score = dict(state.params["head"]["score"])
    score["kernel"] += 0.3 * jax.random.normal(jax.random.key(5), score["kernel"].shape)
    return dataclasses.replace(state, params={**state.params, "head": {"score": score}})


def _examples(n, seed=0):
    rng = np.random.default_rng(seed)
    return replay.Examples(
        prefixes=tuple(rng.integers(0, 13, rng.integers(2, LENGTH + 1)).astype(np.int32) for _ in range(n)),
        target=rng.random(n).astype(np.float32),
        count=rng.integers(1, 6, n).astype(np.int32),
        is_root=rng.random(n) < 0.5,
    )


def _dense_logits(params, examples):
    """Logits at the last tokens of histories that have a row each; causality makes the zeros after them harmless."""
    token = np.stack([np.pad(p, (0, LENGTH - p.size)) for p in examples.prefixes])
    pos, end = np.broadcast_to(np.arange(LENGTH), token.shape), np.full(token.shape, LENGTH)
    hidden = decoder.hidden_states(MODEL, params["decoder"], token, pos, end)
    last = hidden[np.arange(examples.size), [p.size - 1 for p in examples.prefixes]]
    return (last @ params["head"]["score"]["kernel"])[:, 0] + params["head"]["score"]["bias"][0]


def _rows(examples):
    zeros = np.zeros(examples.size, np.float32)
    batch, row, col = pack.pack_prefixes(examples.prefixes, zeros, zeros, row_length=LENGTH, rows_multiple=1)
    return {name: getattr(batch, name) for name in ("token", "pos", "end")}, row, col


def test_scores_are_sigmoids_of_dense_logits():
    trainer, examples = _trainer(), _examples(13)
    state = _bumped(trainer.init(jax.random.key(0)))
    rows, row, col = _rows(examples)
    got = trainer.score(state.params, None, rows)
    assert got.shape == rows["token"].shape and got.shape[0] % ROWS  # the last pass was filled up and cut off again
    logits = jax.jit(lambda params: _dense_logits(params, examples))(state.params)
    want = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    np.testing.assert_allclose(got[row, col], want, atol=2e-6)
    assert np.ptp(want) > 0.05


def test_bits_of_a_row_depend_on_the_row_alone():
    trainer = _trainer()
    state = _bumped(trainer.init(jax.random.key(0)))
    rows, *_ = _rows(_examples(40))
    count = rows["token"].shape[0]
    whole = trainer.score(state.params, None, rows)
    order = np.random.default_rng(3).permutation(count)
    shuffled = trainer.score(state.params, None, {name: x[order] for name, x in rows.items()})
    np.testing.assert_array_equal(shuffled, whole[order])
    for i in range(0, count, 5):
        alone = trainer.score(state.params, None, {name: x[i : i + 1] for name, x in rows.items()})
        np.testing.assert_array_equal(alone[0], whole[i])


@pytest.mark.parametrize(
    "loss, weighting",
    [(value.squared_error, replay.equal_weight), (value.binary_cross_entropy, replay.count_weight)],
    ids=["paper", "ours"],
)
def test_one_batch_is_one_gradient_step_on_the_weighted_mean(loss, weighting):
    """Few enough examples for one batch: p <- p - .3 grad(sum w l / sum w), l by hand from dense logits."""
    trainer, examples = _trainer("critic", loss, weighting), _examples(4)
    state = _bumped(trainer.init(jax.random.key(0)))
    before = jax.device_get(state.params)
    w, y = weighting(examples.count), examples.target

    def mean_loss(params):
        s = jax.nn.sigmoid(_dense_logits(params, examples))
        each = (s - y) ** 2 if loss is value.squared_error else -y * jnp.log(s) - (1 - y) * jnp.log(1 - s)
        return jnp.sum(w * each) / np.sum(w)

    want_loss, grads = jax.jit(jax.value_and_grad(mean_loss))(before)
    state, metrics = trainer.fit(state, None, examples, np.random.default_rng(0), epochs=1)
    assert metrics["predictor/optimizer_steps"] == 1 == int(state.step)
    np.testing.assert_allclose(metrics["predictor/loss"], want_loss, rtol=1e-5)
    for new, old, g in zip(*map(jax.tree.leaves, (state.params, before, grads)), strict=True):
        np.testing.assert_allclose(new - old, -0.3 * g, rtol=1e-3, atol=1e-6)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["predictor/grad_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["predictor/update_norm"], 0.3 * norm, rtol=1e-4)
    assert metrics["predictor/examples"] == 4
    assert metrics["predictor/prefix_share"] == np.mean(~examples.is_root)


def _seen_from(rows, r, c):
    """The tokens that cell (r, c) attends to, itself included."""
    return tuple(t for k, t in enumerate(rows["token"][r, : c + 1].tolist()) if c < rows["end"][r, k])


def test_every_example_is_seen_once_an_epoch():
    trainer, examples, neighbours = _trainer(), _examples(50), []
    for seed in (0, 1):
        batches = list(trainer._epoch(examples, np.random.default_rng(seed)))
        assert all(batch["token"].shape == (ROWS, LENGTH) for batch in batches)
        seen = sorted(
            (_seen_from(b, r, c), b["value_target"][r, c])
            for b in batches
            for r, c in zip(*np.nonzero(b["value_weight"]), strict=True)
        )
        assert seen == sorted((tuple(p.tolist()), t) for p, t in zip(examples.prefixes, examples.target, strict=True))
        filled = [int(np.sum(np.any(b["end"] > 0, axis=1))) for b in batches]
        assert max(filled) - min(filled) <= 1
        neighbours.append({row.tobytes() for b in batches for row in b["token"]})
    assert neighbours[0] != neighbours[1]  # an epoch packs other examples together than the one before


def _nested(rollouts):
    """All 12 histories of each rollout of 5 to 16 tokens; the rollouts share their first 4."""
    rng = np.random.default_rng(0)
    whole = [np.append([1, 2, 3, 4], rng.integers(0, 13, 12)).astype(np.int32) for _ in range(rollouts)]
    prefixes = tuple(tokens[:n] for tokens in whole for n in range(5, 17))
    size = len(prefixes)
    return replay.Examples(
        prefixes, rng.random(size).astype(np.float32), rng.integers(1, 6, size).astype(np.int32), np.zeros(size, bool)
    )


def test_all_histories_of_a_rollout_cost_one_row():
    trainer, examples = _trainer(), _nested(4)
    batches = list(trainer._epoch(examples, np.random.default_rng(0)))
    assert len(batches) == 1 and np.count_nonzero(batches[0]["value_weight"]) == 48
    assert np.all(batches[0]["end"] > 0)  # 4 rows of 16 tokens: rollouts too long to share their first 4 in a row


@pytest.mark.parametrize(
    "loss, weighting",
    [(value.squared_error, replay.equal_weight), (value.binary_cross_entropy, replay.count_weight)],
    ids=["paper", "ours"],
)
def test_nested_and_equal_histories_are_fitted_as_if_alone(loss, weighting):
    """One step on 24 nested histories and 8 of them again, aged: the step along the dense gradient of all 32."""
    trainer, once = _trainer("critic", loss, weighting), _nested(2)
    again = dataclasses.replace(once.take(np.arange(0, 24, 3)), target=np.linspace(0, 1, 8, dtype=np.float32))
    window = replay.ReplayWindow(2, decay=0.5).push(again).push(once)
    examples = window.examples()
    state = _bumped(trainer.init(jax.random.key(0)))
    before = jax.device_get(state.params)
    y, w = examples.target, weighting(examples.count) * np.array([0.5] * 8 + [1.0] * 24)

    def mean_loss(params):
        s = jax.nn.sigmoid(_dense_logits(params, examples))
        each = (s - y) ** 2 if loss is value.squared_error else -y * jnp.log(s) - (1 - y) * jnp.log(1 - s)
        return jnp.sum(w * each) / np.sum(w)

    grads = jax.jit(jax.grad(mean_loss))(before)
    state, metrics = trainer.fit(state, None, examples, np.random.default_rng(0), epochs=1)
    assert metrics["predictor/optimizer_steps"] == 1 and metrics["predictor/examples"] == 32
    for new, old, g in zip(*map(jax.tree.leaves, (state.params, before, grads)), strict=True):
        np.testing.assert_allclose(new - old, -0.3 * g, rtol=1e-3, atol=1e-6)
    assert trainer.compiles()["update"] == 1


def test_order_comes_from_the_generator():
    trainer, examples = _trainer(), _examples(30)
    run = lambda seed: jax.device_get(
        trainer.fit(trainer.init(jax.random.key(0)), None, examples, np.random.default_rng(seed), epochs=2)[0].params
    )
    first, again, other = run(1), run(1), run(2)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True))


def test_fit_learns_and_counts_steps():
    """The target is whether the last token is below 7; SGD finds it."""
    examples = _examples(48)
    examples = replay.Examples(
        prefixes=examples.prefixes,
        target=np.array([float(p[-1] < 7) for p in examples.prefixes], np.float32),
        count=examples.count,
        is_root=examples.is_root,
    )
    trainer = _trainer()
    state, first = trainer.fit(trainer.init(jax.random.key(0)), None, examples, np.random.default_rng(0), epochs=1)
    assert first["predictor/loss"] > 0.15
    state, _ = trainer.fit_steps(state, None, examples, np.random.default_rng(1), steps=100)
    assert int(state.step) == 100 + first["predictor/optimizer_steps"]
    _, last = trainer.fit(state, None, examples, np.random.default_rng(2), epochs=1)
    assert last["predictor/loss"] < 0.02
    assert trainer.compiles()["update"] == 1


def test_an_untrained_predictor_says_one_half_and_nothing_to_fit_changes_nothing():
    trainer = _trainer()
    state = trainer.init(jax.random.key(0))
    rows, row, col = _rows(_examples(3))
    np.testing.assert_array_equal(trainer.score(state.params, None, rows)[row, col], np.float32(0.5))
    none = replay.concatenate([])
    for fitted, metrics in (
        trainer.fit(state, None, none, np.random.default_rng(0), epochs=2),
        trainer.fit_steps(state, None, none, np.random.default_rng(0), steps=2),
    ):
        assert fitted is state and metrics["predictor/optimizer_steps"] == 0


def test_a_head_on_policy_states_reads_the_policy_and_leaves_it_alone():
    trainer, examples = _trainer("head"), _examples(4)
    init = jax.jit(functools.partial(decoder.init_params, MODEL))
    policies = [init(jax.random.key(k)) for k in (1, 2)]
    before = jax.device_get(policies[0])
    state = trainer.init(jax.random.key(0))
    state, metrics = trainer.fit(state, policies[0], examples, np.random.default_rng(0), epochs=3)
    assert metrics["predictor/optimizer_steps"] == 3
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(policies[0]), before)
    rows, row, col = _rows(examples)
    a, b = (trainer.score(state.params, policy, rows)[row, col] for policy in policies)
    assert np.any(a != b) and np.all((a > 0) & (a < 1))


def test_an_adopted_backbone_is_trained_and_the_callers_arrays_stay():
    """Around the backbone of a fresh state it is that state: the same scores, and the same fit."""
    trainer, examples = _trainer(), _examples(12)
    fresh = trainer.init(jax.random.key(0))
    backbone = jax.device_get(fresh.params["decoder"])
    before = jax.tree.map(np.copy, backbone)
    adopted = trainer.adopt(backbone, jax.random.key(1))
    for a, b in zip(jax.tree.leaves(adopted), jax.tree.leaves(fresh), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
        np.testing.assert_array_equal(a, b)  # the read-out is zero with any key
    fits = [trainer.fit(s, None, examples, np.random.default_rng(0), epochs=3)[0] for s in (fresh, adopted)]
    jax.tree.map(np.testing.assert_array_equal, *fits)
    assert np.any(np.asarray(fits[1].params["decoder"]["embed"]["embedding"]) != before["embed"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, backbone, before)
    assert trainer.compiles()["update"] == 1


def test_device_arrays_in_place_are_not_copied():
    trainer = _trainer()
    backbone = trainer.init(jax.random.key(0)).params["decoder"]
    adopted = trainer.adopt(backbone, jax.random.key(1))
    for a, b in zip(jax.tree.leaves(adopted.params["decoder"]), jax.tree.leaves(backbone), strict=True):
        assert a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer()


def test_backbones_that_do_not_fit():
    backbone = jax.device_get(_trainer().init(jax.random.key(0)).params["decoder"])
    with pytest.raises(ValueError, match="reads the policy's states and has no backbone"):
        _trainer("head").adopt(backbone, jax.random.key(0))
    embedding = backbone["embed"]["embedding"]
    message = r"embedding'\] is float32 \(12, 16\) in the pretrained backbone, float32 \(13, 16\) in the model"
    with pytest.raises(ValueError, match=message):
        _trainer().adopt(backbone | {"embed": {"embedding": embedding[:12]}}, jax.random.key(0))
    with pytest.raises(ValueError, match=r"final_norm'\]\['scale'\] is absent in the pretrained backbone"):
        _trainer().adopt({k: v for k, v in backbone.items() if k != "final_norm"}, jax.random.key(0))
    half = backbone | {"embed": {"embedding": embedding.astype(np.float16)}}
    with pytest.raises(ValueError, match=r"is float16 \(13, 16\)"):
        _trainer().adopt(half, jax.random.key(0))


def test_too_long_a_history_is_named():
    trainer = _trainer()
    one = np.ones(1)
    long = replay.Examples((np.zeros(LENGTH + 1, np.int32),), one, one.astype(np.int32), one.astype(bool))
    with pytest.raises(ValueError, match="sequence 0 has 17 tokens, but a row holds 1 to 16"):
        trainer.fit(trainer.init(jax.random.key(0)), None, long, np.random.default_rng(0), epochs=1)


def test_a_gradient_that_is_not_finite_stops_the_run():
    trainer = _trainer()
    bad = replay.Examples(_examples(1).prefixes, np.array([np.nan], np.float32), np.ones(1, np.int32), np.ones(1, bool))
    with pytest.raises(FloatingPointError, match="predictor update: the gradient's norm is nan"):
        trainer.fit(_bumped(trainer.init(jax.random.key(0))), None, bad, np.random.default_rng(0), epochs=1)


def test_abstract_state_and_one_compile():
    trainer = _trainer()
    real, abstract = trainer.init(jax.random.key(0)), trainer.abstract_state()
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    assert optax.tree.norm(real.params) > 0
    assert trainer.compiles()["score"] <= 1 and trainer.compiles()["update"] <= 1  # after all tests above
