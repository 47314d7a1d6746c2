"""Per-problem history shards: which ones are kept, and where a new request's cursors start.

There is one shard per problem and policy version. Shards are dropped as a whole. `max_versions` counts the versions of
each problem, not of the policy: a problem comes up once per epoch, so the policy's last few versions usually have no
rollouts of it, while the problem's last few versions are its last few epochs. Above `max_bytes`, shards are dropped in
the order in which a request last began in them, over all problems.

Invariants: a shard that a live request appends to is never dropped, and no cursor points to a dropped shard. Except for
freeing memory, no operation takes longer for longer shards.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.history import INT, OUT_OF_MEMORY, ROOT, NativeHistory
from paceline.drafters.python_history import PythonHistory

STATE_KEYS = {"names", "name_ends", "versions", "logs", "log_ends"}  # of `HistoryShards.state_dict`


@dataclass(slots=True)
class Problem:
    name: str | None  # None: the request has no problem, and shares its history with no other request
    shards: list[Shard] = field(default_factory=list)  # oldest version first
    slots: set[int] = field(default_factory=set)  # of its live requests


@dataclass(slots=True, eq=False)
class Shard:
    handle: int
    version: int
    problem: Problem
    prompt_ends: dict[bytes, int] = field(default_factory=dict)  # digest of a prompt -> state of its end
    num_live: int = 0  # requests that append to it
    is_kept: bool = False  # False: dropped when its live requests end


class HistoryShards:
    """All shards of all problems."""

    def __init__(self, history: NativeHistory | PythonHistory, max_versions: int, max_bytes: int) -> None:
        self._history = history
        self.max_versions, self.max_bytes = max_versions, max_bytes
        self.num_bytes = 0
        self.problems: dict[str, Problem] = {}
        self._kept: dict[int, Shard] = {}  # by handle, least recently used first
        self._temporary: dict[int, Shard] = {}  # not kept: dropped when their live requests end

    def __len__(self) -> int:
        return len(self._kept) + len(self._temporary)

    def __iter__(self) -> Iterator[Shard]:
        yield from self._kept.values()
        yield from self._temporary.values()

    def acquire(self, name: str | None, version: int) -> Shard:
        """The shard that a new request appends to."""
        problem = Problem(None) if name is None else self.problems.setdefault(name, Problem(name))
        shard = next((shard for shard in problem.shards if shard.version == version), None)
        if shard is None:
            shard = self._new(problem, version)
        if shard.is_kept:
            self._kept[shard.handle] = self._kept.pop(shard.handle)
        shard.num_live += 1
        self._drop_old_versions(problem)
        return shard

    def _new(self, problem: Problem, version: int) -> Shard:
        shard = Shard(self._history.new(), version, problem, is_kept=problem.name is not None)
        (self._kept if shard.is_kept else self._temporary)[shard.handle] = shard
        self.num_bytes += self._history.num_bytes(shard.handle)
        insort(problem.shards, shard, key=lambda shard: shard.version)
        return shard

    def prompt_end(self, shard: Shard, prompt: np.ndarray) -> int:
        """The state after the prompt, or OUT_OF_MEMORY. The prompt is inserted once for all samples of it."""
        key = _digest(prompt)
        if key not in shard.prompt_ends:
            before = self._history.num_bytes(shard.handle)
            shard.prompt_ends[key] = self._history.insert_prompt(shard.handle, prompt)
            self.num_bytes += self._history.num_bytes(shard.handle) - before
        return shard.prompt_ends[key]

    def older_cursors(self, shard: Shard, prompt: np.ndarray) -> list[tuple[int, int, int]]:
        """Where a request with this prompt starts in the older shards of its problem, newest first: (handle, state,
        length)."""
        older = [other for other in shard.problem.shards if other.version < shard.version]
        key, cursors = _digest(prompt), []
        for other in older[::-1][: self.max_versions - 1]:
            end = other.prompt_ends.get(key, OUT_OF_MEMORY)
            match = (end, len(prompt)) if end != OUT_OF_MEMORY else self._history.find(other.handle, prompt)
            cursors.append((other.handle, *match))
        return cursors

    def release(self, shard: Shard) -> None:
        """A request that appended to the shard has ended."""
        shard.num_live -= 1
        if not shard.is_kept and not shard.num_live:
            self._drop(shard)
        self._drop_old_versions(shard.problem)

    def remove(self, version: int) -> int:
        """Remove the shards of a policy version and return their number. Live requests keep theirs until they end."""
        removed = [shard for shard in self._kept.values() if shard.version == version]
        for shard in removed:
            if shard.num_live:
                self._temporary[shard.handle] = self._kept.pop(shard.handle)
                shard.is_kept = False
                self._detach(shard)
            else:
                self._drop(shard)
        return len(removed)

    def evict(self) -> None:
        """Drop shards until `max_bytes` is met or all remaining ones are in use. Shards in use are mostly the most
        recently used ones, so the search is short."""
        while self.num_bytes > self.max_bytes:
            shard = next((shard for shard in self._kept.values() if not shard.num_live), None)
            if shard is None:
                return
            self._drop(shard)

    def clear(self) -> None:
        for shard in list(self):
            self._drop(shard)
        self.num_bytes = 0

    def recompute_num_bytes(self) -> None:
        """For when the growth is unknown because memory ran out."""
        self.num_bytes = sum(self._history.num_bytes(shard.handle) for shard in self)

    def _drop_old_versions(self, problem: Problem) -> None:
        for shard in problem.shards[: -self.max_versions]:
            if not shard.num_live:
                self._drop(shard)

    def _drop(self, shard: Shard) -> None:
        cursors = self._history.cursors
        for slot in shard.problem.slots:
            for i in np.flatnonzero(cursors["shard"][slot] == shard.handle):
                cursors[slot, i] = 0
        del (self._kept if shard.is_kept else self._temporary)[shard.handle]
        self._detach(shard)
        self.num_bytes -= self._history.num_bytes(shard.handle)
        self._history.free(shard.handle)

    def _detach(self, shard: Shard) -> None:
        """Remove the shard from its problem."""
        problem = shard.problem
        if shard in problem.shards:
            problem.shards.remove(shard)
            if not problem.shards and problem.name is not None:
                del self.problems[problem.name]

    def state_dict(self) -> dict[str, np.ndarray]:
        """The logs of all kept shards, least recently used first."""
        names = [np.frombuffer((shard.problem.name or "").encode(), np.uint8) for shard in self._kept.values()]
        logs = [self._history.log(handle) for handle in self._kept]
        return {
            "names": np.concatenate([np.zeros(0, np.uint8), *names]),
            "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
            "versions": np.array([shard.version for shard in self._kept.values()], np.int64),
            "logs": np.concatenate([np.zeros(0, INT), *logs]),
            "log_ends": np.cumsum([len(log) for log in logs], dtype=np.int64),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self.clear()
        try:
            names = [bytes(name).decode() for name in _split(state["names"].astype(np.uint8), state["name_ends"])]
            logs = _split(state["logs"].astype(INT, copy=False), state["log_ends"])
            versions = state["versions"].tolist()
            if not len(names) == len(logs) == len(versions) == len({*zip(names, versions, strict=False)}):
                raise ValueError("each shard needs one log and a unique (name, version)")
            for name, version, log in zip(names, versions, logs, strict=True):
                self._replay(self._new(self.problems.setdefault(name, Problem(name)), version), log)
        except (ValueError, TypeError) as error:
            self.clear()
            raise ValueError(
                f"the suffix drafter's state is damaged, or there is no memory to restore it: {error}"
            ) from error
        self.recompute_num_bytes()
        for problem in list(self.problems.values()):
            self._drop_old_versions(problem)
        self.evict()

    def _replay(self, shard: Shard, log: np.ndarray) -> None:
        for part in np.split(log, np.flatnonzero(log == ~ROOT))[1:]:  # only prompts start at the root
            end = int(np.argmax(np.append(part[1:], OUT_OF_MEMORY) < 0)) + 1
            prompt = part[1:end]
            shard.prompt_ends[_digest(prompt)] = self._history.insert_prompt(shard.handle, prompt)
            if not self._history.replay(shard.handle, part[end:]):
                raise ValueError(f"the log of problem {shard.problem.name!r} refers to an unknown state")


def _split(array: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    if (np.diff(ends, prepend=0) < 0).any() or len(array) != (ends[-1] if len(ends) else 0):
        raise ValueError("an array does not have the length that its parts add up to")
    return np.split(array, ends)[:-1]


def _digest(prompt: np.ndarray) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
