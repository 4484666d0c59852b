"""The client of SGLang servers on stand-ins: an engine for one test, and proof that nothing remains of it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sglang_stand_in import StandIn
from trace_jax.engines import sglang_pool, sglang_server
from trace_jax.engines.sglang import Settings, SglangEngine
from trace_jax.engines.weight_folders import WeightFolders
from trace_jax.types import GenerateRequest

CONTEXT = 64
SETTINGS = Settings(
    request_timeout=5.0, attempts=4, update_timeout=5.0, outage_timeout=3.0, release_memory=False, retry_wait=0.01
)


@pytest.fixture
def impatient(monkeypatch):
    """Waits of seconds become hundredths."""
    monkeypatch.setattr(sglang_pool, "RETRY_FIRST", 0.02)
    monkeypatch.setattr(sglang_pool, "RETRY_MOST", 0.05)
    monkeypatch.setattr(sglang_pool, "HEARTBEAT", 0.1)
    monkeypatch.setattr(sglang_server, "HEALTH", 1.0)  # also on a machine that is busy


def save(folder: Path, params: str) -> None:
    """What stand-ins load."""
    (folder / "weights").write_text(params)


def request(tokens: Any = (3, 4, 5), group: str = "p", **changes: Any) -> GenerateRequest:
    """A small request of the stand-ins' vocabulary; 19 is its stop id."""
    fields = {"max_new_tokens": 4, "temperature": 1.0, "stop_ids": (19,), "key": (0,), "group": group}
    return GenerateRequest(np.array(tokens, np.int32), **fields | changes)


def run(
    tmp_path: Path,
    test: Callable[[SglangEngine], Awaitable[Any]],
    *servers: StandIn,
    save: Callable[[Path, Any], None] = save,
    start: bool = True,
    router: StandIn | None = None,
    **changes: Any,
) -> Any:
    """`await test(engine)` on started stand-ins (or on ports that nobody listens on).

    `changes` are of the settings. Afterwards no task, no folder and no request is left.
    """

    async def main():
        before, everyone = asyncio.all_tasks(), [*servers, *([router] if router else [])]
        for server in everyone:
            await server.start()
            if not start:
                await server.stop()
        engine = SglangEngine(
            [server.url for server in servers],
            router=router and router.url,
            context_length=CONTEXT,
            vocab_size=20,
            sampled_vocab=20,
            weights=WeightFolders(tmp_path / "weights", save),
            settings=dataclasses.replace(SETTINGS, **changes),
        )
        try:
            result = await test(engine)
        finally:
            await engine.close()
            await engine.close()
            for server in everyone:
                await server.stop()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        assert [server.in_flight for server in engine._pool.servers] == [0] * len(servers)
        assert not (tmp_path / "weights").exists()
        return result

    return asyncio.run(main())


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Returns when it holds; fails after some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
