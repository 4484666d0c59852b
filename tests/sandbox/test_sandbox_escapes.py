"""Every escape is refused by the whole sandbox; what a pool with fewer layers promises, it keeps too."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from experiments.real_tasks_cpu import escapes
from experiments.real_tasks_cpu.escape_list import ESCAPES
from trace_jax.sandbox.pool import PythonPool

BY_NAME = {escape.name: escape for escape in ESCAPES}
# None of them does harm if it gets through.
KEPT_BY = {
    "files": ("a file outside", "a file outside by a link", "writing outside", "removing a file outside",
              "changing the installation", "a file in the installation", "environment of the trainer"),
    "network": ("a TCP connection", "a datagram", "a name server", "a unix socket", "an abstract socket"),
    "processes": ("a signal to the trainer", "tracing another process", "reading another's memory"),
}  # fmt: skip


def test_the_list_is_long_and_names_are_unique():
    assert len(BY_NAME) == len(ESCAPES) >= 80


def test_every_escape_is_refused():
    with contextlib.closing(PythonPool(workers=1, limits=escapes.LIMITS)) as pool:
        results = escapes.refused(pool)
        assert [result for result in results if not result[1]] == []
        assert [name for name, _, _ in results] == list(BY_NAME)


@pytest.mark.parametrize("layers", [("namespaces",), ("landlock", "seccomp"), ("landlock",)])
def test_each_layer_keeps_what_it_promises(layers):
    with contextlib.closing(PythonPool(workers=1, limits=escapes.LIMITS, preload=(), layers=layers)) as pool:
        with escapes.surroundings() as around:
            processes = escapes.settled()
            for promise, names in KEPT_BY.items():
                if promise in pool.isolation:
                    results = [escapes.attempt(pool, BY_NAME[name], around, processes) for name in names]
                    assert [result for result in results if not result[1]] == []


def test_what_gets_through_is_reported():
    """The control: without the layer that refuses it, an escape is seen to get through."""
    with contextlib.closing(PythonPool(workers=1, limits=escapes.LIMITS, preload=(), layers=("landlock",))) as pool:
        with escapes.surroundings() as around:
            processes = escapes.settled()
            name, good, detail = escapes.attempt(pool, BY_NAME["a datagram"], around, processes)
            assert (name, good) == ("a datagram", False) and "got through" in detail
            assert escapes.attempt(pool, BY_NAME["a fork bomb"], around, processes)[2].startswith("not tried")


def test_namespaces_alone_end_a_daemon():
    """Without seccomp a call may start processes; none outlives it."""
    code = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  os.fork() or time.sleep(60)\n  os._exit(0)\nprint(1)"
    with contextlib.closing(PythonPool(workers=1, limits=escapes.LIMITS, preload=(), layers=("namespaces",))) as pool:
        processes = escapes.settled()
        if "processes" in pool.isolation:
            assert pool.run(code, 5.0).stdout == "1\n"
            pool.run("print(1)", 5.0)
            time.sleep(0.1)
            assert len(escapes.descendants(os.getpid())) <= processes
