"""The local engine against the trainer's forward, against itself in another order, and against closed forms."""

import asyncio
import random

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
STOP = (0, 1)


def make_params(seed=0, scale=2.0):
    """Random parameters with a larger embedding, so that the policy has opinions."""
    params = decoder.init_params(MODEL, jax.random.key(seed))
    return {**params, "embed": {"embedding": params["embed"]["embedding"] * 5 * scale}}


def make_engine(**change):
    return LocalEngine(MODEL, LocalEngineConfig(**{"slots": 4, "cache_rows": 32, "context_length": 40, **change}))


def request(tokens, key=(0,), **change):
    fields = {"max_new_tokens": 6, "temperature": 0.7, "stop_ids": STOP, **change}
    return GenerateRequest(tokens=np.asarray(tokens, np.int32), key=key, **fields)


@jax.jit
def forward(params, token, n, temperature):
    hidden = decoder.hidden_states(MODEL, params, token, jnp.arange(40)[None], jnp.full((1, 40), n))
    return jax.nn.log_softmax(hidden[0] @ decoder.unembed(MODEL, params) / temperature)


def forward_logprobs(params, history, generated, temperature):
    token, n = np.concatenate([history, generated]), len(history) + len(generated)
    logp = forward(params, np.pad(token, (0, 40 - n))[None], n, temperature)
    return np.asarray(logp)[np.arange(len(history) - 1, n - 1), generated]


async def episode(engine, i, turns=3, sleep=None):
    """A few turns with made-up observations; returns every (history, generation)."""
    rng, history, out = np.random.default_rng(i), np.array([2, 3, 4 + i % 3], np.int32), []
    for turn in range(turns):
        if sleep:
            await asyncio.sleep(sleep.random() * 0.01)
        generation = await engine.generate(request(history, key=(7, i, turn)))
        out.append((history, generation))
        history = np.concatenate([history, generation.tokens, rng.integers(2, 11, 3)]).astype(np.int32)
    return out


def run_episodes(order, sleep=None, **engine_change):
    async def main():
        engine = make_engine(**engine_change)
        await engine.set_weights(make_params(), 3)
        results = await asyncio.gather(*(episode(engine, i, sleep=sleep) for i in order))
        return engine, dict(zip(order, results))

    return asyncio.run(main())


def test_logprobs_equal_the_trainers_forward():
    _, results = run_episodes(range(9))
    params = make_params()
    for turns in results.values():
        for history, generation in turns:
            expected = forward_logprobs(params, history, generation.tokens, 0.7)
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
            assert generation.weight_version == 3
            generation.validate()


def test_results_do_not_depend_on_arrival_order_bit_for_bit():
    _, reference = run_episodes(range(9))
    for seed in (1, 2):
        order = list(range(9))
        random.Random(seed).shuffle(order)
        _, results = run_episodes(order, sleep=random.Random(seed))
        for i, turns in reference.items():
            for (history, one), (other_history, other) in zip(turns, results[i]):
                np.testing.assert_array_equal(history, other_history)
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_later_turns_and_forks_prefill_only_what_the_cache_lacks():
    async def main():
        engine = make_engine()
        await engine.set_weights(make_params(), 0)
        history = np.array([2, 3, 4, 5, 6], np.int32)
        first = await engine.generate(request(history))
        assert (first.cached_tokens, first.prefilled_tokens) == (0, 5)
        longer = np.concatenate([history, first.tokens, [7, 8, 9]]).astype(np.int32)
        second = await engine.generate(request(longer))
        # The first row holds the history and all sampled tokens but the last, which was never fed back.
        held = len(history) + len(first.tokens) - 1
        assert (second.cached_tokens, second.prefilled_tokens) == (held, len(longer) - held)
        fork = await asyncio.gather(*(engine.generate(request(longer, key=(k,))) for k in range(6)))
        # Everything but the last token, whose hidden state the next token is sampled from.
        assert {g.cached_tokens for g in fork} == {len(longer) - 1}
        assert len({tuple(g.tokens) for g in fork}) > 1
        other = await engine.generate(request(longer, salt="other"))
        assert other.cached_tokens == 0

    asyncio.run(main())


def test_one_compile_per_call_however_the_work_is_mixed():
    engine, _ = run_episodes(range(9), slots=3)
    assert engine.compiles() == {"preload": 0, "copy": 2, "prefill": 1, "decode": 1}


def test_generation_ends_at_a_stop_id_the_token_limit_or_the_context():
    _, results = run_episodes(range(12))
    generations = [g for turns in results.values() for _, g in turns]
    assert {g.stopped for g in generations} == {True, False}
    for g in generations:
        assert g.stopped == (g.tokens[-1] in STOP)
        assert not set(g.tokens[:-1]) & set(STOP)
        assert g.stopped or len(g.tokens) == 6

    async def full():
        engine = make_engine(context_length=12)
        await engine.set_weights(make_params(), 0)
        return await engine.generate(request(np.arange(2, 11), stop_ids=(), max_new_tokens=30))

    assert len(asyncio.run(full()).tokens) == 12 - 9


def test_new_weights_empty_the_cache_and_equal_a_cold_engine():
    async def main():
        warm, cold = make_engine(), make_engine()
        await warm.set_weights(make_params(0), 0)
        await warm.generate(request([2, 3, 4, 5]))
        await warm.set_weights(make_params(1), 1)
        await cold.set_weights(make_params(1), 1)
        a, b = await warm.generate(request([2, 3, 4, 5])), await cold.generate(request([2, 3, 4, 5]))
        assert a.cached_tokens == 0 and a.weight_version == 1
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)

    asyncio.run(main())


def test_samples_follow_the_tempered_softmax():
    """4,000 first tokens at T = 0.7: every frequency within 4.5 standard errors of the forward's probability."""
    params, history, n = make_params(scale=1.0), np.array([5, 3, 8], np.int32), 4000

    async def main():
        engine = make_engine(slots=64, cache_rows=64)
        await engine.set_weights(params, 0)
        one = lambda k: engine.generate(request(history, key=(k,), max_new_tokens=1))
        return [int(g.tokens[0]) for g in await asyncio.gather(*(one(k) for k in range(n)))]

    counts = np.bincount(asyncio.run(main()), minlength=MODEL.vocab_size)
    p = np.exp([forward_logprobs(params, history, np.array([v]), 0.7)[0] for v in range(MODEL.vocab_size)])
    assert p.min() > 1e-3
    assert np.all(np.abs(counts / n - p) < 4.5 * np.sqrt(p * (1 - p) / n))


def test_a_small_cache_evicts_counts_it_and_still_agrees_with_the_forward():
    engine, results = run_episodes(range(9), cache_rows=4)
    assert engine.stats()["cache_evictions"] > 0
    params = make_params()
    for turns in results.values():
        for history, generation in turns:
            expected = forward_logprobs(params, history, generation.tokens, 0.7)
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


def test_a_cancelled_request_gives_its_slot_back():
    async def main():
        engine = make_engine(slots=1, context_length=400)
        await engine.set_weights(make_params(), 0)
        slow = asyncio.create_task(engine.generate(request([2, 3], stop_ids=(), max_new_tokens=390)))
        await asyncio.sleep(0.05)
        slow.cancel()
        return await asyncio.wait_for(engine.generate(request([2, 3])), 120)

    assert len(asyncio.run(main()).tokens) >= 1


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"tokens": []}, "does not fit"),
        ({"tokens": [2] * 40}, "does not fit the engine's context of 40"),
        ({"tokens": [2, 11]}, "vocabulary of 11"),
        ({"tokens": [-1]}, "vocabulary"),
        ({"tokens": [2], "temperature": 0.0}, "temperature"),
        ({"tokens": [2], "max_new_tokens": 0}, "max_new_tokens"),
        ({"tokens": [2], "stop_ids": (1, 2, 3, 4, 5)}, "max_stop_ids"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(bad, message):
    async def main():
        engine = make_engine()
        await engine.set_weights(make_params(), 0)
        await engine.generate(request(**bad))

    with pytest.raises(EngineError, match=message):
        asyncio.run(main())


def test_no_weights_and_weights_while_running_are_refused():
    async def main():
        engine = make_engine()
        with pytest.raises(EngineError, match="no weights"):
            await engine.generate(request([2]))
        await engine.set_weights(make_params(), 0)
        task = asyncio.create_task(engine.generate(request([2])))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="while requests are running"):
            await engine.set_weights(make_params(), 1)
        await task
        await engine.close()
        await engine.close()

    asyncio.run(main())


def test_a_broken_device_ends_the_run_and_a_closed_engine_gives_up():
    """Not an EngineError: that would label every rollout as failed, and training would go on with zeros."""

    def broken(plan):
        raise MemoryError("device out of memory")

    async def main(spoil):
        engine = make_engine()
        await engine.set_weights(make_params(), 0)
        if spoil:
            engine._device.run = broken
        tasks = [asyncio.create_task(engine.generate(request([2, 3], key=(k,)))) for k in range(6)]
        if not spoil:
            await asyncio.sleep(0)
            await engine.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in asyncio.run(main(True))] == [MemoryError] * 6
    closed = asyncio.run(main(False))
    assert [type(error) for error in closed] == [EngineError] * 6 and "was closed" in str(closed[0])
