"""A pool of Python interpreters for untrusted code: each call gets a fresh process, which ends with it.

No process is ever forked from this one: an interpreter started by exec, with one thread, forks them (`worker`), ahead
of time, so that neither start-up nor imports are on the path of a call. Calls share nothing: no variable, file or
process outlives one. What holds a call, from the outside in; each where the kernel offers it:

* namespaces: process ids (nothing outside can be seen or signalled; what a call leaves running is killed), network
  (none), mounts (a read-only root with the Python installation, a scratch file system of limited size), IPC;
* a user of its own without rights, where the trainer is root; no capabilities; no new privileges;
* Landlock: files are read in the Python installation and written in the scratch folder, and nowhere else;
* seccomp: no sockets, no new processes, no signals to others, no tracing; threads up to the limit;
* rlimits (always), a wall-clock deadline, limits of output and code, kept by this process.

Not held: time that a call takes from the other processors, the caches of the machine (a side channel), errors of the
kernel itself. Calls of one pool run as ordinary processes of this machine: for strangers' code on a machine with
secrets, serve the pool from another one (`python -m trace_jax.sandbox`, `service.PythonService`). Needs Linux.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import math
import os
import socket
import threading
import weakref
from collections.abc import Sequence

from trace_jax.sandbox import frames
from trace_jax.sandbox.call import Call, CallLost, WorkerLost
from trace_jax.sandbox.nursery import Nursery
from trace_jax.sandbox.result import Execution, Limits, SandboxError

LAYERS = ("namespaces", "landlock", "seccomp")
PRELOAD = ("numpy", "numpy.random", "sympy", "fractions", "statistics", "decimal")
# What is promised, and the layers of which any one keeps it. "root" is the own root, which namespaces allow.
_PROMISES = {
    "network": {"namespaces", "seccomp"},  # no connection to anywhere
    "files": {"root", "landlock"},  # nothing is read or written outside of the installation and the scratch folder
    "processes": {"namespaces", "seccomp"},  # nothing outlives a call, nothing outside is signalled
    "disk": {"root"},  # the files of a call are limited together, not only each
}
_READY_TIMEOUT = 30.0  # seconds
_TRIES = 3  # workers that a call is tried on before any code has run
_OPEN: weakref.WeakSet[PythonPool] = weakref.WeakSet()


class PythonPool:
    """Runs code in fresh interpreters, `workers` at a time. Thread-safe; more calls wait their turn.

    It is closed by `close`, with its last reference, or at the end of the process, whichever comes first.

    `isolation` names what is in force: "limits" always, and of "network", "files", "processes", "disk" what the kernel
    allows. What it does not is said once, by logging.warning.
    """

    _closed = True  # until it is open

    def __init__(
        self,
        *,
        workers: int,
        limits: Limits = Limits(),
        patience: float = 60.0,
        preload: Sequence[str] = PRELOAD,
        layers: Sequence[str] = LAYERS,
    ):
        """Starts the interpreters, which takes about a second.

        Args:
          workers: calls that run at the same time.
          limits: of each call.
          patience: seconds that a call waits for a free worker (our choice); then it is "unavailable".
          preload: modules that code finds imported already; a missing one is passed over. They cost memory once, and
            must start no threads when they are imported.
          layers: of LAYERS, those to use; fewer is for tests.

        Raises ValueError for a number below 1 or an unknown layer; SandboxError where no interpreter starts, or where
        code would run as root and nothing kept it from the files.
        """
        if workers < 1:
            raise ValueError(f"a sandbox of {workers} workers; it needs at least 1")
        if unknown := set(layers) - set(LAYERS):
            raise ValueError(f"unknown sandbox layers {sorted(unknown)}; there are {LAYERS}")
        self._limits, self._patience = limits, patience
        self._start_nursery = lambda: Nursery(limits, layers, preload)
        self._owner, self._idle = os.getpid(), collections.deque()
        self._lock = threading.Condition()
        self._layers: frozenset[str] | None = None
        self._nursery = self._start_nursery()
        self._slots: list[_Slot] = []
        self._closed = False
        _OPEN.add(self)
        try:
            for _ in range(workers):
                self._slots.append(_Slot(self._nursery.worker()))
            self._idle.extend(self._slots)
            for slot in self._slots:
                self._check(slot)
        except (OSError, WorkerLost) as error:
            self.close()
            raise SandboxError(f"the sandbox's workers do not start ({error})") from error
        self.isolation = self._kept_promises()

    def run(self, code: str, timeout: float) -> Execution:
        """Runs `code` as a script and gives back what it printed and how it ended; see `child` for the semantics.

        Never raises for anything the code does; returns within `timeout` seconds, the patience and a few seconds of
        grace. Raises ValueError for code that is no string or a time that is not positive.
        """
        check_call(code, timeout)
        data = code.encode("utf-8", "surrogatepass")
        if refused := too_long(data, self._limits):
            return refused
        with self._lock:
            self._lock.wait_for(lambda: self._idle or self._closed, self._patience)
            if self._closed:
                return _unavailable("the sandbox is closed")
            if not self._idle:
                return _unavailable(f"no interpreter was free for {self._patience:g} s")
            slot = self._idle.popleft()
        try:
            return self._run_on(slot, data, timeout)
        except (OSError, WorkerLost, SandboxError) as error:
            return _unavailable("the sandbox was closed" if self._closed else f"no interpreter starts ({error})")
        finally:
            self._give_back(slot)

    def close(self) -> None:
        """Stops every call and every process; further calls are "unavailable". Idempotent."""
        if self._closed or os.getpid() != self._owner:
            return  # in a fork of the owner, the processes are not its own
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for slot in self._slots:
                slot.stop()  # those in use are closed by who uses them
            for slot in self._idle:
                slot.close()
            self._lock.notify_all()
        self._nursery.close()

    def __del__(self) -> None:
        self.close()

    def _kept_promises(self) -> tuple[str, ...]:
        """`isolation`; warns of what it lacks, and raises SandboxError where nothing keeps root from the files."""
        kept = [promise for promise, keepers in _PROMISES.items() if keepers & self._layers]
        if "files" not in kept and "unprivileged" not in self._layers:
            self.close()
            raise SandboxError(
                "code would run as root with every file in its reach: the kernel has neither namespaces nor Landlock. "
                "Start as another user, or use a sandbox service (python -m trace_jax.sandbox on another machine)"
            )
        if missing := [promise for promise in _PROMISES if promise not in kept]:
            logging.warning(
                "sandbox: this machine offers no isolation of %s for Python code that a model wrote; rlimits hold. "
                "A machine without secrets can serve it: python -m trace_jax.sandbox",
                ", ".join(missing),
            )
        return ("limits", *kept)

    def _run_on(self, slot: _Slot, code: bytes, timeout: float) -> Execution:
        """Raises OSError, WorkerLost or SandboxError where the code has not run; a worker that is lost is replaced."""
        for left in reversed(range(_TRIES)):
            try:
                if slot.lost:
                    self._replace(slot)
                self._check(slot)
                return slot.call(self._limits).run(code, timeout)
            except CallLost as error:
                slot.lost = True
                return _unavailable("the sandbox was closed") if self._closed else Execution("", f"{error}\n", "killed")
            except (OSError, WorkerLost, SandboxError):
                slot.lost = True
                if not left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _check(self, slot: _Slot) -> None:
        """Waits until it is ready; raises WorkerLost where it is not, or is less isolated than the others."""
        layers = slot.wait_ready()
        if self._layers is None:
            self._layers = layers
        if layers != self._layers:
            raise WorkerLost(f"a worker with layers {sorted(layers)} among others with {sorted(self._layers)}")

    def _replace(self, slot: _Slot) -> None:
        """A new worker in place of a lost one, from a new nursery if that is gone too."""
        with self._lock:
            if self._closed:
                raise WorkerLost("the sandbox was closed")
            slot.close()
            try:
                slot.open(self._nursery.worker())
            except OSError:
                self._nursery.close()
                self._nursery = self._start_nursery()
                slot.open(self._nursery.worker())

    def _give_back(self, slot: _Slot) -> None:
        with self._lock:
            if self._closed:
                slot.close()
            else:
                self._idle.append(slot)
                self._lock.notify()


@atexit.register
def _close_all() -> None:
    for pool in list(_OPEN):
        pool.close()


class _Slot:
    """The place of one worker: the pool's end of its socket, and the call that is prepared there."""

    def __init__(self, sock: socket.socket):
        self.open(sock)

    def open(self, sock: socket.socket) -> None:
        """Takes a new worker in."""
        sock.settimeout(_READY_TIMEOUT)
        self._sock, self.lost = sock, False
        self._message: dict | None = None
        self._fds: list[int] = []

    def wait_ready(self) -> frozenset[str]:
        """Until the process of its next call waits for code; the layers that hold it. Raises OSError, WorkerLost."""
        if self._message is None:
            message, self._fds = frames.receive(self._sock, 3)
            if message is None or message["kind"] != "ready":
                raise WorkerLost(message["why"] if message else "a worker ended at its start")
            self._message = message
        return frozenset(self._message["layers"])

    def call(self, limits: Limits) -> Call:
        """The call that `wait_ready` waited for."""
        number, fds = self._message["number"], self._fds
        self._message, self._fds = None, []
        return Call(self._sock, number, fds, limits)

    def stop(self) -> None:
        """The worker notices and ends, and so does its call, there and here."""
        self.lost = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stops the worker and lets go of it; only for the one who uses the slot."""
        self.stop()
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def check_call(code: str, timeout: float) -> None:
    """Raises ValueError for code that is no string or a time that is not a positive number."""
    if not isinstance(code, str):
        raise ValueError(f"code is of type {type(code).__name__}; the sandbox runs strings")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"a time limit of {timeout} s; it must be positive and finite")


def too_long(code: bytes, limits: Limits) -> Execution | None:
    """What is said of code over the limit; None for other code."""
    if len(code) <= limits.code_bytes:
        return None
    return Execution("", f"the code has {len(code)} bytes; at most {limits.code_bytes} are run\n", "error")


def _unavailable(why: str) -> Execution:
    return Execution("", f"{why}\n", "unavailable")
