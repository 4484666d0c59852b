"""Servers that die, hang, come back or are busy, and where the requests of a prompt go."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest

from tests import sglang_faults as faults
from tests.sglang_client import CONTEXT, impatient, request, run, until  # noqa: F401
from tests.sglang_faults import Answer
from tests.sglang_stand_in import StandIn
from trace_jax.engines import sglang_pool
from trace_jax.engines.base import EngineDown, EngineError
from trace_jax.types import Generation

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_server_that_hangs_is_found_by_the_heartbeat(tmp_path):
    """Long before the deadline of the request, which goes on elsewhere; the server is back when it answers again."""
    first, second = StandIn(seed=1), StandIn(seed=2)

    async def test(engine):
        await engine.set_weights("w", 0)
        home = {first.url: first, second.url: second}[(await engine._pool.pick("p")).url]
        home.fail(faults.hang, "/generate", "/health")
        begin = time.monotonic()
        await engine.generate(request())
        seconds, lost = time.monotonic() - begin, engine.stats()
        home.faults.clear()
        await until(lambda: engine.stats()["server_returns"] == 1)
        return seconds, lost

    seconds, stats = run(tmp_path, test, first, second, request_timeout=60.0)
    assert seconds < 3 and (stats["server_losses"], stats["retries"], stats["moved_groups"]) == (1, 1, 1)


def test_a_server_that_dies_in_the_middle_and_is_started_again(tmp_path):
    """32 requests in flight; the new process serves other weights until it has been given the present ones."""
    server = StandIn(delay=0.2)

    async def test(engine):
        await engine.set_weights("w", 3)
        await engine.preload(np.array([3, 4], np.int32))
        work = [asyncio.create_task(engine.generate(request((3, 4, i % 8), group=str(i)))) for i in range(32)]
        await asyncio.sleep(0.1)
        await server.stop()
        server.restart()
        await asyncio.sleep(0.1)
        mark = len(server.calls)
        await server.start()
        generations = await asyncio.gather(*work)
        return generations, server.paths()[mark:], engine.stats()

    generations, after, stats = run(tmp_path, test, server)
    assert [generation.weight_version for generation in generations] == [3] * 32
    assert server.version == "3" and server.loaded == "w"
    after = [path for path in after if path not in ("/health", "/server_info", "/model_info")]
    begin = after.index("/pause_generation")
    assert set(after[:begin]) <= {"/continue_generation"}  # in case it was left paused; refused if it came too early
    assert after[begin : begin + 5] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/flush_cache",
        "/continue_generation",
        "/generate",
    ]
    assert (stats["server_losses"], stats["server_returns"], stats["gave_up"]) == (1, 1, 0)


def test_a_server_that_was_restarted_unseen_is_found_by_its_weights(tmp_path):
    """It still answers, but with the weights of its start: nothing of that is used, and it is given the right ones."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 3)
        server.restart()
        generations = await asyncio.gather(*(engine.generate(request(group=str(i))) for i in range(8)))
        return generations, engine.stats()

    generations, stats = run(tmp_path, test, server)
    assert {generation.weight_version for generation in generations} == {3} and server.loaded == "w"
    assert stats["mixed_versions"] >= 1 and (stats["server_losses"], stats["server_returns"]) == (1, 1)
    used = {tuple(generation.tokens.tolist()) for generation in generations}
    stale = [r for r in server.generated if r["meta_info"]["weight_version"] == "default"]
    assert stale and not used & {tuple(reply["output_ids"]) for reply in stale}


def test_no_server_at_all_ends_the_run_in_time(tmp_path):
    server = StandIn()

    async def test(engine):
        begin = time.monotonic()
        with pytest.raises(EngineDown, match=server.url) as error:
            await engine.set_weights("w", 0)
        return time.monotonic() - begin, str(error.value)

    seconds, text = run(tmp_path, test, server, start=False, outage_timeout=1.0)
    assert 1.0 <= seconds < 1.9 and "\n" not in text


def test_a_server_that_comes_up_later_is_waited_for(tmp_path):
    server = StandIn()

    async def test(engine):
        waiting = asyncio.create_task(engine.set_weights("w", 0))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await server.start()
        await waiting
        return (await engine.generate(request())).weight_version

    assert run(tmp_path, test, server, start=False) == 0


def test_a_server_that_is_too_small_is_named_at_once(tmp_path):
    async def test(engine):
        with pytest.raises(EngineDown, match=f"63 tokens.*up to {CONTEXT}.*--context-length {CONTEXT + 8}"):
            await engine.set_weights("w", 0)

    run(tmp_path, test, StandIn(input_limit=CONTEXT - 1))


def test_an_outage_ends_the_run_in_time(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        await server.stop()
        begin = time.monotonic()
        results = await asyncio.gather(*(engine.generate(request()) for _ in range(8)), return_exceptions=True)
        return time.monotonic() - begin, results

    seconds, results = run(tmp_path, test, server, outage_timeout=0.5)
    assert seconds < 1.5
    assert all(isinstance(error, EngineDown) and server.url in str(error) for error in results), results


def test_a_server_that_never_comes_up_is_done_without(tmp_path):
    """One of two: the run waits for it at the start, for the time of an outage, then goes on."""
    up, down = StandIn(), StandIn()

    async def test(engine):
        await down.stop()
        begin = time.monotonic()
        await engine.set_weights("w", 0)
        seconds = time.monotonic() - begin
        await asyncio.gather(*(engine.generate(request(group=str(i))) for i in range(4)))
        lost = engine.stats()["server_losses"]
        await down.start()
        await until(lambda: engine.stats()["server_returns"] == 1)
        return seconds, lost, down.loaded

    seconds, lost, loaded = run(tmp_path, test, up, down, outage_timeout=0.3)
    assert seconds < 1 and (lost, loaded) == (1, "w")


def test_no_connection_takes_a_server_out_at_once(tmp_path):
    """Other failures do at the third in a row."""
    for fail, tries in ((None, 1), (faults.status(500), sglang_pool.STRIKES)):
        server, other = StandIn(), StandIn()

        async def test(engine, server=server, fail=fail):
            await engine.set_weights("w", 0)
            await engine._pool.pick("p", avoid=_by_url(engine, other.url))
            if fail is None:
                await server.stop()
            else:
                server.fail(fail)
            count = 0
            while not engine.stats()["server_losses"]:
                engine._pool._homes["p"] = _by_url(engine, server.url)
                await engine.generate(request())
                count += 1
            return count

        assert run(tmp_path / str(tries), test, server, other) == tries


def test_a_few_errors_among_many_requests_take_no_server_out(tmp_path):
    """64 in flight, every tenth fails at once while the others take their time: the first answers are all errors."""
    server = StandIn(delay=0.1)

    async def test(engine):
        await engine.set_weights("w", 0)
        for _ in range(5):
            server.fail(faults.status(500), share=0.5, count=6)
            await asyncio.gather(*(engine.generate(request(group=str(i))) for i in range(64)))
        return engine.stats()

    stats = run(tmp_path, test, server)
    assert stats["retries"] == 30 and stats["server_losses"] == stats["gave_up"] == 0


def _by_url(engine, url):
    return next(server for server in engine._pool.servers if server.url == url)


def test_forks_meet_the_server_that_holds_their_prefix(tmp_path):
    """4 prompts on two servers, 2 first turns each, then 2 forks from the end of each: never so many at once that one
    of the servers gives a prompt up.

    At its home a fork finds all but the last sampled token and the observation; on the other server it would find
    nothing at all. So the share of cached tokens tells where every single one went.
    """
    servers = [StandIn(seed=1, delay=0.01), StandIn(seed=2, delay=0.01)]

    async def prompt(engine, index):
        start = [3, 4 + index, *range(index + 1, index + 8)]
        start = [token % 19 for token in start]
        firsts = await asyncio.gather(*(engine.generate(request(start, group=str(index))) for _ in range(2)))
        histories = [[*start, *first.tokens.tolist(), 7, 8] for first in firsts]
        forks = [engine.generate(request(history, group=str(index))) for history in 2 * histories]
        for history, fork in zip(2 * histories, await asyncio.gather(*forks), strict=True):
            assert fork.cached_tokens >= len(history) - 3

    async def test(engine):
        await engine.set_weights("w", 0)
        await asyncio.gather(*(prompt(engine, index) for index in range(4)))
        return engine.stats()["moved_groups"]

    assert run(tmp_path, test, *servers) == 0
    assert [len(server.generated) for server in servers] == [12, 12]  # and both have work


def test_a_group_leaves_a_server_that_is_far_busier(tmp_path):
    """At home with 2 * 0 + SLACK requests in flight it stays, with one more it moves, and stays where it moved."""
    servers = [StandIn(delay=0.1), StandIn(delay=0.1)]

    async def test(engine):
        await engine.set_weights("w", 0)
        await engine.generate(request())
        home = engine._pool._homes["p"]
        busy = [asyncio.create_task(engine.generate(request())) for _ in range(sglang_pool.SLACK)]
        await asyncio.sleep(0.02)
        assert home.in_flight == sglang_pool.SLACK and await engine._pool.pick("p") is home
        busy.append(asyncio.create_task(engine.generate(request())))
        await asyncio.sleep(0.02)
        moved = await engine._pool.pick("p")
        await asyncio.gather(*busy)
        return moved is not home, await engine._pool.pick("p") is moved, engine.stats()["moved_groups"]

    assert run(tmp_path, test, *servers) == (True, True, 1)


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_gives_the_request_to_another(tmp_path, code):
    first, second = StandIn(), StandIn()

    async def test(engine):
        await engine.set_weights("w", 0)
        await engine.generate(request())
        home = first if first.generated else second
        home.fail(faults.status(code))
        await engine.generate(request())
        return engine.stats()

    stats = run(tmp_path, test, first, second)
    assert (stats["retries"], stats["moved_groups"], stats["server_losses"]) == (1, 1, 0)
    assert len(first.generated) == len(second.generated) == 1


def test_a_dead_server_s_groups_move_and_stay_where_they_went(tmp_path):
    servers = [StandIn(seed=i) for i in range(3)]

    async def test(engine):
        await engine.set_weights("w", 0)
        await asyncio.gather(*(engine.generate(request(group=str(i))) for i in range(12)))
        dead = engine._pool.servers[0]
        orphans = [group for group, home in engine._pool._homes.items() if home is dead]
        await servers[0].stop()
        await asyncio.gather(*(engine.generate(request(group=str(i))) for i in range(12)))
        homes = dict(engine._pool._homes)
        await servers[0].start()
        await until(lambda: engine.stats()["server_returns"] == 1)
        await asyncio.gather(*(engine.generate(request(group=str(i))) for i in range(12)))
        assert engine._pool._homes == homes  # its cache is empty: nobody goes back
        return orphans, homes, dead, engine.stats()

    orphans, homes, dead, stats = run(tmp_path, test, *servers)
    assert len(orphans) == 4 and dead not in homes.values()
    assert stats["moved_groups"] == 4


def test_new_weights_reach_all_servers_at_once(tmp_path):
    """Three updates of 0.3 s each take one's time."""
    servers = [StandIn() for _ in range(3)]

    async def test(engine):
        for server in servers:
            server.fail(faults.slow(0.3), "/update_weights_from_disk")
        begin = time.monotonic()
        await engine.set_weights("w", 0)
        return time.monotonic() - begin

    assert 0.3 <= run(tmp_path, test, *servers) < 0.6


def test_weights_that_come_while_a_server_is_brought_back_are_loaded_before_it_is_used(tmp_path):
    good, bad = StandIn(), StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        slow = bad.fail(faults.slow(0.3), "/update_weights_from_disk")
        engine._pool.lose(_by_url(engine, bad.url), "for the test")
        await until(lambda: slow.hits == 1)
        await engine.set_weights("b", 2)  # does not wait for it
        assert engine.stats()["server_returns"] == 0
        await until(lambda: engine.stats()["server_returns"] == 1)
        return slow.hits

    assert run(tmp_path, test, good, bad) == 2
    assert (bad.version, bad.loaded) == ("2", "b") and not bad.generated


class Router(StandIn):
    """Passes /generate on to its workers in turn, and knows no other path but /health."""

    def __init__(self, *workers: StandIn):
        super().__init__()
        self._workers = itertools.cycle(workers)

    async def answer(self, path, document, body):
        if path == "/generate":
            return await next(self._workers).answer(path, document, body)
        return Answer(200, b"") if path == "/health" else Answer(404, b"Not Found")


def test_requests_go_through_a_router_and_weights_past_it(tmp_path):
    workers = [StandIn(seed=1), StandIn(seed=2)]
    router = Router(*workers)

    async def test(engine):
        await engine.set_weights("w", 4)
        return [(await engine.generate(request())).weight_version for _ in range(6)]

    assert run(tmp_path, test, *workers, router=router) == [4] * 6
    assert set(router.paths()) == {"/health", "/generate"}
    for worker in workers:
        assert "/generate" not in worker.paths() and len(worker.generated) == 3 and worker.loaded == "w"


def test_a_worker_behind_a_router_with_other_weights_is_found_and_put_right(tmp_path):
    workers = [StandIn(seed=1), StandIn(seed=2)]

    async def test(engine):
        await engine.set_weights("w", 4)
        workers[0].restart()
        versions = {(await engine.generate(request())).weight_version for _ in range(6)}
        await until(lambda: engine.stats()["server_returns"] == 1)
        return versions, engine.stats()

    versions, stats = run(tmp_path, test, *workers, router=Router(*workers))
    assert versions == {4} and stats["mixed_versions"] >= 1 and workers[0].loaded == "w"


def test_a_router_that_fails_is_gone_round(tmp_path):
    """It has no worker, or sends what shares a prefix to a bad one again: the second try goes straight to a worker."""
    worker = StandIn(seed=2)
    router = Router(worker)

    async def test(engine):
        await engine.set_weights("w", 4)
        router.fail(faults.status(503))
        generation = await engine.generate(request())
        return generation.weight_version, engine.stats()["retries"]

    assert run(tmp_path, test, worker, router=router) == (4, 1)
    assert "/generate" in worker.paths()


def test_servers_that_come_back_and_never_answer_end_the_run(tmp_path):
    """They are well, take weights, and fail every request: not to be tried for ever, nor to be trained on."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 1)
        server.fail(faults.status(500, "out of luck"))
        results = await asyncio.gather(
            *(engine.generate(request(group=str(i))) for i in range(8)), return_exceptions=True
        )
        return {type(result) for result in results}, str(results[0])

    types, text = run(tmp_path, test, server, attempts=99)
    assert types == {EngineDown} and "\n" not in text
    assert "no SGLang server gives a usable answer, though each came back 3 times" in text and "out of luck" in text


def test_workers_behind_a_router_are_not_useless_for_saying_nothing_themselves(tmp_path):
    """Replies come through the router: a worker that was lost three times in a long run has proved nothing wrong."""
    worker = StandIn()

    async def test(engine):
        await engine.set_weights("w", 1)
        for _ in range(3):
            engine._pool.lose(engine._pool.servers[0], "taken out by hand")
            generation = await engine.generate(request())
        return generation.weight_version, engine._pool.servers[0].futile

    assert run(tmp_path, test, worker, router=Router(worker)) == (1, 3)


def losing(times):
    """Eight requests, and their server taken out `times` times while they wait for it."""

    async def test(engine):
        await engine.set_weights("w", 1)
        server = engine._pool.servers[0]
        work = [asyncio.create_task(engine.generate(request(group=str(i)))) for i in range(8)]
        for _ in range(times):
            await until(lambda: server.in_flight == 8)
            engine._pool.lose(server, "taken out by hand")
            await until(lambda: server.in_flight == 0)
        results = await asyncio.gather(*work, return_exceptions=True)
        return {type(result) for result in results}, engine.stats()

    return test


def test_a_server_that_is_lost_takes_no_try_from_the_requests_on_it(tmp_path):
    """One attempt each, and every request outlives two deaths of its server; three in a row end the run."""
    types, stats = run(tmp_path, losing(2), StandIn(delay=0.5), attempts=1)
    assert types == {Generation} and (stats["gave_up"], stats["server_losses"]) == (0, 2)
    assert run(tmp_path, losing(3), StandIn(delay=0.5), attempts=1)[0] == {EngineDown}


def test_a_process_that_was_busy_asks_for_the_health_again(tmp_path, monkeypatch):
    """While it compiled, say, the server's answer came and the deadline passed: that is no sign of a server that hangs."""
    monkeypatch.setattr(sglang_pool, "HEALTH", 0.05)
    monkeypatch.setattr(sglang_pool, "LATE", 0.05)
    asked = []

    async def test(engine):
        server = engine._pool.servers[0]

        async def healthy():
            asked.append(1)
            if len(asked) == 1:
                time.sleep(0.3)  # blocks the loop
            return len(asked) == 2

        monkeypatch.setattr(server, "healthy", healthy)
        held_up = await engine._pool._alive(server)
        count = len(asked)
        return held_up, count, await engine._pool._alive(server), len(asked)

    assert run(tmp_path, test, StandIn()) == (True, 2, False, 3)


def test_closing_while_a_server_is_brought_back(tmp_path):
    """The update hangs, and the word to go on fails: closing ends all the same, soon."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("w", 1)
        server.fail(faults.hang, "/update_weights_from_disk")
        engine._pool.lose(engine._pool.servers[0], "taken out by hand")
        await until(lambda: "/update_weights_from_disk" in server.paths()[4:])
        server.fail(faults.status(500), "/continue_generation")
        begin = time.monotonic()
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await engine.generate(request())
        return time.monotonic() - begin

    assert run(tmp_path, test, server) < 2


def test_a_router_that_dies_is_waited_for(tmp_path):
    worker = StandIn()
    router = Router(worker)

    async def test(engine):
        await engine.set_weights("w", 4)
        await router.stop()
        work = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0.2)
        await router.start()
        return (await work).weight_version, engine.stats()["server_losses"]

    assert run(tmp_path, test, worker, router=router) == (4, 1)
