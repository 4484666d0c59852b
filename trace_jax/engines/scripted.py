"""An engine without a model: a function writes the replies. It exists for tests and dry runs.

It keeps the contract of a real engine (stop ids, token limits, weight versions, a prefix memory per salt), so that
what stands on it can be checked without arithmetic that no one can follow by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trace_jax.engines.base import EngineError
from trace_jax.types import GenerateRequest, Generation

LOGPROB = -0.5  # log-prob of every scripted token; any finite value <= 0 would do

Script = Callable[[GenerateRequest], "Generation | Sequence[int] | np.ndarray"]


class ScriptedEngine:
    """Replies with `script(request)`, after `delay(request)` seconds.

    Args:
      script: token ids of the turn (cut after the first stop id, at `max_new_tokens` and at the context's end), or a
        whole `Generation`, which is passed on untouched. It may raise, e.g. `EngineError`.
      delay: seconds to sleep before the reply is written; None replies without yielding to other tasks.
      context_length: tokens of the longest history plus generation.

    `requests` records every request in the order of arrival, `version` the weights that were set last.
    """

    def __init__(
        self, script: Script, delay: Callable[[GenerateRequest], float] | None = None, *, context_length: int = 4096
    ):
        self.context_length = context_length
        self.requests: list[GenerateRequest] = []
        self.version = 0
        self.closed = False
        self.preloaded_tokens = 0
        self._trunk = np.zeros(0, np.int32)
        self._script = script
        self._delay = delay
        self._memory: dict[str, dict] = {}  # salt -> trie of token ids whose keys and values are "computed"

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns the scripted turn with `cached_tokens` by longest common prefix (see `_cached`)."""
        self.requests.append(request)
        trunk = self._trunk.shape[0]
        if trunk and not (request.tokens.shape[0] > trunk and np.array_equal(request.tokens[:trunk], self._trunk)):
            raise EngineError(f"a request does not begin with the {trunk} preloaded tokens; preload others")
        if self._delay is not None:
            await asyncio.sleep(self._delay(request))
        cached = self._cached(request)
        reply = self._script(request)
        if not isinstance(reply, Generation):
            reply = self._generation(request, np.asarray(reply, np.int32), cached)
        self._remember(request, reply.tokens)
        return reply

    async def set_weights(self, params: Any, version: int) -> None:
        """Records the version and forgets every prefix; `params` are ignored."""
        self.version = version
        self._memory.clear()
        self._trunk = np.zeros(0, np.int32)

    async def preload(self, tokens: np.ndarray) -> None:
        """From now on every request must begin with `tokens`, which count as cached."""
        self._trunk = np.asarray(tokens, np.int32)
        self.preloaded_tokens += self._trunk.shape[0]

    async def release(self) -> None:
        """Holds no device memory."""

    def stats(self) -> dict[str, float]:
        """Counts nothing."""
        return {}

    async def close(self) -> None:
        """Marks the engine as closed."""
        self.closed = True

    def _generation(self, request: GenerateRequest, tokens: np.ndarray, cached: int) -> Generation:
        size = request.tokens.shape[0]
        stops = np.flatnonzero(np.isin(tokens, request.stop_ids))
        if stops.size:
            tokens = tokens[: stops[0] + 1]
        tokens = tokens[: min(request.max_new_tokens, self.context_length - size)]
        return Generation(
            tokens=tokens,
            logprobs=np.full(tokens.shape, LOGPROB, np.float32),
            stopped=bool(tokens.size) and int(tokens[-1]) in request.stop_ids,
            cached_tokens=cached,
            prefilled_tokens=size - cached,
            weight_version=self.version,
        )

    def _cached(self, request: GenerateRequest) -> int:
        """Length of the longest remembered prefix of the request, at most n - 1: the last token must be computed."""
        trie = self._memory.get(request.salt, {})
        tokens = request.tokens.tolist()
        for length, token in enumerate(tokens[:-1]):
            if token not in trie:
                return max(length, self._trunk.shape[0])
            trie = trie[token]
        return len(tokens) - 1

    def _remember(self, request: GenerateRequest, generated: np.ndarray) -> None:
        """Stores the request and all generated tokens but the last, which was sampled and never fed back."""
        trie = self._memory.setdefault(request.salt, {})
        for token in request.tokens.tolist() + generated[:-1].tolist():
            trie = trie.setdefault(token, {})
