"""Stands between a launcher and one server, so that the server never outlives the launcher.

A script of the standard library alone: `python -I guard.py GRACE COMMAND ...` with a pipe as its standard input, whose
other end only the launcher holds. The guard leads a process group of its own, in which the server and all that the
server starts are born. When the pipe closes, however the launcher ended, the guard asks the server to stop, and after
GRACE seconds kills the group. It passes SIGTERM on, and ends as the server ended.

A parent-death signal in the server itself would not do: it is lost on the server's own children until each of them has
armed one too, which takes SGLang's seconds of imports, and it fires when the thread that started the server ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main(grace: float, command: list[str]) -> int:
    """Runs the command to its end; returns its exit status, 128 + N for signal N."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    alone = threading.Event()
    threading.Thread(target=_outlive_nobody, args=(grace, alone), daemon=True).start()
    status = server.wait()
    if alone.is_set():
        os.killpg(0, signal.SIGKILL)  # nobody else is there to end what the server left behind
    return status if status >= 0 else 128 - status


def _outlive_nobody(grace: float, alone: threading.Event) -> None:
    """Waits for the launcher to close the pipe; what is left of the group after `grace` seconds is killed."""
    while os.read(0, 1):
        pass
    alone.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
