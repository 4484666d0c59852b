"""Starts the interpreter that workers are forked from, and asks it for them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trace_jax.sandbox import frames
from trace_jax.sandbox.result import Limits, SandboxError

_PACKAGE_ROOT = str(Path(__file__).parents[2])
# Isolated (-I): neither the folder it starts in nor environment variables say what is imported.
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from trace_jax.sandbox import worker; del sys.path[0]; worker.main()"
)
# Libraries that numpy loads would start threads, and a process with threads cannot fork safely.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_KEPT = ("LD_LIBRARY_PATH",)  # some interpreters do not start without
_START_TIMEOUT, _STOP_TIMEOUT = 60.0, 5.0  # seconds


class Nursery:
    """A started interpreter; see `worker`."""

    def __init__(self, limits: Limits, layers: Sequence[str], preload: Sequence[str]):
        """Raises SandboxError where it does not start."""
        self._control, theirs = socket.socketpair()
        environment = _ENVIRONMENT | {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._folder = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", "-c", _START, _PACKAGE_ROOT],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,  # Ctrl-C is the trainer's
            )
        except OSError as error:
            self._control.close()
            raise SandboxError(f"{sys.executable} does not start ({error})") from error
        finally:
            theirs.close()
        self._control.settimeout(_START_TIMEOUT)
        try:
            settings = {"limits": dataclasses.asdict(limits), "layers": list(layers), "preload": list(preload)}
            frames.send(self._control, settings | {"trainer": os.getpid()})
            started, _ = frames.receive(self._control)
        except OSError:
            started = None
        if started is None:
            self.close()
            raise SandboxError("the sandbox's interpreter ended at its start; its last words are on stderr")
        self._folder = started["folder"]

    @property
    def pid(self) -> int:
        """Of the interpreter, which leads a session of its own."""
        return self._process.pid

    def worker(self) -> socket.socket:
        """The pool's end of a new worker's socket. Raises OSError if the interpreter is gone."""
        ours, theirs = socket.socketpair()
        try:
            frames.send(self._control, {}, [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def close(self) -> None:
        """Stops it and waits; workers end before it does, once their sockets are shut down."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold a copy that close leaves open
        self._control.close()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # it removes it itself unless it was killed
