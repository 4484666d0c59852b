"""Attempts to escape from the sandbox, each of which it must refuse: `refused(pool)` tries them all.

Refused means: nothing outside has changed or was learnt, the call ended in bounded time with the label that it should
have, no process of it is left, and the next call runs as if nothing had been. The list is also a command:
`python -m experiments.real_tasks_cpu.escapes`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.real_tasks_cpu.escape_list import ESCAPES, VARIABLE, Escape
from trace_jax.sandbox.pool import PythonPool
from trace_jax.sandbox.result import Execution, Limits

TIME_LIMIT = 0.3  # seconds of a call that would not end by itself
LONG_LIMIT = 10.0  # of one that would, even on a busy machine
GRACE = 6.0  # seconds beyond it
LIMITS = Limits(cpu_seconds=2, memory_bytes=600 << 20, processes=8, output_bytes=4096, disk_bytes=8 << 20)
SECRET = "a-secret-of-the-trainer"
_DONE = "ESCAPED"


@dataclass
class Surroundings:
    """What an escape tries to reach: a file, listeners, a process, and the trainer (this process) itself."""

    folder: Path
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    victim: subprocess.Popen

    def fill(self, code: str) -> str:
        """Writes the addresses of all this into code that names them in capitals."""
        places = {
            "FOLDER": repr(str(self.folder)),
            "TCP": repr(self.tcp.getsockname()),
            "UDP": repr(self.udp.getsockname()),
            "UNIX": repr(self.unix.getsockname()),
            "ABSTRACT": repr(self.abstract.getsockname()),
            "VICTIM": str(self.victim.pid),
            "TRAINER": str(os.getpid()),
        }
        for name, value in places.items():
            code = code.replace(f"<{name}>", value)
        return textwrap.dedent(code)

    def harm(self) -> str | None:
        """What has happened outside, or None."""
        if sorted(path.name for path in self.folder.iterdir()) != ["secret", "unix"]:
            return "files were written outside"
        if self.victim.poll() is not None:
            return "another process was killed"
        for name in ("tcp", "unix", "abstract"):
            with contextlib.suppress(BlockingIOError):
                getattr(self, name).accept()
                return f"the {name} listener was reached"
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(1)
            return "a datagram arrived"
        return None


@contextlib.contextmanager
def surroundings() -> Iterator[Surroundings]:
    """Sets the bait up and clears it away."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="escape_")))
        folder.chmod(0o777)
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o666)
        os.environ[VARIABLE] = SECRET
        stack.callback(os.environ.pop, VARIABLE)
        families = (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "unix")),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0trace_jax_escape_{os.getpid()}"),
        )
        sockets = []
        for family, kind, address in families:
            sock = stack.enter_context(socket.socket(family, kind))
            sock.bind(address)
            sock.setblocking(False)
            if kind == socket.SOCK_STREAM:
                sock.listen()
            sockets.append(sock)
        (folder / "unix").chmod(0o777)
        victim = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        yield Surroundings(folder, *sockets, victim)


def refused(pool: PythonPool | None = None) -> list[tuple[str, bool, str]]:
    """Tries every escape; (name, whether it was refused, how it ended or what went wrong) of each.

    A pool that is passed needs LIMITS, or limits like them: the floods and bombs are made for their size.
    """
    with contextlib.ExitStack() as stack:
        if pool is None:
            pool = stack.enter_context(contextlib.closing(PythonPool(workers=1, limits=LIMITS)))
        around = stack.enter_context(surroundings())
        processes = settled()
        return [attempt(pool, escape, around, processes) for escape in ESCAPES]


def attempt(pool: PythonPool, escape: Escape, around: Surroundings, processes: int) -> tuple[str, bool, str]:
    """Tries one escape and looks at what it has left; `processes` are as many as there should be."""
    if escape.needs and escape.needs not in pool.isolation:
        return escape.name, False, f"not tried: this machine offers no isolation of {escape.needs}"
    code, started = around.fill(escape.code), time.monotonic()
    execution = pool.run(code, TIME_LIMIT if "timeout" in escape.ends else LONG_LIMIT)
    seconds = time.monotonic() - started
    problem = _problem(execution, escape, seconds) or around.harm()
    after = pool.run(around.fill(escape.after), LONG_LIMIT)
    if problem is None and (after.stdout, after.end) != ("1\n", "ok"):
        problem = f"the next call gave {after}"
    if problem is None and _more_than(processes):
        problem = "processes are left"
    last = execution.stderr.strip().rpartition("\n")[2][:100]
    return escape.name, problem is None, problem or f"{execution.end}: {last}".rstrip(": ")


def _problem(execution: Execution, escape: Escape, seconds: float) -> str | None:
    said = execution.stdout + execution.stderr
    if _DONE in execution.stdout or SECRET in said:  # a traceback repeats the code's own words
        return f"it got through: {said[-200:]!r}"
    if execution.end not in escape.ends:
        return f"it ended with {execution.end!r} instead of {escape.ends}: {said[-200:]!r}"
    if seconds > (TIME_LIMIT if "timeout" in escape.ends else LONG_LIMIT) + GRACE:
        return f"it took {seconds:.1f} s"
    if max(len(execution.stdout.encode()), len(execution.stderr.encode())) > LIMITS.output_bytes + 100:
        return "it printed more than is allowed"
    return None


def settled() -> int:
    """How many processes there are below this one, once every worker has prepared its next call."""
    deadline, most = time.monotonic() + 0.5, 0
    while time.monotonic() < deadline:
        most = max(most, len(descendants(os.getpid())))
        time.sleep(0.05)
    return most


def _more_than(processes: int) -> bool:
    """Whether more processes stay."""
    deadline = time.monotonic() + 2.0
    while len(descendants(os.getpid())) > processes:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.01)
    return False


def descendants(pid: int) -> set[int]:
    """Process ids of all living children of `pid`, theirs, and so on."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(entry)] = int(parent)
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def main() -> None:
    """Prints how each escape ended; status 1 if one got through."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with contextlib.closing(PythonPool(workers=1, limits=LIMITS)) as pool:
        print(f"isolation: {', '.join(pool.isolation)}")
        results = refused(pool)
    for name, good, detail in results:
        print(f"{'refused' if good else 'ESCAPED'}  {name}: {detail}")
    print(f"{sum(good for _, good, _ in results)} of {len(results)} refused")
    sys.exit(not all(good for _, good, _ in results))


if __name__ == "__main__":
    main()
