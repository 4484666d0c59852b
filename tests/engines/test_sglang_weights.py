"""Weights, caches and memory of SGLang servers, in step with the trainer."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path

import numpy as np
import pytest

from tests import sglang_faults as faults
from tests.sglang_client import CONTEXT, impatient, request, run, save, until  # noqa: F401
from tests.sglang_stand_in import StandIn
from trace_jax.engines.base import EngineDown, EngineError

pytestmark = pytest.mark.usefixtures("impatient")


def test_an_update_while_requests_run_leaves_no_turn_of_two_versions(tmp_path):
    server = StandIn(delay=0.2)

    async def test(engine):
        await engine.set_weights("a", 1)
        work = [asyncio.create_task(engine.generate(request(group=str(i)))) for i in range(4)]
        await asyncio.sleep(0.1)
        await engine.set_weights("b", 2)
        return await asyncio.gather(*work), engine.stats()

    generations, stats = run(tmp_path, test, server)
    assert {generation.weight_version for generation in generations} == {2}
    assert stats["mixed_versions"] == stats["retries"] == 4 and stats["server_losses"] == 0


UPDATE, REFUSED = "/update_weights_from_disk", {"success": False, "message": "Failed to get weights iterator"}
REFUSALS = {
    "400": (faults.says(REFUSED, 400), UPDATE),
    "200": (faults.says(REFUSED), UPDATE),
    "no word": (faults.says({}), UPDATE),
    "500": (faults.status(500, "Failed to get weights iterator"), UPDATE),
    "garbage": (faults.status(200, "<html>"), UPDATE),
    "not loaded": (faults.says({"success": True, "message": ""}), UPDATE),
    "flush": (faults.status(400, "Flush cache failed."), "/flush_cache"),
    "pause": (faults.status(404, "Not Found"), "/pause_generation"),
}


def test_a_lone_server_that_stumbles_over_an_update_is_asked_again(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        server.fail(faults.status(500, "out of luck"), UPDATE, count=2)
        await engine.set_weights("b", 2)
        return (await engine.generate(request())).weight_version, engine.stats()["server_losses"]

    assert run(tmp_path, test, server) == (2, 1)


@pytest.mark.parametrize("name", [name for name in REFUSALS if name != "500"])
def test_an_update_that_no_server_takes_ends_the_run_at_once(tmp_path, name):
    behaviour, path = REFUSALS[name]
    first, second = StandIn(), StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        for server in (first, second):
            server.fail(behaviour, path)
        begin = time.monotonic()
        with pytest.raises(EngineDown, match="version 2") as error:
            await engine.set_weights("b", 2)
        return time.monotonic() - begin, str(error.value)

    seconds, text = run(tmp_path, test, first, second)
    assert seconds < 1 and "\n" not in text
    if name in ("400", "200"):
        assert "Failed to get weights iterator" in text
    assert not first.paused and not second.paused


@pytest.mark.parametrize("name", REFUSALS)
def test_a_server_that_refuses_an_update_is_out_until_it_has_it(tmp_path, name):
    behaviour, path = REFUSALS[name]
    good, bad = StandIn(), StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        bad.fail(behaviour, path)
        await engine.set_weights("b", 2)
        seen = len(bad.generated)
        generations = await asyncio.gather(*(engine.generate(request(group=str(i))) for i in range(20)))
        while_out = (len(bad.generated) - seen, engine.stats())
        bad.faults.clear()
        await until(lambda: engine.stats()["server_returns"] == 1)
        generations += await asyncio.gather(*(engine.generate(request(group=f"new {i}")) for i in range(20)))
        return generations, while_out

    generations, (asked, stats) = run(tmp_path, test, good, bad)
    assert asked == 0 and (stats["server_losses"], stats["server_returns"]) == (1, 0)
    assert {generation.weight_version for generation in generations} == {2}
    assert bad.generated and bad.loaded == "b"


def test_the_calls_of_an_update_in_order(tmp_path):
    servers = [StandIn(), StandIn()]

    async def test(engine):
        await engine.set_weights("a", 1)
        marks = [len(server.calls) for server in servers]
        await engine.set_weights("b", 2)
        return [server.calls[mark:] for server, mark in zip(servers, marks, strict=True)]

    for calls in run(tmp_path, test, *servers):
        document = {"model_path": str(tmp_path / "weights" / "version-2"), "weight_version": "2"}
        assert calls == [
            ("/server_info", {}),
            ("/model_info", {}),
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weights_from_disk", document),
            ("/flush_cache", {}),
            ("/continue_generation", {}),
            ("/model_info", {}),
        ]


def test_the_same_version_again_only_forgets(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        await engine.preload(np.array([3, 4], np.int32))
        await engine.generate(request((3, 4, 5)))
        mark = len(server.calls)
        await engine.set_weights("a", 1)
        calls = server.paths()[mark:]
        return calls, await engine.generate(request((3, 4, 5)))

    calls, generation = run(tmp_path, test, server)
    assert calls == ["/pause_generation", "/flush_cache", "/continue_generation"] and generation.cached_tokens == 0


def test_a_stop_while_caches_are_emptied_is_not_lost(tmp_path):
    """The word to go on fails as well; the cancellation comes out all the same."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        server.fail(faults.hang, "/flush_cache")
        server.fail(faults.status(500), "/continue_generation")
        work = asyncio.create_task(engine.set_weights("a", 1))
        while server.paths()[-1] != "/flush_cache":
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    run(tmp_path, test, server)


def test_a_flush_that_fails_takes_the_server_out_until_its_cache_is_empty(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        await engine.generate(request())
        server.fail(faults.status(400, "Flush cache failed."), "/flush_cache", count=1)
        await engine.set_weights("a", 1)
        return await engine.generate(request()), engine.stats()

    generation, stats = run(tmp_path, test, server)
    assert generation.cached_tokens == 0 and (stats["server_losses"], stats["server_returns"]) == (1, 1)


def test_a_full_disk_ends_the_run_with_a_line_and_servers_keep_what_they_have(tmp_path):
    server = StandIn()

    def full(folder: Path, params: str) -> None:
        if params == "b":
            (folder / "weights").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(folder, params)

    async def test(engine):
        await engine.set_weights("a", 1)
        mark = len(server.calls)
        with pytest.raises(EngineDown, match="No space left on device.*weights_folder") as error:
            await engine.set_weights("b", 2)
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-1"]
        return server.calls[mark:], str(error.value)

    calls, text = run(tmp_path, test, server, save=full)
    assert calls == [] and "\n" not in text and server.version == "1"


def test_leftovers_of_a_killed_run_go_before_the_first_version(tmp_path):
    (tmp_path / "weights" / "version-90").mkdir(parents=True)
    (tmp_path / "weights" / ".unfinished-91").mkdir()

    async def test(engine):
        await engine.set_weights("a", 1)
        return [path.name for path in (tmp_path / "weights").iterdir()]

    assert run(tmp_path, test, StandIn()) == ["version-1"]


def test_the_shared_beginning_is_computed_on_every_server_and_counted_once(tmp_path):
    servers = [StandIn(), StandIn()]
    trunk = np.array([3, 4, 5, 6], np.int32)

    async def test(engine):
        await engine.set_weights("a", 1)
        await engine.preload(trunk)
        generations = [await engine.generate(request((3, 4, 5, 6, 7), group=str(i))) for i in range(6)]
        with pytest.raises(EngineError, match="4 preloaded"):
            await engine.generate(request((3, 4, 5)))
        with pytest.raises(EngineError, match="leave no room"):
            await engine.preload(np.full(CONTEXT - 1, 3, np.int32))
        with pytest.raises(EngineError, match="token id 20"):
            await engine.preload(np.array([20], np.int32))
        return generations, engine.preloaded_tokens

    generations, preloaded = run(tmp_path, test, *servers)
    assert preloaded == 4 and all(generation.cached_tokens == 4 for generation in generations)
    for server in servers:
        bodies = [body for path, body in server.calls if path == "/generate"]
        fills = [body for body in bodies if body["sampling_params"]["max_new_tokens"] == 0]
        assert [(fill["input_ids"], fill["extra_key"]) for fill in fills] == [(trunk.tolist(), "1")]


def test_a_server_that_comes_back_computes_the_shared_beginning_before_it_is_used(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        await engine.preload(np.array([3, 4], np.int32))
        server.restart()
        return await engine.generate(request((3, 4, 5)))

    assert run(tmp_path, test, server).cached_tokens == 2


def test_memory_is_given_back_while_training_and_taken_again_first(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.release()  # nothing to release yet
        await engine.set_weights("a", 1)
        await engine.release()
        assert server.released
        mark = len(server.calls)
        await engine.set_weights("a", 1)  # the weights are gone with the memory
        await engine.generate(request())
        return server.paths()[mark:]

    assert run(tmp_path, test, server, release_memory=True) == [
        "/server_info",
        "/model_info",  # has the shapes of the new weights
        "/model_info",  # still the process that gave its memory back
        "/resume_memory_occupation",
        "/pause_generation",
        "/update_weights_from_disk",
        "/flush_cache",
        "/continue_generation",
        "/model_info",
        "/generate",
    ]


def test_nothing_runs_when_memory_is_given_back(tmp_path):
    """A request that its client left behind would be the server's death; it is aborted, and served again afterwards."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        mark = len(server.calls)
        await engine.release()
        return server.calls[mark:]

    assert run(tmp_path, test, server, release_memory=True)[:2] == [
        ("/pause_generation", {"mode": "abort"}),
        ("/release_memory_occupation", {}),
    ]


def test_a_run_that_ends_in_training_leaves_the_servers_their_memory(tmp_path):
    """The next run's first update would meet memory that is not there."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        await engine.release()
        await engine.close()
        return server.released, server.paused

    assert run(tmp_path, test, server, release_memory=True) == (False, False)


def test_a_server_of_another_run_is_not_believed(tmp_path):
    """Both runs are at step 2, so the version says nothing; the folder does."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        server.fail(faults.then(lambda document: document.update(model_path="another")), "/model_info")
        with pytest.raises(EngineDown, match="serves another after an update to .*a server belongs to one run"):
            await engine.set_weights("b", 2)

    run(tmp_path, test, server)


def test_memory_is_kept_where_the_settings_say_nothing(tmp_path):
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        await engine.release()

    run(tmp_path, test, server)
    assert "/release_memory_occupation" not in server.paths()


def test_a_server_restarted_while_its_memory_was_given_back_is_not_asked_to_take_it(tmp_path):
    """A server that gave nothing back dies of that."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        await engine.release()
        server.restart()
        await engine.set_weights("b", 2)
        return await engine.generate(request())

    assert run(tmp_path, test, server, release_memory=True).weight_version == 2
    assert "/resume_memory_occupation" not in server.paths()


def test_a_server_that_was_left_paused_is_back(tmp_path):
    """The word to go on was lost; a paused server samples nothing, and says that it is not well."""
    server = StandIn()

    async def test(engine):
        await engine.set_weights("a", 1)
        server.fail(faults.reset, "/continue_generation", count=1)
        await engine.set_weights("b", 2)
        return await engine.generate(request())

    assert run(tmp_path, test, server).weight_version == 2
