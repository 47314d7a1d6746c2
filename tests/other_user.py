"""Runs a Python script as another user for whom new namespaces are denied, as in an ordinary container.

As root: `python other_user.py [--no-landlock] [--namespaces] [--root] SCRIPT ARGUMENT…` runs it as an unprivileged
user. The interpreter and the package may be in folders that only root can read, so both are mounted where every user
can read them. As an ordinary user nothing needs mounting, and the script runs as that user. A system call filter denies
what a container denies: `unshare`, `clone` with namespace flags and `clone3`. With --no-landlock it also denies
Landlock, as in an old kernel. With --namespaces it denies no namespaces. With --root the user stays root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
sys.path.append(str(SOURCE))

from paceline.tasks import seccomp  # noqa: E402

USER = 50_000 + os.getpid() % 10_000  # another user for each test process, as limits count a user's processes
NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def expose(source: Path, name: str, top: Path) -> Path:
    target = top / name
    target.mkdir()
    call("mount", str(source).encode(), str(target).encode(), None, ctypes.c_ulong(MS_BIND | MS_REC), None)
    return target


def main() -> None:
    options = {argument for argument in sys.argv[1:] if argument in ("--no-landlock", "--namespaces", "--root")}
    script, *arguments = sys.argv[1 + len(options) :]
    python, source = Path(getattr(sys, "_base_executable", sys.executable)).resolve(), SOURCE
    if os.geteuid() == 0:
        call("unshare", NEWNS)
        call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
        top = Path("/mnt")
        call("mount", b"tmpfs", str(top).encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=755")
        prefix = Path(sys.base_prefix)
        python = expose(prefix, "python", top) / python.relative_to(prefix)
        source = expose(SOURCE, "source", top)
        (top / "home").mkdir()
        os.chown(top / "home", USER, USER)
        if "--root" not in options:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
    rules: seccomp.Filter = []
    if "--namespaces" not in options:
        rules += [*seccomp.deny("unshare"), *seccomp.deny("clone3", errno.ENOSYS)]
        rules += seccomp.deny_bits("clone", 0, seccomp.NEW_NAMESPACES)
    if "--no-landlock" in options:
        rules += seccomp.deny("landlock_create_ruleset", errno.ENOSYS)
    seccomp.install(rules)
    start = "import sys; sys.path.append(sys.argv[1]); exec(compile(sys.argv[2], 'script', 'exec'))"
    home = "/mnt/home" if os.getuid() == USER else os.environ.get("HOME", "/")
    environment = {"HOME": home, "PRIVATE": "secret", "PATH": "/usr/bin:/bin"}
    os.execve(python, [str(python), "-I", "-S", "-c", start, str(source), script, *arguments], environment)


if __name__ == "__main__":
    main()
