"""One request while it waits or runs: its tokens, what is known of each of them, its KV blocks, and why it ended."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from paceline.engine.grammar import GrammarMatcher
from paceline.model.kv import BlockTable
from paceline.types import Completion, Request, TopLogprobs

NO_SOURCE = 255  # in `sources`: no drafter proposed a token at this position
Detokenize = Callable[[Seq[int]], str]
COUNTS = ("num_tokens", "num_computed", "num_in_flight", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
COLUMNS = {
    "tokens": np.int32, "logprobs": np.float64, "raw_logprobs": np.float64, "versions": np.int32,
    "provenance": np.uint8, "sources": np.uint8,
}  # fmt: skip


class Record:
    """A sequence's tokens by position, and its counters. With `num`: those of many sequences, one row each."""

    tokens: np.ndarray
    logprobs: np.ndarray  # this and the following columns are valid for emitted tokens only
    raw_logprobs: np.ndarray
    versions: np.ndarray
    provenance: np.ndarray
    sources: np.ndarray

    def __init__(self, length: int, num: int | None = None) -> None:
        rows = () if num is None else (num,)
        self.counts = np.zeros((len(COUNTS), *rows), np.int64)
        for name, dtype in COLUMNS.items():
            setattr(self, name, np.empty((*rows, length), dtype))

    def row(self, i: int) -> Record:
        """A view of row i."""
        view = Record.__new__(Record)
        view.counts = self.counts[:, i]
        for name in COLUMNS:
            setattr(view, name, getattr(self, name)[i])
        return view

    def copy(self, num: int) -> Record:
        """A copy of the first `num` positions of one sequence."""
        copied = Record.__new__(Record)
        copied.counts = self.counts.copy()
        for name in COLUMNS:
            setattr(copied, name, getattr(self, name)[:num].copy())
        return copied

    def assign(self, other: Record, num_prompt: int) -> None:
        self.counts[:] = other.counts
        end = int(other.counts[0])
        self.tokens[:end] = other.tokens[:end]
        if end > num_prompt:
            for name in COLUMNS:
                getattr(self, name)[num_prompt:end] = getattr(other, name)[num_prompt:end]


def _count(name: str) -> property:
    index = COUNTS.index(name)

    def put(sequence: Sequence, value: int) -> None:
        sequence.record.counts[index] = value

    return property(lambda sequence: int(sequence.record.counts[index]), put)


class Sequence:
    """Invariant while it runs: 0 <= num_computed < num_tokens; the KV of the last token is not computed yet. That of a
    prompt counts as computed once a step with it is launched: later steps run after it. While the sequence runs, its
    record is a row of the `SequenceTable`; otherwise it has a record of its own."""

    num_tokens, num_computed = _count("num_tokens"), _count("num_computed")
    num_in_flight = _count("num_in_flight")  # positions by which steps in flight extend it, at most
    num_drafts, num_draft_tokens = _count("num_drafts"), _count("num_draft_tokens")
    num_accepted_tokens = _count("num_accepted_tokens")

    def __init__(
        self,
        request: Request,
        arrival: int,
        max_length: int,
        eos_token_ids: tuple[int, ...],
        bad_words: tuple[tuple[int, ...], ...] = (),  # as token ids
        grammar: GrammarMatcher | None = None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.arrival = arrival
        self.num_prompt = len(request.prompt_ids)
        self.limit = min(self.num_prompt + sampling.max_tokens, max_length)  # most tokens, with the prompt
        self.table = BlockTable()
        self.slot = -1  # index in the sequence table; -1: not running
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.drafters: list[str] = []  # names for the numbers in `sources`
        self.num_preemptions = 0
        self.truncates = sampling.truncates
        self.bad_words, self.grammar = bad_words, grammar
        self.dead_end: int | None = None  # in the last step: no token may come after so many tokens of its draft
        self.changes_logits = bool(sampling.logits_parameters)
        self.needs_logits = self.changes_logits or sampling.logprobs > 0  # more than a sampled token and its logprobs
        self.top_logprobs: list[tuple[int, TopLogprobs]] = []  # by step: its first emitted token, and its tokens'
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self.record = Record(self.num_prompt)
        self.record.tokens[:] = request.prompt_ids
        self.num_tokens = self.num_prompt

    def move(self, record: Record) -> None:
        """Continue in this record."""
        record.assign(self.record, self.num_prompt)
        self.record = record

    @property
    def tokens(self) -> np.ndarray:
        return self.record.tokens[: self.num_tokens]

    @property
    def emitted(self) -> np.ndarray:
        return self.record.tokens[self.num_prompt : self.num_tokens]

    def find_stop(self, tokens: list[int], start: int, detokenize: Detokenize | None) -> tuple[int, int | str | None]:
        """How many of these tokens, from position `start` on, belong to the completion: all, or up to the first stop;
        and the stop token or string. None of the first `min_tokens` tokens can end the completion."""
        stops, min_tokens = self.request.sampling.stop, self.request.sampling.min_tokens
        if not stops and self.stop_ids.isdisjoint(tokens):
            return len(tokens), None
        # Every token is checked when it is emitted, so a new match ends in the newest token. A tail that can hold the
        # longest stop string is enough: a token has at least one byte.
        window = max((len(stop.encode()) for stop in stops), default=0) + 16
        tail = self.record.tokens[max(self.num_prompt, start - window) : start].tolist() if stops else []
        for i, token in enumerate(tokens):
            may_stop = start + i - self.num_prompt >= min_tokens
            if may_stop and token in self.stop_ids:
                return i + 1, token
            if stops:
                assert detokenize is not None
                tail.append(token)
                if not may_stop:
                    continue
                text = detokenize(tail[-window:])
                # A match within the text of the first `min_tokens` tokens does not count later either.
                before = len(detokenize(tail[-window:-1]).rstrip("\ufffd")) if min_tokens else 0
                for stop in stops:
                    if text.find(stop, max(0, before - len(stop) + 1)) >= 0:
                        return i + 1, stop
        return len(tokens), None

    def update_finish_reason(self, detokenize: Detokenize | None) -> None:
        """Derive it from the tokens: for a sequence whose step was interrupted."""
        self.finish_reason = self.stop_reason = None
        if not len(self.emitted):
            return
        last = self.num_tokens - 1
        _, self.stop_reason = self.find_stop(self.emitted[-1:].tolist(), last, detokenize)
        if self.stop_reason is not None:
            self.finish_reason = "stop"
        elif self.num_tokens == self.limit:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        record, emitted = self.record, slice(self.num_prompt, self.num_tokens)
        sources, drafters = self._sources(record.sources[emitted])
        return Completion(
            request=self.request,
            token_ids=record.tokens[emitted].copy(),
            logprobs=record.logprobs[emitted].copy(),
            raw_logprobs=record.raw_logprobs[emitted].copy(),
            versions=record.versions[emitted].copy(),
            provenance=record.provenance[emitted].copy(),
            sources=sources,
            drafters=drafters,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_preemptions=self.num_preemptions,
            top_logprobs=self.emitted_top_logprobs(),
        )

    def add_top_logprobs(self, top: TopLogprobs, num: int) -> None:
        """Of the next `num` tokens, before they are counted."""
        emitted = self.num_tokens - self.num_prompt
        while self.top_logprobs and self.top_logprobs[-1][0] >= emitted:  # an interrupted step left it
            self.top_logprobs.pop()
        self.top_logprobs.append((emitted, TopLogprobs(top.token_ids[:num], top.logprobs[:num])))

    def emitted_top_logprobs(self, start: int = 0) -> TopLogprobs | None:
        """From emitted token `start` on, with which a step began; None if the request does not report them."""
        if not (num := self.request.sampling.logprobs):
            return None
        parts, end = [TopLogprobs(np.empty((0, num), np.int32), np.empty((0, num)))], self.num_tokens - self.num_prompt
        for first, part in reversed(self.top_logprobs):
            if first < start:
                break
            if first < end:
                parts.append(part)
        parts.reverse()
        ids, logprobs = ([getattr(part, name) for part in parts] for name in ("token_ids", "logprobs"))
        return TopLogprobs(np.concatenate(ids), np.concatenate(logprobs))

    def _sources(self, sources: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        """The sources renumbered by this sequence's own drafters in order of appearance, and their names."""
        content = sources.tobytes()
        used = sorted((i for i in range(len(self.drafters)) if i in content), key=content.index)
        renumbered = sources.copy()
        for number, i in enumerate(used):
            if number != i:
                renumbered[sources == i] = number
        return renumbered, tuple(self.drafters[i] for i in used)
