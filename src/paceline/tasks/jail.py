"""The supervisor of one untrusted program: run as a script by `sandbox.Program`, never imported.

It is a process of its own because namespaces, limits and user ids are set between fork and exec, and a trainer with
threads must not run Python there. It starts the program, watches its time and the memory of its whole process tree, and
reports how it ended through a socket that the program never has. Always: when this process ends by itself, nothing of
the program is alive. What can't be set up is refused; the program is then not run.

With spec["sandbox"] = "namespaces" the program has its own file system, network, process table and shared memory. With
"process" it has none of these: Landlock (where the kernel has it) bars files and other processes' memory, and the
system call filter bars sockets, signals to others, leaving the process group, and changing modes, owners, times and
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

# An isolated interpreter knows no packages. Ours come behind the standard library, so that they hide none of it.
if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))

from paceline.tasks import landlock, memory, seccomp

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    0x1, 0x2, 0x4, 0x20, 0x1000, 0x4000, 0x40000, 0x200000,
)  # fmt: skip
MNT_DETACH = 2
MOUNT_FLAGS = {  # by their names in /proc/self/mountinfo
    "ro": MS_RDONLY, "nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": 0x8, "noatime": 0x400, "nodiratime": 0x800,
    "relatime": MS_RELATIME,
}  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
NOBODY = 65534
MIN_UIDS = 4096  # a range of users that is wide enough to give each program one of its own
# What an interpreter needs to start, besides its own prefix. World-readable on any machine.
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/nix/store", "/etc/ld.so.cache")
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib32")  # of these, what may be mounts of their own
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MEMORY_CHECK_S = 0.02  # how often the tree's memory is summed
MEMORY_CHECK_SHARE = 0.1  # of this process's time, at most

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The program can't be run as asked for; the text reads on from 'programs can't be …'."""


def call(name: str, *args: object) -> None:
    if getattr(libc, name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def enter_namespaces() -> None:
    """All of them, or OSError."""
    kinds = NEWNS | NEWNET | NEWPID | NEWIPC
    if os.geteuid() == 0:
        call("unshare", kinds)
        return
    uid, gid = os.getuid(), os.getgid()
    call("unshare", NEWUSER | kinds)  # a user namespace gives the rights for the others
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")  # not 0: exec then drops every capability
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    call("mount", *arguments, ctypes.c_ulong(flags), options.encode() if options is not None else None)


def bind(path: str, root: Path, needed: tuple[str, ...] = ()) -> bool:
    """`path` inside `root`, read-only, at the same place. Mounts beneath it are left out; True if they could not be:
    one of them holds a file of `needed`, or a user namespace keeps them together."""
    target = root / path.lstrip("/")
    if Path(path).is_symlink():  # /lib -> usr/lib
        target.symlink_to(Path(path).readlink())
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    beneath = [file for file in needed if file.startswith(path + "/") and Path(file).exists()]
    is_recursive = False
    try:
        mount(path, str(target), None, MS_BIND)
        if not all(same_file(file, root / file.lstrip("/")) for file in beneath):
            call("umount2", str(target).encode(), MNT_DETACH)
            is_recursive = True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        is_recursive = True
    if is_recursive:
        mount(path, str(target), None, MS_BIND | MS_REC)
    make_read_only(str(target.resolve()), 0 if path in DEVICES else MS_NODEV)
    return is_recursive


def same_file(path: str, other: Path) -> bool:
    return other.exists() and other.samefile(path)


def make_read_only(target: str, nodev: int) -> None:
    """The mount at `target` and every mount beneath it: a remount changes one mount only."""
    is_found = False
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, options = line.split()[4:6]
        place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place)  # a space is written \040
        if place == target or place.startswith(target + "/"):
            # Flags that the mount has already may not be taken away inside a user namespace: keep them.
            kept = sum(MOUNT_FLAGS.get(option, 0) for option in options.split(","))
            mount("none", place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | nodev | kept)
            is_found |= place == target
    if not is_found:
        raise OSError(errno.ENOENT, f"{target} is not in /proc/self/mountinfo")


def build_root(root: Path, python: str, prefix: str, size_mb: int) -> list[str]:
    """A file system in memory that holds the interpreter and /tmp, and nothing of the user's. Returns the folders in
    which other mounts are visible."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", str(root), "tmpfs", MS_NOSUID, f"size={size_mb}m,nr_inodes=4096,mode=755")
    seen: list[str] = []
    with_mounts: list[str] = []
    needed = (*LIBRARIES, prefix, str(Path(os.__file__).parent), python)
    for path in (*SYSTEM, *DEVICES, prefix, python):
        if Path(path).exists() and not any(path == top or path.startswith(top + "/") for top in seen):
            if bind(path, root, needed):
                with_mounts.append(path)
            seen.append(path)
    (root / "tmp").mkdir(exist_ok=True)  # the interpreter may lie in /tmp itself
    return with_mounts


def limit(kind: int, soft: int, hard: int) -> None:
    ceiling = resource.getrlimit(kind)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


class Place:
    """Where the program runs and as whom; made before it starts."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        box = Path(spec["box"])
        self.uid = unprivileged_uid() if os.geteuid() == 0 else None  # None: as the user who asked
        self.root: Path | None = None
        self.with_mounts: list[str] = []
        self.has_namespaces = spec["sandbox"] == "namespaces"
        if self.has_namespaces:
            try:
                enter_namespaces()
                self.with_mounts = build_root(box / "root", spec["python"], spec["prefix"], spec["disk_mb"])
            except OSError as error:
                raise Refused(f"isolated by namespaces on this machine ({error})") from None
            self.root = box / "root"
        elif self.uid is not None and not readable_by_all(spec["python"]):
            raise Refused(f"run as another user than root, since only root can read {spec['python']}")
        self.has_landlock = not self.has_namespaces and landlock.version() > 0
        prctl(PR_SET_DUMPABLE, 0)  # no process of the same user may look into this one
        self.work = "/tmp" if self.root is not None else str(box / "work")
        inside = self.root / "tmp" if self.root is not None else box / "work"
        shutil.copyfile(box / "program.py", inside / "program.py")
        for path in (inside, inside / "program.py", box / "stdin"):  # it may open its standard input a second time
            if self.uid is not None:
                os.chown(path, self.uid, self.uid)
        self.num_processes = spec["num_processes"]
        if not self.has_namespaces and self.uid is None:  # the limit counts what the user has already, too
            self.num_processes += memory.num_tasks(os.getuid())
        if self.uid == NOBODY:
            self.num_processes += memory.num_tasks(NOBODY)

    @property
    def gaps(self) -> list[str]:
        """What the program can reach all the same."""
        return self._gaps + (["the limit on processes of programs that run at once"] if self.uid == NOBODY else [])

    @property
    def _gaps(self) -> list[str]:
        if self.has_namespaces:
            return [f"what is mounted beneath {path}" for path in self.with_mounts]
        if self.has_landlock:
            return ["names and sizes of files", "disk space"]
        if self.uid is not None:
            shared = ["expected values of tests"] if self.uid == NOBODY else []
            return ["files that everyone may read", *shared, "disk space"]
        return ["the user's files", "memory of the user's processes", "expected values of tests", "disk space"]


def become_program(place: Place, cgroup: memory.Cgroup | None, error_fd: int) -> NoReturn:
    spec = place.spec
    try:
        os.setsid()
        with contextlib.suppress(OSError):  # short of memory, the kernel ends this program first
            Path("/proc/self/oom_score_adj").write_text("1000")
        if cgroup is not None:
            cgroup.enter()
        if place.root is not None:
            os.chroot(place.root)
        os.chdir(place.work)
        os.umask(0o077)
        limit(resource.RLIMIT_CPU, spec["cpu_s"], spec["cpu_s"] + 1)
        limit(resource.RLIMIT_AS, spec["memory_mb"] << 20, spec["memory_mb"] << 20)
        limit(resource.RLIMIT_FSIZE, spec["file_kb"] << 10, spec["file_kb"] << 10)
        limit(resource.RLIMIT_NOFILE, spec["num_files"], spec["num_files"])
        limit(resource.RLIMIT_NPROC, place.num_processes, place.num_processes)
        limit(resource.RLIMIT_CORE, 0, 0)
        if place.uid is not None:
            os.setgroups([])
            os.setgid(place.uid)
            os.setuid(place.uid)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        seccomp.install(seccomp.program_filter(None if place.has_namespaces else os.getpid()))
        if place.has_landlock:
            landlock.restrict((*SYSTEM, *DEVICES, spec["prefix"], spec["python"]), (place.work, "/dev/null"))
        # As -I, but with the hash seed that makes a program's behaviour repeat.
        flags = ["-s", "-S", "-P", "-X", "utf8"]
        env = {"PATH": "/usr/bin:/bin", "HOME": place.work, "TMPDIR": place.work, "LANG": "C.UTF-8"}
        arguments = [spec["python"], *flags, f"{place.work}/program.py"]
        os.execve(spec["python"], arguments, {**env, "PYTHONHASHSEED": "0"})
    except BaseException as error:
        os.write(error_fd, f"started ({error})".encode())  # the descriptor closes at exec: the program never has it
    os._exit(127)


def become_init(place: Place, cgroup: memory.Cgroup | None, report_fd: int, error_fd: int) -> NoReturn:
    """Process 1 of the namespace: when it ends, the kernel kills all that the program left behind."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        program = os.fork()
        if program == 0:
            become_program(place, cgroup, error_fd)
        os.close(error_fd)
        while True:
            pid, status = os.wait()
            if pid == program:
                os.write(report_fd, str(status).encode())
                break
    finally:
        os._exit(0)


class Watch:
    """Waits for the program to end, for its time or memory to be used up, or for a reason to stop it."""

    def __init__(self, child: int, place: Place) -> None:
        self.child, self.spec = child, place.spec
        self.own = {child} if place.has_namespaces else set()  # the namespace's init is ours, not the program's

    def wait(self) -> tuple[int | None, str | None]:
        """(wait status of the child, why it must be stopped): one of the two is None."""
        start_s, nap_s, next_check_s = time.monotonic(), 0.001, 0.0
        # SIGTERM is blocked and only ever looked at here: it must not end this process before the program.
        while os.getppid() == self.spec["parent"] and signal.SIGTERM not in signal.sigpending():
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                return status, None
            now_s = time.monotonic()
            if now_s - start_s > self.spec["wall_s"]:
                return None, "time"
            if now_s > next_check_s:
                if self._over_memory():
                    return None, "memory"
                next_check_s = now_s + max(MEMORY_CHECK_S, (time.monotonic() - now_s) / MEMORY_CHECK_SHARE)
            time.sleep(nap_s)
            nap_s = min(0.02, nap_s * 1.3)
        return None, "stopped"

    def _over_memory(self) -> bool:
        programs = [pid for pid in memory.descendants() if pid not in self.own]
        if len(programs) < 2:  # a single process is held by its own limit
            return False
        return sum(map(memory.used_bytes, programs)) > self.spec["memory_mb"] << 20


def sweep(child: int) -> None:
    """Kill what is left. In a PID namespace `child` is the init, whose end takes all others along; without one all are
    in `child`'s process group, which they can't leave. Orphans come to this process, which is a subreaper."""
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
    """A user of this program's own, so that one program's processes never count against another's limit. In a user
    namespace (a rootless container): from the upper half of its widest range of users. NOBODY if it has none."""
    own = 0x70000000 + os.getpid()
    widest = range(0)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            inside, _, length = map(int, line.split())
            if inside <= own < inside + length:
                return own
            widest = max(widest, range(inside, inside + length), key=len)
    if len(widest) < MIN_UIDS:
        return NOBODY
    upper = widest[len(widest) // 2 :]
    uid = upper[os.getpid() % len(upper)]
    return uid if uid != NOBODY else uid - 1


def readable_by_all(python: str) -> bool:
    return all(path.stat().st_mode & stat.S_IXOTH for path in (Path(python), *Path(python).parents))


def supervise(spec: dict[str, Any]) -> dict[str, Any]:
    if sys.platform != "linux":
        raise Refused(f"isolated on {sys.platform}: that needs Linux")
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    cgroup = memory.Cgroup.make(spec["memory_mb"] << 20)
    try:
        place = Place(spec)
        report_read, report_write = os.pipe()
        error_read, error_write = os.pipe()
        child = os.fork()
        if child == 0:
            if place.has_namespaces:
                become_init(place, cgroup, report_write, error_write)
            become_program(place, cgroup, error_write)
        os.close(report_write)
        os.close(error_write)
        status, stopped = Watch(child, place).wait()
        sweep(child)
        if error := os.read(error_read, 1000):
            raise Refused(error.decode(errors="replace"))
        if place.has_namespaces and stopped is None:
            report = os.read(report_read, 32)
            status = int(report) if report else None
        if cgroup is not None and cgroup.was_exceeded():
            stopped = "memory"
    finally:
        if cgroup is not None:
            cgroup.remove()
    code = os.waitstatus_to_exitcode(status) if status is not None else None
    return {"returncode": code, "stopped": stopped, "gaps": place.gaps}


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.umask(0o022)  # folders made here are for another user, the program's
    os.set_inheritable(spec["status_fd"], False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        said = supervise(spec)
    except (Refused, OSError) as error:
        said = {"refused": str(error)}
    os.write(spec["status_fd"], json.dumps(said).encode())


if __name__ == "__main__":
    main()
