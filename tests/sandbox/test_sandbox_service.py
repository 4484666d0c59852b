"""The client against servers of every kind, and our server against the client and against raw requests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.sandbox_stand_in import fusion, stand_in
from trace_jax.sandbox.result import Execution, Limits
from trace_jax.sandbox.server import reply
from trace_jax.sandbox.service import PythonService, read_reply

ROOT = Path(__file__).parents[2]
LIMITS = Limits(output_bytes=1000, code_bytes=10_000)


GOOD = (200, fusion(stdout="1\n"))


def run(url: str, code: str = "print(1)", timeout: float = 0.5, **settings) -> Execution:
    with contextlib.closing(PythonService(url, limits=LIMITS, **settings)) as service:
        return service.run(code, timeout)


def test_a_request_is_what_sandbox_fusion_takes():
    with stand_in(GOOD) as (url, requests):
        assert run(url + "/") == Execution("1\n", "", "ok")
    assert requests == [("/run_code", {"code": "print(1)", "language": "python", "run_timeout": 0.5})]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (fusion(), Execution("", "", "ok")),
        (fusion("Failed", code=1, stderr="Traceback\nZeroDivisionError: x\n"), ("error", "ZeroDivisionError: x\n")),
        (fusion("Failed", "TimeLimitExceeded", None, stdout="a"), Execution("a", "", "timeout")),
        (fusion("Failed", code=1, stderr="Traceback\nMemoryError\n"), ("memory", "MemoryError\n")),
        (fusion("Failed", code=1, stderr="numpy._core._exceptions._ArrayMemoryError: big"), ("memory", "big")),
        (fusion("Failed", code=-11), Execution("", "", "killed")),
        (fusion("Failed", code=137), Execution("", "", "killed")),
        (fusion("Failed", code=1, end="output", stdout="x"), Execution("x", "", "output")),
        (fusion("Failed", code=1, end="nonsense"), Execution("", "", "error")),
        (fusion(stdout=None, stderr=None), Execution("", "", "ok")),
        (fusion(stdout="x" * 1001), Execution("x" * 1000, "", "output")),
        (fusion(stdout="\ud800"), Execution("?", "", "ok")),
    ],
)  # fmt: skip
def test_a_reply_is_read(body, expected):
    execution = read_reply(body, LIMITS)
    if isinstance(expected, Execution):
        assert execution == expected
    else:
        assert execution.end == expected[0] and execution.stderr.endswith(expected[1])


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[]", b"null", b"3", b'{"status": "Success"}', b'{"status": "Success", "run_result": []}',
     b'{"status": "Wonderful", "run_result": {}}', fusion(stdout=["x"]), fusion(stderr=3), b"[" * 10**5, b"\xff",
     fusion("SandboxError")],
)  # fmt: skip
def test_a_reply_that_is_none_is_unavailable(body):
    with stand_in((200, body)) as (url, requests):
        assert run(url).end == "unavailable"
    assert len(requests) == 1


@pytest.mark.parametrize(("status", "tries"), [(500, 3), (503, 3), (429, 3), (502, 3), (404, 1), (400, 1)])
def test_a_status_that_may_pass_is_tried_again(status, tries):
    with stand_in((status, b"no")) as (url, requests):
        execution = run(url)
    assert execution.end == "unavailable" and str(status) in execution.stderr and len(requests) == tries


def test_a_service_that_recovers_is_used():
    with stand_in((503, b""), (500, b""), GOOD) as (url, requests):
        assert run(url) == Execution("1\n", "", "ok")
    assert len(requests) == 3


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        started = time.monotonic()
        assert run(f"http://127.0.0.1:{free.getsockname()[1]}").end == "unavailable"
    assert time.monotonic() - started < 10


def test_a_slow_service_is_given_up_once():
    with stand_in(GOOD, delay=1.0) as (url, requests):
        started = time.monotonic()
        execution = run(url, timeout=0.1, grace=0.2)
        seconds = time.monotonic() - started
    assert execution.end == "unavailable" and "0.3 s" in execution.stderr
    assert len(requests) == 1 and seconds < 0.9


def test_a_reply_that_drips_is_given_up():
    """A byte every 50 ms keeps a connection alive for ever; only a deadline of the whole ends it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                connection.sendall(b" ")
                time.sleep(0.05)

    thread = threading.Thread(target=drip)
    thread.start()
    started = time.monotonic()
    execution = run(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.1, grace=0.2)
    assert execution.end == "unavailable" and time.monotonic() - started < 3
    thread.join()
    listener.close()


def test_a_connection_that_breaks_is_tried_again():
    listener = socket.create_server(("127.0.0.1", 0))
    calls = []

    def hang_up():
        for _ in range(3):
            connection, _ = listener.accept()
            calls.append(connection.recv(10))
            connection.close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    assert run(f"http://127.0.0.1:{listener.getsockname()[1]}").end == "unavailable"
    thread.join()
    listener.close()
    assert len(calls) == 3


def test_a_reply_without_end_is_given_up():
    with stand_in((200, b" " * (5 << 20))) as (url, _):
        execution = run(url)
    assert execution.end == "unavailable" and "4194304" in execution.stderr


def test_what_the_caller_gives_is_checked():
    for url in ("", "localhost:80", "ftp://x"):
        with pytest.raises(ValueError, match="url"):
            PythonService(url)
    with pytest.raises(ValueError, match="at least 1"):
        PythonService("http://x", attempts=0)
    service = PythonService("http://127.0.0.1:1", limits=LIMITS)
    with pytest.raises(ValueError, match="type"):
        service.run(None, 1.0)
    assert service.run("#" * 10_001, 1.0).end == "error"
    service.close()
    assert service.run("print(1)", 1.0).end == "unavailable"


@pytest.mark.parametrize("end", ["ok", "error", "timeout", "memory", "output", "killed"])
def test_our_replies_come_back_as_they_were(end):
    execution = Execution("a\n", "b é\n", end)
    assert read_reply(json.dumps(reply(execution, 0.1)).encode(), LIMITS) == execution


def test_our_replies_are_in_the_words_of_sandbox_fusion():
    # As its RunCodeResponse: Success only for status 0, a time limit has no return code, a broken sandbox no result.
    def short(end):
        said = reply(Execution("", "why", end), 0.1)
        result = said["run_result"] or {}
        return said["status"], result.get("status"), result.get("return_code")

    assert {end: short(end) for end in ("ok", "error", "timeout", "killed", "unavailable")} == {
        "ok": ("Success", "Finished", 0),
        "error": ("Failed", "Finished", 1),
        "timeout": ("Failed", "TimeLimitExceeded", None),
        "killed": ("Failed", "Finished", -9),
        "unavailable": ("SandboxError", None, None),
    }


@pytest.fixture(scope="module")
def served():
    """`python -m trace_jax.sandbox` on a free port; yields its url and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trace_jax.sandbox", f"--port={port}", "--workers=2", "--output_bytes=1000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert f"http://127.0.0.1:{port}" in line and "isolation: limits" in line
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/v1/ping", trust_env=False).json() == "pong":
                    break
            time.sleep(0.05)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('é😀')", Execution("é😀\n", "", "ok")),
        ("", Execution("", "", "ok")),
        ("import time; time.sleep(9)", Execution("", "", "timeout")),
        ("print('x' * 5000)", Execution("x" * 1000, "", "output")),
        ("import os; os.kill(os.getpid(), 9)", Execution("", "killed by SIGKILL\n", "killed")),
        ("exit(1)", Execution("", "", "error")),
    ],
)
def test_the_server_serves_the_client(served, code, expected):
    assert run(served, code) == expected


def test_surrogates_and_nul_reach_the_server(served):
    assert "surrogates not allowed" in run(served, "print('\ud800')").stderr
    assert "null bytes" in run(served, "\0").stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("no json", "no JSON"),
        ("[]", "no string `code`"),
        ({"language": "python"}, "no string `code`"),
        ({"code": 3, "language": "python"}, "no string `code`"),
        ({"code": ""}, "language 'None'"),
        ({"code": "", "language": "cpp"}, "language 'cpp'"),
        ({"code": "", "language": ["python"]}, "language"),
        ({"code": "", "language": "python", "run_timeout": -1}, "run_timeout -1"),
        ({"code": "", "language": "python", "run_timeout": "9"}, "run_timeout 9"),
        ({"code": "", "language": "python", "run_timeout": 1e9}, "run_timeout"),
        ({"code": "", "language": "python", "run_timeout": True}, "run_timeout True"),
        ({"code": "", "language": "python", "stdin": "x"}, "stdin: not served"),
        ({"code": "", "language": "python", "files": {"a": "b"}}, "files: not served"),
    ],
)
def test_a_request_that_is_none_is_refused_in_words(served, body, message):
    content = body if isinstance(body, str) else json.dumps(body)
    answer = httpx.post(f"{served}/run_code", content=content, trust_env=False)
    assert answer.status_code == 400 and answer.json()["status"] == "SandboxError"
    assert message in answer.json()["message"]


def test_what_sandbox_fusion_clients_send_besides_is_taken(served):
    body = {"code": "print(1)", "language": "python", "compile_timeout": 1, "run_timeout": 3, "memory_limit_MB": -1,
            "stdin": "", "files": {}, "fetch_files": []}  # fmt: skip
    answer = httpx.post(f"{served}/run_code", json=body, trust_env=False).json()
    result = answer["run_result"]
    assert (answer["status"], result["return_code"], result["stdout"]) == ("Success", 0, "1\n")


def test_what_a_client_gave_up_while_it_waited_is_not_run(served):
    """Both workers are busy for a second; six calls of 9 s behind them lose their clients, the last one does not."""
    body = lambda code: {"code": code, "language": "python", "run_timeout": 9}
    post = lambda code, seconds: httpx.post(f"{served}/run_code", json=body(code), timeout=seconds, trust_env=False)

    def give_up():
        with pytest.raises(httpx.ReadTimeout):
            post("import time; time.sleep(9)", 0.3)

    busy = [threading.Thread(target=post, args=("import time; time.sleep(1)", 9)) for _ in range(2)]
    for thread in busy:
        thread.start()
    time.sleep(0.2)
    waiting = [threading.Thread(target=give_up) for _ in range(6)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert post("print(1)", 6).json()["run_result"]["stdout"] == "1\n"
    for thread in busy:
        thread.join()


def test_a_port_that_is_taken_is_said(served):
    port = served.rpartition(":")[2]
    command = [sys.executable, "-m", "trace_jax.sandbox", f"--port={port}", "--workers=1"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
