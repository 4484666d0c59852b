"""The scripted engine keeps an engine's contract; expected values are counted by hand, prefixes by brute force."""

import asyncio

import numpy as np
import pytest

from trace_jax.engines.base import EngineError
from trace_jax.engines.scripted import LOGPROB, ScriptedEngine
from trace_jax.types import GenerateRequest, Generation

STOP = 9


def request(tokens, *, max_new_tokens=10, key=(0,), salt=""):
    return GenerateRequest(np.asarray(tokens, np.int32), max_new_tokens, 1.0, (STOP,), key, salt=salt)


def generate(engine, *args, **kwargs):
    return asyncio.run(engine.generate(request(*args, **kwargs)))


@pytest.mark.parametrize(
    "context, max_new_tokens, expected, stopped",
    [
        (100, 10, [5, 6, 9], True),  # the first stop id is kept, what follows it is not
        (100, 2, [5, 6], False),  # max_new_tokens comes first
        (5, 10, [5, 6], False),  # 3 tokens of history leave 2
        (6, 10, [5, 6, 9], True),  # the stop id is the last token that fits
    ],
)
def test_replies_end_as_an_engine_ends_them(context, max_new_tokens, expected, stopped):
    engine = ScriptedEngine(lambda request: [5, 6, 9, 7], context_length=context)
    reply = generate(engine, [1, 2, 3], max_new_tokens=max_new_tokens).validate()
    assert reply.tokens.tolist() == expected and reply.tokens.dtype == np.int32
    assert reply.logprobs.tolist() == [LOGPROB] * len(expected) and reply.logprobs.dtype == np.float32
    assert reply.stopped is stopped


def test_prefix_memory_by_hand():
    engine = ScriptedEngine(lambda request: [5, 9])
    counts = []
    for tokens, salt in [
        ([1, 2, 3], "a"),  # cold: 0 of 3. Afterwards 1 2 3 5 is known; the sampled 9 was never fed back
        ([1, 2, 3, 5, 9, 4], "a"),  # next turn: 1 2 3 5 are known, so 4 of 6
        ([1, 2, 3], "a"),  # all known, but the last token must be computed: 2 of 3
        ([1, 2, 7], "a"),  # fork after 1 2
        ([1, 2, 3], "b"),  # another salt knows nothing
    ]:
        reply = generate(engine, tokens, salt=salt)
        assert reply.cached_tokens + reply.prefilled_tokens == len(tokens)
        counts.append(reply.cached_tokens)
    assert counts == [0, 4, 2, 2, 0]


def test_prefix_memory_equals_brute_force():
    rng = np.random.default_rng(0)
    engine = ScriptedEngine(lambda request: [int(request.tokens.sum()) % 3, STOP])
    known = []
    for _ in range(200):
        tokens = rng.integers(0, 3, rng.integers(1, 7)).tolist()
        shared = [n for old in known for n in range(len(tokens)) if tokens[:n] == old[:n]]
        expected = max(shared, default=0)
        assert generate(engine, tokens).cached_tokens == expected
        known.append(tokens + [sum(tokens) % 3])


def test_set_weights_labels_generations_and_forgets_prefixes():
    engine = ScriptedEngine(lambda request: [5, 9])
    assert generate(engine, [1, 2, 3]).weight_version == 0
    asyncio.run(engine.set_weights(None, 7))
    reply = generate(engine, [1, 2, 3])
    assert (reply.weight_version, reply.cached_tokens, engine.version) == (7, 0, 7)


def test_records_requests_in_order_of_arrival_and_replies_in_order_of_delay():
    done = []

    def script(request):
        done.append(request.key[0])
        return [9]

    engine = ScriptedEngine(script, delay=lambda request: 0.03 if request.key == (0,) else 0.0)

    async def both():
        await asyncio.gather(*(engine.generate(request([1], key=(i,))) for i in range(2)))

    asyncio.run(both())
    assert [r.key for r in engine.requests] == [(0,), (1,)]
    assert done == [1, 0]


def test_a_whole_generation_passes_untouched_and_errors_come_out():
    reply = Generation(np.array([4], np.int32), np.array([np.nan], np.float32), True, 0, 0, 3)
    assert generate(ScriptedEngine(lambda request: reply), [1]) is reply

    def refuse(request):
        raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        generate(ScriptedEngine(refuse), [1])


def test_close_is_recorded_and_may_be_repeated():
    engine = ScriptedEngine(lambda request: [9])
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    assert engine.closed


def test_preloaded_tokens_count_as_cached_and_must_begin_every_request():
    engine = ScriptedEngine(lambda request: [5, 9])
    asyncio.run(engine.preload(np.array([1, 2])))
    assert generate(engine, [1, 2, 3]).cached_tokens == 2
    # Afterwards 1 2 3 5 is known, to this salt only.
    assert generate(engine, [1, 2, 3, 5, 9, 4]).cached_tokens == 4
    assert generate(engine, [1, 2, 3, 5, 9, 4], salt="b").cached_tokens == 2
    for tokens in ([1, 2], [1, 3, 2], [1]):
        with pytest.raises(EngineError, match="does not begin with the 2 preloaded tokens"):
            generate(engine, tokens)
    asyncio.run(engine.set_weights(None, 1))
    assert generate(engine, [1, 3, 2]).cached_tokens == 0
    assert engine.preloaded_tokens == 2
