"""How much memory a process tree takes, and one limit for all of it: a cgroup where one can be made."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants() -> list[int]:
    """All processes below this one. Those that lost their parent are its children, if it is a subreaper."""
    own = os.getpid()
    listed = Path(f"/proc/{own}/task/{own}/children").exists()  # not in every kernel
    by_parent: dict[int, list[int]] = {} if listed else _all_by_parent()
    found, waiting = [], [own]
    while waiting:
        parent = waiting.pop()
        for pid in _children(parent) if listed else by_parent.get(parent, []):
            found.append(pid)
            waiting.append(pid)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it may end meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _all_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(path.parent.name))
    return found


def used_bytes(pid: int) -> int:
    """What a process takes, shared pages divided among those that share them. Where that may not be read, shared pages
    count in full: the limit is then stricter, never looser."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return 0  # it has ended


def num_tasks(uid: int) -> int:
    """Processes and threads of a user, as RLIMIT_NPROC counts them, as far as this process sees them."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # who owns the files there does not say it: not of a process that hides
            fields = dict(line.partition(":")[::2] for line in path.read_text(errors="replace").splitlines())
            if int(fields["Uid"].split()[0]) == uid:
                total += int(fields["Threads"])
    return total


class Cgroup:
    """A cgroup (version 2) with a memory limit, made for one program and removed after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def make(
        limit_bytes: int, top: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
    ) -> Cgroup | None:
        """Below this process's own cgroup, so that the program stays within its limits too. None where the memory
        controller is not enabled there, or it may not be written: the caller must watch the tree itself."""
        with contextlib.suppress(OSError):
            path = next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), "..")
            parent = top / path.strip("/")
            if ".." in path or "memory" not in (parent / "cgroup.subtree_control").read_text().split():
                return None
            group = Cgroup(parent / f"paceline-{os.getpid()}")
            group.folder.mkdir()
            try:
                (group.folder / "memory.max").write_text(str(limit_bytes))
                (group.folder / "memory.oom.group").write_text("1")
                if (group.folder / "memory.swap.max").exists():
                    (group.folder / "memory.swap.max").write_text("0")
                return group
            except OSError:
                group.remove()
        return None

    def enter(self) -> None:
        """With the calling process, and all it starts."""
        (self.folder / "cgroup.procs").write_text("0")

    def was_exceeded(self) -> bool:
        with contextlib.suppress(OSError):
            events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            return int(events.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.folder.rmdir()
