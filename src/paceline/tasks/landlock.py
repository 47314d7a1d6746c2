"""Landlock: a process restricts itself to some files, and loses access to the memory of unrestricted processes.

It needs no privileges and no namespaces, but Linux 5.13 or newer with Landlock enabled. Every child inherits it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from paceline.tasks.libc import libc_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
PATH_BENEATH, GET_VERSION = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEVICE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version of the interface; 16 from version 5 on
TCP, SIGNALS_AND_SOCKETS = 0b11, 0b11


def _call(*arguments: object) -> int:
    return libc_call("syscall", *arguments, label="Landlock")


def version() -> int:
    """The version of the kernel's Landlock interface; 0 if there is none."""
    try:
        return _call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(GET_VERSION))
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process: it may read and execute beneath `readable`, do everything beneath `writable`, and access
    no other file."""
    interface = version()
    handled = (1 << NUM_RIGHTS.get(interface, 16)) - 1
    fields = [handled, *([TCP] if interface >= 4 else []), *([SIGNALS_AND_SOCKETS] if interface >= 6 else [])]
    attributes = ctypes.create_string_buffer(struct.pack(f"={len(fields)}Q", *fields), 8 * len(fields))
    ruleset = _call(CREATE_RULESET, attributes, ctypes.c_size_t(8 * len(fields)), ctypes.c_uint(0))
    rights = {path: EXECUTE | READ_FILE | READ_DIR for path in readable} | {path: handled for path in writable}
    for path, allowed in rights.items():
        if not Path(path).exists():
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed &= handled if Path(path).is_dir() else handled & FILE_RIGHTS
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, handle), 12)
        _call(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint(0))
        os.close(handle)
    _call(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)
