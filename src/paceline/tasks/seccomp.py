"""A system call filter (seccomp BPF) for untrusted programs, on x86-64 and 64-bit ARM.

It denies what namespaces, limits and user ids do not cover: sockets of other families than inet and unix, io_uring
(which can open sockets despite a filter), memory that belongs to no process, new namespaces, and access to other
processes. A filter can't be removed, and every child inherits it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

from paceline.tasks.libc import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, PR_SET_SECCOMP, prctl

Filter = list[tuple[int, int, int, int]]  # BPF instructions: code, jump if true, jump if false, constant

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET = 0, 4  # offsets in struct seccomp_data
X32 = 0x40000000  # system calls of the x32 ABI have this bit
MODE_FILTER = 2
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
NEW_NAMESPACES = 0x7E020000  # all CLONE_NEW… flags
FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR = 0x40086602, 0x40046602, 0x401C5820
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ABSENT = 0xFFFFFFFF  # for a call that an architecture does not have; no call has this number
# name: number on x86-64, number on 64-bit ARM
SYSCALL_NUMBERS = {
    "add_key": (248, 217), "bpf": (321, 280), "clone": (56, 220), "clone3": (435, 435), "fcntl": (72, 25),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioprio_set": (251, 30), "kcmp": (312, 272), "keyctl": (250, 219),
    "kill": (62, 129), "landlock_create_ruleset": (444, 444), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "mq_open": (240, 180), "msgget": (68, 186),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "prctl": (157, 167), "prlimit64": (302, 261), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "semget": (64, 190),
    "setns": (308, 268), "setpgid": (109, 154), "setpriority": (141, 140), "setsid": (112, 157), "shmget": (29, 194),
    "socket": (41, 198), "socketpair": (53, 199), "tgkill": (234, 131), "tkill": (200, 130), "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "chmod": (90, ABSENT), "chown": (92, ABSENT), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "fchown": (93, 55), "fchownat": (260, 54), "lchown": (94, ABSENT), "file_getattr": (468, 468),
    "file_setattr": (469, 469), "futimesat": (261, ABSENT), "utime": (132, ABSENT), "utimensat": (280, 88),
    "utimes": (235, ABSENT), "truncate": (76, 45), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setxattrat": (463, 463), "getxattrat": (464, 464), "listxattrat": (465, 465),
    "removexattrat": (466, 466),
}  # fmt: skip
# A solution never needs these.
ALWAYS_DENIED = (
    "add_key", "bpf", "io_uring_setup", "kcmp", "keyctl", "memfd_create", "memfd_secret", "migrate_pages", "move_pages",
    "mq_open", "msgget", "perf_event_open", "pidfd_getfd", "process_madvise", "process_mrelease", "process_vm_readv",
    "process_vm_writev", "ptrace", "request_key", "semget", "setns", "shmget", "unshare", "userfaultfd",
)  # fmt: skip
# Without a PID namespace these affect other processes of the same user, or leave the process group.
DENIED_WITHOUT_PID_NAMESPACE = (
    "ioprio_set", "pidfd_open", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "setpgid", "setpriority",
    "setsid",
)  # fmt: skip
# Landlock does not restrict these (truncate: before version 3 of its interface), and a filter can't see the path: they
# are denied for the program's own files too.
DENIED_ON_FILES = (
    "chmod", "chown", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "fgetxattr", "file_getattr",
    "file_setattr", "flistxattr", "fremovexattr", "fsetxattr", "futimesat", "getxattr", "getxattrat", "lchown",
    "lgetxattr", "listxattr", "listxattrat", "llistxattr", "lremovexattr", "lsetxattr", "removexattr", "removexattrat",
    "setxattr", "setxattrat", "truncate", "utime", "utimensat", "utimes",
)  # fmt: skip
OWN_PROCESS_ONLY = (
    "prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler", "tgkill", "tkill"
)  # fmt: skip


def machine() -> str:
    name = os.uname().machine
    if name not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call filter for {name}; there is one for {', '.join(ARCHITECTURES)}")
    return name


def syscall_number(name: str) -> int:
    return SYSCALL_NUMBERS[name][list(ARCHITECTURES).index(machine())]


def program_filter(pid: int | None) -> Filter:
    """The filter for a program in its own namespaces (`pid` is None), or for process `pid` without namespaces. Without
    them it may open no socket at all, signal only itself and its process group, not leave that group, and change no
    file's mode, owner, times or extended attributes."""
    rules: Filter = []
    for name in ALWAYS_DENIED:
        rules += deny(name)
    rules += deny("clone3", errno.ENOSYS)  # a filter can't read its flags; the C library falls back to clone
    rules += deny_bits("clone", 0, NEW_NAMESPACES)
    rules += allow_only("socketpair", 0, [AF_UNIX])
    if pid is None:
        return rules + allow_only("socket", 0, [AF_UNIX, AF_INET, AF_INET6])
    for name in ("socket", *DENIED_WITHOUT_PID_NAMESPACE, *DENIED_ON_FILES):
        rules += deny(name)
    for name in OWN_PROCESS_ONLY:
        rules += allow_only(name, 0, [0, pid])
    rules += allow_only("kill", 0, [0, pid, -pid & 0xFFFFFFFF])
    rules += deny_values("fcntl", 1, [F_SETOWN, F_SETOWN_EX])  # both make the kernel send signals to any process
    # One rule for all of them: it decides every ioctl, so that a second one would never apply.
    rules += deny_values("ioctl", 1, [FIOSETOWN, SIOCSPGRP, FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR])
    return rules + deny_values("prctl", 0, [PR_SET_PDEATHSIG])


def deny(name: str, error: int = errno.EPERM) -> Filter:
    return [(EQUAL, 0, 1, syscall_number(name)), (RETURN, 0, 0, ERRNO | error)]


def allow_only(name: str, argument: int, values: Iterable[int]) -> Filter:
    return _by_argument(name, argument, EQUAL, list(values), ALLOW, ERRNO | errno.EPERM)


def deny_values(name: str, argument: int, values: Iterable[int]) -> Filter:
    return _by_argument(name, argument, EQUAL, list(values), ERRNO | errno.EPERM, ALLOW)


def deny_bits(name: str, argument: int, mask: int) -> Filter:
    return _by_argument(name, argument, ANY_BIT, [mask], ERRNO | errno.EPERM, ALLOW)


def _by_argument(name: str, argument: int, test: int, values: list[int], if_true: int, if_false: int) -> Filter:
    """Compares the low 32 bits of an argument with each value. All of these arguments are ints in the kernel."""
    compare = [(test, len(values) - i, 0, value) for i, value in enumerate(values)]
    body = [(LOAD, 0, 0, 16 + 8 * argument), *compare, (RETURN, 0, 0, if_false), (RETURN, 0, 0, if_true)]
    return [(EQUAL, 0, len(body), syscall_number(name)), *body]


def install(rules: Filter) -> None:
    """Installs a filter for this process and its children. Also sets no_new_privs, which the kernel requires."""
    name = machine()
    start: Filter = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (EQUAL, 1, 0, ARCHITECTURES[name]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET),
    ]
    if name == "x86_64":
        start += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    whole = [*start, *rules, (RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in whole)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(whole), ctypes.addressof(buffer)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, MODE_FILTER, header, label="the system call filter can't be installed")
