"""Reference implementation of the suffix drafter without automata: all token strings, and what followed them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.history import NativeHistory
from paceline.drafters.python_history import LONG_MATCH, PythonHistory, confidence
from paceline.drafters.suffix import SuffixDrafter
from paceline.native import NativeUnavailable
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Request, SamplingParams

try:
    NativeHistory()
    HISTORIES: list[type] = [NativeHistory, PythonHistory]
except NativeUnavailable:
    HISTORIES = [PythonHistory]

String = tuple[int, ...]


def rows_of(sequences: dict[int, list[int]]) -> Rows:
    ids = np.array(list(sequences), np.int64)
    tokens = [np.array(sequence, np.int32) for sequence in sequences.values()]
    return Rows(ids, tokens, np.zeros(len(ids), np.uint64), [SamplingParams()] * len(ids))


def commits_of(emitted: dict[int, list[int]]) -> Commits:
    num = np.array([len(tokens) for tokens in emitted.values()], np.int32)
    tokens = np.full((len(emitted), num.max(initial=0)), -7, np.int32)
    for row, new in zip(tokens, emitted.values(), strict=True):
        row[: len(new)] = new
    none = np.zeros(len(emitted), np.int32)
    return Commits(np.array(list(emitted), np.int64), tokens, num, none, none)


def drafts_of(batch: DraftBatch) -> list[tuple[int, list[tuple[int, float]]]]:
    """For each row its match, and its tokens with their confidences."""
    assert batch.match is not None
    return [
        (int(batch.match[i]), list(zip(batch.tokens[i, :n].tolist(), batch.scores[i, :n].tolist(), strict=True)))
        for i, n in enumerate(batch.num)
    ]


class ByTokens:
    """A history with 100 bytes per token, so that all implementations drop the same shards at the same time."""

    def num_bytes(self, shard: int) -> int:
        return 100 * self.num_tokens(shard)  # type: ignore[attr-defined]

    def observe(self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray) -> int:
        super().observe(slots, tokens, num)  # type: ignore[misc]
        return 100 * int(num.sum())


def by_tokens(history: type) -> type:
    return type(f"{history.__name__}ByTokens", (ByTokens, history), {})


@dataclass(eq=False)
class ReferenceShard:
    """All token strings of a shard, and how often each token followed them."""

    problem: object
    version: int
    count: dict[String, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    strings: set[String] = field(default_factory=lambda: {()})
    prompts: set[String] = field(default_factory=set)
    num_tokens: int = 0
    num_live: int = 0
    dropped: bool = False

    def append(self, before: String, token: int) -> None:
        self.num_tokens += 1
        for start in range(len(before) + 1):
            count = self.count[before[start:]]
            count[token] = count.pop(token, 0) + 1  # moved to the end: the most recent token is last
            self.strings.add((*before[start:], token))

    def insert_prompt(self, prompt: String) -> None:
        if prompt not in self.prompts:
            self.prompts.add(prompt)
            for i, token in enumerate(prompt):
                self.append(prompt[:i], token)

    def longest_suffix(self, string: String) -> String:
        return next(string[i:] for i in range(len(string) + 1) if string[i:] in self.strings)

    def best(self, context: String) -> int:
        count = self.count[context]
        return max(reversed(count), key=count.__getitem__)


@dataclass
class Sequence:
    tokens: String
    own: ReferenceShard
    cursors: list[tuple[ReferenceShard, String]]  # in older shards, newest first: the longest suffix that occurs there


def propose(row: Sequence, cap: int, min_match: int, recency: float) -> tuple[int, list[tuple[int, float]]]:
    matches = [(row.own, row.tokens, 1.0)]
    matches += [
        (shard, suffix, recency**age) for age, (shard, suffix) in enumerate(row.cursors, 1) if not shard.dropped
    ]
    draft: list[tuple[int, float]] = []
    match = 0
    while len(draft) < cap:
        contexts = []
        for shard, string, weight in matches:
            continued = (string[i:] for i in range(len(string)) if string[i:] in shard.count)
            contexts.append((shard, next(continued, ()), weight))
        longest = max((len(context) for _, context, _ in contexts), default=0)
        if longest < min_match:
            break
        match = match or longest
        voting = [context for context in contexts if len(context[1]) >= max(min(longest, LONG_MATCH), min_match)]
        votes: dict[int, float] = {}  # newest shard first
        for shard, context, weight in voting:
            token = shard.best(context)
            votes[token] = votes.get(token, 0.0) + weight * shard.count[context][token]
        token = max(votes, key=votes.__getitem__)
        num = sum(weight * sum(shard.count[context].values()) for shard, context, weight in voting)
        draft.append((token, float(np.float32(confidence(votes[token], num, longest)))))
        matches = [
            (shard, (*context, token), weight) for shard, context, weight in voting if shard.best(context) == token
        ]
    return match, draft


class Simulation:
    """Applies the same requests, under changing policy versions, to drafters and to the reference implementation."""

    def __init__(
        self,
        drafters: list[SuffixDrafter],
        min_match: int,
        max_versions: int,
        recency: float,
        max_tokens: int = 1 << 40,
    ) -> None:
        self.drafters, self.min_match, self.recency = drafters, min_match, recency
        self.max_versions, self.max_tokens = max_versions, max_tokens
        self.shards: list[ReferenceShard] = []  # least recently used first
        self.temporary: list[ReferenceShard] = []  # dropped when their live requests end
        self.live: dict[int, Sequence] = {}
        self.num_begun = 0

    def begin(self, problem: str | None, prompt: String, version: int) -> None:
        request = Request(self.num_begun, prompt, problem=problem)
        self.num_begun += 1
        found = [shard for shard in self.shards if (shard.problem, shard.version) == (problem, version)]
        own = found[0] if found else ReferenceShard(problem, version)
        if problem is None:
            self.temporary.append(own)
        else:
            self.shards = [shard for shard in self.shards if shard is not own] + [own]
        own.num_live += 1
        self.drop_old_versions()
        own.insert_prompt(prompt)
        older = [shard for shard in self.shards if shard.problem == problem and shard.version < version]
        older = sorted(older, key=lambda shard: -shard.version)[: self.max_versions - 1]
        cursors = [(shard, shard.longest_suffix(prompt)) for shard in older]
        self.live[request.request_id] = Sequence(prompt, own, cursors)
        self.evict()
        for drafter in self.drafters:
            drafter.begin(request, version)

    def observe(self, emitted: dict[int, list[int]]) -> None:
        for drafter in self.drafters:
            drafter.observe(commits_of(emitted))
        for i, tokens in emitted.items():
            for token in tokens:
                self.live[i].own.append(self.live[i].tokens, token)
                self.live[i].tokens += (token,)
        for i, tokens in emitted.items():
            row = self.live[i]
            for token in tokens:
                row.cursors = [(shard, shard.longest_suffix((*suffix, token))) for shard, suffix in row.cursors]
        self.evict()

    def end(self, i: int) -> None:
        for drafter in self.drafters:
            drafter.end(i)
        own = self.live.pop(i).own
        own.num_live -= 1
        for shard in [shard for shard in self.temporary if not shard.num_live]:
            self.temporary.remove(shard)
            shard.dropped = True
        self.drop_old_versions()
        self.evict()

    def remove(self, version: int) -> None:
        removed = [shard for shard in self.shards if shard.version == version]
        for drafter in self.drafters:
            assert drafter.remove(version) == len(removed)
        for shard in removed:
            self.shards.remove(shard)
            if shard.num_live:
                self.temporary.append(shard)
            else:
                shard.dropped = True

    def drop_old_versions(self) -> None:
        for problem in {shard.problem for shard in self.shards}:
            versions = sorted(shard.version for shard in self.shards if shard.problem == problem)
            for shard in list(self.shards):
                if shard.problem == problem and shard.version in versions[: -self.max_versions] and not shard.num_live:
                    self.drop(shard)

    def evict(self) -> None:
        for shard in list(self.shards):
            if self.num_tokens > self.max_tokens and not shard.num_live:
                self.drop(shard)

    def drop(self, shard: ReferenceShard) -> None:
        self.shards.remove(shard)
        shard.dropped = True

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards + self.temporary)

    def check(self, caps: list[int]) -> None:
        expected = [
            propose(row, cap, self.min_match, self.recency) for row, cap in zip(self.live.values(), caps, strict=True)
        ]
        expected = [(match if cap else 0, draft) for (match, draft), cap in zip(expected, caps, strict=True)]
        for drafter in self.drafters:
            rows = rows_of({i: list(row.tokens) for i, row in self.live.items()})
            batch = drafter.propose(rows, np.array(caps, np.int32))
            assert batch.tokens.shape == batch.scores.shape == (len(caps), max(caps, default=0))
            if caps:
                assert drafts_of(batch) == expected
            assert len(drafter._shards) == len(self.shards) + len(self.temporary)
            assert drafter.num_tokens == self.num_tokens
