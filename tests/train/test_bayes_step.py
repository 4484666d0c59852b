"""The belief and its scores against a general optimiser, hand derivations and Monte Carlo, on features from a table."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from scipy import optimize, special

from trace_jax.train import checkpoint, replay, sharding
from trace_jax.train.bayes_step import BayesianTrainer
from trace_jax.train.state_record import StateRecord
from trace_jax.tree import pack

ROWS, LENGTH, TOKENS, SIZE = 2, 8, 12, 3
# A history's features are those of its last token: the last three rows are e_0, 10 e_0, and all zero.
TABLE = np.random.default_rng(0).standard_normal((TOKENS, SIZE)).astype(np.float32)
TABLE[-3:] = [[1, 0, 0], [10, 0, 0], [0, 0, 0]]
UNIT, TEN, NOTHING = TOKENS - 3, TOKENS - 2, TOKENS - 1
RNG = np.random.default_rng(0)  # a fit takes one and does not use it


@functools.cache
def trainer_of(*, prior_precision=2.0, remembered=1.0, draws=1):
    return BayesianTrainer(
        lambda table, token, pos, end: table[token],
        SIZE,
        sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
        prior_precision=prior_precision,
        remembered=remembered,
        draws=draws,
        batch_rows=ROWS,
        row_length=LENGTH,
    )


def examples_of(tokens, target, count=None, weight=None):
    """One history for each token, [1, 1, token], and what came of it."""
    n = len(tokens)
    return replay.Examples(
        prefixes=tuple(np.array([1, 1, token], np.int32) for token in tokens),
        target=np.asarray(target, np.float32),
        count=np.ones(n, np.int32) if count is None else np.asarray(count, np.int32),
        is_root=np.arange(n) % 2 == 0,
        weight=None if weight is None else np.asarray(weight, np.float32),
    )


def noise(n, seed=0):
    rng = np.random.default_rng(seed)
    return examples_of(rng.integers(0, TOKENS - 3, n), rng.random(n), rng.integers(1, 6, n), rng.random(n) + 0.5)


def fit(trainer, state, examples, epochs=30):
    return trainer.fit(state, TABLE, examples, RNG, epochs=epochs)


def start(trainer):
    return trainer.init(jax.random.key(0))


def belief(state):
    """(mean, precision) in float64, and that the spread is of the same belief."""
    mean, factor, spread = (np.asarray(state.params[name], np.float64) for name in ("mean", "factor", "spread"))
    precision = factor @ factor.T
    np.testing.assert_allclose(spread @ spread.T @ precision, np.eye(SIZE + 1), atol=1e-4)
    return mean, precision


def inputs(examples):
    """The rows of the table with a 1 behind them, and the weight of each."""
    last = [prefix[-1] for prefix in examples.prefixes]
    return np.column_stack([TABLE[last].astype(np.float64), np.ones(examples.size)]), examples.count * examples.weight


def penalised(w, examples, centre, precision):
    x, n = inputs(examples)
    p = special.expit(x @ w)
    nats = -np.sum(n * (examples.target * np.log(p) + (1 - examples.target) * np.log(1 - p)))
    return nats + (w - centre) @ precision @ (w - centre) / 2


def best(*problem):
    """The minimum by a method without derivatives of its own making, to about 1e-5."""
    return optimize.minimize(penalised, np.zeros(SIZE + 1), problem, method="BFGS", options={"gtol": 1e-6}).x


def curvature(w, examples):
    """sum n s (1 - s) x x', one example after the other."""
    total = np.zeros((SIZE + 1, SIZE + 1))
    for x, n in zip(*inputs(examples), strict=True):
        s = 1 / (1 + np.exp(-x @ w))
        total += n * s * (1 - s) * np.outer(x, x)
    return total


PRIOR = np.diag([2.0, 2.0, 2.0, 0.01])


def score(trainer, state, tokens):
    """Scores of the histories [1, 1, token], each in a row of its own; with draws [S, n]."""
    rows = rows_of(tokens)
    return trainer.score(state.params, TABLE, rows)[..., 2]


def rows_of(tokens):
    token = np.zeros((len(tokens), LENGTH), np.int32)
    token[:, :2], token[:, 2] = 1, tokens
    pos, end = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), token.shape), np.full_like(token, LENGTH)
    return {"token": token, "pos": pos, "end": end}


def test_a_fit_is_the_minimum_of_the_penalised_likelihood_and_its_curvature():
    trainer, examples = trainer_of(), noise(40)
    state, metrics = fit(trainer, start(trainer), examples)
    mean, precision = belief(state)
    want = best(examples, np.zeros(SIZE + 1), PRIOR)
    np.testing.assert_allclose(mean, want, atol=1e-4)
    np.testing.assert_allclose(precision, PRIOR + curvature(want, examples), rtol=1e-4, atol=1e-4)
    x, n = inputs(examples)
    gradient = x.T @ (n * (0.5 - examples.target))
    assert metrics == {
        "predictor/examples": 40,
        "predictor/prefix_share": 0.5,
        "predictor/optimizer_steps": metrics["predictor/optimizer_steps"],
        "predictor/loss": pytest.approx(np.log(2)),  # a score of one half before the fit
        "predictor/grad_norm": pytest.approx(np.linalg.norm(gradient)),
        "predictor/update_norm": pytest.approx(np.linalg.norm(want), abs=1e-4),
    }
    assert 2 <= metrics["predictor/optimizer_steps"] <= 6 and int(state.step) == 1
    again, _ = trainer.fit_steps(start(trainer), TABLE, examples, RNG, steps=30)
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.parametrize("remembered", [1.0, 0.6])
def test_the_next_fit_starts_from_what_is_remembered(remembered):
    """f = .6: precision f P + .4 P_0 around the point that solves it, and another general minimum."""
    trainer = trainer_of(remembered=remembered)
    state, _ = fit(trainer, start(trainer), noise(30, 1))
    mean, precision = belief(state)
    kept = remembered * precision + (1 - remembered) * PRIOR
    centre = remembered * np.linalg.inv(kept) @ precision @ mean
    state, metrics = fit(trainer, state, noise(20, 2))
    want = best(noise(20, 2), centre, kept)
    np.testing.assert_allclose(belief(state)[0], want, atol=1e-4)
    np.testing.assert_allclose(belief(state)[1], kept + curvature(want, noise(20, 2)), rtol=1e-4, atol=1e-4)
    assert metrics["predictor/loss"] == pytest.approx(
        penalised(mean, noise(20, 2), mean, kept) / np.sum(inputs(noise(20, 2))[1]), rel=1e-5
    )


def test_one_feature_by_hand():
    """e_0 and its opposite outcome on NOTHING's constant: n outcomes with mean .5 leave the mean at 0, and each fit
    adds n / 4 to the constant's precision; on e_0 it adds n / 4 to the constant's, to e_0's, and to the two together.
    With f = .5 the second fit halves what the first one added."""
    for remembered, share in ((1.0, 1.0), (0.5, 0.5)):
        trainer = trainer_of(remembered=remembered)
        state, _ = fit(trainer, start(trainer), examples_of([NOTHING], [0.5], [12]))
        np.testing.assert_allclose(np.diag(belief(state)[1]), [2, 2, 2, 3.01], rtol=1e-6)
        state, metrics = fit(trainer, state, examples_of([UNIT], [0.5], [8]))
        want = PRIOR + np.diag([2, 0, 0, 3 * share + 2])
        want[0, 3] = want[3, 0] = 2
        np.testing.assert_allclose(belief(state)[1], want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(state.params["mean"], 0.0)
        assert metrics["predictor/optimizer_steps"] == 0 and int(state.step) == 2


def test_two_fits_of_small_effects_are_about_one_fit_of_both():
    """Under a prior of precision 200 logits stay below .1, where the likelihood is close to Gaussian."""
    trainer, parts = trainer_of(prior_precision=200.0), [noise(10, seed) for seed in (3, 4)]
    state = start(trainer)
    for part in parts:
        balanced = dataclasses.replace(part, target=0.5 + 0.1 * (part.target - 0.5))
        state, _ = fit(trainer, state, balanced)
    both = replay.concatenate(parts)
    joint, _ = fit(trainer, start(trainer), dataclasses.replace(both, target=0.5 + 0.1 * (both.target - 0.5)))
    scale = np.max(np.abs(belief(joint)[0]))
    assert scale > 0.01
    np.testing.assert_allclose(belief(state)[0], belief(joint)[0], atol=0.01 * scale)
    np.testing.assert_allclose(belief(state)[1], belief(joint)[1], rtol=1e-2, atol=0.02)


def test_counts_and_weights_are_outcomes():
    """3 outcomes with mean 1/3 are the outcomes 0, 0, 1; an example of weight .5 twice is one of weight 1."""
    trainer, others = trainer_of(), noise(5)
    one = replay.concatenate([others, examples_of([4], [1 / 3], [3]), examples_of([5], [0.9], [2])])
    split = replay.concatenate(
        [others, examples_of([4, 4, 4], [0, 0, 1]), examples_of([5, 5], [0.9, 0.9], [2, 2], [0.5, 0.5])]
    )
    a, b = (belief(fit(trainer, start(trainer), examples)[0]) for examples in (one, split))
    np.testing.assert_allclose(a[0], b[0], atol=1e-6)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-5, atol=1e-5)


def test_one_epoch_is_one_newton_step():
    """From the prior, where s = 1/2: w = (P_0 + X' N X / 4)^-1 X' N (y - 1/2)."""
    trainer, examples = trainer_of(), noise(40)
    state, metrics = fit(trainer, start(trainer), examples, epochs=1)
    x, n = inputs(examples)
    want = np.linalg.inv(PRIOR + (x.T * n) @ x / 4) @ x.T @ (n * (examples.target - 0.5))
    np.testing.assert_allclose(belief(state)[0], want, atol=1e-5)
    assert metrics["predictor/optimizer_steps"] == 1


def test_steps_that_lead_too_far_are_halved():
    """Far out s (1 - s) vanishes, and a whole Newton step on this outcome would throw the logit to the other side."""
    trainer = trainer_of(prior_precision=1e-3)
    state = start(trainer)
    far = dataclasses.replace(state, params=state.params | {"mean": np.array([30, 0, 0, 0], np.float32)})
    examples = examples_of([UNIT], [0.4], [50])
    prior = np.diag([1e-3, 1e-3, 1e-3, 0.01])
    centre = np.array([30.0, 0, 0, 0])
    values = [penalised(centre, examples, centre, prior)]
    for epochs in (1, 2, 3):
        mean = belief(fit(trainer, far, examples, epochs)[0])[0]
        assert abs(mean[0]) < 100  # 30 nats of slope over a curvature of 1e-3 would be 20 000 away
        values.append(penalised(mean, examples, centre, prior))
    assert values[0] > values[1] > values[2] > values[3]
    np.testing.assert_allclose(belief(fit(trainer, far, examples)[0])[0], best(examples, centre, prior), atol=2e-3)


def test_outcomes_that_a_line_separates_stay_finite():
    trainer = trainer_of(prior_precision=1e-4)
    state, examples = start(trainer), examples_of([TEN, NOTHING], [1, 0], [1000, 1000])
    for _ in range(5):
        state, _ = fit(trainer, state, examples)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))
    np.testing.assert_allclose(score(trainer, state, [TEN, NOTHING]), [1, 0], atol=1e-3)


def test_a_belief_that_remembers_everything_lasts():
    """40 fits of 1800 outcomes with features of length 1000 along one line: its precision grows to 1e11, what nothing
    is known about keeps the prior's. A precision rounded to float32 at each step would soon be indefinite."""
    table = (1000 * np.ones((TOKENS, SIZE)) + 0.1 * TABLE).astype(np.float32)
    trainer = trainer_of()
    state = start(trainer)
    for seed in range(40):
        examples = dataclasses.replace(noise(6, seed), count=np.full(6, 300, np.int32))
        state, _ = trainer.fit(state, table, examples, RNG, epochs=1)
    factor, spread = (np.asarray(state.params[name], np.float64) for name in ("factor", "spread"))
    values = np.linalg.eigvalsh(factor @ factor.T)
    assert values[0] > 0.009 and values[-1] > 1e10 and np.all(np.isfinite(spread))


def test_nothing_to_fit_changes_nothing():
    trainer = trainer_of(remembered=0.6)
    state, _ = fit(trainer, start(trainer), noise(5))
    none = replay.concatenate([])
    for after, metrics in (
        fit(trainer, state, none),
        trainer.fit_steps(state, TABLE, none, RNG, steps=3),
    ):
        assert after is state
        assert metrics == {f"predictor/{k}": 0 for k in ("examples", "prefix_share", "optimizer_steps")}


def test_forgetting_widens_what_is_no_longer_seen():
    """After 24 fits elsewhere the standard deviation along e_0 is nearly the prior's, sqrt(1 / 2), with f = .6; with
    f = 1 it stays what it was."""
    deviations = {}
    for remembered in (1.0, 0.6):
        trainer = trainer_of(remembered=remembered)
        state, _ = fit(trainer, start(trainer), examples_of([UNIT, NOTHING], [0.5, 0.5], [400, 400]))
        found = [np.linalg.inv(belief(state)[1])[0, 0]]
        for _ in range(24):
            state, _ = fit(trainer, state, examples_of([NOTHING], [0.5], [400]))
            found.append(np.linalg.inv(belief(state)[1])[0, 0])
        deviations[remembered] = np.sqrt(found)
    assert np.all(np.diff(deviations[0.6]) > -1e-6) and deviations[0.6][0] < 0.2
    assert deviations[0.6][-1] == pytest.approx(np.sqrt(0.5), rel=1e-2)
    assert deviations[1.0][-1] <= deviations[1.0][0] == pytest.approx(deviations[0.6][0], rel=1e-6)


def test_a_score_is_the_sigmoid_at_the_mean_and_of_the_prior_one_half():
    trainer = trainer_of()
    np.testing.assert_array_equal(score(trainer, start(trainer), range(TOKENS)), np.float32(0.5))
    state, _ = fit(trainer, start(trainer), noise(40))
    mean = np.asarray(state.params["mean"], np.float64)
    want = 1 / (1 + np.exp(-(TABLE @ mean[:-1] + mean[-1])))
    got = score(trainer, state, range(TOKENS))
    assert got.shape == (TOKENS,) and got.dtype == np.float32 and np.ptp(got) > 0.05
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_draws_have_the_mean_and_spread_of_the_belief():
    """401 quantiles against 200 000 weights drawn from N(mean, precision^-1)."""
    trainer = trainer_of(draws=401)
    state, _ = fit(trainer, start(trainer), noise(4, 7))
    draws = score(trainer, state, np.delete(np.arange(TOKENS), TEN))
    mean, precision = belief(state)
    sampled = np.random.default_rng(0).multivariate_normal(mean, np.linalg.inv(precision), 200_000)
    want = 1 / (1 + np.exp(-(sampled[:, :-1] @ np.delete(TABLE, TEN, 0).T + sampled[:, -1:])))
    assert draws.shape == (401, TOKENS - 1) and np.all(np.diff(draws, axis=0) > 0) and np.min(np.std(draws, 0)) > 0.05
    np.testing.assert_allclose(draws.mean(0), want.mean(0), atol=3e-3)
    np.testing.assert_allclose(draws.std(0), want.std(0), rtol=1e-2)
    np.testing.assert_allclose(np.median(draws, 0), np.median(want, 0), atol=3e-3)


@pytest.mark.parametrize("draws", [1, 5])
def test_on_the_host_from_features_it_says_the_same(draws):
    trainer = trainer_of(draws=draws)
    state, _ = fit(trainer, start(trainer), noise(40))
    got = trainer.probability(state.params, TABLE)
    assert got.dtype == np.float64 and got.shape == ((TOKENS,) if draws == 1 else (draws, TOKENS))
    np.testing.assert_allclose(got, score(trainer, state, range(TOKENS)), atol=1e-6)
    assert trainer.probability(state.params, TABLE[:0]).shape[-1] == 0


def test_a_record_of_features_is_fitted_as_the_policy_that_made_it():
    trainer, examples = trainer_of(), noise(40)
    record = StateRecord({prefix.tobytes(): TABLE[prefix[-1]] for prefix in examples.prefixes})
    from_record, metrics = trainer.fit(start(trainer), record, examples, RNG, epochs=30)
    from_policy, same = fit(trainer, start(trainer), examples)
    jax.tree.map(np.testing.assert_array_equal, from_record, from_policy)
    assert metrics == same


@pytest.mark.parametrize("draws", [1, 5])
def test_bits_of_a_row_depend_on_the_row_alone(draws):
    trainer = trainer_of(draws=draws)
    state, _ = fit(trainer, start(trainer), noise(40))
    tokens = np.arange(TOKENS - 1)  # the last pass is filled up
    whole, order = score(trainer, state, tokens), np.random.default_rng(3).permutation(TOKENS - 1)
    np.testing.assert_array_equal(score(trainer, state, tokens[order]), whole[..., order])
    for i in (0, 4, 7):
        np.testing.assert_array_equal(score(trainer, state, tokens[i : i + 1])[..., 0], whole[..., i])


def test_histories_of_many_lengths_are_found_where_they_end():
    """30 histories, some the beginnings of others, in several passes: as with the inputs gathered by hand."""
    trainer, rng = trainer_of(), np.random.default_rng(5)
    whole = [rng.integers(0, TOKENS, LENGTH).astype(np.int32) for _ in range(10)]
    prefixes = tuple(tokens[:n] for tokens in whole for n in (2, 5, 8))
    target = rng.random(30).astype(np.float32)
    examples = replay.Examples(prefixes, target, np.ones(30, np.int32), np.zeros(30, bool))
    assert pack.pack_prefixes(prefixes, target, target, row_length=LENGTH, rows_multiple=1)[0].token.shape[0] > 2 * ROWS
    state, _ = fit(trainer, start(trainer), examples)
    np.testing.assert_allclose(belief(state)[0], best(examples, np.zeros(SIZE + 1), PRIOR), atol=1e-4)


def test_states_are_kept_and_a_checkpoint_is_the_state(tmp_path):
    """Also that `abstract_state` is its form, and that what comes back fits on to the same bits."""
    trainer = trainer_of(remembered=0.6)
    state, _ = fit(trainer, start(trainer), noise(9))
    real, abstract = jax.tree.leaves(state), jax.tree.leaves(trainer.abstract_state())
    assert jax.tree.structure(state) == jax.tree.structure(trainer.abstract_state())
    for a, b in zip(real, abstract, strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    saver = checkpoint.Checkpointer(tmp_path, fingerprint={"seed": 0}, keep=1)
    saver.save(checkpoint.Snapshot(step=1, arrays={"predictor": state}, host={}, document={}))
    found = saver.restore_latest({"predictor": trainer.abstract_state()}).arrays["predictor"]
    saver.close()
    jax.tree.map(np.testing.assert_array_equal, found, state)
    after, again = (fit(trainer, one, noise(9, 1))[0] for one in (state, found))
    jax.tree.map(np.testing.assert_array_equal, after, again)
    assert np.any(np.asarray(after.params["mean"]) != np.asarray(state.params["mean"])) and int(after.step) == 2


def test_what_is_not_finite_stops_the_run():
    trainer = trainer_of()
    table = TABLE.copy()
    table[3] = np.nan
    for bad, rows in ((examples_of([3], [1]), table), (examples_of([4], [np.nan]), TABLE)):
        with pytest.raises(FloatingPointError, match="predictor update: the gradient's norm is nan"):
            trainer.fit(start(trainer), rows, bad, RNG, epochs=1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prior_precision": 0.0}, "prior_precision 0.0,"),
        ({"remembered": 0.0}, "remembered 0.0,"),
        ({"remembered": 1.1}, "remembered 1.1,"),
        ({"draws": 0}, "draws 0;"),
    ],
)
def test_settings_that_make_no_belief(change, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(**change)


def test_one_compile():
    trainer = trainer_of()  # after all tests above
    assert trainer.compiles()["score"] <= 1 and trainer.compiles()["update"] <= 1
    fit(trainer, start(trainer), noise(3))
    score(trainer, start(trainer), [1])
    assert trainer.compiles() == {"score": 1, "update": 1}


def test_without_a_step_nothing_is_learnt_and_nothing_is_forgotten():
    """A precision that took in outcomes which the mean did not would be sure of what it never learnt."""
    trainer = trainer_of(remembered=0.5)
    state, _ = fit(trainer, start(trainer), noise(20))
    after, report = trainer.fit_steps(state, TABLE, noise(20, seed=1), RNG, steps=0)
    assert after is state and report["predictor/optimizer_steps"] == 0
