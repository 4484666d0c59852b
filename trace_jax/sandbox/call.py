"""The pool's side of one call: code in, output out, up to a deadline and a size; then the verdict."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from trace_jax.sandbox import frames
from trace_jax.sandbox.child import STATUS_MEMORY
from trace_jax.sandbox.result import Execution, Limits

_CHUNK = 1 << 16
_KILL_GRACE = 5.0  # seconds that a worker may take to kill a call


class WorkerLost(Exception):
    """A worker is gone, or not what it should be, and no code has run on it: another may run it."""


class CallLost(Exception):
    """The worker of a call is gone or does not answer, and the code may have run."""


class Call:
    """One call on a worker that is ready for it."""

    def __init__(self, sock: socket.socket, number: int, fds: Sequence[int], limits: Limits):
        """`fds`: where code is written, where stdout and stderr are read; closed by `run`. `number`: of the call."""
        self._sock, self._number, self._limits = sock, number, limits
        self._code_fd, *self._output_fds = fds
        self._output = {fd: bytearray() for fd in self._output_fds}
        self._watched = set(fds)  # those that are not at their end or their limit
        self._reason = ""  # why it was killed by us: a member of ENDS
        self._handed_over = False  # any of the code

    def run(self, code: bytes, timeout: float) -> Execution:
        """Hands the code over and follows the call to its end, `timeout` seconds plus the grace at the most.

        Raises WorkerLost or CallLost.
        """
        try:
            for fd in (self._code_fd, *self._output_fds):
                os.set_blocking(fd, False)
            done = self._follow(memoryview(len(code).to_bytes(8) + code), time.monotonic() + timeout)
            for fd in self._output_fds:
                while fd in self._watched and self._read(fd):
                    pass
        finally:
            # Not before: a call that is over its output limit shall wait for its end, not learn of a broken pipe.
            for fd in self._output_fds:
                os.close(fd)
            if self._code_fd in self._watched:
                os.close(self._code_fd)
        stdout, stderr = (bytes(self._output[fd]) for fd in self._output_fds)
        return verdict(stdout, stderr, done["status"], done["cpu_seconds"], self._reason, self._limits)

    def _follow(self, rest: memoryview, deadline: float) -> dict[str, Any]:
        """Until the worker says that the call is over; returns what it says."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._code_fd, select.POLLOUT)
        for fd in self._output_fds:
            poll.register(fd, select.POLLIN)
        while True:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                if self._reason:
                    raise CallLost(f"a worker did not end its call within {_KILL_GRACE:g} s")
                self._kill("timeout")
                deadline = time.monotonic() + _KILL_GRACE
                continue
            for fd, _ in poll.poll(seconds * 1000 + 1):
                if fd == self._sock.fileno():
                    done, _ = frames.receive(self._sock)
                    if done is None or not self._handed_over:  # or its process died while it waited for code
                        raise self._lost()
                    return done
                if fd == self._code_fd:
                    rest = self._write(rest)
                else:
                    self._read(fd)
                    if self._reason == "output":
                        deadline = min(deadline, time.monotonic() + _KILL_GRACE)
                if fd not in self._watched:
                    poll.unregister(fd)

    def _write(self, rest: memoryview) -> memoryview:
        try:
            rest = rest[os.write(self._code_fd, rest[:_CHUNK]) :]
            self._handed_over = True
        except BlockingIOError:
            return rest
        except OSError:  # its process is gone; the worker will say how
            rest = rest[:0]
        if not rest:
            self._watched.discard(self._code_fd)
            os.close(self._code_fd)
        return rest

    def _read(self, fd: int) -> bool:
        """Takes what is there; False if nothing was. A descriptor at its end or its limit is watched no longer."""
        kept = self._output[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        room = self._limits.output_bytes - len(kept)
        kept += data[:room]
        if len(data) > room:
            self._kill("output")
        if not data or len(data) > room:
            self._watched.discard(fd)
        return bool(data)

    def _kill(self, reason: str) -> None:
        """Has the worker end the call; the first reason counts."""
        if not self._reason:
            self._reason = reason
            try:
                frames.send(self._sock, {"kill": self._number})
            except OSError as error:
                raise self._lost() from error

    def _lost(self) -> Exception:
        return CallLost("the worker ended during the call") if self._handed_over else WorkerLost("it was gone")


def verdict(stdout: bytes, stderr: bytes, status: int, cpu_seconds: float, reason: str, limits: Limits) -> Execution:
    """Names the end of a call.

    Args:
      status: of its process, as `os.wait` gives it.
      cpu_seconds: that it used.
      reason: "output" or "timeout" if that is why it was killed, else "".
    """
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    note = ""
    if reason == "output":
        end = "output"
    elif number and reason:
        end = reason
    elif number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_seconds >= limits.cpu_seconds):
        end = "timeout"
    elif number:
        end, note = "killed", f"killed by {_signal_name(number)}\n"
    else:
        end = "ok" if code == 0 else "memory" if code == STATUS_MEMORY else "error"
    text = stderr.decode("utf-8", "replace")
    if note and text and not text.endswith("\n"):
        text += "\n"
    return Execution(stdout.decode("utf-8", "replace"), text + note, end)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
