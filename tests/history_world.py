"""A history without automata, to hold the suffix drafter against: all strings ever said, and what followed them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.history import NativeHistory
from paceline.drafters.slow_history import LONG, SlowHistory, confidence
from paceline.drafters.suffix import SuffixDrafter
from paceline.native import NativeUnavailable
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Request, SamplingParams

try:
    NativeHistory()
    HISTORIES: list[type] = [NativeHistory, SlowHistory]
except NativeUnavailable:
    HISTORIES = [SlowHistory]

String = tuple[int, ...]


def rows_of(sequences: dict[int, list[int]]) -> Rows:
    ids = np.array(list(sequences), np.int64)
    tokens = [np.array(sequence, np.int32) for sequence in sequences.values()]
    return Rows(ids, tokens, np.zeros(len(ids), np.uint64), [SamplingParams()] * len(ids))


def commits_of(said: dict[int, list[int]]) -> Commits:
    num = np.array([len(tokens) for tokens in said.values()], np.int32)
    tokens = np.full((len(said), num.max(initial=0)), -7, np.int32)
    for row, new in zip(tokens, said.values(), strict=True):
        row[: len(new)] = new
    none = np.zeros(len(said), np.int32)
    return Commits(np.array(list(said), np.int64), tokens, num, none, none)


def drafts_of(batch: DraftBatch) -> list[tuple[int, list[tuple[int, float]]]]:
    """Of each row its match, tokens and confidences."""
    assert batch.match is not None
    return [
        (int(batch.match[i]), list(zip(batch.tokens[i, :n].tolist(), batch.confidence[i, :n].tolist(), strict=True)))
        for i, n in enumerate(batch.num)
    ]


class ByTokens:
    """A history whose bytes are 100 a token, so that every twin drops the same shards at the same time."""

    def num_bytes(self, shard: int) -> int:
        return 100 * self.num_tokens(shard)  # type: ignore[attr-defined]

    def observe(self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray) -> int:
        super().observe(slots, tokens, num)  # type: ignore[misc]
        return 100 * int(num.sum())


def by_tokens(history: type) -> type:
    return type(f"{history.__name__}ByTokens", (ByTokens, history), {})


@dataclass(eq=False)
class Events:
    """A shard: all strings, and how often which token followed them."""

    problem: object
    version: int
    count: dict[String, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    said: set[String] = field(default_factory=lambda: {()})
    prompts: set[String] = field(default_factory=set)
    num_tokens: int = 0
    num_live: int = 0
    dropped: bool = False

    def say(self, before: String, token: int) -> None:
        self.num_tokens += 1
        for start in range(len(before) + 1):
            count = self.count[before[start:]]
            count[token] = count.pop(token, 0) + 1  # to the end: the most recent is last
            self.said.add((*before[start:], token))

    def insert_prompt(self, prompt: String) -> None:
        if prompt not in self.prompts:
            self.prompts.add(prompt)
            for i, token in enumerate(prompt):
                self.say(prompt[:i], token)

    def longest_end(self, string: String) -> String:
        return next(string[i:] for i in range(len(string) + 1) if string[i:] in self.said)

    def best(self, context: String) -> int:
        count = self.count[context]
        return max(reversed(count), key=count.__getitem__)


@dataclass
class Sequence:
    text: String
    own: Events
    places: list[tuple[Events, String]]  # in older shards, newest first: the end of it that is known there


def propose(row: Sequence, cap: int, min_match: int, recency: float) -> tuple[int, list[tuple[int, float]]]:
    voices = [(row.own, row.text, 1.0)]
    voices += [(shard, end, recency**age) for age, (shard, end) in enumerate(row.places, 1) if not shard.dropped]
    draft: list[tuple[int, float]] = []
    match = 0
    while len(draft) < cap:
        contexts = []
        for shard, string, weight in voices:
            went_on = (string[i:] for i in range(len(string)) if string[i:] in shard.count)
            contexts.append((shard, next(went_on, ()), weight))
        longest = max((len(context) for _, context, _ in contexts), default=0)
        if longest < min_match:
            break
        match = match or longest
        speaking = [voice for voice in contexts if len(voice[1]) >= max(min(longest, LONG), min_match)]
        votes: dict[int, float] = {}  # newest shard first
        for shard, context, weight in speaking:
            token = shard.best(context)
            votes[token] = votes.get(token, 0.0) + weight * shard.count[context][token]
        token = max(votes, key=votes.__getitem__)
        num = sum(weight * sum(shard.count[context].values()) for shard, context, weight in speaking)
        draft.append((token, float(np.float32(confidence(votes[token], num, longest)))))
        voices = [
            (shard, (*context, token), weight) for shard, context, weight in speaking if shard.best(context) == token
        ]
    return match, draft


class World:
    """Requests that come, speak and go under changing policies, told to drafters and to the twin alike."""

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
        self.shards: list[Events] = []  # least recently begun in first
        self.cut_off: list[Events] = []
        self.live: dict[int, Sequence] = {}
        self.num_begun = 0

    def begin(self, problem: str | None, prompt: String, version: int) -> None:
        request = Request(self.num_begun, prompt, problem=problem)
        self.num_begun += 1
        found = [shard for shard in self.shards if (shard.problem, shard.version) == (problem, version)]
        own = found[0] if found else Events(problem, version)
        if problem is None:
            self.cut_off.append(own)
        else:
            self.shards = [shard for shard in self.shards if shard is not own] + [own]
        own.num_live += 1
        self.keep_window()
        own.insert_prompt(prompt)
        older = [shard for shard in self.shards if shard.problem == problem and shard.version < version]
        older = sorted(older, key=lambda shard: -shard.version)[: self.max_versions - 1]
        places = [(shard, shard.longest_end(prompt)) for shard in older]
        self.live[request.request_id] = Sequence(prompt, own, places)
        self.keep_budget()
        for drafter in self.drafters:
            drafter.begin(request, version)

    def observe(self, said: dict[int, list[int]]) -> None:
        for drafter in self.drafters:
            drafter.observe(commits_of(said))
        for i, tokens in said.items():
            for token in tokens:
                self.live[i].own.say(self.live[i].text, token)
                self.live[i].text += (token,)
        for i, tokens in said.items():
            for token in tokens:
                self.live[i].places = [(shard, shard.longest_end((*end, token))) for shard, end in self.live[i].places]
        self.keep_budget()

    def end(self, i: int) -> None:
        for drafter in self.drafters:
            drafter.end(i)
        own = self.live.pop(i).own
        own.num_live -= 1
        for shard in [shard for shard in self.cut_off if not shard.num_live]:
            self.cut_off.remove(shard)
            shard.dropped = True
        self.keep_window()
        self.keep_budget()

    def remove(self, version: int) -> None:
        gone = [shard for shard in self.shards if shard.version == version]
        for drafter in self.drafters:
            assert drafter.remove(version) == len(gone)
        for shard in gone:
            self.shards.remove(shard)
            if shard.num_live:
                self.cut_off.append(shard)
            else:
                shard.dropped = True

    def keep_window(self) -> None:
        for problem in {shard.problem for shard in self.shards}:
            versions = sorted(shard.version for shard in self.shards if shard.problem == problem)
            for shard in list(self.shards):
                if shard.problem == problem and shard.version in versions[: -self.max_versions] and not shard.num_live:
                    self.drop(shard)

    def keep_budget(self) -> None:
        for shard in list(self.shards):
            if self.num_tokens > self.max_tokens and not shard.num_live:
                self.drop(shard)

    def drop(self, shard: Events) -> None:
        self.shards.remove(shard)
        shard.dropped = True

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards + self.cut_off)

    def check(self, caps: list[int]) -> None:
        expected = [
            propose(row, cap, self.min_match, self.recency) for row, cap in zip(self.live.values(), caps, strict=True)
        ]
        expected = [(match if cap else 0, draft) for (match, draft), cap in zip(expected, caps, strict=True)]
        for drafter in self.drafters:
            rows = rows_of({i: list(row.text) for i, row in self.live.items()})
            batch = drafter.propose(rows, np.array(caps, np.int32))
            assert batch.tokens.shape == batch.confidence.shape == (len(caps), max(caps, default=0))
            if caps:
                assert drafts_of(batch) == expected
            assert drafter.num_shards == len(self.shards) + len(self.cut_off)
            assert drafter.num_tokens == self.num_tokens
