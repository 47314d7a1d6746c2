"""One request on its way: tokens so far, what is known of each, how much of its KV is computed, when it ends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from paceline.model.kv import BlockTable
from paceline.types import Completion, Provenance, Request

NOBODY = 255  # in `sources`: no drafter guessed at this position
Detokenize = Callable[[Seq[int]], str]
COUNTS = ("num_tokens", "num_computed", "num_flying", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
KINDS = {
    "tokens": np.int32, "logprobs": np.float64, "raw_logprobs": np.float64, "versions": np.int32,
    "provenance": np.uint8, "sources": np.uint8,
}  # fmt: skip


class Record:
    """What a sequence has said so far, by position, and what has been counted of it. With a `num`, of so many sequences
    side by side: a row each."""

    tokens: np.ndarray
    logprobs: np.ndarray  # this and what follows: of emitted tokens alone
    raw_logprobs: np.ndarray
    versions: np.ndarray
    provenance: np.ndarray
    sources: np.ndarray

    def __init__(self, length: int, num: int | None = None) -> None:
        rows = () if num is None else (num,)
        self.counts = np.zeros((len(COUNTS), *rows), np.int64)
        for name, kind in KINDS.items():
            setattr(self, name, np.empty((*rows, length), kind))

    def row(self, i: int) -> Record:
        """One of many, which lies where they lie."""
        mine = Record.__new__(Record)
        mine.counts = self.counts[:, i]
        for name in KINDS:
            setattr(mine, name, getattr(self, name)[i])
        return mine

    def copy(self, num: int) -> Record:
        """Of one sequence, the first so many positions: where it said no more."""
        mine = Record.__new__(Record)
        mine.counts = self.counts.copy()
        for name in KINDS:
            setattr(mine, name, getattr(self, name)[:num].copy())
        return mine

    def take_over(self, other: Record, num_prompt: int) -> None:
        self.counts[:] = other.counts
        end = int(other.counts[0])
        self.tokens[:end] = other.tokens[:end]
        if end > num_prompt:
            for name in KINDS:
                getattr(self, name)[num_prompt:end] = getattr(other, name)[num_prompt:end]


def _count(name: str) -> property:
    place = COUNTS.index(name)

    def put(sequence: Sequence, value: int) -> None:
        sequence.record.counts[place] = value

    return property(lambda sequence: int(sequence.record.counts[place]), put)


class Sequence:
    """Always: 0 <= num_computed < num_tokens while it runs; the last token's KV is not computed yet. Its record is its
    own, but while it runs, when it lies beside those of the others (`seats`)."""

    num_tokens, num_computed = _count("num_tokens"), _count("num_computed")
    num_flying = _count("num_flying")  # tokens that steps on their way may emit at most
    num_drafts, num_draft_tokens = _count("num_drafts"), _count("num_draft_tokens")
    num_accepted_tokens = _count("num_accepted_tokens")

    def __init__(self, request: Request, arrival: int, max_length: int, eos_token_ids: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.request = request
        self.arrival = arrival
        self.num_prompt = len(request.prompt_ids)
        self.limit = min(self.num_prompt + sampling.max_tokens, max_length)  # tokens in all, at most
        self.table = BlockTable()
        self.seat = -1  # none
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.drafters: list[str] = []  # whom `sources` means
        self.num_preemptions = 0
        self.truncates = sampling.truncates
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self.record = Record(self.limit)
        self.record.tokens[: self.num_prompt] = request.prompt_ids
        self.num_tokens = self.num_prompt

    def move(self, record: Record) -> None:
        """What is known of it is kept there from now on."""
        record.take_over(self.record, self.num_prompt)
        self.record = record

    @property
    def tokens(self) -> np.ndarray:
        return self.record.tokens[: self.num_tokens]

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed: 1 when decoding, more while prefilling."""
        return self.num_tokens - self.num_computed

    @property
    def num_left(self) -> int:
        """Tokens it may still emit."""
        return self.limit - self.num_tokens

    def take(self, tokens: list[int], detokenize: Detokenize | None) -> int:
        """Append what a verification emitted, up to and including the first stop; returns how many were taken. What
        else is to be known of them is told to `book`, which can wait."""
        count = self.up_to_stop(tokens[: self.limit - self.num_tokens], detokenize)
        self.record.tokens[self.num_tokens : self.num_tokens + count] = tokens[:count]
        self.num_tokens += count
        if self.finish_reason is None and self.num_tokens == self.limit:
            self.finish_reason = "length"
        return count

    def book(
        self,
        start: int,
        count: int,
        logprobs: np.ndarray,
        raw_logprobs: np.ndarray,
        num_accepted: int,
        num_drafted: int,
        version: int,
        drafter: str | None,
    ) -> None:
        """Of the `count` tokens from position `start` on: the first num_accepted had been drafted, out of num_drafted;
        the one after them is the target's own."""
        record, new = self.record, slice(start, start + count)
        record.logprobs[new], record.raw_logprobs[new] = logprobs[:count], raw_logprobs[:count]
        record.versions[new] = version
        record.provenance[new] = Provenance.ACCEPTED
        record.sources[new] = self._index_of(drafter) if num_drafted and drafter else NOBODY
        if count > num_accepted:
            own = start + num_accepted
            if num_drafted == 0:
                record.provenance[own] = Provenance.SAMPLED
            elif num_accepted < num_drafted:
                record.provenance[own] = Provenance.CORRECTED
            else:
                record.provenance[own], record.sources[own] = Provenance.BONUS, NOBODY
        if num_drafted:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafted
            self.num_accepted_tokens += min(count, num_accepted)

    def up_to_stop(self, tokens: list[int], detokenize: Detokenize | None) -> int:
        """How many of these tokens come up to the first stop, which is noted; all of them if there is none."""
        stops = self.request.sampling.stop
        if not stops and self.stop_ids.isdisjoint(tokens):
            return len(tokens)
        # Every token is checked as it comes, so a new match must end in the newest token: a tail that holds the
        # longest stop is enough, and a token is at least one byte.
        window = max((len(stop.encode()) for stop in stops), default=0) + 16
        tail = self.record.tokens[max(self.num_prompt, self.num_tokens - window) : self.num_tokens]
        emitted = tail.tolist() if stops else []
        for i, token in enumerate(tokens):
            if token in self.stop_ids:
                self.finish_reason, self.stop_reason = "stop", token
                return i + 1
            if stops:
                assert detokenize is not None
                emitted.append(token)
                text = detokenize(emitted[-window:])
                for stop in stops:
                    if stop in text:
                        self.finish_reason, self.stop_reason = "stop", stop
                        return i + 1
        return len(tokens)

    def _index_of(self, drafter: str) -> int:
        if drafter not in self.drafters:
            self.drafters.append(drafter)
        return self.drafters.index(drafter)

    def completion(self) -> Completion:
        record, said = self.record, slice(self.num_prompt, self.num_tokens)
        sources, drafters = self._sources(record.sources[said])
        return Completion(
            request=self.request,
            token_ids=record.tokens[said].copy(),
            logprobs=record.logprobs[said].copy(),
            raw_logprobs=record.raw_logprobs[said].copy(),
            versions=record.versions[said].copy(),
            provenance=record.provenance[said].copy(),
            sources=sources,
            drafters=drafters,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_preemptions=self.num_preemptions,
        )

    def _sources(self, sources: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        """Who drafted for it, in order of appearance, and these numbers for them."""
        told = sources.tobytes()
        used = sorted((i for i in range(len(self.drafters)) if i in told), key=told.index)
        numbered = sources.copy()
        for number, i in enumerate(used):
            if number != i:
                numbered[sources == i] = number
        return numbered, tuple(self.drafters[i] for i in used)
