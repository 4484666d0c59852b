"""The trusted processes between the pool and the calls: `main` runs in an interpreter of its own, started by the pool.

The first process (the nursery) imports what is slow to import, has one thread, and forks a worker for each socket that
the pool sends it. A worker forks one process for each call ahead of time, sends the pool the ends of its pipes, waits
until it exits or the pool wants it gone, kills all that is left of the call, says how it ended, and makes the next.
Workers never see code or output, so nothing of a call is in the memory that the next one is forked from.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile

from trace_jax.sandbox import child, frames, isolation, kernel
from trace_jax.sandbox.result import Limits

_MORE_LIKELY_KILLED = "500"  # of 1000: when memory runs out, the sandbox goes before the trainer


def main() -> None:
    """Serves the pool, whose socket is standard input, until the pool is gone; then leaves nothing behind."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    message, _ = frames.receive(control)
    if message is None:
        return
    limits, layers = Limits(**message["limits"]), tuple(message["layers"])
    # Its sockets alone do not tell that the pool's process is gone: a fork of it may hold copies of them.
    trainer = os.pidfd_open(message["trainer"])
    if os.getppid() != message["trainer"]:
        return
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_MORE_LIKELY_KILLED)
    sys.dont_write_bytecode = True
    for name in message["preload"]:
        with contextlib.suppress(ImportError):  # the code will see the same
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of {message['preload']} starts threads when it is imported; do not preload it")
    if not isolation.namespaces_work():
        layers = tuple(layer for layer in layers if layer != "namespaces")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    kernel.adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    folder = tempfile.mkdtemp(prefix="trace_jax_sandbox_")
    try:
        with contextlib.suppress(ConnectionError):  # the pool is gone before it began
            frames.send(control, {"folder": folder})
            _serve_nursery(control, trainer, folder, limits, layers)
    finally:
        control.close()
        _wait_for_workers()
        isolation.empty(folder)
        os.rmdir(folder)


def _serve_nursery(
    control: socket.socket, trainer: int, folder: str, limits: Limits, layers: tuple[str, ...]
) -> None:
    readable = isolation.readable_paths()
    while trainer not in _readable(control.fileno(), trainer):
        message, fds = frames.receive(control, 1)
        if message is None:
            return
        if os.fork() == 0:
            try:
                control.close()
                _become_worker(socket.socket(fileno=fds[0]), trainer, folder, limits, layers, readable)
            finally:
                os._exit(0)
        os.close(fds[0])


def _readable(*fds: int) -> set[int]:
    """Waits until there is something on one of these; those where there is."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll()}


def _wait_for_workers() -> None:
    """They end by themselves, for the reason for which the nursery does."""
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


def _become_worker(
    sock: socket.socket,
    trainer: int,
    folder: str,
    limits: Limits,
    layers: tuple[str, ...],
    readable: tuple[str, ...],
) -> None:
    identity = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        namespaces = "namespaces" in layers
        if namespaces:
            isolation.enter_namespaces()
            if os.fork() != 0:
                return  # the child is the first process of the namespaces; they end with it
        os.chdir("/")
        own_root = namespaces and isolation.enter_own_root(folder, readable)
        user = isolation.unprivileged_user(identity)
        scratch = isolation.Scratch(
            f"{folder}/{identity}", own_root=own_root, disk_bytes=limits.disk_bytes, user=user
        )
        surroundings = [name for name, there in (("namespaces", namespaces), ("root", own_root)) if there]
        confinement = child.Confinement(limits, layers, scratch.path, user, os.getpid(), readable)
        _Worker(sock, trainer, scratch, confinement, surroundings).serve()
    except Exception as error:
        try:
            frames.send(sock, {"kind": "failed", "why": f"{type(error).__name__}: {error}"[:500]})
        except OSError:
            pass


class _Worker:
    """One call after the other."""

    def __init__(
        self,
        sock: socket.socket,
        trainer: int,
        scratch: isolation.Scratch,
        confinement: child.Confinement,
        surroundings: list[str],
    ):
        """`trainer`: a pidfd of the pool's process; `surroundings`: the layers in force around every call."""
        self._sock, self._trainer, self._scratch, self._confinement = sock, trainer, scratch, confinement
        self._surroundings = surroundings

    def serve(self) -> None:
        """Until the pool is gone. Raises OSError where no call can be made."""
        number = 0
        while True:
            number += 1
            self._scratch.renew()
            pid, fds, layers = self._start()
            try:
                message = {"kind": "ready", "number": number, "layers": [*self._surroundings, *layers]}
                frames.send(self._sock, message, fds)
                for fd in fds:
                    os.close(fd)
                wanted = self._wait(pid, number)
            except ConnectionError:
                wanted = False
            status, seconds = self._end(pid)
            if not wanted:
                return
            frames.send(self._sock, {"kind": "done", "status": status, "cpu_seconds": seconds})

    def _start(self) -> tuple[int, list[int], list[str]]:
        """A process that waits for code: its id, the pool's ends of its pipes, the layers in force in it."""
        (code, code_in), (stdout_out, stdout), (stderr_out, stderr), (ready_out, ready) = (os.pipe() for _ in range(4))
        pid = os.fork()
        if pid == 0:
            child.main(self._confinement, code, stdout, stderr, ready)
        for fd in (code, stdout, stderr, ready):
            os.close(fd)
        said = b"".join(iter(lambda: os.read(ready_out, 1 << 12), b""))
        os.close(ready_out)
        report = json.loads(said) if said else {"error": "the process of a call ended at its start"}
        if "error" in report:
            self._end(pid)
            raise OSError(report["error"])
        return pid, [code_in, stdout_out, stderr_out], report["layers"]

    def _wait(self, pid: int, number: int) -> bool:
        """Until the call ended, or the pool wants it to (True), or the pool is gone (False)."""
        exited = os.pidfd_open(pid)
        try:
            while True:
                events = _readable(exited, self._sock.fileno(), self._trainer)
                if self._trainer in events:
                    return False
                if self._sock.fileno() in events:
                    message, _ = frames.receive(self._sock)
                    if message is None:
                        return False
                    if message["kill"] == number:  # not of a call that had ended by itself meanwhile
                        return True
                elif exited in events:
                    return True
        finally:
            os.close(exited)

    def _end(self, pid: int) -> tuple[int, float]:
        """Kills what is left of the call; the wait status of its process and its processor seconds."""
        self._kill(pid)
        _, status, usage = os.wait4(pid, 0)
        try:
            while "namespaces" in self._surroundings:
                self._kill(pid)
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass  # nobody is left
        return status, usage.ru_utime + usage.ru_stime

    def _kill(self, pid: int) -> None:
        """In namespaces everybody but this process, which is their first; else the process group of the call."""
        try:
            if "namespaces" in self._surroundings:
                assert os.getpid() == 1
                os.kill(-1, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
