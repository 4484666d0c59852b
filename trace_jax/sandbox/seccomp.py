"""A seccomp filter: system calls that computing never needs and escapes do.

Refused with EPERM: sockets (a socketpair is none to anywhere), new processes and programs, signals to others, tracing,
namespaces, mounts, kernel objects that outlive a process or whose memory no limit counts, everything administrative.
Threads are allowed up to the limit, or not at all. Numbers are those of the kernel's tables for each architecture;
the table stands here so that the filter needs no library beside the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os

from trace_jax.sandbox import kernel

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); None: no such call there.
_REFUSED = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "bind": (49, 200), "listen": (50, 201),
    "accept4": (288, 242),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "mknod": (133, None), "mknodat": (259, 33), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262), "personality": (135, 92),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "init_module": (175, 105),
    "delete_module": (176, 106), "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "settimeofday": (164, 170), "adjtimex": (159, 171),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "vhangup": (153, 58),
}
_CLONE, _CLONE3, _KILL, _TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
_PRCTL, _PRLIMIT = (157, 167), (302, 261)
_PRCTL_REFUSED = (1, 4, 35, 36)  # PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_MM, PR_SET_CHILD_SUBREAPER
_CLONE_THREAD = 0x10000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF on 32-bit words
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; low words come first

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if not, operand


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter))]


def program(machine: str, pid: int, threads: bool) -> list[Instruction]:
    """The filter for process `pid` (signals to itself stay allowed). Raises OSError for an unknown architecture."""
    if machine not in _ARCHITECTURES:
        raise OSError(f"seccomp: the system calls of {machine} are not known here")
    column = list(_ARCHITECTURES).index(machine)
    refuse, allow = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    argument = (_LOAD, 0, 0, _FIRST_ARGUMENT)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),  # a call by the table of another architecture
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        refuse,
    ]
    for numbers in _REFUSED.values():
        if numbers[column] is not None:
            code += [(_EQUAL, 0, 1, numbers[column]), refuse]
    # glibc falls back to clone, whose flags a filter can read.
    code += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    thread = [argument, (_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse] if threads else [refuse]
    code += [(_EQUAL, 0, len(thread), _CLONE[column]), *thread]
    for call in (_KILL, _TGKILL):
        code += [(_EQUAL, 0, 4, call[column]), argument, (_EQUAL, 0, 1, pid), allow, refuse]
    code += [(_EQUAL, 0, 5, _PRLIMIT[column]), argument, (_EQUAL, 1, 0, 0), (_EQUAL, 0, 1, pid), allow, refuse]
    options = [step for option in _PRCTL_REFUSED for step in ((_EQUAL, 0, 1, option), refuse)]
    code += [(_EQUAL, 0, len(options) + 2, _PRCTL[column]), argument, *options, allow]
    return [*code, allow]


def restrict(*, threads: bool) -> None:
    """Puts the filter in force for this process and its threads, for good; needs `no_new_privileges`.

    Raises OSError where the kernel has no seccomp or the architecture is unknown.
    """
    steps = program(os.uname().machine, os.getpid(), threads)
    array = (_Filter * len(steps))(*(_Filter(*step) for step in steps))
    kernel.load_filter(_Program(len(steps), array))
