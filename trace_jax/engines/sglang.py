"""Rollouts on SGLang servers: the engine protocol over HTTP.

Token ids go out and token ids with their log-probs come back (`sglang_wire`); a prompt and its forks stay on the server
that holds their prefixes (`sglang_pool`); weights go through a model folder that every server loads, verified
(`weight_folders`, `sglang_server`). What a request draws depends on the servers' own random state: a run is
reproducible in distribution only.

A try that fails (no connection, a hang, HTTP 5xx, a reply that does not add up, other weights) is repeated with back-
off and jitter, on another server where there is one. After `attempts` tries the request raises `EngineError` and its
episode ends with that label. A busy server (429, 503) and one that is lost with the request on it cost no try. Where
no server is left, requests wait for one to come back; after `outage_timeout` the run ends with `EngineDown`, and so
it does where servers come back again and again without one good reply.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tenacity

from trace_jax.engines import sglang_wire as wire
from trace_jax.engines.base import EngineDown, EngineError
from trace_jax.engines.sglang_pool import Pool
from trace_jax.engines.sglang_server import Lost, Refused, Server, Target, Unreachable
from trace_jax.engines.weight_folders import WeightFolders
from trace_jax.types import GenerateRequest, Generation

_BUSY = (429, 503)
_NO_TOKENS = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How patient the client is; defaults are the config's."""

    request_timeout: float  # seconds of one try
    attempts: int  # tries of one request
    update_timeout: float  # seconds in which a server must take new weights
    outage_timeout: float  # seconds without any server after which the run ends
    release_memory: bool  # whether `release` has servers give their device memory back
    retry_wait: float = 0.5  # seconds: the first back-off; it doubles, with jitter, up to 30


class _Again(Exception):
    """This try failed in a way that another one may not. It `counts` where the request may be what is wrong."""

    def __init__(self, error: Exception | str, *, counts: bool = True):
        super().__init__(str(error))
        self.counts = counts


class SglangEngine:
    """`engines.base.Engine` over one or more SGLang servers. One asyncio loop from the first call to `close`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        router: str | None,
        context_length: int,
        vocab_size: int,
        sampled_vocab: int,
        weights: WeightFolders,
        settings: Settings,
    ):
        """
        Args:
          urls: of the servers, at least one.
          router: see `sglang_pool.Pool`.
          context_length: tokens of the longest history plus generation.
          vocab_size: ids that may be sent are below it.
          sampled_vocab: ids that may come back are below it; the others are padding that the trainer never scores.
          weights: where the policy's weights are written.
        """
        self.context_length = context_length
        self.preloaded_tokens = 0
        self.version: int | None = None
        self._vocab_size, self._sampled_vocab = vocab_size, sampled_vocab
        self._weights, self._settings = weights, settings
        self._pool = Pool(
            urls, router, update_timeout=settings.update_timeout, outage_timeout=settings.outage_timeout
        )
        self._target: Target | None = None
        self._writing: asyncio.Task | None = None
        self._loading = False
        self._trunk = _NO_TOKENS
        self._released = self._opened = self._closed = False
        self._counts = {"retries": 0, "bad_replies": 0, "mixed_versions": 0, "gave_up": 0}

    def stats(self) -> dict[str, float]:
        """Tries that were repeated, replies that were refused (and those of other weights among them), requests that
        were given up, servers lost and back again, prompts that changed their server."""
        pool = self._pool
        return self._counts | {"server_losses": pool.losses, "server_returns": pool.returns, "moved_groups": pool.moves}

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `engines.base.Engine`; also raises EngineDown."""
        if self._closed:
            raise EngineError("the engine was closed")
        if self.version is None:
            raise EngineError("the engine has no weights; call set_weights first")
        wire.check_request(request, context_length=self.context_length, vocab_size=self._vocab_size)
        trunk = self._trunk.shape[0]
        if trunk and not (request.tokens.shape[0] > trunk and np.array_equal(request.tokens[:trunk], self._trunk)):
            raise EngineError(f"a request does not begin with the {trunk} preloaded tokens; preload others")
        settings, avoid = self._settings, None
        body = wire.generate_body(request, context_length=self.context_length, salt=request.salt or str(self.version))
        tries = tenacity.AsyncRetrying(
            stop=_enough(settings),
            wait=_back_off(settings),
            retry=tenacity.retry_if_exception_type(_Again),
            before_sleep=self._count_retry,
        )
        try:
            async for attempt in tries:
                with attempt:
                    avoid = await self._pool.pick(request.group, avoid)
                    return await self._once(avoid, body, request)
        except tenacity.RetryError as error:
            self._counts["gave_up"] += 1
            last = error.last_attempt.exception()
            raise EngineError(
                f"gave up after {error.last_attempt.attempt_number} tries (config.sglang.attempts is "
                f"{settings.attempts}), the last: {last}"
            ) from last
        raise AssertionError("unreachable: the loop above returns or raises")

    async def _once(self, server: Server, body: bytes, request: GenerateRequest) -> Generation:
        """One try. Raises _Again or EngineError."""
        sent = asyncio.get_running_loop().time()
        try:
            reply = await server.generate(body, self._settings.request_timeout)
            generation = wire.read_generation(
                reply, request, version=self.version, vocab_size=self._sampled_vocab
            )
        except wire.MixedVersions as error:
            self._counts["bad_replies"] += 1
            self._counts["mixed_versions"] += 1
            await self._stale(server, error)
            raise _Again(f"{server.url}: {error}") from error
        except wire.BadReply as error:
            self._counts["bad_replies"] += 1
            self._pool.failed(server, error, sent)
            raise _Again(f"{server.url}: {error}") from error
        except Refused as error:
            if error.for_good:
                raise EngineError(f"a request was refused: {error}") from error
            if error.status not in _BUSY:
                self._pool.failed(server, error, sent)
            raise _Again(error, counts=error.status not in _BUSY) from error
        except Lost as error:
            raise _Again(error, counts=False) from error
        except Unreachable as error:
            self._pool.failed(server, error, sent)
            raise _Again(error) from error
        server.replied()
        return generation

    async def _stale(self, server: Server, error: wire.MixedVersions) -> None:
        """A server that has other weights than it should (it was restarted, say) is out until it has the right ones."""
        if server is not self._pool.router:
            if server.ready and str(self.version) not in error.found:  # else it spans a change of weights
                self._pool.lose(server, str(error))
            return

        async def check(worker: Server) -> None:
            if (found := await worker.version()) != str(self.version):
                raise wire.BadReply(f"serves weight version {found}, expected {self.version}")

        await self._pool.each(check)

    def _count_retry(self, state: tenacity.RetryCallState) -> None:
        del state
        self._counts["retries"] += 1

    async def set_weights(self, params: Any, version: int) -> None:
        """Writes the model folder of `version` and has every server load it; see `engines.base.Engine`.

        Raises EngineDown where the folder cannot be written, or no server takes it.
        """
        if not self._opened:
            self._opened = True
            self._weights.clear()  # of a run before this one
            await self._pool.open(self.context_length)
        if version == self.version and not self._released:
            target = self._target = dataclasses.replace(self._target, trunk=None)
            self._trunk = _NO_TOKENS
            self._pool.retarget(target)
            await self._pool.each(lambda server: server.forget())
            await self._pool.serving()
            return
        try:
            self._writing = asyncio.create_task(asyncio.to_thread(self._weights.write, params, version))
            folder = await asyncio.shield(self._writing)
        except OSError as error:
            raise EngineDown(
                f"the weights of version {version} cannot be written to {self._weights.home} ({error}); make room "
                "or choose another folder (config.sglang.weights_folder), then the same command goes on"
            ) from error
        self.version, self._trunk, self._released = version, _NO_TOKENS, False
        self._target, self._loading = Target(folder, version), True
        try:
            await self._pool.update(self._target)
        except EngineDown:
            self._loading = False
            raise
        self._loading = False

    async def preload(self, tokens: np.ndarray) -> None:
        """See `engines.base.Engine`: every server computes `tokens`, in the name space of the present version."""
        tokens = np.array(tokens, np.int32)
        if self.version is None:
            raise EngineError("the engine has no weights; call set_weights first")
        wire.check_ids(tokens, self._vocab_size)
        if tokens.shape[0] > self.context_length - 2:
            raise EngineError(
                f"{tokens.shape[0]} tokens to preload leave no room in the engine's context of {self.context_length}; "
                "enlarge it or shorten them"
            )
        self._trunk = tokens
        body = wire.preload_body(tokens, salt=str(self.version)) if tokens.size else None
        self._target = dataclasses.replace(self._target, trunk=body)
        self._pool.retarget(self._target)
        if body is not None:
            await self._pool.each(lambda server: server.fill(body, self._settings.update_timeout))
            self.preloaded_tokens += tokens.shape[0]

    async def release(self) -> None:
        """With `release_memory`, servers give their device memory back until the next `set_weights`."""
        if self._settings.release_memory and self.version is not None:
            await self._pool.each(lambda server: server.release())
            self._released = True

    async def close(self) -> None:
        """Ends the connections and removes the weight folders; the servers go on running.

        A folder that a server may be reading at this moment stays until the next run in this workdir.
        """
        self._closed = True
        await self._pool.close()
        if self._writing is not None:  # a thread goes on when its caller is cancelled
            await asyncio.gather(self._writing, return_exceptions=True)
        if not self._loading:
            self._weights.clear()


def _enough(settings: Settings) -> Callable[[tenacity.RetryCallState], bool]:
    """Ends the tries of one request: after `attempts` that count, or `outage_timeout` seconds of those that do not."""
    counted = 0

    def enough(state: tenacity.RetryCallState) -> bool:
        nonlocal counted
        counts = state.outcome.exception().counts
        counted += counts
        return counted >= settings.attempts or (not counts and state.seconds_since_start > settings.outage_timeout)

    return enough


def _back_off(settings: Settings) -> Callable[[tenacity.RetryCallState], float]:
    """Seconds before the next try: exponential with full jitter; a busy server is asked last when the outage ends."""
    jittered = tenacity.wait_random_exponential(settings.retry_wait, max=30)

    def wait(state: tenacity.RetryCallState) -> float:
        seconds = jittered(state)
        if state.outcome.exception().counts:
            return seconds
        return min(seconds, max(0.0, settings.outage_timeout - state.seconds_since_start))

    return wait
