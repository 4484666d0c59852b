"""Stands in for a server where SGLang's 15 seconds are not what a test is about: HTTP, a child process, ways to fail.

A script of the standard library alone. `--port`, `--host` and `--random-seed` are read as SGLang names them, other
arguments of SGLang's are ignored; `--mode` says how it behaves.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import time

MODES = ("healthy", "dies", "hangs", "stubborn", "leaves")


class Handler(http.server.BaseHTTPRequestHandler):
    """GET /health: 503 for the first 0.3 seconds, then 200. GET /about: arguments, environment, child. GET /die."""

    ready_at = 0.0
    about: dict = {}

    def do_GET(self):
        if self.path == "/die":
            os._exit(9)
        self.send_response(503 if time.monotonic() < self.ready_at else 200)
        self.end_headers()
        if self.path == "/about":
            self.wfile.write(json.dumps(self.about).encode())

    def log_message(self, *_):
        """Says nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--mode", choices=MODES, default="healthy")
    arguments, _ = parser.parse_known_args()
    print(f"stand-in: {arguments.mode}", flush=True)
    if arguments.mode == "dies":
        raise RuntimeError("no such model")
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", deaf])  # a scheduler that no SIGTERM reaches
    if arguments.mode == "leaves":
        os._exit(5)  # and the child stays
    if arguments.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: (child.kill(), child.wait(), os._exit(0)))
    if arguments.mode == "hangs":
        time.sleep(600)
    Handler.ready_at = time.monotonic() + 0.3
    Handler.about = {"arguments": sys.argv[1:], "environment": dict(os.environ), "child": child.pid}
    http.server.ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
