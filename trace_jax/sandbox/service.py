"""Client of an HTTP code-execution service: SandboxFusion's `POST /run_code`, or `python -m trace_jax.sandbox`.

Request: {"code", "language": "python", "run_timeout": seconds}. Reply: {"status": "Success" | "Failed" |
"SandboxError", "message", "run_result": {"status": "Finished" | "TimeLimitExceeded" | "Error", "return_code",
"stdout", "stderr"}}; ours adds "end", a member of `result.ENDS`.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import tenacity

from trace_jax.sandbox.pool import check_call, too_long
from trace_jax.sandbox.result import ENDS, Execution, Limits

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0  # seconds of back-off
_MAY_PASS = (429, 500, 502, 503, 504)
_MAX_REPLY = 4 << 20  # bytes


class _Again(Exception):
    """A try that failed in a way that another may not. Code has no effect outside, so running it twice is harmless."""


class _Lost(Exception):
    """A try after which there is no time or no point for another."""


class PythonService:
    """Runs code on a service. Thread-safe; connections are kept open and shared."""

    def __init__(self, url: str, *, attempts: int = 3, grace: float = 5.0, limits: Limits = Limits()):
        """
        Args:
          url: of the service, without /run_code.
          attempts: tries of one call.
          grace: seconds that a reply may take beyond the call's own time limit.
          limits: of code and output as `Limits` has them; the others are the service's own.

        Raises ValueError for an url that is none, or fewer than 1 attempt.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"sandbox service {url!r}; its url starts with http:// or https://")
        if attempts < 1:
            raise ValueError(f"{attempts} attempts of a sandbox call; there must be at least 1")
        self._url, self._attempts, self._grace, self._limits = url.rstrip("/"), attempts, grace, limits
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.Client(limits=pool, trust_env=False)  # no proxy stands between a run and its sandbox

    def run(self, code: str, timeout: float) -> Execution:
        """As `pool.PythonPool.run`. A service that is down, slow or answers nonsense gives end "unavailable".

        Takes at most `attempts` times `timeout` + grace, and the back-off between them; a try that was not answered in
        time is not repeated. Raises ValueError as the pool does.
        """
        check_call(code, timeout)
        if refused := too_long(code.encode("utf-8", "surrogatepass"), self._limits):
            return refused
        body = json.dumps({"code": code, "language": "python", "run_timeout": timeout}).encode()
        tries = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_random_exponential(_FIRST_WAIT, max=_LONGEST_WAIT),
            retry=tenacity.retry_if_exception_type(_Again),
            reraise=True,
        )
        try:
            return read_reply(tries(self._once, body, timeout), self._limits)
        except (_Again, _Lost, ValueError) as error:
            return Execution("", f"the sandbox service {self._url} failed: {error}\n", "unavailable")

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _once(self, body: bytes, timeout: float) -> bytes:
        """One try: the body of a reply with status 200. Raises _Again or _Lost."""
        deadline = time.monotonic() + timeout + self._grace
        patience = httpx.Timeout(timeout + self._grace, connect=self._grace)
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.stream(
                "POST", f"{self._url}/run_code", content=body, headers=headers, timeout=patience
            ) as reply:
                if reply.status_code in _MAY_PASS:
                    raise _Again(f"HTTP {reply.status_code}")
                if reply.status_code != 200:
                    raise _Lost(f"HTTP {reply.status_code}")
                data = bytearray()
                for chunk in reply.iter_bytes():
                    data += chunk
                    if len(data) > _MAX_REPLY:
                        raise _Lost(f"a reply of more than {_MAX_REPLY} bytes")
                    if time.monotonic() > deadline:
                        raise _Lost(f"no whole reply within {timeout + self._grace:g} s")
                return bytes(data)
        except httpx.ConnectTimeout as error:
            raise _Again("no connection in time") from error
        except httpx.TimeoutException as error:
            raise _Lost(f"no reply within {timeout + self._grace:g} s") from error
        except httpx.TransportError as error:
            raise _Again(str(error) or type(error).__name__) from error
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: the client was closed
            raise _Lost(str(error) or type(error).__name__) from error


def read_reply(data: bytes, limits: Limits) -> Execution:
    """What a reply says. Raises ValueError for one that does not keep to the protocol, or where the service failed."""
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("the reply is no JSON") from error
    result = reply.get("run_result") if isinstance(reply, dict) else None
    status = reply.get("status") if isinstance(reply, dict) else None
    if status == "SandboxError":
        raise ValueError(str(reply.get("message"))[:200])
    if status not in ("Success", "Failed") or not isinstance(result, dict):
        raise ValueError("the reply has no status or run_result")
    stdout, stderr = (_bytes(result, name) for name in ("stdout", "stderr"))
    end = reply.get("end")
    if end not in ENDS:
        end = _end(status, result, stderr)
    size = limits.output_bytes
    if end in ("ok", "error") and max(len(stdout), len(stderr)) > size:
        end = "output"
    return Execution(stdout[:size].decode("utf-8", "replace"), stderr[:size].decode("utf-8", "replace"), end)


def _bytes(result: dict[str, Any], name: str) -> bytes:
    text = result.get(name)
    if not isinstance(text, str | None):
        raise ValueError(f"{name} of the reply is no string")
    return (text or "").encode("utf-8", "replace")


def _end(status: str, result: dict[str, Any], stderr: bytes) -> str:
    """Of a service that does not say; out-of-memory is told by the exception, a signal by the exit status."""
    code = result.get("return_code")
    if result.get("status") == "TimeLimitExceeded":
        return "timeout"
    if status == "Success":
        return "ok"
    if isinstance(code, int) and (code < 0 or code > 128):
        return "killed"
    last = stderr.rstrip().rpartition(b"\n")[2]
    return "memory" if last.partition(b":")[0].endswith(b"MemoryError") else "error"
