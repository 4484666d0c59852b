"""Calls of the pool: what they give back, how they end, that they share nothing, and how the pool itself ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.real_tasks_cpu.escapes import descendants
from trace_jax.sandbox.pool import PythonPool
from trace_jax.sandbox.result import Execution, Limits, SandboxError

LIMITS = Limits(cpu_seconds=1, memory_bytes=600 << 20, output_bytes=1000, code_bytes=500_000)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool():
    with contextlib.closing(PythonPool(workers=2, limits=LIMITS)) as opened:
        yield opened


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent_of(pid: int) -> int | None:
    """The parent of a process, None for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", Execution("", "", "ok")),
        ("print(1)", Execution("1\n", "", "ok")),
        ("1 + 1", Execution("", "", "ok")),  # a script, not a prompt
        ("print('a', end='')", Execution("a", "", "ok")),
        ("print('π≈3 😀')", Execution("π≈3 😀\n", "", "ok")),
        ("print(chr(0xd800))", Execution("\\ud800\n", "", "ok")),
        ("import os; os.write(1, bytes([255]))", Execution("\ufffd", "", "ok")),
        ("import sys; print('e', file=sys.stderr)", Execution("", "e\n", "ok")),
        ("print(__name__)", Execution("__main__\n", "", "ok")),
        ("def f(): return g()\ndef g(): return 7\nprint(f())", Execution("7\n", "", "ok")),
        ("exit()", Execution("", "", "ok")),
        ("exit(2)", Execution("", "", "error")),
        ("import sys; sys.exit('no')", Execution("", "no\n", "error")),
        ("import atexit; atexit.register(print, 'last')", Execution("last\n", "", "ok")),
        ("import threading; threading.Thread(target=print, args=(5,)).start()", Execution("5\n", "", "ok")),
        ("import os; print(sorted(os.environ))", Execution("['HOME', 'TMPDIR']\n", "", "ok")),
        ("import sys; print(sys.stdin.read())", Execution("\n", "", "ok")),
        ("import sympy; print(sympy.factorint(360))", Execution("{2: 3, 3: 2, 5: 1}\n", "", "ok")),
        ("import numpy; print(numpy.arange(3).sum())", Execution("3\n", "", "ok")),
        ("import tempfile; f = tempfile.TemporaryFile(); print(f.write(b'abc'))", Execution("3\n", "", "ok")),
        ("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))", Execution("3\n", "", "ok")),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\nprint(A(1))",
         Execution("A(x=1)\n", "", "ok")),
    ],
)  # fmt: skip
def test_a_script_gives_what_it_prints(pool, code, expected):
    assert pool.run(code, 5.0) == expected


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("\0", "SyntaxError: source code string cannot contain null bytes"),
        ("print('\ud800')", "surrogates not allowed"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class E(Exception):\n  def __str__(self): raise E\nraise E", "E: <exception str() failed>"),
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("raise SystemExit(1.5)", "1.5"),
    ],
)
def test_an_error_ends_with_its_name(pool, code, last):
    execution = pool.run(code, 5.0)
    assert execution.end == "error" and execution.stderr.rstrip().endswith(last)


def test_a_traceback_shows_the_code_and_not_the_sandbox(pool):
    # Line numbers are those of the code below; Python 3.11 and later mark the place in the line.
    stderr = pool.run("def f(x):\n    return 1 / x\n\nf(0)\n", 5.0).stderr
    lines = [line for line in stderr.splitlines() if set(line.strip()) - {"^", "~"}]
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<code>", line 4, in <module>',
        "    f(0)",
        '  File "<code>", line 2, in f',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(
    ("code", "end", "stderr"),
    [
        ("bytes(10**10)", "memory", None),
        ("import os; os.kill(os.getpid(), 9)", "killed", "killed by SIGKILL\n"),
        ("import os\nos.write(2, b'x')\nos.abort()", "killed", "x\nkilled by SIGABRT\n"),
        ("import time; time.sleep(9)", "timeout", ""),
    ],
)  # fmt: skip
def test_an_end_has_its_label(pool, code, end, stderr):
    execution = pool.run(code, 0.3)
    assert execution.end == end and stderr in (None, execution.stderr)


def test_what_was_printed_before_the_time_limit_is_kept(pool):
    assert pool.run("print(1)\nprint(2)\nwhile True: pass", 0.3) == Execution("1\n2\n", "", "timeout")


def test_processor_time_is_limited_whatever_the_time_limit(pool):
    started = time.monotonic()
    assert pool.run("while True: pass", 60.0).end == "timeout"  # LIMITS.cpu_seconds is 1
    assert time.monotonic() - started < 20


def test_the_head_of_a_flood_is_kept(pool):
    execution = pool.run("for n in range(10**9): print(n)", 5.0)
    head = "".join(f"{n}\n" for n in range(1000))[: LIMITS.output_bytes]
    assert execution == Execution(head, "", "output")


@pytest.mark.parametrize(("size", "end"), [(1000, "ok"), (1001, "output")])
def test_output_may_be_as_long_as_its_limit(pool, size, end):
    for fd, name in ((1, "stdout"), (2, "stderr")):
        execution = pool.run(f"import os; os.write({fd}, b'x' * {size})", 5.0)
        assert (getattr(execution, name), execution.end) == ("x" * 1000, end)


@pytest.mark.parametrize(("size", "end"), [(500_000, "ok"), (500_001, "error"), (10 << 20, "error")])
def test_code_is_limited(pool, size, end):
    execution = pool.run("#" * size, 5.0)
    assert execution.end == end and (end == "ok" or str(size) in execution.stderr)


def test_code_longer_than_a_pipe_arrives(pool):
    assert pool.run("x = '" + "y" * 400_000 + "'\nprint(len(x))", 10.0).stdout == "400000\n"


@pytest.mark.parametrize("code", [None, 3, b"print(1)", ["print(1)"]])
def test_code_that_is_no_string_is_the_callers_mistake(pool, code):
    with pytest.raises(ValueError, match="type"):
        pool.run(code, 1.0)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_is_positive_and_finite(pool, timeout):
    with pytest.raises(ValueError, match="time limit"):
        pool.run("print(1)", timeout)


def test_what_a_pool_is_made_of_is_checked():
    with pytest.raises(ValueError, match="at least 1"):
        PythonPool(workers=0)
    with pytest.raises(ValueError, match="unknown sandbox layers"):
        PythonPool(workers=1, layers=("walls",))
    with pytest.raises(ValueError, match="memory_bytes is 0"):
        Limits(memory_bytes=0)


def test_calls_share_nothing(pool):
    change = "import math, random\nmath.pi = 3\nshared = 1\nopen('f', 'w').write('x')\nprint(random.random())"
    look = "import math, os, random\nprint(math.pi, 'shared' in globals(), os.listdir('.'))\nprint(random.random())"
    first, second = pool.run(change, 5.0), pool.run(look, 5.0)
    assert second.stdout.splitlines()[0] == "3.141592653589793 False []"
    assert first.stdout.strip() != second.stdout.splitlines()[1]  # fresh random numbers too
    assert len({pool.run("import numpy; print(numpy.random.rand())", 5).stdout for _ in range(3)}) == 3


def test_more_calls_than_workers_wait_their_turn(pool):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: pool.run(f"print({n} ** 2)", 5.0), range(24)))
    assert results == [Execution(f"{n * n}\n", "", "ok") for n in range(24)]


def test_a_call_waits_for_a_worker_as_long_as_its_patience():
    with contextlib.closing(PythonPool(workers=1, limits=LIMITS, preload=(), patience=0.2)) as busy:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            slow = threads.submit(busy.run, "import time; time.sleep(2)", 20.0)
            assert wait_until(lambda: not busy._idle)
            assert busy.run("print(1)", 5.0) == Execution("", "no interpreter was free for 0.2 s\n", "unavailable")
            assert not slow.done() and slow.result().end == "ok"
        assert busy.run("print(1)", 5.0) == Execution("1\n", "", "ok")


def test_a_worker_that_dies_is_replaced(pool):
    """Kills both workers (children of the nursery): one has a call, the other waits for one."""
    nursery = pool._nursery.pid
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.run, "import time; time.sleep(60)", 90.0)
        time.sleep(1.0)
        workers = [pid for pid in descendants(nursery) if parent_of(pid) == nursery]
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        assert call.result(60).end == "killed"
    assert len(workers) == 2 and wait_until(lambda: not any(map(alive, workers)))
    for _ in range(3):
        assert pool.run("print(1)", 5.0) == Execution("1\n", "", "ok")


def test_a_pool_whose_nursery_dies_starts_another_if_it_can(monkeypatch):
    with contextlib.closing(PythonPool(workers=1, limits=LIMITS, preload=())) as pool:
        old = pool._nursery.pid
        _kill_all(old)
        assert pool.run("print(1)", 5.0) == Execution("1\n", "", "ok")
        assert pool._nursery.pid != old
        _kill_all(pool._nursery.pid)
        monkeypatch.setattr(sys, "executable", "/no/python")
        execution = pool.run("print(1)", 5.0)
        assert execution.end == "unavailable" and "/no/python" in execution.stderr


def _kill_all(nursery: int) -> None:
    pids = {nursery} | descendants(nursery)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(alive, pids)))


def test_no_interpreter_is_said(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="ended at its start"):
        PythonPool(workers=1)
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(SandboxError, match="does not start"):
        PythonPool(workers=1)


def test_close_ends_calls_and_waiting_calls_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pool = PythonPool(workers=1, limits=LIMITS, preload=())
    nursery = pool._nursery.pid
    folder = Path(pool._nursery._folder)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(pool.run, "import time; time.sleep(9)", 20.0) for _ in range(3)]
        time.sleep(0.2)
        below = descendants(nursery)
        assert len(below) >= 2 and folder.exists()
        pool.close()
        assert {call.result(10).end for call in calls} == {"unavailable"}
    pool.close()
    assert pool.run("print(1)", 1.0).end == "unavailable"
    assert not Path(f"/proc/{nursery}").exists()  # no zombie either
    assert wait_until(lambda: not any(map(alive, below)))
    assert not folder.exists()


def test_a_pool_that_nobody_holds_is_closed():
    pool = PythonPool(workers=1, limits=LIMITS, preload=())
    assert pool.run("print(1)", 5.0).stdout == "1\n"
    pids = {pool._nursery.pid} | descendants(pool._nursery.pid)
    assert len(pids) >= 2 and alive(pool._nursery.pid)  # a worker may be between two calls
    del pool
    gc.collect()
    assert wait_until(lambda: not any(map(alive, pids)))


PROGRAM = """
import json, os, signal, sys, threading, time
from pathlib import Path
from experiments.real_tasks_cpu.escapes import descendants
from trace_jax.sandbox.pool import PythonPool
pool = PythonPool(workers=2, preload=())
threading.Thread(target=pool.run, args=("import time; time.sleep(99)", 99), daemon=True).start()
time.sleep(0.3)
if (fork := os.fork()) == 0:
    pool.close()  # nothing happens: it is not the owner's
    os.closerange(0, 3)
    time.sleep(30)
    os._exit(0)
time.sleep(0.1)
assert pool.run("print(1)", 5.0).end == "ok"
print(json.dumps([fork, pool._nursery._folder, *(descendants(os.getpid()) - {fork})]), flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "status"), [("kill", -signal.SIGKILL), ("exit", 0)])
def test_nothing_survives_the_trainer(how, status):
    """However it ends, and without `close`: interpreters, the running call and the folder go with it, although a fork
    of it, which holds copies of all that the pool had open, lives on."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    fork, folder, *pids = json.loads(done.stdout)
    assert len(pids) >= 4  # the nursery, two workers, the call
    assert wait_until(lambda: not any(map(alive, pids)))
    assert wait_until(lambda: not Path(folder).exists())
    assert alive(fork)
    os.kill(fork, signal.SIGKILL)


def test_the_pool_says_what_holds_and_what_does_not(pool, caplog):
    everything = ("limits", "network", "files", "processes", "disk")
    assert pool.isolation[0] == "limits" and set(pool.isolation) <= set(everything)
    if "files" not in pool.isolation:
        return  # as root, such a kernel gets no pool with fewer layers
    with caplog.at_level(logging.WARNING):
        weak = PythonPool(workers=1, preload=(), layers=("landlock",))
    with contextlib.closing(weak):
        assert weak.isolation == ("limits", "files")
        assert weak.run("print(1)", 5.0).stdout == "1\n"
    (record,) = caplog.records
    assert "no isolation of network, processes, disk" in record.getMessage()


def test_root_does_not_run_code_with_every_file_in_reach():
    if os.geteuid() == 0:
        with pytest.raises(SandboxError, match="as root"):
            PythonPool(workers=1, preload=(), layers=())
    else:
        with contextlib.closing(PythonPool(workers=1, preload=(), layers=())) as bare:
            assert bare.isolation == ("limits",)


def test_threads_do_not_wait_for_each_other(pool):
    """Two workers: a call that sleeps does not hold up the next."""
    started = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        slow = threads.submit(lambda: (started.set(), pool.run("import time; time.sleep(1)", 5.0))[1])
        started.wait()
        time.sleep(0.05)
        assert pool.run("print(1)", 5.0).stdout == "1\n" and not slow.done()
        assert slow.result().end == "ok"


def test_modules_that_are_preloaded_are_there_and_missing_ones_passed_over(pool):
    assert pool.run("import sys; print('sympy' in sys.modules)", 5.0).stdout == "True\n"
    with contextlib.closing(PythonPool(workers=1, preload=("colorsys", "nothing_like_this"))) as small:
        seen = small.run("import sys; print([n in sys.modules for n in ('colorsys', 'sympy', 'numpy')])", 5.0)
        assert seen.stdout == "[True, False, False]\n"
