"""Serves a pool over HTTP with SandboxFusion's `POST /run_code` and `GET /v1/ping`; see `service` for the protocol.

It has no authentication: whoever reaches the port runs code in the sandbox. Bind it to an address that only the
cluster reaches.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import time
from typing import Any

from aiohttp import web

from trace_jax.sandbox.pool import PythonPool
from trace_jax.sandbox.result import Execution, Limits

_LONGEST = 600.0  # seconds that a request may ask for
_DEFAULT_TIMEOUT = 10.0  # seconds; SandboxFusion's
_LANGUAGES = ("python",)
_REFUSED = ("stdin", "files", "fetch_files")  # of SandboxFusion's request; not served here


def application(pool: PythonPool, limits: Limits, workers: int) -> web.Application:
    """The web application around a pool of that many workers, which stays the caller's to close."""
    executor = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="sandbox")

    async def run_code(request: web.Request) -> web.Response:
        try:
            code, timeout = _read(await request.read())
        except ValueError as error:
            return web.json_response({"status": "SandboxError", "message": str(error), "run_result": None}, status=400)
        started = time.monotonic()
        execution = await asyncio.get_running_loop().run_in_executor(executor, pool.run, code, timeout)
        return web.json_response(reply(execution, time.monotonic() - started))

    async def ping(_: web.Request) -> web.Response:
        return web.json_response("pong")

    async def stop(_: web.Application) -> None:
        executor.shutdown(wait=False, cancel_futures=True)

    app = web.Application(client_max_size=8 * limits.code_bytes + (1 << 16))  # JSON writes a byte as up to 6
    app.router.add_post("/run_code", run_code)
    app.router.add_get("/v1/ping", ping)
    app.on_cleanup.append(stop)
    return app


def serve(pool: PythonPool, limits: Limits, workers: int, *, host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM; does not run what a client gave up while it waited. Raises OSError where the
    address is taken."""
    app = application(pool, limits, workers)
    web.run_app(app, host=host, port=port, print=None, shutdown_timeout=1.0, handler_cancellation=True)


def _read(body: bytes) -> tuple[str, float]:
    """Code and time limit of a request. Raises ValueError, in words for who sent it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError("the request is no JSON") from error
    if not isinstance(request, dict) or not isinstance(request.get("code"), str):
        raise ValueError("the request has no string `code`")
    if request.get("language") not in _LANGUAGES:
        raise ValueError(f"language {str(request.get('language'))[:40]!r}; this service runs {', '.join(_LANGUAGES)}")
    if unserved := [name for name in _REFUSED if request.get(name)]:
        raise ValueError(f"{', '.join(unserved)}: not served here")
    timeout = request.get("run_timeout", _DEFAULT_TIMEOUT)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
        raise ValueError(f"run_timeout {str(timeout)[:40]}; it must be above 0 and at most {_LONGEST:g} seconds")
    return request["code"], float(timeout)


def reply(execution: Execution, seconds: float) -> dict[str, Any]:
    """An execution in SandboxFusion's words, and in ours (`end`), which say more."""
    if execution.end == "unavailable":
        return {"status": "SandboxError", "message": execution.stderr.strip(), "run_result": None}
    timeout = execution.end == "timeout"
    result = {
        "status": "TimeLimitExceeded" if timeout else "Finished",
        "execution_time": seconds if math.isfinite(seconds) else None,
        "return_code": {"ok": 0, "error": 1, "killed": -9, "timeout": None}.get(execution.end, 1),
        "stdout": execution.stdout,
        "stderr": execution.stderr,
    }
    status = "Success" if execution.end == "ok" else "Failed"
    return {"status": status, "message": "", "run_result": result, "end": execution.end}
