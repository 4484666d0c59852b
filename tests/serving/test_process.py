"""Processes of servers, with a stand-in: each way to start, to fail and to end, and that nobody else is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from trace_jax.serving.process import (
    Program,
    ServerError,
    ServerProcess,
    answers,
    check_port,
    free_port,
    wait_until_healthy,
)
from trace_jax.serving.servers import Restarts, Servers

STAND_IN = Path(__file__).parent / "stand_in.py"
QUICK = Restarts(limit=2, first_delay=0.05, longest_delay=0.1)


@pytest.fixture
def program(tmp_path):
    """Makes a stand-in of some mode, on a port of its own."""

    def make(mode: str = "healthy", grace: float = 5.0) -> Program:
        port = free_port()
        return Program(
            command=(sys.executable, str(STAND_IN), "--host=127.0.0.1", f"--port={port}", f"--mode={mode}"),
            environment=os.environ | {"MARK": mode},
            host="127.0.0.1",
            port=port,
            url=f"http://127.0.0.1:{port}",
            log=tmp_path / "logs" / f"{port}.log",
            grace=grace,
        )

    return make


@pytest.fixture
def start(program):
    """Starts a stand-in; the end of the test ends it."""
    with contextlib.ExitStack() as ends:

        def begin(mode: str = "healthy", **changes) -> ServerProcess:
            server = ServerProcess(program(mode, **changes))
            ends.callback(server.kill)
            return server

        yield begin


def about(server: ServerProcess) -> dict:
    with urllib.request.urlopen(f"{server.program.url}/about", timeout=10) as reply:
        return json.loads(reply.read())


def exists(pid: int) -> bool:
    """Whether a process lives; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it was gone before, or went while it was read
        return False


def group_of(pid: int) -> int | None:
    """The process group of a process, None for one that is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_server_starts_answers_and_stops(start):
    server, seen = start(), []
    wait_until_healthy(server, 30, seen.append)
    assert server.healthy() and server.exit_status is None
    assert seen and seen == sorted(seen)  # 503 in between: it was not ready at once
    facts = about(server)
    assert facts["environment"]["MARK"] == "healthy" and f"--port={server.program.port}" in facts["arguments"]
    assert os.getsid(server.pid) == server.pid != os.getsid(0)  # Ctrl-C of our terminal does not reach it
    server.stop()
    assert server.program.log.read_text() == "stand-in: healthy\n"
    assert not exists(server.pid) and not exists(facts["child"]) and not answers(server.program.url)
    assert server.exit_status == 0
    server.stop()  # a second time is no error


def test_one_that_dies_at_its_start_is_told_at_once_with_its_last_words(start):
    server, begin = start("dies"), time.monotonic()
    with pytest.raises(ServerError) as told:
        wait_until_healthy(server, 600)
    assert time.monotonic() - begin < 60
    lines = str(told.value).splitlines()
    assert lines[0] == f"server {server.program.url} ended with status 1 before it was ready; log: {server.program.log}"
    assert lines[-1] == "RuntimeError: no such model"


def test_last_words_are_of_this_start_and_without_noise(start):
    server = start("dies")
    wait_for(lambda: server.exit_status is not None)
    with open(server.program.log, "a") as log:
        log.write("nanobind: leaked 4 instances!\n - leaked instance\n\n" + "x\n" * 30 + "end\n")
    again = ServerProcess(dataclasses.replace(server.program))
    wait_for(lambda: again.exit_status is not None)
    again.kill()
    assert again.last_words().startswith("stand-in: dies\n") and "end" not in again.last_words()
    words = server.last_words().splitlines()
    assert len(words) == 15 and not [line for line in words if "leaked" in line]


def test_one_that_never_answers_is_given_up_and_ended(start):
    server = start("hangs")
    with pytest.raises(ServerError, match="was not ready after 0.5 seconds"):
        wait_until_healthy(server, 0.5)
    assert not exists(server.pid)


def test_one_that_ignores_sigterm_is_killed_with_its_child(start):
    server = start("stubborn", grace=0.3)
    wait_until_healthy(server, 30)
    child = about(server)["child"]
    server.stop()
    assert not exists(child) and not answers(server.program.url)
    assert server.exit_status == 128 + signal.SIGKILL


def test_one_that_hangs_completely_is_ended_too(start):
    server = start(grace=0.3)
    wait_until_healthy(server, 30)
    child = about(server)["child"]
    server.signal_group(signal.SIGSTOP)
    server.stop()
    assert not exists(child) and not exists(server.pid)


def test_what_a_dead_server_leaves_behind_is_ended(start):
    server = start("leaves")
    wait_for(lambda: server.exit_status == 5)
    living = [pid for entry in Path("/proc").glob("[0-9]*") if exists(pid := int(entry.name))]
    members = [pid for pid in living if group_of(pid) == server.pid]
    assert len(members) == 1
    server.kill()
    assert not exists(members[0])


def test_a_port_that_is_taken_is_refused_before_the_start(program):
    taken = program()
    with contextlib.closing(socket.create_server(("127.0.0.1", taken.port))):
        with pytest.raises(ServerError, match=f"port {taken.port} of 127.0.0.1 cannot be used .*; choose another port"):
            ServerProcess(taken)
    assert not taken.log.exists()
    check_port("127.0.0.1", taken.port)


def test_a_free_port_is_free_and_out_of_the_way_of_outgoing_connections(monkeypatch):
    port = free_port()
    assert port < 32768  # where Linux begins with outgoing connections
    with contextlib.closing(socket.create_server(("127.0.0.1", port))):
        monkeypatch.setattr("trace_jax.serving.process._PORTS", range(port, port + 1))
        with pytest.raises(ServerError, match=f"no port of {port} to {port} is free"):
            free_port()


def test_what_answers_without_http_is_not_healthy():
    """An echo, as of a connection that meets itself: it says the request's own first line."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        assert not answers(f"http://127.0.0.1:{listener.getsockname()[1]}")


def _echo(listener: socket.socket) -> None:
    with contextlib.closing(listener.accept()[0]) as connection:
        connection.sendall(connection.recv(1000))


def test_an_ended_server_does_not_count_as_healthy_because_another_answers(start, program):
    """Somebody else's server on the same port, after ours has died."""
    server = start("dies")
    wait_for(lambda: server.exit_status is not None)
    with foreign(server.program.port):
        assert answers(server.program.url) and not server.healthy()


@contextlib.contextmanager
def foreign(port: int):
    """A server that the code under test did not start."""
    command = [sys.executable, str(STAND_IN), "--host=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}"))
        yield process
        assert process.poll() is None and answers(f"http://127.0.0.1:{port}"), "it was touched"
    finally:
        process.terminate()
        process.wait()


def test_others_survive_all_of_it(start):
    with foreign(free_port()):
        for mode in ("healthy", "stubborn", "dies", "leaves"):
            server = start(mode, grace=0.2)
            with contextlib.suppress(ServerError):
                wait_until_healthy(server, 30)
            server.stop()


_LAUNCHER = """
import sys, time
from pathlib import Path
from trace_jax.serving.process import Program, ServerProcess, wait_until_healthy
script, mode, port, log, python = sys.argv[1:]
command = (python, script, "--host=127.0.0.1", f"--port={port}", f"--mode={mode}")
server = ServerProcess(Program(command, {}, "127.0.0.1", int(port), f"http://127.0.0.1:{port}", Path(log), grace=0.5))
wait_until_healthy(server, 30)
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("mode", ["healthy", "stubborn"])
def test_a_server_does_not_outlive_a_launcher_that_is_killed(mode, tmp_path):
    port = free_port()
    command = [sys.executable, "-c", _LAUNCHER, str(STAND_IN), mode, str(port), str(tmp_path / "log"), sys.executable]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    guard = int(launcher.stdout.readline())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/about", timeout=10) as reply:
        child = json.loads(reply.read())["child"]
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not exists(guard) and not exists(child) and not answers(f"http://127.0.0.1:{port}"))


def test_several_start_together_and_stop_together(program):
    programs, seen = [program() for _ in range(3)], []
    with Servers(programs, start_timeout=30) as servers:
        servers.start(lambda seconds, ready: seen.append(ready))
        assert all(answers(p.url) for p in programs)
        assert seen and seen == sorted(seen) and set(seen) <= {0, 1, 2, 3}  # how many are ready
    assert not any(answers(p.url) for p in programs)


def test_where_one_does_not_start_none_remains(program):
    good, bad = program(), program("dies")
    with pytest.raises(ServerError, match=f"{bad.url} ended with status 1"):
        with Servers([good, bad], start_timeout=600) as servers:
            servers.start()
    assert not answers(good.url)


def test_one_that_is_slow_to_start_ends_the_start(program):
    with pytest.raises(ServerError, match="was not ready after 0.4 seconds"):
        with Servers([program("hangs")], start_timeout=0.4) as servers:
            servers.start()


def die(program: Program) -> None:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{program.url}/die", timeout=10)


def watch_until(servers: Servers, condition) -> None:
    def look():
        servers.watch_once()
        return condition()

    wait_for(look)


def test_one_that_dies_is_started_again_while_the_other_serves_on(program):
    first, second, said = program(), program(), []
    with Servers([first, second], start_timeout=30, restarts=QUICK, report=said.append) as servers:
        servers.start()
        before = (about_url(first), about_url(second))
        die(first)
        watch_until(servers, lambda: len(said) == 2)
        assert about_url(first) != before[0] and about_url(second) == before[1]
    assert said == [
        f"server {first.url} ended with status 9; log: {first.log}; started again in 0.05 s",
        f"server {first.url} is back after 1 death(s)",
    ]


def about_url(program: Program) -> int:
    with urllib.request.urlopen(f"{program.url}/about", timeout=10) as reply:
        return json.loads(reply.read())["child"]


def test_one_that_dies_too_often_is_given_up_and_the_last_one_is_an_error(program):
    """limit 2: the third death in a row. Delays 0.05, then 0.1. A run goes on with the servers that are left."""
    bad, good, said = program(), program(), []
    given_up = lambda one: f"given up after 2 restarts: server {one.url} ended with status 9; log: {one.log}"
    with pytest.raises(ServerError) as told:
        with Servers([bad, good], start_timeout=30, restarts=QUICK, report=said.append) as servers:
            servers.start()
            for wanted in (2, 4, 5):
                die(bad)
                watch_until(servers, lambda: len(said) >= wanted)
            assert [line[-7:] for line in said[:4:2]] == [" 0.05 s", "n 0.1 s"]
            assert said[4] == given_up(bad) + "; 1 left" and answers(good.url) and not answers(bad.url)
            for wanted in (7, 9, 10):
                die(good)
                watch_until(servers, lambda: len(said) >= wanted)
    assert str(told.value) == given_up(good) and not answers(good.url)


def test_deaths_long_ago_are_forgotten(program):
    steady, said = dataclasses.replace(QUICK, steady=0.0), []
    flaky = program()
    with Servers([flaky], start_timeout=30, restarts=steady, report=said.append) as servers:
        servers.start()
        for deaths in (1, 2, 3, 4):
            die(flaky)
            watch_until(servers, lambda wanted=2 * deaths: len(said) == wanted)
            servers.watch_once()
    assert all("started again in 0.05 s" in line for line in said[::2]) and len(said) == 8


def test_a_port_that_is_taken_in_between_counts_as_a_death(program):
    unlucky, said = program(), []
    with Servers([unlucky], start_timeout=30, restarts=QUICK, report=said.append) as servers:
        servers.start()
        die(unlucky)
        watch_until(servers, lambda: len(said) == 1)
        with contextlib.closing(socket.create_server(("127.0.0.1", unlucky.port))):
            watch_until(servers, lambda: len(said) == 2)
        watch_until(servers, lambda: len(said) == 3)
    assert "cannot be used" in said[1] and "is back after 2 death(s)" in said[2]
