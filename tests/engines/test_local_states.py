"""The engine's record of states: against packed rows of the trainer's forward, and against itself in another order."""

import asyncio
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.engines.base import EngineError
from trace_jax.engines.local import LocalEngine, LocalEngineConfig, record_key
from trace_jax.models import decoder, state_features
from trace_jax.models.config import DecoderConfig
from trace_jax.types import GenerateRequest

MODEL = DecoderConfig(
    vocab_size=11, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48, rope_theta=1e4
)
FEATURES = state_features.of_policy(MODEL, layers=2, max_size=40)  # of 64 numbers: projected
TRUNK = np.random.default_rng(5).integers(2, 11, 13).astype(np.int32)
CONTEXT = 48


@functools.cache
def make_params(seed=0):
    """N(0, 0.4^2) everywhere, drawn on the host: nothing to compile."""
    shapes, rng = jax.eval_shape(lambda: decoder.init_params(MODEL, jax.random.key(0))), np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32), shapes)


async def make_engine(trunk=()):
    config = LocalEngineConfig(slots=4, cache_rows=48, context_length=CONTEXT, prefill_rows=2, prefill_chunk=4)
    engine = LocalEngine(MODEL, config, features=FEATURES)
    await engine.set_weights(make_params(), 0)
    await engine.preload(np.asarray(trunk, np.int32))
    return engine


def request(history, key=(0,)):
    return GenerateRequest(np.asarray(history, np.int32), 6, 0.7, (0, 1), key)


async def episode(engine, i, trunk, sleep=None):
    """Three turns with made-up observations, the second one forked twice."""
    rng, history = np.random.default_rng(i), np.concatenate([trunk, [2, 3, 4 + i % 3]]).astype(np.int32)
    for turn in range(3):
        if sleep:
            await asyncio.sleep(sleep.random() * 0.01)
        generation = await engine.generate(request(history, (7, i, turn)))
        if turn == 1:
            await asyncio.gather(*(engine.generate(request(history, (8, i, k))) for k in range(2)))
        history = np.concatenate([history, generation.tokens, rng.integers(2, 11, 3)]).astype(np.int32)


def run_episodes(order, trunk, sleep=None):
    async def main():
        engine = await make_engine(trunk)
        await asyncio.gather(*(episode(engine, i, trunk, sleep) for i in order))
        return engine

    return asyncio.run(main())


@jax.jit
def of_rows(params, token, n):
    return FEATURES.of_rows(params, token, jnp.arange(CONTEXT)[None], jnp.full((1, CONTEXT), n))[0, n - 1]


def expected(history, params=None):
    row = np.pad(np.asarray(history), (0, CONTEXT - len(history)))[None]
    return np.asarray(of_rows(params or make_params(), row, len(history)))


def assert_equal_to_rounding(found, wanted):
    assert found.shape == wanted.shape and found.dtype == np.float32
    assert np.max(np.abs(found - wanted)) < 1e-4 * np.sqrt(np.mean(np.square(wanted)))


@pytest.mark.parametrize("trunk", [(), TRUNK], ids=["bare", "trunk"])
def test_every_history_is_on_record_with_the_features_of_packed_rows(trunk):
    """Prompts, forks and turns that were reached through cached rows: 3 histories of each of 6 episodes, 3 prompts."""
    engine = run_episodes(range(6), trunk)
    record = engine.state_record
    assert engine.compiles() == {"preload": int(len(trunk) > 0), "copy": 2, "prefill": 1, "decode": 1}
    assert len(record) == 3 + 6 * 2
    for key, features in record.items():
        assert_equal_to_rounding(features, expected(np.frombuffer(key, np.int32)))


@pytest.mark.parametrize("trunk", [(), TRUNK], ids=["bare", "trunk"])
def test_the_record_does_not_depend_on_order_or_neighbours_bit_for_bit(trunk):
    order = list(range(6))
    one = run_episodes(order, trunk).state_record
    random.Random(1).shuffle(order)
    other = run_episodes(order, trunk, random.Random(2)).state_record

    async def asked_first():
        """One after another, most of them computed by `states` and not by the turn that is asked for afterwards."""
        engine = await make_engine(trunk)
        for i in order:
            await engine.states([np.concatenate([trunk, [2, 3, 4 + i % 3]])])
            await episode(engine, i, trunk)
        return engine.state_record

    for again in (other, asyncio.run(asked_first())):
        assert one.keys() == again.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], again[key])


def test_states_come_from_the_record_or_cost_their_tokens_once():
    async def main():
        engine = await make_engine()
        history, new = np.array([2, 3, 4, 5], np.int32), np.array([2, 3, 4, 7, 8, 9], np.int32)
        generation = await engine.generate(request(history))
        (known,) = await engine.states([history])
        assert engine.stats() == {"cache_evictions": 0, "scored_tokens": 0}
        np.testing.assert_array_equal(known, engine.state_record[record_key(history)])
        found = await engine.states([new, history, new.tolist()])
        # [2, 3, 4] is in the cache already; 7, 8 and 9 are computed, once for both.
        assert engine.stats()["scored_tokens"] == 3
        np.testing.assert_array_equal(found[0], found[2])
        np.testing.assert_array_equal(found[1], known)
        assert_equal_to_rounding(found, np.stack([expected(h) for h in (new, history, new)]))
        # A turn that follows finds all but the last token; another salt finds nothing.
        assert (await engine.generate(request(new))).cached_tokens == 5
        assert (await engine.states([], "other")).shape == (0, FEATURES.size)
        await engine.states([np.append(new, 3)], "other")
        assert engine.stats()["scored_tokens"] == 3 + 7
        # What is sampled does not change by what was asked for before.
        cold = await make_engine()
        np.testing.assert_array_equal((await cold.generate(request(history))).tokens, generation.tokens)

    asyncio.run(main())


def test_new_weights_and_another_trunk_begin_a_record_and_the_same_trunk_does_not():
    async def main():
        engine, history = await make_engine(TRUNK), np.append(TRUNK, 5)
        (old,) = await engine.states([history])
        first = engine.state_record
        await engine.preload(TRUNK)
        assert engine.state_record is first and len(first) == 1
        await engine.preload([])
        assert engine.state_record == {} and first[record_key(history)] is not None
        assert_equal_to_rounding((await engine.states([history]))[0], old)
        await engine.set_weights(make_params(1), 1)
        assert engine.state_record == {}
        (new,) = await engine.states([history])
        assert_equal_to_rounding(new, expected(history, make_params(1)))
        assert np.abs(new - old).max() > 0.1

    asyncio.run(main())


def test_an_engine_without_features_keeps_no_states():
    plain = LocalEngine(MODEL, LocalEngineConfig(slots=1))
    assert plain.state_record == {} and plain.stats() == {"cache_evictions": 0}
    with pytest.raises(ValueError, match="keeps no states"):
        asyncio.run(plain.states([np.array([2])]))


def test_histories_that_can_never_be_served_are_refused_and_leave_nothing_behind():
    async def main():
        engine = await make_engine()
        for bad, message in [([], "does not fit"), ([2] * CONTEXT, "does not fit"), ([2, 11], "vocabulary of 11")]:
            with pytest.raises(EngineError, match=message):
                await engine.states([[2, 3], bad])
        assert engine.state_record == {} and not engine._queue
        task = asyncio.create_task(engine.states([[2, 3], [4, 5, 6]]))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="while requests are running"):
            await engine.set_weights(make_params(1), 1)
        assert (await task).shape == (2, FEATURES.size)
        await engine.close()
        with pytest.raises(EngineError, match="no weights"):
            await LocalEngine(MODEL, LocalEngineConfig(slots=1), features=FEATURES).states([[2]])

    asyncio.run(main())
