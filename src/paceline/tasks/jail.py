"""The launcher of one untrusted program: run as a script by `sandbox.run_program`, never imported.

It is a process of its own because namespaces, limits and user ids are set between fork and exec, and a trainer with
threads must not run Python there. Three processes: this one watches the clock; in a fresh PID namespace an init whose
death takes every descendant with it; and the program. Always: when this process ends, none of the others is alive.
Only the standard library is at hand, and little of it, as it starts once per program.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

LINUX = sys.platform == "linux"
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    0x1, 0x2, 0x4, 0x20, 0x1000, 0x4000, 0x40000, 0x200000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
NOBODY = 65534
# What an interpreter needs to start, besides its own prefix. World-readable on any machine.
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/nix/store", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: object) -> None:
    if getattr(libc, name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    if LINUX:
        call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def enter_namespaces() -> set[str]:
    """Which of "files", "network" and "processes" are ours alone from here on."""
    if not LINUX:
        return set()
    kinds = {"files": NEWNS, "network": NEWNET, "processes": NEWPID, "shared memory": NEWIPC}
    entered = set()
    if os.geteuid() == 0:
        for name, flag in kinds.items():
            with contextlib.suppress(OSError):
                call("unshare", flag)
                entered.add(name)
        return entered
    uid, gid = os.getuid(), os.getgid()
    try:  # a user namespace gives the rights for the others; all or nothing
        call("unshare", NEWUSER | sum(kinds.values()))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")  # not 0: exec then drops every capability
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")
    except OSError:
        return set()
    return set(kinds)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    call("mount", *arguments, ctypes.c_ulong(flags), options.encode() if options is not None else None)


def bind(path: str, root: Path) -> None:
    """`path` inside `root`, read-only, at the same place."""
    target = root / path.lstrip("/")
    if Path(path).is_symlink():  # /lib -> usr/lib
        target.symlink_to(Path(path).readlink())
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    mount(path, str(target), None, MS_BIND | MS_REC)
    # Flags that the mount has already may not be taken away inside a user namespace: keep them.
    flags = os.statvfs(target).f_flag
    kept = flags & 0xC0F | (MS_RELATIME if flags & 0x1000 else 0)
    nodev = 0 if path in DEVICES else MS_NODEV
    mount("none", str(target), None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | nodev | kept)


def build_root(root: Path, python: str, prefix: str, size_mb: int) -> None:
    """A file system in memory that holds the interpreter and /tmp, and nothing of the user's."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", str(root), "tmpfs", MS_NOSUID, f"size={size_mb}m,nr_inodes=4096,mode=755")
    seen: list[str] = []
    for path in (*SYSTEM, *DEVICES, prefix, python):
        if Path(path).exists() and not any(path == top or path.startswith(top + "/") for top in seen):
            bind(path, root)
            seen.append(path)
    (root / "tmp").mkdir()


def limit(kind: int, soft: int, hard: int) -> None:
    ceiling = resource.getrlimit(kind)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    try:
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):
        if LINUX:
            raise


def become_program(spec: dict[str, Any], root: Path | None, work: str, uid: int | None) -> NoReturn:
    try:
        os.setsid()
        if root is not None:
            os.chroot(root)
        os.chdir(work)
        os.umask(0o077)
        limit(resource.RLIMIT_CPU, spec["cpu_s"], spec["cpu_s"] + 1)
        limit(resource.RLIMIT_AS, spec["memory_mb"] << 20, spec["memory_mb"] << 20)
        limit(resource.RLIMIT_FSIZE, spec["file_kb"] << 10, spec["file_kb"] << 10)
        limit(resource.RLIMIT_NOFILE, spec["num_files"], spec["num_files"])
        limit(resource.RLIMIT_NPROC, spec["num_processes"], spec["num_processes"])
        limit(resource.RLIMIT_CORE, 0, 0)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # As -I, but with the hash seed that makes a program's behaviour repeat.
        flags = ["-s", "-S", "-P", "-X", "utf8"]
        env = {"PATH": "/usr/bin:/bin", "HOME": work, "TMPDIR": work, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        os.execve(spec["python"], [spec["python"], *flags, f"{work}/program.py"], env)
    except BaseException as error:
        os.write(2, f"the program could not be started: {error}\n".encode())
    os._exit(127)


def become_init(spec: dict[str, Any], root: Path | None, work: str, uid: int | None, report_fd: int) -> NoReturn:
    """Process 1 of the namespace: when it ends, the kernel kills all that the program left behind."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        program = os.fork()
        if program == 0:
            become_program(spec, root, work, uid)
        while True:
            pid, status = os.wait()
            if pid == program:
                os.write(report_fd, str(status).encode())
                break
    finally:
        os._exit(0)


def children() -> list[int]:
    """This process's children, also those it inherited; all are the program's descendants."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def sweep(child: int) -> None:
    """Kill what is left. With a PID namespace `child` is its init; otherwise orphans come to us one by one."""
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # a program without a namespace leads a group of its own
    while True:
        for pid in {*children(), child} if LINUX else {child}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def watch(child: int, wall_s: float) -> tuple[int | None, bool]:
    """(wait status, timed out); also ends when whoever asked for the program is gone."""
    parent, start_s, nap_s = os.getppid(), time.monotonic(), 0.001
    while os.getppid() == parent:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status, False
        if time.monotonic() - start_s > wall_s:
            return None, True
        time.sleep(nap_s)
        nap_s = min(0.02, nap_s * 1.3)
    return None, False


def unprivileged_uid() -> int:
    """A user of this program's own, so that one program's processes never count against another's limit."""
    own = 0x70000000 + os.getpid()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            inside, _, length = map(int, line.split())
            if inside <= own < inside + length:
                return own
    return NOBODY


def readable_by_all(python: str) -> bool:
    return all(path.stat().st_mode & stat.S_IXOTH for path in (Path(python), *Path(python).parents))


def main() -> None:
    spec = json.loads(sys.argv[1])
    status_fd, box = spec["status_fd"], Path(spec["box"])
    os.set_inheritable(status_fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uid = unprivileged_uid() if os.geteuid() == 0 else None
    own = enter_namespaces()
    root = None
    if "files" in own:
        try:
            build_root(box / "root", spec["python"], spec["prefix"], spec["disk_mb"])
            root = box / "root"
        except OSError:
            own.discard("files")
    if uid is not None and root is None and not readable_by_all(spec["python"]):
        refusal = f"root without namespaces may run it only as another user, who can't read {spec['python']}"
        os.write(status_fd, json.dumps({"refused": refusal}).encode())
        return
    missing = [name for name in ("network", "files", "processes") if name not in own]
    if uid is not None and "files" in missing:
        missing[missing.index("files")] = "files that everyone may read"
    if not LINUX:
        missing.append("memory")
    work = Path("/tmp") if root is not None else box / "work"
    inside = root / "tmp" if root is not None else work
    shutil.copyfile(box / "program.py", inside / "program.py")
    for path in (inside, inside / "program.py"):
        if uid is not None:
            os.chown(path, uid, uid)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_DUMPABLE, 0)  # the program may not look into this process

    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        if "processes" in own:
            become_init(spec, root, str(work), uid, write_fd)
        become_program(spec, root, str(work), uid)
    os.close(write_fd)
    status, timed_out = watch(child, spec["wall_s"])
    sweep(child)
    if "processes" in own and not timed_out:
        report = os.read(read_fd, 32)
        status = int(report) if report else None
    code = os.waitstatus_to_exitcode(status) if status is not None else None
    os.write(status_fd, json.dumps({"returncode": code, "timed_out": timed_out, "missing": missing}).encode())


if __name__ == "__main__":
    main()
