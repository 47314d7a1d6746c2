"""The memory of a process tree, and a cgroup that limits it, if one can be made."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants() -> list[int]:
    """All descendants of this process. Includes orphans if this process is a subreaper."""
    own = os.getpid()
    has_children_file = Path(f"/proc/{own}/task/{own}/children").exists()  # not in every kernel
    children = _children if has_children_file else _all_by_parent().__getitem__
    found = [own]
    for pid in found:  # the list grows
        found += children(pid)
    return found[1:]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process may end meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _all_by_parent() -> defaultdict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            found[parent].append(int(path.parent.name))
    return found


def used_bytes(pid: int) -> int:
    """Memory of a process. Shared pages are divided among the processes that share them (PSS). If that can't be read,
    shared pages count in full: the limit is then stricter."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return 0  # the process has ended


def num_tasks(uid: int) -> int:
    """Processes and threads of a user, as RLIMIT_NPROC counts them, as far as this process can see them."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            # Not the owner of the file: for a process that is not dumpable that is root.
            fields = dict(line.partition(":")[::2] for line in path.read_text(errors="replace").splitlines())
            if int(fields["Uid"].split()[0]) == uid:
                total += int(fields["Threads"])
    return total


class Cgroup:
    """A cgroup (version 2) with a memory limit, for one program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def make(
        limit_bytes: int, top: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
    ) -> Cgroup | None:
        """Makes a child of this process's own cgroup, so that the limits of that one apply too. None if the memory
        controller is not enabled there or the folder is not writable: then the caller must check the memory itself."""
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
        """Moves the calling process into the cgroup. Processes that it starts are in it too."""
        (self.folder / "cgroup.procs").write_text("0")

    def was_exceeded(self) -> bool:
        with contextlib.suppress(OSError):
            events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            return int(events.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.folder.rmdir()
