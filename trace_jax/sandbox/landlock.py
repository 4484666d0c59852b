"""Landlock: a process gives up the file system, but for some folders (kernel documentation, userspace-api/landlock).

Needs Linux 5.13. From 6.7 on TCP is refused as well, from 6.12 on signals and abstract sockets that leave the sandbox.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from trace_jax.sandbox import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15  # write, truncate and ioctl are the others
_FILE_SYSTEM = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}  # rights by version; 5 on: 16
_TCP, _SCOPES = 3, 3  # bind and connect; abstract sockets and signals


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """From here on this process reads below `readable`, does everything below `writable`, and nothing elsewhere.

    Paths that are not there are left out. Raises OSError where the kernel has no Landlock; needs `no_new_privileges`.
    """
    version = kernel.syscall("landlock", _CREATE_RULESET, None, 0, _ASK_VERSION)
    everything = _FILE_SYSTEM.get(version, (1 << 16) - 1)
    fields = [everything] + [_TCP] * (version >= 4) + [_SCOPES] * (version >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = kernel.syscall("landlock", _CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
    try:
        for paths, rights in ((readable, _READ), (writable, everything)):
            for path in paths:
                if os.path.exists(path):
                    _allow(ruleset, path, rights)
        kernel.syscall("landlock", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_RIGHTS
        rule = ctypes.c_char_p(struct.pack("=Qi", rights, fd))
        kernel.syscall("landlock", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(fd)
