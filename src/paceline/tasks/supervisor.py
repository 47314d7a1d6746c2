"""The supervisor of one untrusted program. `sandbox.Program` runs it as a script.

It is a separate process because namespaces, limits and user ids are set between fork and exec, and a trainer with
threads must not run Python code there. It starts the program, limits its time and the memory of its whole process tree,
and reports how it ended through a socket that the program has no access to. Invariant: when this process ends by
itself, no process of the program is alive. If a protection can't be set up, the program is not run.

With spec["sandbox"] = "namespaces" the program has its own file system, network, process table and shared memory. With
"process" it has none of these: Landlock (if the kernel has it) denies files and other processes' memory, and the system
call filter denies sockets, signals to other processes, leaving the process group, and changing modes, owners, times and
extended attributes of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

# An isolated interpreter finds no packages. Ours come after the standard library, so that they shadow none of it.
if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))

from paceline.tasks import landlock, memory, seccomp
from paceline.tasks.libc import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, libc_call, prctl

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    0x1, 0x2, 0x4, 0x20, 0x1000, 0x4000, 0x40000, 0x200000,
)  # fmt: skip
MNT_DETACH = 2
MOUNT_FLAGS = {  # by name in /proc/self/mountinfo
    "ro": MS_RDONLY, "nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": 0x8, "noatime": 0x400, "nodiratime": 0x800,
    "relatime": MS_RELATIME,
}  # fmt: skip
NOBODY_UID = 65534
MIN_UIDS = 4096  # a range of user ids with at least so many gives each program its own
# What an interpreter needs to start, besides its own prefix. World-readable on any machine.
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/nix/store", "/etc/ld.so.cache")
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib32")  # the interpreter needs them even if they are separate mounts
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MEMORY_CHECK_S = 0.02  # how often the memory of the process tree is summed
MEMORY_CHECK_SHARE = 0.1  # of this process's time, at most


class SetupFailed(Exception):
    """The sandbox can't be set up. The message continues the sentence "programs can't be …"."""


def enter_namespaces() -> None:
    """Enters all of them, or raises OSError."""
    kinds = NEWNS | NEWNET | NEWPID | NEWIPC
    if os.geteuid() == 0:
        libc_call("unshare", kinds)
        return
    uid, gid = os.getuid(), os.getgid()
    libc_call("unshare", NEWUSER | kinds)  # a user namespace gives the right to create the others
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY_UID} {uid} 1")  # not 0: exec then drops every capability
    Path("/proc/self/gid_map").write_text(f"{NOBODY_UID} {gid} 1")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    libc_call("mount", *arguments, ctypes.c_ulong(flags), options.encode() if options is not None else None)


def bind(path: str, root: Path, needed: tuple[str, ...]) -> bool:
    """Mounts `path` read-only at the same path inside `root`. Leaves out other mounts beneath `path`, except in two
    cases: one of them has a file of `needed`, or the kernel requires them because this is a user namespace. True: they
    are visible."""
    target = root / path.lstrip("/")
    if Path(path).is_symlink():  # /lib -> usr/lib
        target.symlink_to(Path(path).readlink())
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    required = [file for file in needed if file.startswith(path + "/") and Path(file).exists()]
    has_mounts = False
    try:
        mount(path, str(target), None, MS_BIND)
        if not all(same_file(file, root / file.lstrip("/")) for file in required):
            libc_call("umount2", str(target).encode(), MNT_DETACH)
            has_mounts = True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        has_mounts = True
    if has_mounts:
        mount(path, str(target), None, MS_BIND | MS_REC)
    make_read_only(str(target.resolve()), 0 if path in DEVICES else MS_NODEV)
    return has_mounts


def same_file(path: str, other: Path) -> bool:
    return other.exists() and other.samefile(path)


def make_read_only(target: str, nodev: int) -> None:
    """Makes the mount at `target` and every mount beneath it read-only: a remount changes only one mount."""
    is_found = False
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point, options = line.split()[4:6]
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)  # a space is written as \040
        if point == target or point.startswith(target + "/"):
            # Inside a user namespace the existing mount flags must not be removed: keep them.
            kept = sum(MOUNT_FLAGS.get(option, 0) for option in options.split(","))
            mount("none", point, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | nodev | kept)
            is_found |= point == target
    if not is_found:
        raise OSError(errno.ENOENT, f"{target} is not in /proc/self/mountinfo")


def build_root(root: Path, python: str, prefix: str, size_mb: int) -> list[str]:
    """Makes a file system in memory with the interpreter and /tmp, and no file of the user. Returns the folders in
    which other mounts are visible."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", str(root), "tmpfs", MS_NOSUID, f"size={size_mb}m,nr_inodes=4096,mode=755")
    bound: dict[str, bool] = {}  # whether other mounts are visible in it
    needed = (*LIBRARIES, prefix, str(Path(os.__file__).parent), python)
    for path in (*SYSTEM, *DEVICES, prefix, python):
        if Path(path).exists() and not any(path == top or path.startswith(top + "/") for top in bound):
            bound[path] = bind(path, root, needed)
    (root / "tmp").mkdir(exist_ok=True)  # it exists if the interpreter is in /tmp
    return [path for path, has_mounts in bound.items() if has_mounts]


def limit(kind: int, soft: int, hard: int) -> None:
    ceiling = resource.getrlimit(kind)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


class Setup:
    """Root directory, user and limits of the program. Made before it starts."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        folder = Path(spec["folder"])
        self.uid = unprivileged_uid() if os.geteuid() == 0 else None  # None: the current user
        self.root: Path | None = None
        self.with_mounts: list[str] = []
        self.has_namespaces = spec["sandbox"] == "namespaces"
        if self.has_namespaces:
            try:
                enter_namespaces()
                self.with_mounts = build_root(folder / "root", spec["python"], spec["prefix"], spec["disk_mb"])
            except OSError as error:
                raise SetupFailed(f"isolated by namespaces on this machine ({error})") from None
            self.root = folder / "root"
        elif self.uid is not None and not readable_by_all(spec["python"]):
            raise SetupFailed(f"run as another user than root, since only root can read {spec['python']}")
        self.has_landlock = not self.has_namespaces and landlock.version() > 0
        prctl(PR_SET_DUMPABLE, 0)  # no process of the same user may inspect this one
        self.work = "/tmp" if self.root is not None else str(folder / "work")  # as the program sees it
        work = self.root / "tmp" if self.root is not None else folder / "work"
        shutil.copyfile(folder / "program.py", work / "program.py")
        for path in (work, work / "program.py", folder / "stdin"):  # it may open its standard input a second time
            if self.uid is not None:
                os.chown(path, self.uid, self.uid)
        self.num_processes = spec["num_processes"]
        if not self.has_namespaces and self.uid is None:  # the kernel also counts the user's other processes
            self.num_processes += memory.num_tasks(os.getuid())
        if self.uid == NOBODY_UID:  # and the processes of other programs
            self.num_processes += memory.num_tasks(NOBODY_UID)

    @property
    def not_isolated(self) -> list[str]:
        """What the program can access although it is in a sandbox."""
        expected = ["expected values of tests"]
        has_shared_uid = self.uid == NOBODY_UID
        if self.has_namespaces:
            found = [f"what is mounted beneath {path}" for path in self.with_mounts]
        elif self.has_landlock:
            found = ["names and sizes of files", "disk space"]
        elif self.uid is not None:
            found = ["files that everyone may read", *(expected if has_shared_uid else []), "disk space"]
        else:
            found = ["the user's files", "memory of the user's processes", *expected, "disk space"]
        return found + (["the limit on processes of programs that run at once"] if has_shared_uid else [])


def exec_program(setup: Setup, cgroup: memory.Cgroup | None, error_fd: int) -> NoReturn:
    spec = setup.spec
    try:
        os.setsid()
        with contextlib.suppress(OSError):  # when memory runs out, the kernel kills this program first
            Path("/proc/self/oom_score_adj").write_text("1000")
        if cgroup is not None:
            cgroup.enter()
        if setup.root is not None:
            os.chroot(setup.root)
        os.chdir(setup.work)
        os.umask(0o077)
        limit(resource.RLIMIT_CPU, spec["cpu_s"], spec["cpu_s"] + 1)
        limit(resource.RLIMIT_AS, spec["memory_mb"] << 20, spec["memory_mb"] << 20)
        limit(resource.RLIMIT_FSIZE, spec["output_kb"] << 10, spec["output_kb"] << 10)
        limit(resource.RLIMIT_NOFILE, spec["num_files"], spec["num_files"])
        limit(resource.RLIMIT_NPROC, setup.num_processes, setup.num_processes)
        limit(resource.RLIMIT_CORE, 0, 0)
        if setup.uid is not None:
            os.setgroups([])
            os.setgid(setup.uid)
            os.setuid(setup.uid)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        seccomp.install(seccomp.program_filter(None if setup.has_namespaces else os.getpid()))
        if setup.has_landlock:
            landlock.restrict((*SYSTEM, *DEVICES, spec["prefix"], spec["python"]), (setup.work, "/dev/null"))
        # Like -I, but with a fixed hash seed, so that a program behaves the same in every run.
        flags = ["-s", "-S", "-P", "-X", "utf8"]
        env = {"PATH": "/usr/bin:/bin", "HOME": setup.work, "TMPDIR": setup.work, "LANG": "C.UTF-8"}
        arguments = [spec["python"], *flags, f"{setup.work}/program.py"]
        os.execve(spec["python"], arguments, {**env, "PYTHONHASHSEED": "0"})
    except BaseException as error:
        os.write(error_fd, f"started ({error})".encode())  # closed at exec: the program never has this descriptor
    os._exit(127)


def run_init(setup: Setup, cgroup: memory.Cgroup | None, report_fd: int, error_fd: int) -> NoReturn:
    """Process 1 of the namespace: when it ends, the kernel kills every other process of the namespace."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        program = os.fork()
        if program == 0:
            exec_program(setup, cgroup, error_fd)
        os.close(error_fd)
        while True:
            pid, status = os.wait()
            if pid == program:
                os.write(report_fd, str(status).encode())
                break
    finally:
        os._exit(0)


def watch(child: int, setup: Setup) -> tuple[int | None, str | None]:
    """Waits until the program ends, exceeds its time or memory, or must be stopped for another reason. Returns the wait
    status of the child and the reason to stop it: one of the two is None."""
    spec, start_s, sleep_s, next_check_s = setup.spec, time.monotonic(), 0.001, 0.0
    # SIGTERM is blocked and only polled here: it must not end this process before the program.
    while os.getppid() == spec["parent"] and signal.SIGTERM not in signal.sigpending():
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status, None
        now_s = time.monotonic()
        if now_s - start_s > spec["wall_s"]:
            return None, "time"
        if now_s > next_check_s:
            processes = memory.descendants()
            if setup.has_namespaces and child in processes:
                processes.remove(child)  # the namespace's init is not the program's
            # RLIMIT_AS limits a single process.
            if len(processes) > 1 and sum(map(memory.used_bytes, processes)) > spec["memory_mb"] << 20:
                return None, "memory"
            next_check_s = now_s + max(MEMORY_CHECK_S, (time.monotonic() - now_s) / MEMORY_CHECK_SHARE)
        time.sleep(sleep_s)
        sleep_s = min(0.02, sleep_s * 1.3)
    return None, "stopped"


def kill_all(child: int) -> None:
    """Kills every process of the program. In a PID namespace `child` is the init: when it ends, the kernel kills all
    others. Without one, all are in `child`'s process group, which they can't leave. Orphans become children of this
    process, which is a subreaper."""
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    while True:
        for pid in {*memory.descendants(), child}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def unprivileged_uid() -> int:
    """A user id for this program only, so that the processes of other programs do not count against its limit. In a
    user namespace (a rootless container) it is in the upper half of the largest range. NOBODY_UID: every range is too
    small, and programs share that user."""
    uid = 0x70000000 + os.getpid()
    largest = range(0)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, _, length = map(int, line.split())
            if first <= uid < first + length:
                return uid
            largest = max(largest, range(first, first + length), key=len)
    if len(largest) < MIN_UIDS:
        return NOBODY_UID
    upper = largest[len(largest) // 2 :]
    uid = upper[os.getpid() % len(upper)]
    return uid if uid != NOBODY_UID else uid - 1


def readable_by_all(python: str) -> bool:
    return all(path.stat().st_mode & stat.S_IXOTH for path in (Path(python), *Path(python).parents))


def supervise(spec: dict[str, Any]) -> dict[str, Any]:
    if sys.platform != "linux":
        raise SetupFailed(f"isolated on {sys.platform}: that needs Linux")
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    cgroup = memory.Cgroup.make(spec["memory_mb"] << 20)
    try:
        setup = Setup(spec)
        report_read, report_write = os.pipe()
        error_read, error_write = os.pipe()
        child = os.fork()
        if child == 0:
            if setup.has_namespaces:
                run_init(setup, cgroup, report_write, error_write)
            exec_program(setup, cgroup, error_write)
        os.close(report_write)
        os.close(error_write)
        status, stopped = watch(child, setup)
        kill_all(child)
        if error := os.read(error_read, 1000):
            raise SetupFailed(error.decode(errors="replace"))
        if setup.has_namespaces and stopped is None:
            report = os.read(report_read, 32)
            status = int(report) if report else None
        if cgroup is not None and cgroup.was_exceeded():
            stopped = "memory"
    finally:
        if cgroup is not None:
            cgroup.remove()
    code = os.waitstatus_to_exitcode(status) if status is not None else None
    return {"returncode": code, "stopped": stopped, "not_isolated": setup.not_isolated}


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.umask(0o022)  # the program's user must be able to enter the folders that are made here
    os.set_inheritable(spec["status_fd"], False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        status = supervise(spec)
    except (SetupFailed, OSError) as error:
        status = {"setup_failed": str(error)}
    os.write(spec["status_fd"], json.dumps(status).encode())


if __name__ == "__main__":
    main()
