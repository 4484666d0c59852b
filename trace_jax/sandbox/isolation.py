"""What surrounds the calls of one worker: namespaces, a root of its own, a user of its own, a scratch folder.

Namespaces (process ids, network, mounts, IPC) need root or user namespaces. The own root is a tmpfs that holds the
Python installation, the system's libraries and four devices, all read-only, and a scratch file system of limited size.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence

from trace_jax.sandbox import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)
_SCRATCH = "/sandbox"  # in the own root
_FIRST_USER = 1_900_000_000  # far above the ids that systems hand out
_MAX_FILES = 4096


def readable_paths() -> tuple[str, ...]:
    """What the interpreter reads: installation, packages, shared libraries; none lies below another."""
    wanted = {sys.base_prefix, sys.prefix, *_SYSTEM, *(path for path in sys.path if os.path.isdir(path))}
    inside = lambda path: any(path != other and path.startswith(other + "/") for other in wanted)
    return tuple(sorted(path for path in wanted if os.path.exists(path) and not inside(path)))


def namespaces_work() -> bool:
    """Tries it in a process of its own: half of it cannot be taken back."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            enter_namespaces()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def enter_namespaces() -> None:
    """New namespaces for this process; its next child is the first process of the new ones. Raises OSError."""
    try:
        kernel.unshare(_NAMESPACES)
        return
    except OSError:
        pass  # not root, or root without the capability: by a user namespace, which has it
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_NAMESPACES | kernel.CLONE_NEWUSER)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def enter_own_root(folder: str, readable: Sequence[str]) -> bool:
    """Makes a new root over `folder`, in this mount namespace only; False, with nothing changed, if refused."""
    try:
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID, "size=1m,mode=755")
    except OSError:
        return False
    try:
        for path in (*readable, *DEVICES):
            _show(path, folder + path)
        os.mkdir(folder + _SCRATCH)
        kernel.change_root(folder)
    except OSError:
        kernel.unmount(folder)
        return False
    return True


def _show(path: str, target: str) -> None:
    """`path` at `target`, read-only: a symbolic link as one, anything else as a mount."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode) and not os.path.isabs(os.readlink(path)):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(target)


def unprivileged_user(identity: int) -> int | None:
    """A user and group id that no other process has, for a worker that is root; None where it is not, or where that
    user could not read the interpreter's files."""
    if os.geteuid() != 0:
        return None
    user, files = _FIRST_USER + identity, [os.__file__, *(path for path in sys.path if os.path.isdir(path))]
    try:
        os.setgroups([])
        os.setresgid(-1, user, 0)
        os.setresuid(-1, user, 0)
        readable = all(os.access(path, os.R_OK, effective_ids=True) for path in files)
    except OSError:
        readable = False
    os.setresuid(-1, 0, 0)
    os.setresgid(-1, 0, 0)
    return user if readable else None


class Scratch:
    """The working folder of the calls, empty at the start of each."""

    def __init__(self, folder: str, *, own_root: bool, disk_bytes: int, user: int | None):
        """`folder` is made and used where there is no own root; `user` will own it."""
        self.path = _SCRATCH if own_root else folder
        self._own_root, self._mounted = own_root, False
        self._user = os.geteuid() if user is None else user
        self._group = os.getegid() if user is None else user
        self._disk_bytes = disk_bytes

    def renew(self) -> None:
        """Empties it. Raises OSError."""
        if not self._own_root:
            if os.path.isdir(self.path):
                empty(self.path)
            else:
                os.mkdir(self.path, 0o700)
            os.chown(self.path, self._user, self._group)
            return
        if self._mounted:
            kernel.unmount(self.path)
        options = f"size={self._disk_bytes},nr_inodes={_MAX_FILES},mode=700,uid={self._user},gid={self._group}"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("tmpfs", self.path, "tmpfs", flags, options)
        self._mounted = True


def empty(folder: str) -> None:
    """Removes all that a folder holds, however deep: folders inside its folders are first moved to its top."""
    os.chmod(folder, 0o700)
    moved = 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # a folder that is moved is written to
                    moved += 1
                    os.rename(inner.path, f"{folder}/.moved-{moved}-{os.urandom(8).hex()}")
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
