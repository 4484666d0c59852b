"""The parts of the sandbox alone: frames, the seccomp filter in an interpreter of its own, verdicts, folders."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from trace_jax.sandbox import frames, isolation, nursery, seccomp
from trace_jax.sandbox.call import verdict
from trace_jax.sandbox.result import ENDS, Execution, Limits

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None, threads: bool = True) -> int:
    """Runs the filter of process 42 on a system call, by the kernel's rules for classic BPF."""
    low = lambda value: value & 0xFFFFFFFF
    words = {0: number, 4: ARCHITECTURES[machine] if architecture is None else architecture}
    words |= {16 + 8 * place: low(value) for place, value in enumerate((*arguments, 0, 0, 0, 0, 0, 0)[:6])}
    program, place, accumulator = seccomp.program(machine, 42, threads), 0, 0
    while True:
        code, jump_true, jump_false, operand = program[place]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            accumulator = words[operand]
        else:
            true = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[code]
            place += jump_true if true else jump_false


# Numbers from `man 2 syscalls` and the kernel's tables, written down here a second time.
X86 = {"read": 0, "write": 1, "mmap": 9, "socket": 41, "connect": 42, "socketpair": 53, "clone": 56, "fork": 57,
       "execve": 59, "kill": 62, "ptrace": 101, "prctl": 157, "mount": 165, "tgkill": 234, "unshare": 272,
       "prlimit64": 302, "getrandom": 318, "io_uring_setup": 425, "clone3": 435}  # fmt: skip
ARM = {"read": 63, "write": 64, "mmap": 222, "socket": 198, "connect": 203, "socketpair": 199, "clone": 220,
       "execve": 221, "kill": 129, "ptrace": 117, "prctl": 167, "mount": 40, "tgkill": 131, "unshare": 97,
       "prlimit64": 261, "getrandom": 278, "io_uring_setup": 425, "clone3": 435}  # fmt: skip


@pytest.mark.parametrize(("machine", "calls"), [("x86_64", X86), ("aarch64", ARM)])
def test_the_filter_decides_by_the_call(machine, calls):
    for name in ("read", "write", "mmap", "socketpair", "getrandom"):
        assert decide(machine, calls[name]) == ALLOW, name
    for name in ("socket", "connect", "fork", "execve", "ptrace", "mount", "unshare", "io_uring_setup"):
        if name in calls:
            assert decide(machine, calls[name]) == EPERM, name
    assert decide(machine, calls["clone3"]) == ENOSYS
    assert decide(machine, calls["clone"], 0x00010F00) == ALLOW  # CLONE_THREAD among others
    assert decide(machine, calls["clone"], 0x00010F00, threads=False) == EPERM
    assert decide(machine, calls["clone"], signal.SIGCHLD) == EPERM
    for call in ("kill", "tgkill"):
        assert decide(machine, calls[call], 42, 9) == ALLOW
        for other in (43, 1, 0, -1, -42):
            assert decide(machine, calls[call], other, 9) == EPERM
    assert decide(machine, calls["prlimit64"], 0) == decide(machine, calls["prlimit64"], 42) == ALLOW
    assert decide(machine, calls["prlimit64"], 41) == EPERM
    assert decide(machine, calls["prctl"], 15) == ALLOW  # PR_SET_NAME
    for option in (1, 4, 35, 36):
        assert decide(machine, calls["prctl"], option) == EPERM


def test_the_filter_refuses_other_tables():
    assert decide("x86_64", 0, architecture=0x40000003) == KILL  # i386, by int 0x80
    assert decide("x86_64", 0x40000000 | 41) == EPERM  # x32
    with pytest.raises(OSError, match="sparc64"):
        seccomp.program("sparc64", 42, True)


def test_a_message_and_its_descriptors_arrive():
    here, there = socket.socketpair()
    with here, there:
        read, write = os.pipe()
        frames.send(here, {"a": [1, "é"]}, [write])
        frames.send(here, {"b": None})
        message, (copy,) = frames.receive(there, 1)
        assert message == {"a": [1, "é"]} and not os.get_inheritable(copy)
        os.write(copy, b"x")
        assert os.read(read, 1) == b"x"
        assert frames.receive(there) == ({"b": None}, [])
        for fd in (read, write, copy):
            os.close(fd)
        here.sendall(b"{")
        here.close()
        assert frames.receive(there) == (None, [])  # half a frame is none
        with pytest.raises(ValueError, match="does not fit"):
            frames.send(there, {"x": "y" * frames.SIZE})


@pytest.mark.parametrize(
    ("status", "cpu", "reason", "end"),
    [
        (0, 0.1, "", "ok"),
        (1 << 8, 0.1, "", "error"),
        (86 << 8, 0.1, "", "memory"),
        (signal.SIGKILL, 0.1, "timeout", "timeout"),
        (signal.SIGKILL, 0.1, "output", "output"),
        (0, 0.1, "timeout", "ok"),  # it ended by itself just before it was killed
        (0, 0.1, "output", "output"),  # it ended by itself, but there is more output than is kept
        (signal.SIGXCPU, 2.0, "", "timeout"),
        (signal.SIGKILL, 2.0, "", "timeout"),  # the hard limit, where SIGXCPU was ignored
        (signal.SIGKILL, 0.1, "", "killed"),
        (signal.SIGSEGV | 0x80, 0.1, "", "killed"),  # 0x80: with a core
    ],
)
def test_a_status_has_its_end(status, cpu, reason, end):
    execution = verdict(b"a", b"b", status, cpu, reason, Limits(cpu_seconds=2))
    assert execution.end == end and end in ENDS and execution.stdout == "a"
    assert execution.stderr.startswith("b") and ("killed by SIG" in execution.stderr) == (end == "killed")


def test_a_real_time_signal_has_a_name():
    assert verdict(b"", b"", 40, 0.0, "", Limits()) == Execution("", "killed by signal 40\n", "killed")


def test_a_folder_is_emptied_whatever_is_in_it(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "file").write_text("x")
    (folder / "link").symlink_to(outside)
    (folder / "closed").mkdir()
    (folder / "closed" / "inner").mkdir(mode=0)
    (folder / "closed").chmod(0)
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(400):  # deeper than a path may be long
            os.mkdir("d" * 20)
            os.chdir("d" * 20)
            open("f", "w").close()
    finally:
        os.chdir(here)
    isolation.empty(str(folder))
    assert list(folder.iterdir()) == [] and (outside / "kept").exists()


def test_the_interpreter_is_readable_and_no_path_lies_in_another():
    paths = isolation.readable_paths()
    assert any(os.__file__.startswith(path + "/") for path in paths)
    assert sys.prefix in paths or any(sys.prefix.startswith(path + "/") for path in paths)
    assert not [(a, b) for a in paths for b in paths if a.startswith(b + "/")]


def test_an_interpreter_whose_pool_is_gone_before_it_began_ends_without_a_word(tmp_path):
    """As where a run is stopped while it starts."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-X", "utf8", "-c", nursery._START, nursery._PACKAGE_ROOT]
    environment = {"TMPDIR": str(tmp_path)}
    with theirs, subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE, env=environment) as process:
        settings = {"limits": dataclasses.asdict(Limits()), "layers": [], "preload": [], "trainer": os.getpid()}
        frames.send(ours, settings)
        theirs.close()
        ours.close()
        assert process.communicate(timeout=30)[1] == b"" and process.returncode == 0
    assert list(tmp_path.iterdir()) == []
