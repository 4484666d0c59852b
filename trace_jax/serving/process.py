"""One server process: started on a free port, watched until it is healthy, stopped with all that it started.

Signals go to processes that were started here and not yet waited for, and to their own process group: such ids cannot
have passed to somebody else. `guard.py` stands between, so a server ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

_GUARD = Path(__file__).parent / "guard.py"
_POLL = 0.1  # seconds between two looks at a process
_HEALTH_TIMEOUT = 5.0  # seconds
_DEATH_TIMEOUT = 20.0  # seconds; a killed process first gives its memory back
_TAIL_LINES = 15
_PORTS = range(20000, 32000)
_NOISE = ("nanobind:", " - ")  # what native libraries say last, whatever went wrong
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy knows nothing of this machine's ports


class ServerError(Exception):
    """A server that does not start or does not stay; its message ends with the last lines of the server's log."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What is run, and where it will answer."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    port: int
    url: str
    log: Path  # appended to; its folder is made
    grace: float = 30.0  # seconds from SIGTERM to SIGKILL; SGLang finishes its requests in between


class ServerProcess:
    """A program that was started and leads a process group of its own."""

    def __init__(self, program: Program):
        """Starts it. Raises ServerError where its port is taken, and OSError where its log cannot be written."""
        check_port(program.host, program.port)
        self.program = program
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with open(program.log, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(program.grace), *program.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(program.environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the guard, which is also the id of the process group."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; 128 + N if signal N ended it."""
        if self._process.returncode is not None:
            return _shell_status(self._process.returncode)
        # Looks without collecting the exit status: until `kill` does that, nobody else can get this process id.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status

    def healthy(self) -> bool:
        """Whether it runs and answers GET /health with 200."""
        return self.exit_status is None and answers(self.program.url)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the server and all that it started; nothing if they were stopped already."""
        if self._process.returncode is None:
            os.killpg(self.pid, number)

    def ask_to_stop(self) -> None:
        """Sends SIGTERM and does not wait."""
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def stop(self) -> None:
        """SIGTERM, and after `program.grace` seconds SIGKILL to the group. Does nothing the second time."""
        self.ask_to_stop()
        deadline = time.monotonic() + self.program.grace
        while self.exit_status is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the group, also to what a server that has ended left behind; returns when its memory is free."""
        if self._process.returncode is not None:
            return
        self.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + _DEATH_TIMEOUT
        while _living(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL)
        self._process.wait()
        self._process.stdin.close()

    def last_words(self) -> str:
        """The end of what it wrote to its log since it was started."""
        with open(self.program.log, "rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        said = [line.rstrip() for line in lines if line.strip() and not line.startswith(_NOISE)]
        return "\n".join(said[-_TAIL_LINES:])

    def failure(self, what: str) -> ServerError:
        """The error that says what happened, with the log's last lines."""
        return ServerError(f"server {self.program.url} {what}; log: {self.program.log}\n{self.last_words()}".rstrip())


def wait_until_healthy(
    server: ServerProcess, timeout: float, progress: Callable[[float], None] = lambda _: None
) -> None:
    """Returns once the server is healthy; `progress` is called with the seconds that have passed.

    Raises ServerError as soon as the server ends, and after `timeout` seconds; it is stopped then.
    """
    begin = time.monotonic()
    while not server.healthy():
        passed = time.monotonic() - begin
        if server.exit_status is not None:
            problem = server.failure(f"ended with status {server.exit_status} before it was ready")
        elif passed > timeout:
            problem = server.failure(f"was not ready after {timeout:g} seconds")
        else:
            progress(passed)
            time.sleep(_POLL)
            continue
        server.kill()
        raise problem


def check_port(host: str, port: int) -> None:
    """Raises ServerError if a server could not listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(
                f"port {port} of {host} cannot be used ({error.strerror}); choose another port"
            ) from error


def free_port() -> int:
    """A port of this machine that nobody listens on now.

    Below those that outgoing connections are given: a connection to a port of that range, on which nobody listens yet,
    may be given the same port and meet itself.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(ServerError):
            check_port("127.0.0.1", port)
            return port
    raise ServerError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free; end servers that are not needed")


def answers(url: str) -> bool:
    """Whether GET /health there is answered with 200."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=_HEALTH_TIMEOUT) as reply:
            return reply.status == 200
    except (OSError, http.client.HTTPException):  # refused, reset, no answer in time, another status, no HTTP
        return False


def _living(group: int) -> list[int]:
    """Processes of a group that have not ended, as far as /proc tells."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                found.append(int(entry.name))
    return found


def _shell_status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
