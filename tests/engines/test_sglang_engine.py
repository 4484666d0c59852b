"""Requests to SGLang servers: what leaves, what comes back, what is tried again and what is given up."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests import sglang_faults as faults
from tests.sglang_client import CONTEXT, impatient, request, run, save  # noqa: F401
from tests.sglang_stand_in import StandIn
from trace_jax.engines.base import EngineError

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_generation_carries_what_the_server_said(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 7)
        return await engine.generate(request())

    generation = run(tmp_path, test, server)
    meta = server.generated[0]["meta_info"]
    assert [[p, t, None] for p, t in zip(generation.logprobs, generation.tokens, strict=True)] == [
        [np.float32(p), t, None] for p, t, _ in meta["output_token_logprobs"]
    ]
    assert generation.weight_version == 7 and generation.prefilled_tokens == 3
    path, body = server.calls[-1]
    assert path == "/generate" and body["extra_key"] == "7" and body["input_ids"] == [3, 4, 5]


def test_a_second_turn_is_prefilled_from_the_cache(tmp_path):
    async def test(engine):
        await engine.set_weights("w", 0)
        first = await engine.generate(request())
        history = [3, 4, 5, *first.tokens.tolist(), 6, 7]
        second = await engine.generate(request(history))
        return len(history), len(first.tokens), second

    size, sampled, second = run(tmp_path, test, StandIn())
    assert second.cached_tokens == 3 + sampled - 1  # what was sampled last was never computed
    assert second.prefilled_tokens == size - second.cached_tokens


HURTFUL = [{"tokens": (3, 20)}, {"tokens": (-1,)}, {"tokens": ()}, {"tokens": (3,) * CONTEXT}, {"max_new_tokens": 0}]


@pytest.mark.parametrize("changes", HURTFUL)
def test_a_request_that_would_hurt_a_server_never_leaves(tmp_path, changes):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        with pytest.raises(EngineError):
            await engine.generate(request(**changes))

    run(tmp_path, test, server)
    assert "/generate" not in server.paths()


def test_max_new_tokens_is_cut_to_the_context(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        await engine.generate(request((3,) * 61, max_new_tokens=50))

    run(tmp_path, test, server)
    assert server.calls[-1][1]["sampling_params"]["max_new_tokens"] == 3


def test_nothing_is_sampled_before_there_are_weights(tmp_path):
    server = StandIn()

    async def test(engine):
        for call in (engine.generate(request()), engine.preload(np.array([1], np.int32))):
            with pytest.raises(EngineError, match="set_weights"):
                await call

    run(tmp_path, test, server)
    assert server.calls == []


PASSING = {
    "500": faults.status(500),
    "502 page": faults.status(502, "<html>Bad Gateway</html>"),
    "429": faults.status(429),
    "503": faults.status(503),
    "408": faults.status(408),
    "reset": faults.reset,
    "cut off": faults.cut_off,
    "truncated": faults.truncate,
    "HTML": faults.status(200, "<html>Welcome</html>"),
    "empty": faults.status(200, ""),
    "a list": faults.says([{}]),
    "no log-probs": faults.then(faults.without_logprobs),
    "short": faults.then(faults.short_logprobs),
    "null": faults.then(faults.logprob(None)),
    "NaN": faults.then(faults.logprob(float("nan"))),
    "positive": faults.then(faults.logprob(1.0)),
    "abort": faults.then(faults.aborted),
    "foreign id": faults.then(faults.token_id(20)),
    "huge id": faults.then(faults.token_id(2**40)),
    "mixed": faults.then(faults.versions("4", "5")),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_is_waited_out(tmp_path, name):
    """Two bad tries, then a good one, from the server itself: nothing of the bad ones is in it."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 5)
        fault = server.fail(PASSING[name], count=2)
        generation = await engine.generate(request())
        return fault, generation, engine.stats()

    fault, generation, stats = run(tmp_path, test, server)
    last = server.generated[-1]["meta_info"]["output_token_logprobs"]
    assert generation.tokens.tolist() == [entry[1] for entry in last]
    assert generation.logprobs.tolist() == [np.float32(entry[0]) for entry in last]
    assert (fault.hits, stats["retries"], stats["gave_up"]) == (2, 2, 0)


@pytest.mark.parametrize("name", [name for name in PASSING if name not in ("429", "503")])
def test_a_fault_that_stays_ends_the_request_after_its_attempts(tmp_path, name):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 5)
        fault = server.fail(PASSING[name])
        with pytest.raises(EngineError, match="gave up after 4 tries") as error:
            await engine.generate(request())
        return fault, str(error.value), engine.stats()

    fault, text, stats = run(tmp_path, test, server)
    assert (fault.hits, stats["retries"], stats["gave_up"]) == (4, 3, 1)
    assert server.url in text and "\n" not in text


@pytest.mark.parametrize("name", ["429", "503"])
def test_a_busy_server_is_asked_again_and_stays_in_rotation(tmp_path, name):
    """Being busy is no fault of the request: it costs no try, up to the time of an outage."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 5)
        server.fail(PASSING[name], count=5)
        first = await engine.generate(request())
        server.fail(PASSING[name])
        begin = time.monotonic()
        with pytest.raises(EngineError, match="config.sglang.attempts is 4.*HTTP (429|503)"):
            await engine.generate(request())
        return first, time.monotonic() - begin, engine.stats()

    generation, seconds, stats = run(tmp_path, test, server, outage_timeout=1.0)
    assert generation.tokens.size and 1 < seconds < 3
    assert stats["server_losses"] == 0 and stats["retries"] >= 5 and stats["gave_up"] == 1


def test_no_back_off_outlasts_an_outage(tmp_path):
    """The first wait is uniform below 30 s, the outage ends after one."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        server.fail(PASSING["429"])
        begin = time.monotonic()
        with pytest.raises(EngineError, match="HTTP 429"):
            await engine.generate(request())
        return time.monotonic() - begin

    seconds = [run(tmp_path, test, server, outage_timeout=1.0, retry_wait=30.0) for _ in range(3)]
    assert all(1 < each < 3 for each in seconds)


@pytest.mark.parametrize("code", [400, 404, 422])
def test_a_request_that_is_refused_is_not_repeated(tmp_path, code):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        fault = server.fail(faults.says({"error": {"message": "temperature is wrong"}}, code))
        with pytest.raises(EngineError, match=f"HTTP {code}: .*temperature is wrong"):
            await engine.generate(request())
        return fault.hits, engine.stats()

    hits, stats = run(tmp_path, test, server)
    assert (hits, stats["retries"], stats["server_losses"]) == (1, 0, 0)


def test_tries_are_further_and_further_apart(tmp_path):
    """Exponential back-off with full jitter: the wait before try k + 1 is uniform below 0.2 * 2^(k - 1) s.

    Of 40 requests the mean waits are 0.1, 0.2 and 0.4 s with standard errors of at most 0.04.
    """
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        server.fail(faults.status(503))
        begin = time.monotonic()
        times = {i: [] for i in range(40)}
        fault = faults.status(503)

        async def noting(http_request, honest):
            tens, ones = (await http_request.json())["input_ids"]
            times[10 * tens + ones].append(time.monotonic() - begin)
            return await fault(http_request, honest)

        server.fail(noting)
        await asyncio.gather(
            *(engine.generate(request((i // 10, i % 10))) for i in range(40)), return_exceptions=True
        )
        return times

    times = run(tmp_path, test, server, retry_wait=0.2)
    waits = np.array([np.diff(row[:4]) for row in times.values()])
    assert waits.shape == (40, 3)
    mean = waits.mean(axis=0)
    np.testing.assert_allclose(mean, [0.1, 0.2, 0.4], atol=0.15)
    assert mean[0] < mean[1] < mean[2]
    assert len({round(wait, 3) for wait in waits[:, 1]}) > 20  # jitter


def test_a_slow_server_is_left_alone(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        server.fail(faults.slow(0.6))  # six heartbeats
        await asyncio.gather(*(engine.generate(request(group=str(i))) for i in range(5)))
        return engine.stats()

    stats = run(tmp_path, test, server)
    assert stats["retries"] == stats["server_losses"] == 0


def test_a_try_ends_at_its_deadline(tmp_path):
    """The server says that it is well, but this answer never comes."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        server.fail(faults.hang, count=1)
        await engine.generate(request())
        return engine.stats()

    assert run(tmp_path, test, server, request_timeout=0.3)["retries"] == 1


@pytest.mark.parametrize("where", ["/generate", "outage", "back-off", "/update_weights_from_disk", "save"])
def test_cancellation_leaves_nothing_behind(tmp_path, where):
    """What `run` checks after every test: no request, no task, no folder. Then the engine is as good as before."""
    server = StandIn()

    def slow_save(folder: Path, params: str) -> None:
        if params == "slow":
            time.sleep(0.3)
        save(folder, params)

    async def test(engine):
        await engine.set_weights("a", 1)
        if where == "outage":
            await server.stop()
        elif where == "back-off":
            server.fail(faults.status(503))
        elif where != "save":
            server.fail(faults.hang, where)
        generates = where in ("/generate", "outage", "back-off")
        calls = [engine.generate(request()) for _ in range(3)] if generates else [engine.set_weights("slow", 2)]
        work = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.15)
        for task in work:
            task.cancel()
        results = await asyncio.gather(*work, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        assert sum(server.in_flight for server in engine._pool.servers) == 0
        assert not server.paused
        if generates:
            server.faults.clear()
            if where == "outage":
                await server.start()
            await engine.generate(request())

    run(tmp_path, test, server, save=slow_save, retry_wait=5.0 if where == "back-off" else 0.01)
    time.sleep(0.4)  # what a thread goes on writing
    assert not (tmp_path / "weights").exists()


def test_a_deadline_of_the_caller_is_kept(tmp_path):
    """`asyncio.timeout` around a generation ends it: the episode's deadline, not an engine's error."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        server.fail(faults.hang)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await engine.generate(request())

    run(tmp_path, test, server)


def test_counts_only_rise_and_name_what_happened(tmp_path):
    async def test(engine):
        stats = [engine.stats()]
        await engine.set_weights("a", 1)
        await engine.generate(request())
        return [*stats, engine.stats()]

    names = {"retries", "bad_replies", "mixed_versions", "gave_up"}
    names |= {"server_losses", "server_returns", "moved_groups"}
    for stats in run(tmp_path, test, StandIn()):
        assert set(stats) == names and not any(stats.values())


def test_replies_of_one_request_are_never_another_s(tmp_path):
    """Tokens that come back are those that the server sampled behind this history."""
    server = StandIn(delay=0.01)

    async def test(engine):
        await engine.set_weights("a", 1)
        server.fail(faults.status(500), share=0.1)
        histories = [(3, i, j) for i in range(8) for j in range(8)]
        generations = await asyncio.gather(*(engine.generate(request(h, group=str(h))) for h in histories))
        return list(zip(histories, generations, strict=True))

    pairs = run(tmp_path, test, server, attempts=30)
    bodies = [json.dumps(body["input_ids"]) for path, body in server.calls if path == "/generate"]
    assert len(set(bodies)) == 64 and len(bodies) > 64
    sampled = {tuple(reply["output_ids"]) for reply in server.generated}
    assert all(tuple(generation.tokens.tolist()) in sampled for _, generation in pairs)
