"""One SGLang server: its HTTP calls, each with a deadline, and whether it is in rotation.

This is the one place that talks HTTP. Every failure of a call is one of two: `Unreachable` (nothing came back in time)
or `Refused` (an HTTP error), so that callers never see the HTTP library's own exceptions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from trace_jax.engines import sglang_wire as wire
from trace_jax.engines.weight_folders import difference

_CONNECT = 10.0  # seconds to make a connection
_CONTROL = 60.0  # seconds of a call that samples nothing and loads nothing
HEALTH = 30.0  # seconds; the server itself gives its scheduler 20 to show a sign of life
_JSON = {"Content-Type": "application/json"}


class Unreachable(Exception):
    """No reply: refused, reset, or not in time."""


class NoConnection(Unreachable):
    """Nobody listens there."""


class Lost(Unreachable):
    """The server was taken out of rotation while the request waited: no fault of the request's own."""


class Refused(Exception):
    """A reply with an HTTP error."""

    def __init__(self, status: int, text: str):
        super().__init__(f"HTTP {status}: {text}")
        self.status = status

    @property
    def for_good(self) -> bool:
        """Whether the same request would be refused again, by any server: a client error that is not about load."""
        return 400 <= self.status < 500 and self.status not in (408, 429)


class TooShort(Exception):
    """A server whose context is too short for the run."""


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
        self.futile = 0  # times in a row that it was taken out without a good reply since it had come back
        self._proven = False  # whether there was one
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
            raise Lost(f"{self.url}: {self.reason}") from None
        finally:
            self._calls.discard(call)

    def replied(self) -> None:
        """Notes a good reply."""
        self.failures, self.futile, self._proven = 0, 0, True

    def taken_out(self) -> None:
        """Notes that it is out of rotation from now on."""
        self.futile, self._proven = 0 if self._proven else self.futile + 1, False

    def drop_calls(self) -> None:
        """All requests that wait for this server raise Lost now."""
        for call in self._calls:
            call.cancel()

    async def healthy(self) -> bool:
        """Whether the server says that it can sample."""
        try:
            await self._ask("GET", "/health", None, HEALTH)
        except (Unreachable, Refused) as error:
            self.reason = str(error)
            return False
        return True

    async def awake(self) -> bool:
        """As `healthy`, of a server that an update may have left paused: it samples nothing, so it would never be."""
        async with self.bringing:
            with contextlib.suppress(Unreachable, Refused):
                await self._control("/continue_generation", {}, HEALTH)
        return await self.healthy()

    async def check_context(self, tokens: int) -> None:
        """Raises TooShort where an episode of `tokens` tokens does not fit, BadReply where the server does not say."""
        info = wire.read_object(await self._ask("GET", "/server_info", None, _CONTROL))
        limit = info.get("max_req_input_len")
        if not isinstance(limit, int):
            raise wire.BadReply(
                f"{self.url}: /server_info has max_req_input_len {limit!r}, must be a number; SGLang 0.5.23 says it"
            )
        if limit < tokens:
            raise TooShort(
                f"{self.url} holds requests below {limit} tokens, but an episode has up to {tokens}; start it with "
                f"--context-length {tokens + 8} or more, or lower config.model.context_length"
            )

    async def version(self) -> str:
        """The weight version that it serves."""
        return str((await self._model_info()).get("weight_version"))

    async def _model_info(self) -> dict[str, Any]:
        return wire.read_object(await self._ask("GET", "/model_info", None, _CONTROL))

    async def load(self, target: Target, timeout: float) -> None:
        """Serves `target`, verified: loaded, cache empty, version told back, shared beginning computed.

        Paused meanwhile, so that no request is sampled from two sets of weights. Raises Unreachable, Refused, BadReply.
        """
        async with self.bringing:
            await self._check_model(target.folder)
            await self.resume()
            async with self._paused("retract"):
                document = {"model_path": str(target.folder), "weight_version": str(target.version)}
                reply = wire.read_object(await self._control("/update_weights_from_disk", document, timeout))
                if reply.get("success") is not True:
                    raise wire.BadReply(f"{self.url}: update refused: {wire.one_line(str(reply.get('message')))}")
                await self._control("/flush_cache", {})
            info = await self._model_info()
            if (found := str(info.get("weight_version"))) != str(target.version):
                raise wire.BadReply(f"{self.url}: serves version {found} after an update to {target.version}")
            if (path := str(info.get("model_path"))) != str(target.folder):
                raise wire.BadReply(
                    f"{self.url}: serves {path} after an update to {target.folder}; a server belongs to one run"
                )
            self._loaded = found
            if target.trunk is not None:
                await self.fill(target.trunk, timeout)

    async def _check_model(self, folder: Path) -> None:
        """Raises BadReply where the server's model has other shapes than `folder`: it would die of the update.

        The weights that it was given last may be gone with the run that gave them; the tokenizer's folder is the one
        that it was started with.
        """
        info = await self._model_info()
        for served in (str(info.get("model_path")), str(info.get("tokenizer_path"))):
            if found := difference(Path(served), folder):
                raise wire.BadReply(f"{self.url}: serves {served}, another model than this run's: {found}")

    async def forget(self) -> None:
        """Empties the prefix cache, verified. What a client has left behind is aborted first: nothing may run then."""
        async with self.bringing:
            async with self._paused("abort"):
                await self._control("/flush_cache", {})

    @contextlib.asynccontextmanager
    async def _paused(self, mode: str) -> AsyncIterator[None]:
        """Nothing is sampled within. `mode`: running requests are "retract"ed, to go on afterwards, or "abort"ed."""
        await self._control("/pause_generation", {"mode": mode})
        try:
            yield
        except asyncio.CancelledError:
            with contextlib.suppress(Unreachable, Refused):  # or the cancellation would be lost
                await self._control("/continue_generation", {}, _CONNECT)
            raise
        except BaseException:
            await self._control("/continue_generation", {})
            raise
        await self._control("/continue_generation", {})

    async def fill(self, body: bytes, timeout: float) -> None:
        """Computes a shared beginning."""
        await self._ask("POST", "/generate", body, timeout)

    async def release(self) -> None:
        """Gives its device memory back until the next `load`. The server dies of this while a request is running, so
        what a client has left behind is aborted first; `load` ends the pause."""
        async with self.bringing:
            await self._control("/pause_generation", {"mode": "abort"})
            await self._control("/release_memory_occupation", {})
            self.released = True

    async def resume(self) -> None:
        """Takes the memory back that `release` gave away; what is in it is not the weights."""
        if self.released and await self.version() == self._loaded:  # else it was started again: it would die of this
            await self._control("/resume_memory_occupation", {})
        self.released = False

    async def leave(self) -> None:
        """Leaves a server behind that the next run can use, even if this one ends while its memory is given back."""
        if self.released:
            with contextlib.suppress(Unreachable, Refused, wire.BadReply):
                await self.resume()
                await self._control("/continue_generation", {})

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
