"""Linux system calls that Python 3.11 does not wrap, each raising OSError where the kernel refuses.

Numbers and flags are those of the kernel's public headers (man 2 prctl, unshare, mount, mount_setattr, pivot_root,
capset). On other systems nothing here may be called.
"""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_NR_MOUNT_SETATTR = 442  # the same on every architecture, as are all calls from number 424 on
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """A system call by number; integers are passed as 64 bits."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *wide), what)


def _prctl(what: str, option: int, *arguments: object) -> None:
    padded = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    padded += [ctypes.c_ulong(0)] * (4 - len(padded))
    _checked(_libc.prctl(option, *padded), what)


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that forked it ends. A change of user or capabilities undoes it."""
    _prctl("parent-death signal", _PR_SET_PDEATHSIG, int(signal.SIGKILL))


def adopt_orphans() -> None:
    """Grandchildren whose parent ends become children of this process."""
    _prctl("subreaper", _PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    """No later exec gives this process rights that it does not have."""
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def load_filter(program: ctypes.Structure) -> None:
    """Puts a seccomp filter (a `struct sock_fprog`) in force for good; needs `no_new_privileges`."""
    _prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


def unshare(flags: int) -> None:
    """New namespaces for this process (for its children, with CLONE_NEWPID)."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """See man 2 mount."""
    encode = lambda text: None if text is None else os.fsencode(text)
    arguments = (encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(options))
    _checked(_libc.mount(*arguments), f"mount {target}")


def unmount(target: str) -> None:
    """Takes a mount off its place at once; what still uses it keeps it."""
    _checked(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"unmount {target}")


def make_read_only(target: str) -> None:
    """A mount and all below it: nothing can be written, and set-user-id bits do nothing."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    path = ctypes.c_char_p(os.fsencode(target))
    size = ctypes.sizeof(attributes)
    syscall("mount_setattr", _NR_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(attributes), size)


def change_root(folder: str) -> None:
    """Makes a mount point the root of this mount namespace; nothing of the old root stays reachable."""
    machine = os.uname().machine
    if machine not in _NR_PIVOT_ROOT:
        raise OSError(f"pivot_root: its number on {machine} is not known here")
    os.chdir(folder)
    here = ctypes.c_char_p(b".")
    syscall("pivot_root", _NR_PIVOT_ROOT[machine], here, here)
    unmount(".")
    os.chdir("/")


def drop_capabilities() -> None:
    """Gives up every capability for good."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
