"""One SGLang server: its HTTP calls, each with a deadline, and whether it is in rotation.

This is the one place that talks HTTP. Every failure is one of two: `Unreachable` (nothing came back in time) or
`Refused` (an HTTP error), so that callers never see the HTTP library's own exceptions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from trace_jax.engines import sglang_wire as wire

_CONNECT = 10.0  # seconds to make a connection
_CONTROL = 60.0  # seconds of a call that samples nothing and loads nothing
_HEALTH = 30.0  # seconds; the server itself gives its scheduler 20 to show a sign of life
_JSON = {"Content-Type": "application/json"}


class Unreachable(Exception):
    """No reply: refused, reset, or not in time."""


class NoConnection(Unreachable):
    """Nobody listens there."""


class Refused(Exception):
    """A reply with an HTTP error."""

    def __init__(self, status: int, text: str):
        super().__init__(f"HTTP {status}: {text}")
        self.status = status

    @property
    def for_good(self) -> bool:
        """Whether the same request would be refused again, by any server: a client error that is not about load."""
        return 400 <= self.status < 500 and self.status not in (408, 429)


@dataclasses.dataclass(frozen=True)
class Target:
    """What every server in rotation serves."""

    folder: Path  # model folder of the weights
    version: int
    trunk: bytes | None = None  # body of the request that fills the cache with what all requests begin with


class Server:
    """A server at `url`. It is in rotation while `ready`; `reason` says why it is not."""

    def __init__(self, url: str):
        self.url = url
        self.ready = False
        self.reason = "not asked yet"
        self.released = False  # its device memory is given back
        self._loaded = ""  # the version that it was last given
        self.failures = 0  # tries that failed since the last one that did not; see `Pool.failed`
        self.failed_at = 0.0  # time of the loop
        self.bringing = asyncio.Lock()  # one change of weights at a time
        self.session: aiohttp.ClientSession | None = None
        self._calls: set[asyncio.Task] = set()

    @property
    def in_flight(self) -> int:
        """Requests that wait for this server."""
        return len(self._calls)

    async def generate(self, body: bytes, timeout: float) -> bytes:
        """The reply of `/generate`. Raises Unreachable (also where the server is taken out meanwhile) and Refused."""
        call = asyncio.create_task(self._ask("POST", "/generate", body, timeout))
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise Unreachable(f"{self.url}: {self.reason}") from None
        finally:
            self._calls.discard(call)

    def drop_calls(self) -> None:
        """All requests that wait for this server raise Unreachable now."""
        for call in self._calls:
            call.cancel()

    async def healthy(self) -> bool:
        """Whether the server says that it can sample."""
        try:
            await self._ask("GET", "/health", None, _HEALTH)
        except (Unreachable, Refused) as error:
            self.reason = str(error)
            return False
        return True

    async def awake(self) -> bool:
        """As `healthy`, of a server that an update may have left paused: it samples nothing, so it would never be."""
        with contextlib.suppress(Unreachable, Refused):
            await self._control("/continue_generation", {}, _HEALTH)
        return await self.healthy()

    async def input_limit(self) -> int:
        """Tokens that a request must stay below. BadReply where the server does not say."""
        info = wire.read_object(await self._ask("GET", "/server_info", None, _CONTROL))
        limit = info.get("max_req_input_len")
        if not isinstance(limit, int):
            raise wire.BadReply(f"{self.url}: /server_info has max_req_input_len {limit!r}")
        return limit

    async def version(self) -> str:
        """The weight version that it serves."""
        info = wire.read_object(await self._ask("GET", "/model_info", None, _CONTROL))
        return str(info.get("weight_version"))

    async def load(self, target: Target, timeout: float) -> None:
        """Serves `target`, verified: loaded, cache empty, version told back, shared beginning computed.

        Paused meanwhile, so that no request is sampled from two sets of weights. Raises Unreachable, Refused, BadReply.
        """
        async with self.bringing:
            if self.released:
                if await self.version() == self._loaded:  # else it was started again since; it would die of a resume
                    await self._control("/resume_memory_occupation", {})
                self.released = False
            await self._control("/pause_generation", {"mode": "retract"})
            try:
                document = {"model_path": str(target.folder), "weight_version": str(target.version)}
                reply = wire.read_object(await self._control("/update_weights_from_disk", document, timeout))
                if reply.get("success") is not True:
                    raise wire.BadReply(f"{self.url}: update refused: {wire.one_line(str(reply.get('message')))}")
                await self._control("/flush_cache", {})
            finally:
                await self._control("/continue_generation", {})
            found = await self.version()
            if found != str(target.version):
                raise wire.BadReply(f"{self.url}: serves version {found} after an update to {target.version}")
            self._loaded = found
            if target.trunk is not None:
                await self.fill(target.trunk, timeout)

    async def forget(self) -> None:
        """Empties the prefix cache, verified: the server answers with an error while requests are running."""
        await self._control("/flush_cache", {})

    async def fill(self, body: bytes, timeout: float) -> None:
        """Computes a shared beginning."""
        await self._ask("POST", "/generate", body, timeout)

    async def release(self) -> None:
        """Gives its device memory back until the next `load`."""
        await self._control("/release_memory_occupation", {})
        self.released = True

    async def _control(self, path: str, document: dict[str, Any], timeout: float = _CONTROL) -> bytes:
        return await self._ask("POST", path, orjson.dumps(document), timeout)

    async def _ask(self, method: str, path: str, body: bytes | None, timeout: float) -> bytes:
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT)
        try:
            async with self.session.request(
                method, self.url + path, data=body, headers=_JSON, timeout=limit
            ) as response:
                reply = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            kind = NoConnection if isinstance(error, aiohttp.ClientConnectorError) else Unreachable
            raise kind(f"{self.url}{path}: {what or type(error).__name__}") from error
        if response.status >= 400:
            raise Refused(response.status, f"{self.url}{path}: {wire.error_text(reply)}")
        return reply
