"""The preloaded trunk: against the same engine without one, against the trainer's forward, and counted by hand."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.engines.base import EngineError
from trace_jax.engines.local import LocalEngine, LocalEngineConfig
from trace_jax.models import decoder
from trace_jax.models.config import DecoderConfig
from trace_jax.types import GenerateRequest

MODEL = DecoderConfig(
    vocab_size=11, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48, rope_theta=1e4
)
TRUNK = np.random.default_rng(5).integers(2, 11, 21).astype(np.int32)
CONTEXT = 60


def make_params(seed=0):
    params = decoder.init_params(MODEL, jax.random.key(seed))
    return {**params, "embed": {"embedding": params["embed"]["embedding"] * 10}}


def make_engine(**change):
    shapes = {"slots": 4, "cache_rows": 32, "context_length": CONTEXT, "prefill_rows": 2, "prefill_chunk": 4}
    return LocalEngine(MODEL, LocalEngineConfig(**shapes | change))


def request(tokens, key=(0,), **change):
    fields = {"max_new_tokens": 6, "temperature": 0.7, "stop_ids": (0, 1), **change}
    return GenerateRequest(tokens=np.asarray(tokens, np.int32), key=key, **fields)


async def episode(engine, i, turns=3):
    rng, out = np.random.default_rng(i), []
    history = np.concatenate([TRUNK, [2, 3, 4 + i % 3]]).astype(np.int32)
    for turn in range(turns):
        generation = await engine.generate(request(history, key=(7, i, turn)))
        out.append((history, generation))
        history = np.concatenate([history, generation.tokens, rng.integers(2, 11, 3)]).astype(np.int32)
    return out


def run_episodes(order, trunk=TRUNK, **change):
    async def main():
        engine = make_engine(**change)
        await engine.set_weights(make_params(), 0)
        await engine.preload(trunk)
        return engine, dict(zip(order, await asyncio.gather(*(episode(engine, i) for i in order))))

    return asyncio.run(main())


def pairs(one, other):
    for i in one:
        for (history, a), (other_history, b) in zip(one[i], other[i], strict=True):
            np.testing.assert_array_equal(history, other_history)
            yield a, b


def test_a_trunk_changes_nothing_but_the_accounts():
    engine, with_trunk = run_episodes(range(9))
    _, without = run_episodes(range(9), trunk=[])
    for a, b in pairs(with_trunk, without):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.cached_tokens + a.prefilled_tokens == b.cached_tokens + b.prefilled_tokens
        assert a.cached_tokens >= len(TRUNK)
    assert engine.compiles() == {"preload": 1, "copy": 2, "prefill": 1, "decode": 1}
    assert engine.preloaded_tokens == len(TRUNK)


def test_order_of_arrival_changes_no_bit_behind_a_trunk():
    _, one = run_episodes(range(9))
    _, other = run_episodes([4, 8, 0, 7, 3, 1, 6, 2, 5], slots=4)
    for a, b in pairs(one, other):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_logprobs_behind_a_trunk_equal_the_trainers_forward():
    params = make_params()

    @jax.jit
    def forward(token, n):
        hidden = decoder.hidden_states(MODEL, params, token, jnp.arange(CONTEXT)[None], jnp.full((1, CONTEXT), n))
        return jax.nn.log_softmax(hidden[0] @ decoder.unembed(MODEL, params) / 0.7)

    _, results = run_episodes(range(6))
    for turns in results.values():
        for history, generation in turns:
            token = np.concatenate([history, generation.tokens])
            logp = np.asarray(forward(np.pad(token, (0, CONTEXT - len(token)))[None], len(token)))
            expected = logp[np.arange(len(history) - 1, len(token) - 1), generation.tokens]
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


def test_accounts_and_forks_by_hand():
    async def main():
        engine = make_engine()
        await engine.set_weights(make_params(), 0)
        await engine.preload(TRUNK)
        await engine.preload(TRUNK)  # known already: costs nothing
        assert engine.preloaded_tokens == 21
        history = np.concatenate([TRUNK, [5, 6, 7]])
        first = await engine.generate(request(history))
        assert (first.cached_tokens, first.prefilled_tokens) == (21, 3)
        longer = np.concatenate([history, first.tokens, [8, 9]])
        held = 24 + len(first.tokens) - 1  # trunk, question, and what was sampled and fed back
        second = await engine.generate(request(longer))
        assert (second.cached_tokens, second.prefilled_tokens) == (held, len(longer) - held)
        forks = await asyncio.gather(*(engine.generate(request(longer, key=(k,))) for k in range(6)))
        assert {(g.cached_tokens, g.prefilled_tokens) for g in forks} == {(len(longer) - 1, 1)}
        assert len({tuple(g.tokens) for g in forks}) > 1
        # Another salt shares the trunk, and nothing else.
        assert (await engine.generate(request(longer, salt="other"))).cached_tokens == 21
        await engine.set_weights(make_params(1), 1)
        free = await engine.generate(request([5, 6]))  # new weights: no trunk any more
        assert (free.cached_tokens, free.prefilled_tokens, engine.preloaded_tokens) == (0, 2, 21)
        await engine.preload(TRUNK)
        again = await engine.generate(request(history))
        assert (again.cached_tokens, engine.preloaded_tokens) == (21, 42)

    asyncio.run(main())


def test_the_trunk_counts_for_the_context_and_is_stored_once():
    async def main():
        engine = make_engine()
        await engine.set_weights(make_params(), 0)
        await engine.preload(TRUNK)
        history = np.concatenate([TRUNK, [5] * 30])
        full = await engine.generate(request(history, stop_ids=(), max_new_tokens=50))
        assert len(full.tokens) == CONTEXT - 51
        # K, H, positions of one layer's keys: 60 - 21 of them for each slot and row, 21 for all together
        assert engine._device._slot_cache[0].keys.shape == (4, 2, 8, 39)
        assert engine._device._row_cache[0].values.shape == (32, 2, 39, 8)
        assert engine._device._trunk[0].keys.shape == (2, 8, 21)

    asyncio.run(main())


def test_prefill_takes_only_the_rows_that_need_it():
    """Prefills of 9, 4, 1, 0 and 5 tokens, 4 at a time, in calls of 2 rows: chunks 3 + 1 + 1 + 2 = 7, so 4 calls."""

    async def main():
        engine, calls = make_engine(slots=5), []
        await engine.set_weights(make_params(), 0)
        await engine.preload(TRUNK)
        device, prefill = engine._device, engine._device._prefill
        device._prefill = lambda *args: calls.append((args[3][: args[7]].tolist(), args[6].tolist())) or prefill(*args)
        sizes = [9, 4, 1, 0, 5]
        await asyncio.gather(
            *(engine.generate(request(np.concatenate([TRUNK, np.full(n, 3), [i + 3]]))) for i, n in enumerate(sizes))
        )
        return calls

    calls = asyncio.run(main())
    assert calls == [([0, 4], [4, 4]), ([0, 1], [4, 4]), ([2, 4], [1, 1]), ([0], [1, 0])]


@pytest.mark.parametrize(
    "tokens, message",
    [
        (TRUNK, "does not begin with the 21 preloaded ones"),  # nothing comes after it
        (np.concatenate([TRUNK[:-1], [TRUNK[-1] - 1, 3]]), "preload what all prompts share"),
        ([2, 3], "a request of 2 tokens"),
    ],
)
def test_requests_without_the_trunk_are_refused(tokens, message):
    async def main():
        engine = make_engine()
        await engine.set_weights(make_params(), 0)
        await engine.preload(TRUNK)
        await engine.generate(request(tokens))

    with pytest.raises(EngineError, match=message):
        asyncio.run(main())


def test_trunks_that_cannot_be_are_refused():
    async def main():
        engine = make_engine()
        with pytest.raises(EngineError, match="no weights"):
            await engine.preload(TRUNK)
        await engine.set_weights(make_params(), 0)
        with pytest.raises(EngineError, match="59 tokens to preload leave no room in the engine's context of 60"):
            await engine.preload(np.full(59, 2))
        with pytest.raises(EngineError, match="vocabulary of 11"):
            await engine.preload([2, 11])
        task = asyncio.create_task(engine.generate(request([2, 3])))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="while requests are running"):
            await engine.preload(TRUNK)
        await task

    asyncio.run(main())


def test_a_small_cache_evicts_rows_and_never_the_trunk():
    """Every first turn still finds the whole trunk; rows that were lost are computed again, by prefill."""
    large, kept = run_episodes(range(9))
    small, lost = run_episodes(range(9), cache_rows=2)
    assert large.stats()["cache_evictions"] == 0 and small.stats()["cache_evictions"] > 9
    assert small.preloaded_tokens == large.preloaded_tokens == len(TRUNK)
    for a, b in pairs(lost, kept):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert len(TRUNK) <= a.cached_tokens <= b.cached_tokens
        assert a.cached_tokens + a.prefilled_tokens == b.cached_tokens + b.prefilled_tokens
    assert any(a.cached_tokens < b.cached_tokens for a, b in pairs(lost, kept))
