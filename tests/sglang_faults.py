"""Faults that a server of tests can be told to have, and the HTTP server that has them.

A fault is a function of a request and of the honest answer to it; whoever knows how to answer honestly (a stand-in, a
proxy before a real server) derives from `FaultyServer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer before it is sent."""

    status: int
    body: bytes


Honest = Callable[[], Awaitable[Answer]]
Behaviour = Callable[[web.Request, Honest], Awaitable[web.StreamResponse]]
Edit = Callable[[dict[str, Any]], object]  # changes a reply's document in place
NEVER = 3600.0  # seconds


@dataclasses.dataclass
class Fault:
    """How requests of some paths are answered while it lasts."""

    behaviour: Behaviour
    paths: tuple[str, ...] = ("/generate",)
    after: int = 0  # of these requests, the first ones are spared
    share: float = 1.0  # of the others, drawn at random
    count: int | None = None  # requests that it hits before it is over; None: until it is cleared
    seen: int = 0
    hits: int = 0

    def strikes(self, path: str, rng: random.Random) -> bool:
        """Whether this request is hit; counts it."""
        if path not in self.paths or (self.count is not None and self.hits >= self.count):
            return False
        self.seen += 1
        if self.seen <= self.after or rng.random() >= self.share:
            return False
        self.hits += 1
        return True


def respond(answer: Answer) -> web.Response:
    """Sends an answer as JSON."""
    return web.Response(status=answer.status, body=answer.body, content_type="application/json")


async def hang(request: web.Request, honest: Honest) -> web.StreamResponse:
    """Accepts, and never answers."""
    del request, honest
    await asyncio.sleep(NEVER)
    raise AssertionError("unreachable: tests are shorter")


def slow(seconds: float) -> Behaviour:
    """Answers honestly, but late."""

    async def behave(request: web.Request, honest: Honest) -> web.StreamResponse:
        del request
        await asyncio.sleep(seconds)
        return respond(await honest())

    return behave


def status(code: int, body: str = "Internal Server Error") -> Behaviour:
    """Answers with a status and a text, and does nothing."""

    async def behave(request: web.Request, honest: Honest) -> web.StreamResponse:
        del request, honest
        return web.Response(status=code, text=body)

    return behave


def says(document: Any, code: int = 200) -> Behaviour:
    """Answers with a JSON document, and does nothing."""
    return status(code, json.dumps(document))


def then(edit: Edit) -> Behaviour:
    """Answers honestly but for an edit of the document. NaN is written as Python writes it."""

    async def behave(request: web.Request, honest: Honest) -> web.StreamResponse:
        del request
        answer = await honest()
        document = json.loads(answer.body)
        edit(document)
        return respond(dataclasses.replace(answer, body=json.dumps(document).encode()))

    return behave


async def truncate(request: web.Request, honest: Honest) -> web.StreamResponse:
    """Half of the JSON, as if that were all."""
    del request
    answer = await honest()
    return respond(dataclasses.replace(answer, body=answer.body[: len(answer.body) // 2]))


async def cut_off(request: web.Request, honest: Honest) -> web.StreamResponse:
    """Half of the body that was announced, then the connection ends."""
    answer = await honest()
    response = web.StreamResponse(headers={"Content-Length": str(len(answer.body))})
    await response.prepare(request)
    await response.write(answer.body[: len(answer.body) // 2])
    request.transport.abort()
    return response


async def reset(request: web.Request, honest: Honest) -> web.StreamResponse:
    """Ends the connection without an answer."""
    del honest
    request.transport.abort()
    return web.Response()


def without_logprobs(document: dict[str, Any]) -> None:
    """As if they had not been asked for."""
    del document["meta_info"]["output_token_logprobs"]


def short_logprobs(document: dict[str, Any]) -> None:
    """One too few."""
    document["meta_info"]["output_token_logprobs"].pop()


def logprob(value: float | None) -> Edit:
    """The first token gets this log-prob."""

    def edit(document: dict[str, Any]) -> None:
        document["meta_info"]["output_token_logprobs"][0][0] = value

    return edit


def aborted(document: dict[str, Any]) -> None:
    """As a server ends its running requests."""
    document["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}


def token_id(value: Any) -> Edit:
    """The first sampled id is this one."""

    def edit(document: dict[str, Any]) -> None:
        document["output_ids"][0] = document["meta_info"]["output_token_logprobs"][0][1] = value

    return edit


def versions(*names: str) -> Edit:
    """Tokens from these weight versions, the first ones from the first."""

    def edit(document: dict[str, Any]) -> None:
        meta = document["meta_info"]
        end = meta["completion_tokens"]
        borders = [end * i // len(names) for i in range(len(names))] + [end]
        spans = zip(names, borders, borders[1:], strict=False)
        meta["weight_versions"] = [{"version": name, "start": a, "end": b} for name, a, b in spans]
        meta["weight_version"] = names[-1]

    return edit


class FaultyServer:
    """An HTTP server on a port that it keeps from its first start on."""

    def __init__(self, *, seed: int = 0):
        self.faults: list[Fault] = []
        self.port = 0
        self.calls: list[tuple[str, dict[str, Any]]] = []  # path and document of every request, whatever came of it
        self.in_flight = self.most_in_flight = 0
        self._rng = random.Random(seed)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens, or listened."""
        return f"http://127.0.0.1:{self.port}"

    def fail(
        self, behaviour: Behaviour, *paths: str, after: int = 0, share: float = 1.0, count: int | None = None
    ) -> Fault:
        """Has a fault from now on, of /generate if no paths are given; of several that fit, the newest one counts."""
        fault = Fault(behaviour, paths or ("/generate",), after, share, count)
        self.faults.append(fault)
        return fault

    def paths(self, *without: str) -> list[str]:
        """Of all requests so far, in order."""
        return [path for path, _ in self.calls if path not in without]

    async def start(self) -> None:
        """Listens."""
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuses connections from now on, and ends those that there are."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def answer(self, path: str, document: dict[str, Any], body: bytes) -> Answer:
        """The honest answer to a request."""
        raise NotImplementedError

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            document = json.loads(body) if body else {}
        except ValueError:
            document = {}
        self.calls.append((request.path, document))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            fault = self._fault(request.path)
            if fault is None:
                return respond(await self.answer(request.path, document, body))
            return await fault.behaviour(request, lambda: self.answer(request.path, document, body))
        finally:
            self.in_flight -= 1

    def _fault(self, path: str) -> Fault | None:
        return next((fault for fault in reversed(self.faults) if fault.strikes(path, self._rng)), None)


class InThread:
    """Servers with an event loop of their own, for callers that block or have none."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Awaitable[Any]) -> Any:
        """Runs a coroutine there, and waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        """Ends the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def serving(*servers: FaultyServer) -> Iterator[InThread]:
    """Starts servers in a thread; stops them at the end."""
    thread = InThread()
    try:
        for server in servers:
            thread.run(server.start())
        yield thread
    finally:
        for server in servers:
            thread.run(server.stop())
        thread.close()
