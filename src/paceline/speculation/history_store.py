"""The history of each problem as plain tokens, for a device that searches it (`model/cuda/graph_history.py`).

An entry has the end of a prompt, so that the first emitted tokens have a context, and the tokens emitted after it. A
problem keeps the entries of its last few policy versions. All entries together take at most `max_bytes`: the oldest are
dropped first, except those of live requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from paceline.speculation.batch import Commits
from paceline.types import Request

TAIL = 16  # tokens of a prompt
STATE = {"names", "name_ends", "problems", "versions", "tokens", "ends"}  # keys of the state dict


@dataclass(slots=True, eq=False)
class Entry:
    problem: str | None  # None: only for this request
    version: int
    capacity: int  # most tokens
    tokens: np.ndarray  # int32
    num: int = 0  # of these are used
    is_live: bool = True

    @property
    def emitted(self) -> np.ndarray:
        return self.tokens[: self.num]

    def append(self, tokens: np.ndarray) -> None:
        end = self.num + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(end, 64), np.int32)])
        self.tokens[self.num : end] = tokens
        self.num = end


@dataclass(slots=True)
class HistoryStore:
    max_versions: int = 4
    max_bytes: int = 1 << 30
    problems: dict[str, list[Entry]] = field(default_factory=dict)  # oldest first
    live: dict[int, Entry] = field(default_factory=dict)  # by request
    num_bytes: int = 0
    _order: dict[Entry, None] = field(default_factory=dict)  # all entries, oldest first

    def begin(self, request: Request, version: int) -> Entry:
        tail = np.array(request.prompt_ids[-TAIL:], np.int32)
        entry = Entry(request.problem, version, len(tail) + request.sampling.max_tokens, tail.copy(), len(tail))
        self.live[request.request_id] = entry
        if request.problem is not None:
            self._keep(entry)
            self._fit(request.problem)
        return entry

    def observe(self, commits: Commits) -> None:
        for i, (request_id, num) in enumerate(zip(commits.request_ids.tolist(), commits.num.tolist(), strict=True)):
            entry = self.live[request_id]
            before = entry.num
            entry.append(commits.tokens[i, :num])
            if entry in self._order:
                self.num_bytes += 4 * (entry.num - before)

    def end(self, request_id: int) -> None:
        entry = self.live.pop(request_id)
        entry.is_live, entry.tokens = False, entry.emitted.copy()
        if entry.problem is not None:
            self._fit(entry.problem)

    def entries(self, problem: str | None) -> list[Entry]:
        """Newest first."""
        return [] if problem is None else self.problems.get(problem, [])[::-1]

    def _keep(self, entry: Entry) -> None:
        assert entry.problem is not None
        self.problems.setdefault(entry.problem, []).append(entry)
        self._order[entry] = None
        self.num_bytes += 4 * entry.num

    def _fit(self, problem: str) -> None:
        entries = self.problems.get(problem, [])
        versions = sorted({entry.version for entry in entries}, reverse=True)[: self.max_versions]
        for entry in [entry for entry in entries if entry.version not in versions and not entry.is_live]:
            self._drop(entry)
        gone, num_bytes = [], self.num_bytes
        for entry in self._order if num_bytes > self.max_bytes else ():
            if not entry.is_live:
                gone.append(entry)
                num_bytes -= 4 * entry.num
                if num_bytes <= self.max_bytes:
                    break
        for entry in gone:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        assert entry.problem is not None
        del self._order[entry]
        entries = self.problems[entry.problem]
        entries.remove(entry)
        if not entries:
            del self.problems[entry.problem]
        self.num_bytes -= 4 * entry.num

    def state_dict(self) -> dict[str, np.ndarray]:
        names = list(self.problems)
        number, encoded = {name: i for i, name in enumerate(names)}, [name.encode() for name in names]
        entries = list(self._order)
        return {
            "names": np.frombuffer(b"".join(encoded), np.uint8).copy(),
            "name_ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
            "problems": np.array([number[entry.problem or ""] for entry in entries], np.int64),
            "versions": np.array([entry.version for entry in entries], np.int64),
            "tokens": np.concatenate([entry.emitted for entry in entries]) if entries else np.zeros(0, np.int32),
            "ends": np.cumsum([entry.num for entry in entries], dtype=np.int64),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces all entries."""
        assert not self.live, "requests are running"
        if state.keys() != STATE:
            raise ValueError(
                f"not a state of a history on the device: it holds {sorted(state) or 'nothing'}; was "
                "speculation.method or model.device changed?"
            )
        self.problems, self._order, self.num_bytes = {}, {}, 0
        ends = [0, *state["name_ends"].tolist()]
        names = [state["names"][a:b].tobytes().decode() for a, b in pairwise(ends)]
        start = 0
        for problem, version, end in zip(
            state["problems"].tolist(), state["versions"].tolist(), state["ends"].tolist(), strict=True
        ):
            tokens = state["tokens"][start:end].astype(np.int32)
            self._keep(Entry(names[problem], version, len(tokens), tokens, len(tokens), is_live=False))
            start = end
