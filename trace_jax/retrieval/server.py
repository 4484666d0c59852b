"""Serves an index over HTTP, in the protocol of Search-R1's retrieval server.

POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
             -> {"result": [[{"document": {"id", "contents"}, "score": 0.5}, ...], ...]}, a list for each query;
                without "return_scores" (or with false) the documents stand in the lists themselves.
                "topk" may be missing, null or 0: then it is 3. `contents` is the title in quotes, a newline, the text.
GET /health  -> {"status": "ok", "kind": "bm25", "passages": 5}

A request of another shape gets status 422 with {"detail": "what is wrong"}, one above 4 MiB status 413.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from trace_jax.retrieval.base import Index, Passage

DEFAULT_TOP_K = 3
MOST_TOP_K = 1000
MOST_QUERIES = 1024
_MOST_BYTES = 4 * 2**20


class _Malformed(Exception):
    """A request that cannot be answered; the text says why."""


def make_app(index: Index, *, threads: int = 4) -> web.Application:
    """The web application. Searches run in `threads` threads, further requests wait their turn."""
    app = web.Application(client_max_size=_MOST_BYTES)
    pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="search")

    async def retrieve(request: web.Request) -> web.Response:
        try:
            queries, top_k, with_scores = _read(await request.read())
        except _Malformed as error:
            return _json({"detail": str(error)}, status=422)
        found = await asyncio.get_running_loop().run_in_executor(pool, index.search_many, queries, top_k)
        return _json({"result": [[_document(passage, with_scores) for passage in row] for row in found]})

    async def health(_: web.Request) -> web.Response:
        return _json({"status": "ok", "kind": index.kind, "passages": len(index)})

    async def stop(_: web.Application) -> None:
        pool.shutdown(wait=False, cancel_futures=True)

    app.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    app.on_cleanup.append(stop)
    return app


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _document(passage: Passage, with_scores: bool) -> dict[str, Any]:
    document = {"id": passage.id} if passage.id else {}
    document["contents"] = passage.contents
    return {"document": document, "score": passage.score} if with_scores else document


def _read(body: bytes) -> tuple[list[str], int, bool]:
    """Queries, number of passages and whether scores are wanted. Raises _Malformed."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _Malformed(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _Malformed("the body must be a JSON object")
    queries, top_k, with_scores = fields.get("queries"), fields.get("topk"), fields.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _Malformed("queries must be a list of strings")
    if len(queries) > MOST_QUERIES:
        raise _Malformed(f"{len(queries)} queries; at most {MOST_QUERIES} in one request")
    if not isinstance(with_scores, bool):
        raise _Malformed("return_scores must be true or false")
    if top_k is None or top_k == 0:
        top_k = DEFAULT_TOP_K
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= MOST_TOP_K:
        raise _Malformed(f"topk must be an integer in 1..{MOST_TOP_K}")
    return queries, top_k, with_scores


def serve(index: Index, *, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serves until it is interrupted or terminated. `started` is called with the address once it is open.

    Port 0 is any free one. Raises OSError for an address that cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as sock:
        name = f"[{host}]" if ":" in host else host
        started(f"http://{name}:{sock.getsockname()[1]}")
        web.run_app(make_app(index), sock=sock, print=None, access_log=None)
