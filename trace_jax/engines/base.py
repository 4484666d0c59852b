"""The protocol of everything that samples tokens.

An engine gets token ids and returns token ids with the log-probs that it sampled them from; it never sees text.
What a request draws is a function of the weights, its tokens and its `key`, never of what else is in flight. (Remote
engines may fall short of that; they say so.)
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from trace_jax.types import GenerateRequest, Generation


class EngineError(Exception):
    """The engine gave up on one request after its own retries. Any other exception of an engine ends the run."""


class EngineDown(Exception):
    """Nothing can be sampled any more: no server answers, or none takes the weights. Ends the run, one line."""


class Engine(Protocol):
    """Samples one turn at a time; many requests may be in flight at once."""

    context_length: int  # tokens: the longest history plus generation that the engine can hold
    preloaded_tokens: int  # tokens that `preload` has computed since the engine was made

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples until a stop id, `max_new_tokens` or the context's end; the stop id is kept.

        Must tolerate cancellation at any await. Raises `EngineError` when it gives up on this request, and
        `EngineDown` when nothing can be sampled any more.
        """
        ...

    async def set_weights(self, params: Any, version: int) -> None:
        """Serves `params` from now on, labels generations with `version`, and forgets every cached prefix.

        A version names one set of parameters: the same version again only forgets prefixes. Raises `EngineDown`.
        """
        ...

    async def preload(self, tokens: np.ndarray) -> None:
        """Computes `tokens` (int32 [n]) once, as the beginning that all requests share until the next `set_weights`.

        They count as cached in every generation, and in `preloaded_tokens` once. A request that does not begin with
        them, or holds nothing after them, raises `EngineError`. No tokens: nothing is shared.
        """
        ...

    async def release(self) -> None:
        """Gives back what device memory it can until the next `set_weights`; nothing is sampled in between."""
        ...

    def stats(self) -> dict[str, float]:
        """Counts since the engine was made, by name; they only rise (cache evictions, retries, ...)."""
        ...

    async def close(self) -> None:
        """Releases what the engine holds; calling it twice is harmless."""
        ...
