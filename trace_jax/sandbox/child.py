"""The process of one call: it gives up every right, waits for the code, runs it as a script, and exits.

Script semantics: what the code prints is the result; the value of a last expression is not printed. An exception is
printed to stderr as a traceback, its last ten frames and last 2000 characters, and the exit status is 1.
"""

from __future__ import annotations

import atexit
import builtins
import dataclasses
import json
import linecache
import os
import resource
import sys
import tempfile
import threading
import traceback
import types

from trace_jax.sandbox import isolation, kernel, landlock, seccomp
from trace_jax.sandbox.result import Limits

STATUS_ERROR, STATUS_MEMORY = 1, 86
_NAME = "<code>"
_FRAMES, _CHARACTERS = 10, 2000
_leave = os._exit  # code that replaces os._exit still leaves


@dataclasses.dataclass(frozen=True)
class Confinement:
    """What a call is held in."""

    limits: Limits
    layers: tuple[str, ...]  # of pool.LAYERS, those wanted
    scratch: str
    user: int | None  # to become, where the worker is root
    worker: int  # the parent's process id
    readable: tuple[str, ...]


def main(confinement: Confinement, code: int, stdout: int, stderr: int, ready: int) -> None:
    """Runs in a fresh fork and never returns. Descriptors: where code comes from; output; where readiness is said.

    What goes to `ready`, closed before code is read, is a JSON object: {"layers": those in force} or {"error": why}.
    """
    try:
        code, ready = _arrange_descriptors(code, stdout, stderr, ready)
        said = {"layers": _confine(confinement)}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    os.write(ready, json.dumps(said).encode())
    os.close(ready)
    if "error" in said:
        _leave(STATUS_ERROR)
    status = STATUS_ERROR
    try:
        source = _read_code(code)
        os.close(code)
        _prepare_interpreter(confinement.scratch)
        status = _finish(_run(source))
    finally:  # whatever the code has made of exceptions: this process does not go on as a worker
        _leave(status)


def _read_code(fd: int) -> bytes:
    """Its length in 8 bytes, then the code; the end of the pipe may not come, where the pool's process has forks."""
    with open(fd, "rb", closefd=False) as file:
        return file.read(int.from_bytes(file.read(8)))


def _arrange_descriptors(code: int, stdout: int, stderr: int, ready: int) -> tuple[int, int]:
    """0 reads nothing, 1 and 2 are the output, 3 and 4 the pipes; every other descriptor is closed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    high = [os.dup2(fd, 100 + place) for place, fd in enumerate((nothing, stdout, stderr, code, ready))]
    for place, fd in enumerate(high):
        os.dup2(fd, place)
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))
    return 3, 4


def _confine(confinement: Confinement) -> list[str]:
    """Gives up rights, in the order in which each is still allowed; returns the layers that are in force."""
    os.setsid()
    os.umask(0o077)
    _set_limits(confinement.limits)
    os.chdir(confinement.scratch)
    if confinement.user is not None:
        os.setresgid(*[confinement.user] * 3)
        os.setresuid(*[confinement.user] * 3)
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    kernel.die_with_parent()
    if os.getppid() != confinement.worker:
        raise OSError("the worker is gone")
    writable = (confinement.scratch, *isolation.DEVICES)
    # The kernel does not count the processes of root, so it gets no threads either.
    attempts = {
        "landlock": lambda: landlock.restrict(confinement.readable, writable),
        "seccomp": lambda: seccomp.restrict(threads=os.geteuid() != 0),
    }
    in_force = [] if os.geteuid() == 0 else ["unprivileged"]
    for layer, attempt in attempts.items():
        if layer in confinement.layers:
            try:
                attempt()
                in_force.append(layer)
            except OSError:
                pass  # the kernel has none; the pool reports what is in force
    return in_force


def _set_limits(limits: Limits) -> None:
    values = {
        resource.RLIMIT_CPU: (limits.cpu_seconds, limits.cpu_seconds + 1),  # SIGXCPU, a second later SIGKILL
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
        resource.RLIMIT_NPROC: (limits.processes + 1, limits.processes + 1),  # the worker may count as one
        resource.RLIMIT_FSIZE: (limits.file_bytes, limits.file_bytes),
        resource.RLIMIT_NOFILE: (limits.open_files, limits.open_files),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    for name, value in values.items():
        hard = resource.getrlimit(name)[1]
        resource.setrlimit(name, value if hard == resource.RLIM_INFINITY else tuple(min(v, hard) for v in value))


def _prepare_interpreter(scratch: str) -> None:
    """As if freshly started: own streams, no environment, other random numbers than the last call's."""
    os.environ.clear()
    os.environ.update(HOME=scratch, TMPDIR=scratch)
    tempfile.tempdir = None  # what the nursery has found is no longer there
    sys.argv = [_NAME]
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    # A line at a time: what was printed before the time limit is kept.
    streams = [open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False) for fd in (1, 2)]
    sys.stdout, sys.stderr = streams
    sys.__stdout__, sys.__stderr__ = streams
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # Python's own generator reseeds itself in a fork


def _run(source: bytes) -> int:
    """Runs the code as the module __main__; returns the exit status."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    try:
        text = source.decode("utf-8", "surrogatepass")
        linecache.cache[_NAME] = (len(text), None, text.splitlines(keepends=True), _NAME)
        exec(compile(text, _NAME, "exec", dont_inherit=True), module.__dict__)
        return 0
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return 0
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return STATUS_ERROR
    except BaseException as error:
        status = STATUS_MEMORY if isinstance(error, MemoryError) else STATUS_ERROR
        try:
            _print_traceback(error)
        except MemoryError:
            os.write(2, b"MemoryError\n")
        return status


def _print_traceback(error: BaseException) -> None:
    """The last frames, without the one of this module."""
    own = error.__traceback__
    own = own.tb_next if own is not None and own.tb_frame.f_code is _run.__code__ else own
    report = traceback.TracebackException(type(error), error, own, limit=-_FRAMES, compact=True)
    text = "".join(report.format())
    print(text if len(text) <= _CHARACTERS else f"...{text[-_CHARACTERS:]}", end="", file=sys.stderr)


def _finish(status: int) -> int:
    """What an interpreter does last: waits for threads, calls what was registered for the exit, flushes."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException as error:
        _print_traceback(error)
        status = status or STATUS_ERROR
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()
        except Exception:  # the code may have put anything in the place of a stream
            status = status or STATUS_ERROR
    return status
