"""The policy's update against one dense row per rollout, plain softmax and plain `jax.grad`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.objectives.policy import policy_loss
from trace_jax.train import optimizer, policy_step, sharding
from trace_jax.train.policy_step import Plan, PolicyTrainer
from trace_jax.tree import advantage, aggregate, grow, pack, query
from trace_jax.types import Finish, Prompt, Stage, Turn

MODEL = DecoderConfig(
    vocab_size=13, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=32
)
RATE, TEMPERATURE = 0.5, 0.7
LOSS = functools.partial(policy_loss, clip_low=0.2, clip_high=0.28)


def _sgd(**limits):
    limits = {"clip_norm": 1e9, "max_update_norm": None} | limits
    return optimizer.build(optimizer.sgd(optimizer.constant(RATE), momentum=0.0), **limits)


@functools.cache
def _mesh():
    return sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


def _fresh_trainer(tx=None, loss=LOSS, *, micro_rows=2, rescore=False):
    return PolicyTrainer(
        MODEL, tx or _sgd(), loss, _mesh(), temperature=TEMPERATURE, chunk=5, micro_rows=micro_rows, rescore=rescore
    )


_trainer = functools.cache(_fresh_trainer)  # tests that count compiles take a fresh one


def _turns(rng, count, success):
    turns = []
    for t in range(count):
        a, o = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        last = t == count - 1
        turns.append(
            Turn(
                action=rng.integers(0, 13, a).astype(np.int32),
                # the fresh model is nearly uniform, log-prob -2.56, so some ratios leave [0.8, 1.28]
                logprobs=(-2.56 + rng.uniform(-0.4, 0.4, a)).astype(np.float32),
                observation=np.zeros(0, np.int32) if last else rng.integers(0, 13, o).astype(np.int32),
                finish=Finish.ANSWER if last else Finish.TURN,
                weight_version=0,
                reward=float(success) if last else None,
                success=float(success) if last else None,
            )
        )
    return turns


def _tree(seed):
    """Three bare rollouts of three turns with outcomes 1, 0, 1 and two continuations of the first anchor."""
    rng = np.random.default_rng(seed)
    tree = grow.new_tree(Prompt(uid=f"p{seed}", tokens=rng.integers(0, 13, 4).astype(np.int32), state=None))
    tree = grow.add_rollouts(tree, [(0, Stage.ROOT_ROLLOUT, _turns(rng, 3, s)) for s in (1, 0, 1)])
    anchor = int(query.anchors(tree)[0])
    return grow.add_rollouts(tree, [(anchor, Stage.CONTINUATION, _turns(rng, 2, s)) for s in (0, 1)])


def _credits(trees):
    credits = [advantage.grpo(tree) for tree in trees]
    weights = aggregate.token_weights(
        trees, credits, mode="sequence_mean_token_mean", prompt_weight="equal", max_tokens=99
    )
    return credits, weights


def _batch(trees, rows_multiple=1):
    return pack.pack_paths(
        trees, *_credits(trees), row_length=48, rows_multiple=rows_multiple, skip_untrained=False
    )


TREES = [_tree(1), _tree(2)]


@jax.jit
def _dense_logprobs(params, tokens):
    """[P, 31] log-probs of tokens 1..31 of rows that hold one rollout each, from column 0; all logits at once."""
    visible_to_all_after = jnp.full(tokens.shape, tokens.shape[1])
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = decoder.hidden_states(MODEL, params, tokens, pos, visible_to_all_after) @ decoder.unembed(MODEL, params)
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1] / TEMPERATURE), tokens[:, 1:, None], axis=2)[..., 0]


def _rollouts(trees):
    """Rollouts as rows [P, 32]; per trained token (rollout, column in the log-probs, old, weight, advantage)."""
    rows, cells = [], []
    for tree, credit, weight in zip(trees, *_credits(trees), strict=True):
        for leaf in query.leaves(tree):
            column = -1
            for node in query.path(tree, leaf):
                for p in np.flatnonzero((credit.leaf == leaf) & (credit.node == node)):
                    for k in range(tree.offset[node], tree.offset[node + 1]):
                        if tree.is_action[k]:
                            at = column + k - tree.offset[node]
                            cells.append((len(rows), at, tree.logprob[k], weight[p], credit.advantage[p]))
                column += tree.offset[node + 1] - tree.offset[node]
            tokens = query.prefix_tokens(tree, leaf)
            rows.append(np.pad(tokens, (0, 32 - tokens.size)))
    return np.stack(rows), [np.array(column) for column in zip(*cells, strict=True)]


def _oracle_loss(params, trees):
    """Sum over trained tokens of -weight * min(r A, clip(r) A), written as in the paper's Eq. 43."""
    rows, (rollout, at, old, weight, a) = _rollouts(trees)
    r = jnp.exp(_dense_logprobs(params, rows)[rollout, at] - old)
    return -jnp.sum(weight * jnp.minimum(r * a, jnp.clip(r, 0.8, 1.28) * a))


def _close(got, want, rtol=2e-5):
    """Equal changes of parameters; what is left of a change of numbers near 1 is a multiple of 2^-23."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.abs(b).max()) + 2**-23, err_msg=name)


@functools.cache
def _params():
    return jax.device_get(jax.jit(functools.partial(decoder.init_params, MODEL))(jax.random.key(0)))


def _moved(trainer, batch, plan=Plan(), seed=0):
    """(parameters after minus before, metrics)."""
    state, metrics = trainer.update(trainer.adopt(_params()), batch, plan, np.random.default_rng(seed))
    return jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, _params()), metrics


def test_one_step_is_the_gradient_of_one_row_per_rollout():
    moved, metrics = _moved(_trainer(), _batch(TREES))
    loss, grads = jax.jit(jax.value_and_grad(lambda params: _oracle_loss(params, TREES)))(_params())
    _close(moved, jax.tree.map(lambda g: -RATE * g, grads), rtol=1e-4)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["train/loss"], loss, rtol=1e-4)
    np.testing.assert_allclose(metrics["train/grad_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["train/update_norm"], RATE * norm, rtol=1e-4)
    assert metrics["train/clip_high"] + metrics["train/clip_low"] > 0.05  # the clip did something here
    assert metrics["train/optimizer_steps"] == 1


def test_a_trunk_in_each_row_gives_the_same_step():
    # the prompt of every tree, 4 tokens, begins with the same 2: once per row instead of once per rollout
    trunk = np.array([5, 9], np.int32)
    trees = [dataclasses.replace(tree, token=np.concatenate([trunk, tree.token[2:]])) for tree in TREES]
    shared = pack.pack_paths(trees, *_credits(trees), row_length=48, rows_multiple=1, skip_untrained=False, trunk=trunk)
    assert np.sum(shared.end > 0) < np.sum(_batch(trees).end > 0)
    moved, metrics = _moved(_trainer(), shared)
    plain, expected = _moved(_trainer(), _batch(trees))
    _close(moved, plain)
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)


def test_counts_and_gap_by_hand():
    batch = _batch(TREES, rows_multiple=8)
    _, metrics = _moved(_trainer(), batch)
    rows, (rollout, at, old, *_) = _rollouts(TREES)
    gap = np.abs(np.asarray(_dense_logprobs(_params(), rows))[rollout, at] - old)
    assert metrics["train/tokens"] == gap.size
    np.testing.assert_allclose(metrics["train/logprob_gap_mean"], gap.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["train/logprob_gap_p99"], np.percentile(gap, 99), rtol=1e-4)
    np.testing.assert_allclose(metrics["train/logprob_gap_max"], gap.max(), rtol=1e-4)
    lengths = [query.prefix_tokens(tree, leaf).size for tree in TREES for leaf in query.leaves(tree)]
    np.testing.assert_allclose(metrics["train/fill_ratio"], sum(lengths) / (8 * 48), rtol=1e-6)
    assert metrics["train/rows"] == np.sum(np.any(batch.end > 0, axis=1)) < 8
    # a nearly uniform distribution over 13 tokens has entropy log 13 = 2.565
    np.testing.assert_allclose(metrics["train/entropy"], np.log(13), atol=0.02)


@pytest.mark.parametrize("micro_rows, rows_multiple", [(1, 1), (2, 1), (8, 16)])
def test_gaps_that_were_planted(micro_rows, rows_multiple):
    """Log-probs of the engine that lie 1, 2, ..., n thousandths of a nat away, above and below, over several rows.

    Sorted gap i (from 0) is (i + 1) / 1000; the 99th percentile lies at i = 0.99 (n - 1), between its neighbours.
    Tokens that are not trained have absurd log-probs and count nowhere, however rows are padded and grouped.
    """
    trainer, batch = _trainer(micro_rows=micro_rows), _batch(TREES, rows_multiple)
    own, trained = trainer.logprobs(trainer.adopt(_params()).params, batch), batch.weight != 0
    n = np.count_nonzero(trained)
    gaps = np.random.default_rng(0).permutation(np.arange(1, n + 1)) / 1000 * np.where(np.arange(n) % 2, 1, -1)
    behaviour = np.full(own.shape, -77, np.float32)
    behaviour[trained] = own[trained] + gaps
    _, metrics = _moved(trainer, dataclasses.replace(batch, behaviour_logprob=behaviour))
    at = 0.99 * (n - 1)
    low = int(at)
    p99 = ((low + 1) * (1 - (at - low)) + (low + 2) * (at - low)) / 1000
    assert n > 20 and np.count_nonzero(trained.any(axis=1)) > 1
    assert metrics["train/logprob_gap_mean"] == pytest.approx((n + 1) / 2000, abs=2e-6)
    assert metrics["train/logprob_gap_p99"] == pytest.approx(p99, abs=2e-6)
    assert metrics["train/logprob_gap_max"] == pytest.approx(n / 1000, abs=2e-6)


def test_micro_batches_add_up():
    want, _ = _moved(_trainer(), _batch(TREES))
    got, _ = _moved(_trainer(micro_rows=8), _batch(TREES))
    _close(got, want)


def test_padding_rows_change_no_bit():
    trainer = _trainer()
    want, _ = _moved(trainer, _batch(TREES))
    got, _ = _moved(trainer, _batch(TREES, rows_multiple=16))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_rescoring_takes_the_ratio_against_the_trainer():
    """r = 1 before the first step: no clipping, KL 0, and the gradient is that of -sum w A log pi."""
    moved, metrics = _moved(_trainer(rescore=True), _batch(TREES))
    assert metrics["train/clip_high"] == metrics["train/clip_low"] == 0 and metrics["train/approx_kl"] < 1e-10
    np.testing.assert_allclose(metrics["train/behaviour_gap"], metrics["train/logprob_gap_mean"], rtol=1e-5)

    def policy_gradient(params):
        rows, (rollout, at, _, weight, a) = _rollouts(TREES)
        return -jnp.sum(weight * a * _dense_logprobs(params, rows)[rollout, at])

    _close(moved, jax.tree.map(lambda g: -RATE * g, jax.jit(jax.grad(policy_gradient))(_params())), rtol=1e-4)


def test_importance_weights_reach_the_loss():
    """All engine log-probs are lower by log 4, so old / behaviour = 4, capped at 2: twice the gradient of weight 1."""
    trainer = _trainer(rescore=True)
    batch = _batch(TREES)
    own = trainer.logprobs(trainer.adopt(_params()).params, batch)
    behaviour = np.where(batch.is_action, own - np.log(4), 0).astype(np.float32)
    batch = dataclasses.replace(batch, behaviour_logprob=behaviour)
    plain, _ = _moved(trainer, batch)
    weighted, metrics = _moved(_trainer(loss=functools.partial(LOSS, tis_cap=2.0), rescore=True), batch)
    _close(weighted, jax.tree.map(lambda x: 2 * x, plain), rtol=1e-4)
    np.testing.assert_allclose(metrics["train/tis_weight"], 2.0, rtol=1e-6)
    assert metrics["train/tis_capped"] == 1
    np.testing.assert_allclose(metrics["train/logprob_gap_mean"], np.log(4), rtol=1e-4)


def test_kl_to_a_reference():
    """Without advantages the loss is kl_coef * sum w k3; at reference == policy value and gradient are zero."""
    loss = functools.partial(LOSS, kl_coef=0.5)
    batch = dataclasses.replace(_batch(TREES), adv_pos=np.zeros_like(_batch(TREES).weight))
    batch = dataclasses.replace(batch, adv_neg=batch.adv_pos)
    trainer = _trainer(loss=loss)
    state = trainer.adopt(_params())
    _, metrics = trainer.update(state, batch, Plan(), np.random.default_rng(0), ref_params=_params())
    assert abs(metrics["train/loss"]) < 1e-9 and metrics["train/grad_norm"] < 1e-6
    other = jax.tree.map(lambda p: p + 0.05, _params())
    ref, new = (trainer.logprobs(trainer.adopt(p).params, batch) for p in (other, _params()))
    want = 0.5 * np.sum(batch.weight * (np.exp(ref - new) - 1 - (ref - new)))
    state, metrics = trainer.update(
        trainer.adopt(_params()), batch, Plan(), np.random.default_rng(0), ref_params=trainer.adopt(other).params
    )
    np.testing.assert_allclose(metrics["train/loss"], want, rtol=1e-3)


def test_kl_after_is_measured_on_the_new_parameters():
    trainer = _trainer(rescore=True)
    batch = _batch(TREES)
    state = trainer.adopt(_params())
    old = trainer.logprobs(state.params, batch)
    state, metrics = trainer.update(state, batch, Plan(measure_kl=True), np.random.default_rng(0))
    d = (trainer.logprobs(state.params, batch) - old)[batch.weight != 0].astype(np.float64)
    np.testing.assert_allclose(metrics["train/kl_after"], np.mean(np.exp(d) - 1 - d), rtol=1e-5)
    assert metrics["train/kl_after"] > 1e-6
    assert "train/kl_after" not in _moved(trainer, batch)[1]


def test_mini_batches_and_epochs():
    """2 epochs of 3 mini-batches replayed by hand with single steps on the same rows, each scaled by 3."""
    batch, plan = _batch(TREES), Plan(epochs=2, mini_batches=3)
    count = int(np.sum(np.any(batch.end > 0, axis=1)))
    assert count >= 3
    trainer = _trainer()
    got, metrics = trainer.update(trainer.adopt(_params()), batch, plan, np.random.default_rng(7))
    assert metrics["train/optimizer_steps"] == 6 == int(got.step)
    rng, state, single = np.random.default_rng(7), trainer.adopt(_params()), []
    for _ in range(2):
        for part in np.array_split(rng.permutation(count), 3):
            rows = {f.name: getattr(batch, f.name)[part] for f in dataclasses.fields(batch)}
            rows |= {name: 3 * rows[name] for name in ("adv_pos", "adv_neg")}
            state, one = trainer.update(state, type(batch)(**rows), Plan(), np.random.default_rng(0))
            single.append(one)
    _close(got.params, state.params)
    for name in ("train/loss", "train/grad_norm", "train/update_norm"):
        np.testing.assert_allclose(metrics[name], np.mean([one[name] for one in single]), rtol=1e-4)
    for name in ("mean", "p99", "max"):  # of the policy that sampled, so the first step's
        name = f"train/logprob_gap_{name}"
        np.testing.assert_allclose(metrics[name], single[0][name], rtol=1e-5)
    again, _ = trainer.update(trainer.adopt(_params()), batch, plan, np.random.default_rng(7))
    jax.tree.map(np.testing.assert_array_equal, again, got)
    other, _ = trainer.update(trainer.adopt(_params()), batch, plan, np.random.default_rng(8))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(other.params), jax.tree.leaves(got.params), strict=True))


def test_one_compile_whatever_the_batch():
    base = optimizer.adamw(optimizer.constant(1e-3), b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1)
    trainer = _fresh_trainer(optimizer.build(base, clip_norm=1.0, max_update_norm=0.03), rescore=True)
    state = trainer.init(jax.random.key(0))
    for trees, plan in ((TREES, Plan(measure_kl=True)), (TREES[:1], Plan(epochs=2)), (TREES, Plan(mini_batches=2))):
        state, _ = trainer.update(state, _batch(trees), plan, np.random.default_rng(0))
    assert trainer.compiles() == {"accumulate": 1, "apply": 1, "score": 1}


def test_the_old_state_is_donated_and_adopted_parameters_are_not():
    trainer = _trainer()
    params = jax.device_put(_params())
    state = trainer.adopt(params)
    new, _ = trainer.update(state, _batch(TREES), Plan(), np.random.default_rng(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, params)))


def test_without_trained_tokens_nothing_happens():
    trainer = _trainer()
    batch = pack.pack_paths([], [], [], row_length=48, rows_multiple=2, skip_untrained=True)
    state = trainer.adopt(_params())
    same, metrics = trainer.update(state, batch, Plan(), np.random.default_rng(0))
    assert same is state and metrics["train/optimizer_steps"] == 0 and metrics["train/tokens"] == 0


def test_a_gradient_that_is_not_finite_stops_the_run():
    batch = _batch(TREES)
    bad = dataclasses.replace(batch, adv_pos=np.where(batch.adv_pos > 0, np.float32(np.inf), batch.adv_pos))
    with pytest.raises(FloatingPointError, match="step 1 of 1 of this batch; resume from the last checkpoint"):
        _moved(_trainer(), bad)


def test_impossible_plans_are_named():
    with pytest.raises(ValueError, match="epochs 0 and mini_batches 1"):
        Plan(epochs=0).validate()


def test_abstract_state_matches_a_real_one():
    trainer = _trainer()
    real, abstract = trainer.init(jax.random.key(0)), trainer.abstract_state()
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    _close(real.params, _params())


def test_row_logprobs_follow_prev_across_packed_rollouts():
    batch = _batch(TREES[:1])
    rows = {name: jnp.asarray(getattr(batch, name)) for name in ("token", "pos", "prev", "end")}
    logprobs = functools.partial(policy_step.row_logprobs, MODEL, temperature=TEMPERATURE, chunk=7)
    got, _ = jax.jit(logprobs)(_params(), rows)
    found = 0
    for b in range(batch.shape[0]):
        for start in np.flatnonzero((batch.prev[b] == -1) & (batch.end[b] > 0)):
            stop = batch.end[b, start]
            alone = np.pad(batch.token[b, start:stop], (0, 32 - stop + start))[None]
            want = _dense_logprobs(_params(), jnp.asarray(alone))[0, : stop - start - 1]
            np.testing.assert_allclose(got[b, start + 1 : stop], want, atol=1e-5)
            found += 1
    assert found == len(query.leaves(TREES[0]))


def test_row_logprobs_at_a_fork():
    """A tree in one row: prompt a b c, then two branches d e and f g that both follow c.

    index   0 1 2 3 4 5 6        pos and prev count along the own path: f (index 5) is at depth 3 and predicted at c
    token   a b c d e f g        (index 2); nobody after index 4 sees d and e, whose subtree ends there.
    """
    token = np.array([[1, 4, 2, 7, 9, 3, 12]], np.int32)
    rows = {
        "token": token,
        "pos": np.array([[0, 1, 2, 3, 4, 3, 4]], np.int32),
        "prev": np.array([[-1, 0, 1, 2, 3, 2, 5]], np.int32),
        "end": np.array([[7, 7, 7, 5, 5, 7, 7]], np.int32),
    }
    logprobs = jax.jit(functools.partial(policy_step.row_logprobs, MODEL, temperature=TEMPERATURE, chunk=7))
    got, _ = logprobs(_params(), rows)
    branches = np.stack([np.pad(token[0, [0, 1, 2, *branch]], (0, 27)) for branch in ((3, 4), (5, 6))])
    first, second = np.asarray(_dense_logprobs(_params(), jnp.asarray(branches)))[:, :4]
    np.testing.assert_allclose(got[0, 1:5], first, atol=1e-5)
    np.testing.assert_allclose(got[0, 5:], second[2:], atol=1e-5)
