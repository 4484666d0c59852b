"""A code-execution service that says what a test wants it to say."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time


@contextlib.contextmanager
def stand_in(*answers, delay: float = 0.0):
    """A server that gives these (status, body) in turn, the last again and again; yields its url and its requests."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            time.sleep(delay)
            status, body = answers[min(len(requests), len(answers)) - 1]
            with contextlib.suppress(BrokenPipeError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fusion(status="Success", run_status="Finished", code=0, stdout="", stderr="", **more) -> bytes:
    """A reply in SandboxFusion's words."""
    result = {"status": run_status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": stderr}
    return json.dumps({"status": status, "message": "", "compile_result": None, "run_result": result, **more}).encode()
