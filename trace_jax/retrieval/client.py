"""The client of a retrieval server that speaks the protocol of `retrieval.server` (Search-R1's).

A try that fails in a way that another one may not (no connection, no answer in time, status 408, 429 or 5xx, a reply
that is not what was asked for) is repeated with exponential back-off and jitter. What failed for good, and what did
not succeed within `deadline` seconds, is a RetrievalError.
"""

from __future__ import annotations

import math
import time
from typing import Any

import httpx
import orjson
import tenacity

from trace_jax.retrieval.base import Passage, RetrievalError, split_contents

_MOST_BYTES = 32 * 2**20  # of a reply
_AGAIN = (408, 425, 429)


class _Again(Exception):
    """This try failed in a way that another one may not."""


class SearchService:
    """`retrieval.base.Searcher` on a server. Safe to use from several threads; connections are kept and shared."""

    def __init__(
        self, url: str, *, timeout: float = 10.0, attempts: int = 4, deadline: float = 30.0, retry_wait: float = 0.25
    ):
        """
        Args:
          url: of the server, with or without its path "/retrieve".
          timeout: seconds that one try waits for a connection and for each part of the reply.
          attempts: tries of one search, at least 1.
          deadline: seconds of one search with all its tries; no try begins or goes on reading after it.
          retry_wait: seconds of the first back-off at most; it doubles with every try.
        Raises ValueError for an address that is not http or https, and for settings that are not positive.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"retrieval server {url!r}: must begin with http:// or https://")
        for name, value in {"timeout": timeout, "attempts": attempts, "deadline": deadline}.items():
            if not value > 0:
                raise ValueError(f"retrieval server: {name} is {value}, must be positive")
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._timeout, self._attempts, self._deadline, self._wait = timeout, attempts, deadline, retry_wait
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        self._client = httpx.Client(limits=limits, trust_env=False)  # no proxy between a run and its own server

    def search(self, query: str, top_k: int) -> list[Passage]:
        """See `retrieval.base.Searcher`. Raises RetrievalError after at most about `deadline` + `timeout` seconds."""
        query = query.encode("utf-8", "replace").decode()  # lone surrogates cannot be sent
        body = orjson.dumps({"queries": [query], "topk": top_k, "return_scores": True})
        end = time.monotonic() + self._deadline
        tries = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._attempts) | tenacity.stop_before_delay(self._deadline),
            wait=tenacity.wait_random_exponential(self._wait, max=5),
            retry=tenacity.retry_if_exception_type(_Again),
        )
        try:
            return tries(self._try, body, top_k, end)
        except tenacity.RetryError as error:
            last = error.last_attempt
            raise RetrievalError(f"{self.url}: {last.exception()} (tries: {last.attempt_number})") from error

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _try(self, body: bytes, top_k: int, end: float) -> list[Passage]:
        try:
            status, reply = self._post(body, end)
        except httpx.TimeoutException as error:
            raise _Again(f"no answer in time ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        if status in _AGAIN or status >= 500:
            raise _Again(f"status {status}")
        if status != 200:
            said = " ".join(reply[:200].decode(errors="replace").split())
            raise RetrievalError(f"{self.url}: status {status}: {said}")
        return _passages(reply)[:top_k]

    def _post(self, body: bytes, end: float) -> tuple[int, bytes]:
        """Status and body of the reply. Reads part by part, so that a reply that never ends is given up too."""
        timeout = min(self._timeout, max(end - time.monotonic(), 0.01))
        headers = {"content-type": "application/json"}
        with self._client.stream("POST", self.url, content=body, headers=headers, timeout=timeout) as response:
            parts, size = [], 0
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > _MOST_BYTES:
                    raise _Again(f"a reply of more than {_MOST_BYTES} bytes")
                if time.monotonic() > end:
                    raise _Again("the reply did not end in time")
            return response.status_code, b"".join(parts)


def _passages(reply: bytes) -> list[Passage]:
    """The passages of a reply to one query. Raises _Again for one of another shape."""
    try:
        (row,) = orjson.loads(reply)["result"]
        if not isinstance(row, list):
            raise TypeError("the passages of a query are no list")
        return [_passage(item) for item in row]
    except (KeyError, TypeError, ValueError) as error:  # ValueError: no JSON, too
        raise _Again(f"a reply that is none of the protocol ({type(error).__name__}: {error})") from error


def _passage(item: Any) -> Passage:
    """A passage of {"document", "score"} or of a bare document; a document is a text, or has "contents" or "text".

    Raises KeyError, TypeError or ValueError for anything else.
    """
    scored = isinstance(item, dict) and "document" in item
    document, score = (item["document"], item["score"]) if scored else (item, 0.0)
    if not math.isfinite(score):
        raise ValueError(f"score {score}")
    fields = {"contents": document} if isinstance(document, str) else document
    if not isinstance(fields, dict):
        raise TypeError(f"a document that is a {type(fields).__name__}")
    title, text = fields.get("title") or "", fields.get("text")
    if isinstance(fields.get("contents"), str):
        title, text = split_contents(fields["contents"])
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("a document without contents or text")
    name = fields.get("id")
    return Passage(title=title, text=text, score=float(score), id="" if name is None else str(name))
