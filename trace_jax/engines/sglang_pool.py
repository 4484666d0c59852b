"""Which server answers what, and which servers are in rotation.

All requests of a group (a prompt and every fork of its prefixes) go to one server, the one that holds their prefixes;
a server that is dead, or far busier than the least busy one, gives the group up. A server that fails is taken out; in
the background it is asked for its health, given the newest weights and only then put back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import aiohttp

from trace_jax.engines.base import EngineDown
from trace_jax.engines.sglang_server import HEALTH, NoConnection, Refused, Server, Target, TooShort, Unreachable
from trace_jax.engines.sglang_wire import BadReply

# A group moves where its server has more than OVERLOAD * least + SLACK requests in flight. A server decodes that many
# at once; to move costs the prefixes: all forks of a prompt are sent together, and none finds them on the new server.
OVERLOAD, SLACK = 2.0, 256
STRIKES = 3  # failed tries, each sent after the one before, that take a server out; no connection does at once
HEARTBEAT = 5.0  # seconds between looks at servers that owe an answer
LATE = 1.0  # seconds after a deadline: later, this process was busy with something else
RETRY_FIRST, RETRY_MOST = 0.5, 15.0  # seconds between tries to bring a server back
_KEEP_ALIVE = 4.0  # seconds of an idle connection: SGLang closes its own after 5, and a request must not meet that
FAILURES = (Unreachable, Refused, BadReply, TooShort)

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Pool:
    """The servers of one engine; everything here runs in one event loop."""

    def __init__(self, urls: Sequence[str], router: str | None, *, update_timeout: float, outage_timeout: float):
        """
        Args:
          urls: of every server.
          router: URL of a router that spreads requests over them, if there is one: then it does the routing, and only
            weights go to the servers themselves.
          update_timeout: seconds in which a server must take new weights.
          outage_timeout: seconds without any server after which `pick` gives up.
        """
        self.servers = [Server(url) for url in urls]
        self.router = Server(router) if router else None
        self.losses = self.returns = self.moves = 0
        self._update_timeout, self._outage_timeout = update_timeout, outage_timeout
        self._target: Target | None = None
        self._homes: dict[str, Server] = {}
        self._serving = asyncio.Event()  # some server is in rotation
        self._tasks: dict[str, asyncio.Task] = {}  # by URL: the one that brings a server back; "": the heartbeat
        self._session: aiohttp.ClientSession | None = None
        self._input_tokens = 0
        self._closed = False

    async def open(self, input_tokens: int) -> None:
        """Waits until every server answers, or some do and the time is up.

        Raises EngineDown where none does in time, or where one cannot hold requests of `input_tokens` tokens.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
        self._session = aiohttp.ClientSession(connector=connector)
        for server in self._all():
            server.session = self._session
        self._input_tokens = input_tokens
        if not any(await _all_or_error(self._meet(server) for server in self.servers)):
            raise self._outage()
        self._tasks[""] = asyncio.create_task(self._heartbeat())

    async def _meet(self, server: Server) -> bool:
        """Whether it answered in time. Raises EngineDown for one that no waiting would make usable."""
        loop, delay = asyncio.get_running_loop(), RETRY_FIRST
        end, told = loop.time() + self._outage_timeout, False
        while True:
            try:
                await server.check_context(self._input_tokens)
                return True
            except TooShort as error:
                raise EngineDown(str(error)) from error
            except FAILURES as error:
                server.reason = str(error)
                if isinstance(error, Refused) and error.for_good:
                    raise EngineDown(f"{error}; is this the URL of an SGLang server? (config.sglang.urls)") from error
            if not told:
                _log.warning("waiting for %s", server.reason)
            told = True
            if loop.time() > end:
                return False
            delay = await _back_off(delay)

    async def update(self, target: Target) -> None:
        """Serves `target` everywhere at once. Returns when every server has it or is out of rotation.

        Raises EngineDown where every server refused for good, or none came back in time.
        """
        self._target = target
        self._homes.clear()
        fresh = [server for server in self._all() if server.url not in self._tasks]
        for server in fresh:
            server.ready = False
        self._note()
        results = await _all_or_error(self._try_to_bring(server) for server in fresh)
        refused = [e for e in results if isinstance(e, BadReply) or (isinstance(e, Refused) and e.for_good)]
        if refused and len(refused) == len(self.servers):
            reasons = "; ".join(map(str, refused))
            raise EngineDown(
                f"no server took the weights of version {target.version}: {reasons}; start the servers with the model "
                "folder of this run, and let them see the folder of the weights"
            )
        await self.serving()

    async def each(self, act: Callable[[Server], Awaitable[None]]) -> None:
        """Does something on every server in rotation at once; one that fails is taken out."""

        async def one(server: Server) -> None:
            try:
                await act(server)
            except FAILURES as error:
                self.lose(server, str(error))

        await asyncio.gather(*(one(server) for server in self.servers if server.ready))

    def retarget(self, target: Target) -> None:
        """What a server that comes back must serve."""
        self._target = target

    async def serving(self) -> None:
        """Waits for a server in rotation. Raises EngineDown after the outage's time, with a reason for each."""
        try:
            async with asyncio.timeout(self._outage_timeout):
                while not self._serving.is_set():  # what came back may be lost again before a waiter's turn
                    await self._serving.wait()
        except TimeoutError:
            raise self._outage() from None

    def _outage(self) -> EngineDown:
        reasons = "; ".join(f"{server.url} ({server.reason})" for server in self._all() if not server.ready)
        return EngineDown(
            f"no SGLang server has been in rotation for {self._outage_timeout:g} s: {reasons}; start them again, then "
            "the same command goes on"
        )

    async def pick(self, group: str, avoid: Server | None = None) -> Server:
        """The server for a request of `group`: not `avoid`, if there is another one.

        With a router it is the router, unless that is to be avoided: it would send the request where it failed before.
        Raises EngineDown.
        """
        await self.serving()
        if all(server.futile >= STRIKES for server in self._all()):  # behind a router, its replies speak for all
            reasons = "; ".join(f"{server.url} ({server.reason})" for server in self._all())
            raise EngineDown(
                f"no SGLang server gives a usable answer, though each came back {STRIKES} times: {reasons}; look at "
                "their logs and start them again, then the same command goes on"
            )
        if self.router is not None and avoid is not self.router:
            return self.router
        ready = [server for server in self.servers if server.ready]
        others = [server for server in ready if server is not avoid] or ready
        home, least = self._homes.get(group), min(others, key=lambda server: server.in_flight)
        if home is None or home not in others or home.in_flight > OVERLOAD * least.in_flight + SLACK:
            self.moves += home is not None
            self._homes[group] = home = least
        return home

    def failed(self, server: Server, error: Exception, sent: float) -> None:
        """Books a try that failed, sent at that time of the loop; too many, or no connection, take the server out.

        What was on its way when another try failed does not count: errors come back sooner than tokens, so of many
        requests at once a few that fail are the first to be heard of.
        """
        if sent < server.failed_at and not isinstance(error, NoConnection):
            return
        server.failures, server.failed_at = server.failures + 1, asyncio.get_running_loop().time()
        if server.ready and (server.failures >= STRIKES or isinstance(error, NoConnection)):
            self.lose(server, f"{server.failures} tries failed, the last: {error}")

    def lose(self, server: Server, reason: str) -> None:
        """Takes a server out of rotation and begins to bring it back; its requests go elsewhere."""
        server.reason, server.ready = reason, False
        self._note()
        server.drop_calls()
        if server.url not in self._tasks and not self._closed:
            server.taken_out()
            _log.warning("%s is out of rotation: %s", server.url, reason)
            self.losses += 1
            self._tasks[server.url] = asyncio.create_task(self._bring_back(server))

    async def close(self) -> None:
        """Stops everything in the background; the servers go on running, with the memory that they had."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*(server.leave() for server in self.servers))
        for server in self._all():
            server.drop_calls()
        if self._session is not None:
            await self._session.close()

    def _all(self) -> list[Server]:
        return self.servers + ([self.router] if self.router else [])

    async def _bring(self, server: Server) -> None:
        """Puts a server into rotation with the newest weights; on failure it is out, and the reason is raised."""
        try:
            if server is self.router:
                if not await server.healthy():
                    raise Unreachable(server.reason)
            else:
                target = None
                while target is not self._target:  # newer weights may come while these are loaded
                    target = self._target
                    await server.check_context(self._input_tokens)
                    await server.load(target, self._update_timeout)
        except FAILURES as error:
            self.lose(server, str(error))
            raise
        server.ready, server.failures = True, 0
        self._note()

    async def _try_to_bring(self, server: Server) -> Exception | None:
        try:
            await self._bring(server)
        except FAILURES as error:
            return error
        return None

    def _note(self) -> None:
        """Says whether anything can be sampled now."""
        if any(server.ready for server in self.servers) and (self.router is None or self.router.ready):
            self._serving.set()
        else:
            self._serving.clear()

    async def _bring_back(self, server: Server) -> None:
        delay = RETRY_FIRST
        while not (server.ready or self._closed):
            delay = await _back_off(delay)
            if await server.awake():
                await self._try_to_bring(server)
        _log.warning("%s is back in rotation", server.url)
        self.returns += 1
        del self._tasks[server.url]

    async def _heartbeat(self) -> None:
        """Finds servers that hang: they owe an answer and do not say that they are alive."""
        while True:
            await asyncio.sleep(HEARTBEAT)
            routed = self.router is not None and self.router.in_flight > 0  # to whom, only the router knows
            busy = [server for server in self._all() if server.ready and (server.in_flight or routed)]
            alive = await asyncio.gather(*(self._alive(server) for server in busy))
            for server, well in zip(busy, alive, strict=True):
                if not well and server.ready:
                    self.lose(server, server.reason)

    async def _alive(self, server: Server) -> bool:
        """Whether it is healthy. Asked again where this loop was held up, so that the time was over unseen."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        return await server.healthy() or (loop.time() - begin > HEALTH + LATE and await server.healthy())


async def _all_or_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first exception cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _back_off(delay: float) -> float:
    """Sleeps about `delay` seconds; returns the next delay."""
    await asyncio.sleep(delay * random.uniform(0.5, 1.0))
    return min(2 * delay, RETRY_MOST)
