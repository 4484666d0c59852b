"""What a call of the sandbox gives back, and what it may use."""

from __future__ import annotations

import dataclasses

ENDS = ("ok", "error", "timeout", "memory", "output", "killed", "unavailable")


class SandboxError(Exception):
    """The sandbox itself does not work: no interpreter starts. Never raised for what the code does."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """What a call printed and how it ended.

    `end` is one of ENDS:
      ok           the code ran to its end (or left by `exit()`).
      error        an exception, whose traceback ends `stderr`, an exit status that is not 0, or code that is too long.
      timeout      the time limit: wall clock or CPU.
      memory       a MemoryError that the code did not catch.
      output       more was printed than is allowed; its head is kept.
      killed       a signal, whose name ends `stderr`: a crash, or the code killed itself.
      unavailable  the code was not run, or nobody knows how it ended; `stderr` says why.
    """

    stdout: str
    stderr: str
    end: str


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one call may use. Defaults are our choice; all sizes in bytes."""

    cpu_seconds: int = 30  # processor time of all its threads
    memory_bytes: int = 1 << 30  # address space; the interpreter with numpy and sympy takes about 150 MB of it
    processes: int = 32  # threads; where the kernel cannot forbid new processes, these too
    file_bytes: int = 16 << 20  # of one file
    disk_bytes: int = 64 << 20  # of all files together, where the scratch folder is a file system of its own
    open_files: int = 64
    output_bytes: int = 64 << 10  # of stdout and of stderr, each
    code_bytes: int = 1 << 20  # of the code as UTF-8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"sandbox limit {field.name} is {value!r}; it must be an integer of at least 1")
