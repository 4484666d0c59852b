"""The engine on a real SGLang server. Oracle: the trainer's own forward of the same weights.

The server computes on the CPU; this proves protocol, cache and weight updates, not GPU kernels.
"""

from __future__ import annotations

import asyncio
import functools

import jax
import numpy as np
import pytest

from trace_jax.engines.base import EngineError
from trace_jax.engines.sglang import Settings, SglangEngine
from trace_jax.engines.weight_folders import WeightFolders
from trace_jax.models import decoder
from trace_jax.models import folder as model_folder
from trace_jax.types import GenerateRequest

SETTINGS = Settings(request_timeout=60, attempts=3, update_timeout=60, outage_timeout=60, release_memory=False)
STOP = 5


@pytest.fixture(scope="module")
def model(sglang_model):
    """(decoder, parameters) of the model that the server was started with."""
    cfg = model_folder.load_config(sglang_model)
    return cfg, jax.device_get(model_folder.load_params(sglang_model, cfg))


@pytest.fixture
def served(sglang_server, model, tmp_path):
    """`served(work)` runs `work(engine)` with an engine on the server, which gets its own weights back afterwards."""
    cfg, _ = model

    def run(work, settings=SETTINGS):
        async def inside():
            engine = SglangEngine(
                [sglang_server.url],
                router=None,
                context_length=sglang_server.context_length,
                vocab_size=cfg.vocab_size,
                sampled_vocab=cfg.vocab_size,
                weights=WeightFolders(tmp_path / "w", lambda folder, params: model_folder.save(folder, cfg, params)),
                settings=settings,
            )
            try:
                return await work(engine)
            finally:
                await engine.close()

        return asyncio.run(inside())

    yield run
    sglang_server.restore()


def request(tokens, **change):
    fields = {"max_new_tokens": 8, "temperature": 1.0, "stop_ids": (STOP,), "key": (0,), "group": "p"}
    return GenerateRequest(tokens=np.asarray(tokens, np.int32), **fields | change)


def changed(params, seed):
    """The parameters a realistic step away: every kernel moved by about a tenth of its size."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (x + 0.1 * np.std(x) * rng.standard_normal(x.shape)).astype(np.float32), params)


@functools.partial(jax.jit, static_argnums=0)
def forward(cfg, params, tokens):
    """Logits of one row."""
    pos = np.arange(tokens.shape[0], dtype=np.int32)[None]
    hidden = decoder.hidden_states(cfg, params, tokens[None], pos, np.full_like(pos, tokens.shape[0]), None)
    return hidden[0] @ decoder.unembed(cfg, params)


def logits_of(cfg, params, tokens):
    """Logits behind each token; one compiled length, as what comes later changes nothing before it."""
    padded = np.zeros(128, np.int32)
    padded[: tokens.size] = tokens
    return np.asarray(forward(cfg, params, padded), np.float64)[: tokens.size]


def gap(cfg, params, asked, generation):
    """Largest difference between the generation's log-probs and those of the trainer's forward pass."""
    logits = logits_of(cfg, params, np.concatenate([asked.tokens, generation.tokens])) / asked.temperature
    logprob = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    first = asked.tokens.size - 1  # the row that predicts the first sampled token
    own = [logprob[first + i, token] for i, token in enumerate(generation.tokens)]
    return float(np.max(np.abs(own - generation.logprobs.astype(np.float64))))


def random_tokens(seed, size):
    return np.random.default_rng(seed).integers(3, 19, size).astype(np.int32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers_through_ten_updates(served, model, temperature):
    """Before and after updates, cold and from the cache: a stale cache or stale weights would be off by 0.1 and more."""
    cfg, params = model

    async def work(engine):
        now = params
        for version in range(11):
            now = changed(now, version) if version else now
            await engine.set_weights(now, version)
            histories = [np.append(np.int32(3 + i), random_tokens(i, 20 + 5 * i)) for i in range(4)]
            asked = [request(history, temperature=temperature, stop_ids=(), salt="all") for history in histories]
            cold = await asyncio.gather(*map(engine.generate, asked))
            warm = await asyncio.gather(*map(engine.generate, asked))
            # one salt for all versions: only the flush keeps the old version's keys and values away
            assert [g.cached_tokens for g in cold] == [0] * 4
            assert [g.cached_tokens for g in warm] == [r.tokens.size - 1 for r in asked]
            assert {g.weight_version for g in cold + warm} == {version}
            for one, generation in zip(asked * 2, cold + warm, strict=True):
                assert gap(cfg, now, one, generation) < 1e-4
        return max(gap(cfg, params, one, generation) for one, generation in zip(asked * 2, cold + warm, strict=True))

    assert served(work) > 0.1  # the first weights, on the 64 tokens that the last ones sampled


def test_the_next_turn_and_its_forks_come_from_the_cache(served, model):
    async def work(engine):
        await engine.set_weights(model[1], 0)
        first = request(random_tokens(1, 30), max_new_tokens=10, stop_ids=(), salt="0")
        turn = await engine.generate(first)
        history = np.concatenate([first.tokens, turn.tokens, random_tokens(2, 3)])
        second = await engine.generate(request(history, salt="0"))
        forks = await asyncio.gather(*(engine.generate(request(history, salt="0")) for _ in range(4)))
        other = await engine.generate(request(history, salt="1"))
        return turn, second, forks, other

    turn, second, forks, other = served(work)
    assert turn.tokens.size == 10 and not turn.stopped and turn.cached_tokens == 0
    # 30 + 10 + 3 tokens; the last sampled one was never fed to the model, the observation is new
    assert second.cached_tokens == 39 and second.prefilled_tokens == 4
    assert [fork.cached_tokens for fork in forks] == [42] * 4
    assert other.cached_tokens == 0  # another name space


def test_how_a_turn_ends(served, model, sglang_server):
    async def work(engine):
        await engine.set_weights(model[1], 0)
        many = [request(random_tokens(i, 12), max_new_tokens=40, stop_ids=(STOP, 7)) for i in range(24)]
        texts = [request(random_tokens(i, 12), max_new_tokens=40, stop_ids=(), stop_texts=("1", "2")) for i in range(24)]
        full = request(random_tokens(3, sglang_server.context_length - 3), max_new_tokens=50, stop_ids=())
        return await asyncio.gather(*map(engine.generate, [*many, *texts, full]))

    *rest, full = served(work)
    by_id, by_text = rest[:24], rest[24:]
    for generation in by_id:
        ends = np.flatnonzero(np.isin(generation.tokens, (STOP, 7)))
        assert generation.stopped == (ends.size > 0) and (ends.tolist() or [39]) == [generation.tokens.size - 1]
    assert sum(generation.stopped for generation in by_id) > 12
    assert sum(generation.stopped for generation in by_text) > 12
    for generation in by_text:
        assert generation.stopped or generation.tokens.size == 40
    assert full.tokens.size == 3 and not full.stopped  # the context had room for three


def test_only_the_likeliest_tokens_are_drawn(served, model):
    """top_k = 1 is greedy: the trainer's argmax, while the log-prob is still that of the whole softmax."""
    cfg, params = model
    asked = request(random_tokens(4, 25), max_new_tokens=6, stop_ids=(), top_k=1, top_p=0.5)

    async def work(engine):
        await engine.set_weights(params, 0)
        return await engine.generate(asked)

    generation = served(work)
    logits = logits_of(cfg, params, np.concatenate([asked.tokens, generation.tokens]))
    assert np.argmax(logits[24:-1], axis=-1).tolist() == generation.tokens.tolist()
    assert gap(cfg, params, asked, generation) < 1e-4 and generation.logprobs.min() < -0.1


def test_a_shared_beginning_is_computed_once(served, model):
    async def work(engine):
        await engine.set_weights(model[1], 0)
        trunk = random_tokens(5, 60)
        await engine.preload(trunk)
        asked = [request(np.append(trunk, 3 + i)) for i in range(3)]
        counts = [(await engine.generate(one)).cached_tokens for one in asked]
        with pytest.raises(EngineError, match="does not begin with the 60 preloaded tokens"):
            await engine.generate(request(trunk))
        await engine.set_weights(model[1], 0)  # the same version: only the cache is emptied
        after = (await engine.generate(request(trunk))).cached_tokens
        return counts, engine.preloaded_tokens, after

    assert served(work) == ([60, 60, 60], 60, 0)


def test_memory_is_given_back_and_taken_again(served, model):
    """On a CPU nothing is freed; the calls, their order and the weights afterwards are what a GPU needs."""
    cfg, params = model
    asked = request(random_tokens(6, 20))

    async def work(engine):
        await engine.set_weights(params, 0)
        await engine.release()
        await engine.set_weights(changed(params, 1), 1)
        return await engine.generate(asked)

    settings = Settings(request_timeout=60, attempts=3, update_timeout=60, outage_timeout=60, release_memory=True)
    assert gap(cfg, changed(params, 1), asked, served(work, settings)) < 1e-4


def test_a_bad_id_never_reaches_the_server(served, model):
    cfg, params = model

    async def work(engine):
        await engine.set_weights(params, 0)
        for bad in (-1, cfg.vocab_size):
            with pytest.raises(EngineError, match=f"token id {bad} lies outside the vocabulary of {cfg.vocab_size}"):
                await engine.generate(request([3, bad, 4]))
        return await engine.generate(request([3, 4]))

    assert served(work).tokens.size >= 1
