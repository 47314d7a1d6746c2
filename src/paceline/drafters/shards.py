"""Which history is kept: one shard per problem and policy version, dropped whole.

The window counts a problem's own versions, not the policy's: a problem comes up once an epoch, so that the policy's
last few versions know nothing of it, while its own last few are its last few epochs. Beyond `max_bytes` the shards go
that were begun in least recently, whoever's they are: every problem's oldest epochs before anybody's newer ones.

What always holds: a shard that a live request speaks in is never dropped, and when a shard is, no cursor is left in
it. Nothing here takes longer for longer shards, but for giving their memory back.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.history import INT, LOST, ROOT, NativeHistory
from paceline.drafters.slow_history import SlowHistory

STATE = {"names", "name_ends", "versions", "logs", "log_ends"}  # what `Shelf.state` holds


@dataclass(slots=True)
class Problem:
    name: str | None  # None: a request without a problem has one of its own
    shards: list[Shard] = field(default_factory=list)  # oldest version first
    slots: set[int] = field(default_factory=set)  # of its live requests


@dataclass(slots=True, eq=False)
class Shard:
    handle: int
    version: int
    problem: Problem
    prompts: dict[bytes, int] = field(default_factory=dict)  # digest -> state of the prompt's end
    num_live: int = 0
    kept: bool = False  # or gone when its live requests end


class Shelf:
    """All shards, and where cursors may be set in them."""

    def __init__(self, history: NativeHistory | SlowHistory, max_versions: int, max_bytes: int) -> None:
        self._history = history
        self.max_versions, self.max_bytes = max_versions, max_bytes
        self.num_bytes = 0
        self.problems: dict[str, Problem] = {}
        self._shards: dict[int, Shard] = {}  # kept ones by handle, least recently begun in first
        self._cut_off: dict[int, Shard] = {}  # the others

    def __len__(self) -> int:
        return len(self._shards) + len(self._cut_off)

    def __iter__(self) -> Iterator[Shard]:
        yield from self._shards.values()
        yield from self._cut_off.values()

    def open(self, name: str | None, version: int) -> Shard:
        """The shard that a request speaks in."""
        problem = Problem(None) if name is None else self.problems.setdefault(name, Problem(name))
        shard = next((shard for shard in problem.shards if shard.version == version), None)
        if shard is None:
            shard = self._new(problem, version)
        if shard.kept:
            self._shards[shard.handle] = self._shards.pop(shard.handle)
        shard.num_live += 1
        self._trim(problem)
        return shard

    def _new(self, problem: Problem, version: int) -> Shard:
        shard = Shard(self._history.new(), version, problem, kept=problem.name is not None)
        (self._shards if shard.kept else self._cut_off)[shard.handle] = shard
        self.num_bytes += self._history.num_bytes(shard.handle)
        insort(problem.shards, shard, key=lambda shard: shard.version)
        return shard

    def end_of_prompt(self, shard: Shard, prompt: np.ndarray) -> int:
        """The state after the prompt, which is said once however many samples are drawn from it; LOST without memory
        for it."""
        key = _digest(prompt)
        if key not in shard.prompts:
            before = self._history.num_bytes(shard.handle)
            shard.prompts[key] = self._history.prompt(shard.handle, prompt)
            self.num_bytes += self._history.num_bytes(shard.handle) - before
        return shard.prompts[key]

    def older(self, shard: Shard, prompt: np.ndarray) -> list[tuple[int, int, int]]:
        """Where a request with this prompt begins in the shards before its own, newest first: (handle, state,
        length)."""
        before = [other for other in shard.problem.shards if other.version < shard.version]
        key, places = _digest(prompt), []
        for other in before[::-1][: self.max_versions - 1]:
            end = other.prompts.get(key, LOST)
            place = (end, len(prompt)) if end != LOST else self._history.find(other.handle, prompt)
            places.append((other.handle, *place))
        return places

    def close(self, shard: Shard) -> None:
        """A request that spoke in it ended."""
        shard.num_live -= 1
        if not shard.kept and not shard.num_live:
            self._drop(shard)
        self._trim(shard.problem)

    def remove(self, version: int) -> int:
        """Forget what was said under a version; how many shards that were. Live requests go on with theirs alone."""
        gone = [shard for shard in self._shards.values() if shard.version == version]
        for shard in gone:
            if shard.num_live:
                self._cut_off[shard.handle] = self._shards.pop(shard.handle)
                shard.kept = False
                self._leave(shard)
            else:
                self._drop(shard)
        return len(gone)

    def fit(self) -> None:
        """Drop what is too much, or all that may be dropped. Live requests' shards are mostly the last of all."""
        while self.num_bytes > self.max_bytes:
            shard = next((shard for shard in self._shards.values() if not shard.num_live), None)
            if shard is None:
                return
            self._drop(shard)

    def clear(self) -> None:
        for shard in list(self):
            self._drop(shard)
        self.num_bytes = 0

    def recount(self) -> None:
        """When growth was not told, since memory ran out within it."""
        self.num_bytes = sum(self._history.num_bytes(shard.handle) for shard in self)

    def _trim(self, problem: Problem) -> None:
        for shard in problem.shards[: -self.max_versions]:
            if not shard.num_live:
                self._drop(shard)

    def _drop(self, shard: Shard) -> None:
        cursors = self._history.cursors
        for slot in shard.problem.slots:
            for i in np.flatnonzero(cursors["shard"][slot] == shard.handle):
                cursors[slot, i] = 0
        del (self._shards if shard.kept else self._cut_off)[shard.handle]
        self._leave(shard)
        self.num_bytes -= self._history.num_bytes(shard.handle)
        self._history.free(shard.handle)

    def _leave(self, shard: Shard) -> None:
        problem = shard.problem
        if shard in problem.shards:
            problem.shards.remove(shard)
            if not problem.shards and problem.name is not None:
                del self.problems[problem.name]

    def state(self) -> dict[str, np.ndarray]:
        """Every kept shard's log, least recently begun in first."""
        names = [np.frombuffer((shard.problem.name or "").encode(), np.uint8) for shard in self._shards.values()]
        logs = [self._history.log(handle) for handle in self._shards]
        return {
            "names": np.concatenate([np.zeros(0, np.uint8), *names]),
            "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
            "versions": np.array([shard.version for shard in self._shards.values()], np.int64),
            "logs": np.concatenate([np.zeros(0, INT), *logs]),
            "log_ends": np.cumsum([len(log) for log in logs], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.clear()
        try:
            names = [bytes(name).decode() for name in _split(state["names"].astype(np.uint8), state["name_ends"])]
            logs = _split(state["logs"].astype(INT, copy=False), state["log_ends"])
            versions = state["versions"].tolist()
            if not len(names) == len(logs) == len(versions) == len({*zip(names, versions, strict=False)}):
                raise ValueError("every shard has one name, one version and one log")
            for name, version, log in zip(names, versions, logs, strict=True):
                self._retell(self._new(self.problems.setdefault(name, Problem(name)), version), log)
        except (ValueError, TypeError) as error:
            self.clear()
            raise ValueError(
                f"the suffix drafter's state is damaged, or there is no memory to restore it: {error}"
            ) from error
        self.recount()
        for problem in list(self.problems.values()):
            self._trim(problem)
        self.fit()

    def _retell(self, shard: Shard, log: np.ndarray) -> None:
        for part in np.split(log, np.flatnonzero(log == ~ROOT))[1:]:  # only prompts begin at the root
            end = int(np.argmax(np.append(part[1:], LOST) < 0)) + 1
            prompt = part[1:end]
            shard.prompts[_digest(prompt)] = self._history.prompt(shard.handle, prompt)
            if not self._history.replay(shard.handle, part[end:]):
                raise ValueError("a log names what was never said")


def _split(array: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    if (np.diff(ends, prepend=0) < 0).any() or len(array) != (ends[-1] if len(ends) else 0):
        raise ValueError("its parts do not add up")
    return np.split(array, ends)[:-1]


def _digest(prompt: np.ndarray) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
