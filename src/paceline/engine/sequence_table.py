"""The table of running sequences: one slot per sequence, and one array per property.

A step reads and writes all its rows at once, so that host time hardly grows with their number. A runner on a device
uses the same slots. Invariant: entry i of every array belongs to the sequence in slot i.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice

import numpy as np

from paceline.engine.accept import VerificationResult
from paceline.engine.sequence import NO_SOURCE, Detokenize, Record, Sequence
from paceline.types import Provenance

EMPTY_SLOT = -(2**62)  # in `arrival`
STRIDE = 1024  # positions that records grow by
SAMPLED, ACCEPTED, CORRECTED, BONUS = (np.uint8(kind) for kind in Provenance)


class SequenceTable:
    """`num_slots` sequences at first; it grows."""

    def __init__(self, num_slots: int) -> None:
        self.drafters: list[str] = []  # names for the numbers in `sources`
        self.sequences: list[Sequence | None] = []
        self.stop_ids: frozenset[int] = frozenset()  # of all running sequences, and perhaps of some that have left
        self.num_removed = self._num_table_versions = 0
        self._ids = np.zeros(0, np.int64), np.zeros(0, np.int64)  # the last slots asked for, and their request ids
        self._resize(max(1, num_slots), STRIDE)

    def _resize(self, num_slots: int, length: int) -> None:
        """Grow the arrays. Each sequence keeps its slot."""
        before, self.sequences = self.sequences, [*self.sequences, *[None] * (num_slots - len(self.sequences))]
        self.length = length
        self.record = Record(length, num_slots)
        self._rows = [self.record.row(i) for i in range(num_slots)]
        self.num_tokens, self.num_computed, self.num_in_flight = self.record.counts[:3]
        self.arrival = np.full(num_slots, EMPTY_SLOT, np.int64)
        self.request_id, self.noise_key = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.uint64)
        self.limit, self.num_prompt = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
        self.num_blocks = np.zeros(num_slots, np.int64)  # of the block table
        self.block_table_versions = np.zeros(num_slots, np.int64)  # see `set_num_blocks`
        self.truncates, self.has_stop_strings, self.needs_logits = (np.zeros(num_slots, bool) for _ in range(3))
        sequences = [sequence for sequence in before if sequence is not None]
        self._place(sequences, [sequence.slot for sequence in sequences])

    def _lengthen(self, needed: int) -> None:
        """Double the positions, or more. Limits are often far beyond what is emitted, so this starts small."""
        if needed > self.length:
            self._resize(len(self.sequences), max(2 * self.length, -(-needed // STRIDE) * STRIDE))

    def add(self, *new: Sequence) -> None:
        """Each takes the first free slot."""
        self._lengthen(max(sequence.num_tokens for sequence in new))
        while self.sequences.count(None) < len(new):
            self._resize(2 * len(self.sequences), self.length)
        running = [sequence for sequence in self.sequences if sequence is not None]
        self.stop_ids = frozenset().union(*(sequence.stop_ids for sequence in (*running, *new)))
        free = (slot for slot, sequence in enumerate(self.sequences) if sequence is None)
        self._place(new, list(islice(free, len(new))))

    def _place(self, new: Seq[Sequence], slots: list[int]) -> None:
        for sequence, slot in zip(new, slots, strict=True):
            sequence.slot, self.sequences[slot] = slot, sequence
            sequence.move(self._rows[slot])
            sequence.drafters = self.drafters
        at, requests = np.array(slots, np.int64), [sequence.request for sequence in new]
        self.arrival[at] = [sequence.arrival for sequence in new]
        self.request_id[at] = [request.request_id for request in requests]
        self.noise_key[at] = np.array([request.noise_key for request in requests], np.uint64)
        self.limit[at] = [sequence.limit for sequence in new]
        self.num_prompt[at] = [sequence.num_prompt for sequence in new]
        self.truncates[at] = [sequence.truncates for sequence in new]
        self.needs_logits[at] = [sequence.needs_logits for sequence in new]
        self.has_stop_strings[at] = [bool(request.sampling.stop) for request in requests]
        self.set_num_blocks(at, np.array([len(sequence.table.blocks) for sequence in new], np.int64))

    def remove(self, sequence: Sequence) -> None:
        """The sequence takes its record with it."""
        slot = sequence.slot
        sequence.record = sequence.record.copy(sequence.num_tokens)
        sequence.num_in_flight = 0
        self.arrival[slot], self.sequences[slot] = EMPTY_SLOT, None
        self.num_removed += 1
        sequence.slot = -1

    def set_num_blocks(self, slots: np.ndarray | int, num_blocks: np.ndarray | int) -> None:
        """Block tables have changed. `block_table_versions` gets a number that it never had before."""
        self._num_table_versions += 1
        self.num_blocks[slots], self.block_table_versions[slots] = num_blocks, self._num_table_versions

    def __getitem__(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def of(self, slots: np.ndarray) -> list[Sequence]:
        return [self[slot] for slot in slots.tolist()]

    def request_ids(self, slots: np.ndarray) -> np.ndarray:
        """The same array again for the same `slots` array, so that callers can compare by identity."""
        if slots is not self._ids[0]:
            self._ids = slots, self.request_id[slots]
        return self._ids[1]

    def drafter_index(self, name: str) -> int:
        if name not in self.drafters:
            assert len(self.drafters) < NO_SOURCE, "more drafters than uint8 can number"
            self.drafters.append(name)
        return self.drafters.index(name)

    # -- commit -----------------------------------------------------------------------------------------------------

    def commit(
        self,
        slots: np.ndarray,
        result: VerificationResult,
        num_drafted: np.ndarray,
        drafters: np.ndarray,  # index into self.drafters
        version: int,
        detokenize: Detokenize | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append what a step emitted, up to each sequence's first stop. Returns how many tokens each sequence got, and
        which sequences are finished. `num_tokens` is written after the tokens: an interrupt before that adds none."""
        self._lengthen(int(self.num_tokens[slots].max(initial=0)) + result.tokens.shape[1])
        record, drafted = self.record, num_drafted > 0
        start, limit = self.num_tokens[slots], self.limit[slots]
        num = np.minimum(result.num_accepted + 1, limit - start)
        for i, (most, _) in result.dead_ends.items():
            num[i] = min(num[i], most)
        position = np.arange(result.tokens.shape[1])
        stopped = self._cut_at_stops(slots, result.tokens, num, detokenize)
        kept = np.flatnonzero(position < num[:, None])
        at = ((slots * self.length + start)[:, None] + position).take(kept)
        record.tokens.reshape(-1)[at] = result.tokens.take(kept)
        record.logprobs.reshape(-1)[at] = result.logprobs.take(kept)
        record.raw_logprobs.reshape(-1)[at] = result.raw_logprobs.take(kept)
        record.versions.reshape(-1)[at] = version
        if drafted.any():
            provenance, sources = _provenance(position, result.num_accepted, num_drafted, drafters)
            record.provenance.reshape(-1)[at] = provenance.take(kept)
            record.sources.reshape(-1)[at] = sources.take(kept)
            record.counts[3, slots] += drafted
            record.counts[4, slots] += num_drafted
            record.counts[5, slots] += np.minimum(num, result.num_accepted) * drafted
        else:
            record.provenance.reshape(-1)[at] = SAMPLED
            record.sources.reshape(-1)[at] = NO_SOURCE
        for i, top in result.top_logprobs.items():
            self[slots[i]].add_top_logprobs(top, int(num[i]))
        end = self.num_tokens[slots] = start + num
        finished = end == limit
        if stopped or result.dead_ends or finished.any():
            for i in np.flatnonzero(finished).tolist():
                self[slots[i]].finish_reason = "length"
            for i, (most, why) in result.dead_ends.items():
                if i not in stopped and not finished[i] and num[i] == most:
                    sequence, finished[i] = self[slots[i]], True
                    sequence.finish_reason, sequence.stop_reason = "error", why
            for i, reason in stopped.items():
                sequence = self[slots[i]]
                sequence.finish_reason, sequence.stop_reason = "stop", reason
                finished[i] = True
        return num, finished

    def _cut_at_stops(
        self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray, detokenize: Detokenize | None
    ) -> dict[int, int | str]:
        """Cut `num` at the first stop of each row. Returns row -> stop."""
        found: dict[int, int | str] = {}
        for i in (self._may_stop(tokens).any(1) | self.has_stop_strings[slots]).nonzero()[0].tolist():
            sequence = self[slots[i]]
            emitted = tokens[i, : num[i]].tolist()
            num[i], reason = sequence.find_stop(emitted, sequence.num_tokens, detokenize)
            if reason is not None:
                found[i] = reason
        return found

    def _may_stop(self, tokens: np.ndarray) -> np.ndarray:
        """Which tokens are a stop token of any sequence: bool."""
        if len(self.stop_ids) > 8:
            return np.isin(tokens, list(self.stop_ids))
        found = np.zeros(tokens.shape, bool)
        for token in self.stop_ids:
            found |= tokens == token
        return found


def _provenance(
    position: np.ndarray, num_accepted: np.ndarray, num_drafted: np.ndarray, drafters: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where emitted tokens come from, and which drafter proposed a token there: uint8 [B, W] each."""
    accepted, all_accepted = position < num_accepted[:, None], num_accepted >= num_drafted
    own = np.where(num_drafted > 0, np.where(all_accepted, BONUS, CORRECTED), SAMPLED)
    provenance = np.where(accepted, ACCEPTED, own[:, None])
    return provenance, np.where(accepted | ~all_accepted[:, None], drafters[:, None], np.uint8(NO_SOURCE))
