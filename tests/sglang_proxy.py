"""A proxy before a real SGLang server that can be told to misbehave; see `sglang_faults`."""

from __future__ import annotations

from typing import Any

import aiohttp

from tests.sglang_faults import Answer, FaultyServer


class Proxy(FaultyServer):
    """Passes requests on to `upstream`; without one, or where that one is dead, answers 502."""

    def __init__(self, upstream: str, *, seed: int = 0):
        super().__init__(seed=seed)
        self.upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Listens."""
        # A new connection for each request: a real server closes idle ones, and a reset here must be a fault of ours.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        await super().start()

    async def stop(self) -> None:
        """Refuses connections from now on."""
        await super().stop()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def answer(self, path: str, document: dict[str, Any], body: bytes) -> Answer:
        """What the real server says."""
        del document
        method, headers = ("POST", {"Content-Type": "application/json"}) if body else ("GET", {})
        try:
            async with self._session.request(method, self.upstream + path, data=body or None, headers=headers) as reply:
                return Answer(reply.status, await reply.read())
        except aiohttp.ClientError as error:
            return Answer(502, str(error).encode())
