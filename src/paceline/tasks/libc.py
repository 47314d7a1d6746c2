"""Calls of the C library that Python has no function for. Standard library only: the supervisor imports it."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

_LIBRARY = ctypes.CDLL(None, use_errno=True)


def libc_call(name: str, *args: object, label: str | None = None) -> int:
    """Call a function that returns a negative number if it fails. Raises OSError then; its message starts with
    `label`."""
    result = getattr(_LIBRARY, name)(*args)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{label or name}: {os.strerror(error)}")
    return int(result)


def prctl(option: int, value: int, argument: object = ctypes.c_ulong(0), label: str | None = None) -> None:
    libc_call("prctl", option, ctypes.c_ulong(value), argument, ctypes.c_ulong(0), ctypes.c_ulong(0), label=label)
