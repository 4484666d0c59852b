"""Serves the sandbox over HTTP: `python -m trace_jax.sandbox --port=8080 --workers=8`.

Runs name it as the code-execution service. Ctrl-C or SIGTERM stops it and all that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from trace_jax.sandbox.pool import PythonPool
from trace_jax.sandbox.result import Limits, SandboxError
from trace_jax.sandbox.server import serve


def main() -> None:
    """Parses the command line, starts the pool, serves until a signal comes."""
    defaults = Limits()
    parser = argparse.ArgumentParser(prog="python -m trace_jax.sandbox", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; anybody who reaches it runs code")
    parser.add_argument("--port", type=int, required=True, help="to listen on")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="calls at the same time")
    parser.add_argument("--cpu_seconds", type=int, default=defaults.cpu_seconds, help="of a call")
    parser.add_argument("--memory_bytes", type=int, default=defaults.memory_bytes, help="of a call")
    parser.add_argument("--output_bytes", type=int, default=defaults.output_bytes, help="of a call, each stream")
    arguments = parser.parse_args()
    try:
        limits = Limits(
            cpu_seconds=arguments.cpu_seconds,
            memory_bytes=arguments.memory_bytes,
            output_bytes=arguments.output_bytes,
        )
        with contextlib.closing(PythonPool(workers=arguments.workers, limits=limits)) as pool:
            where = f"http://{arguments.host}:{arguments.port}"
            print(f"sandbox on {where}, isolation: {', '.join(pool.isolation)}", flush=True)
            serve(pool, limits, arguments.workers, host=arguments.host, port=arguments.port)
    except (SandboxError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
