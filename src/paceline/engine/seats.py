"""The sequences that run, side by side: one seat each, and one array for each thing that is to be known of them.

A step looks at all its rows at once, so that what it takes here hardly grows with their number; `Sequence` shows one
of them, and does the same for a single one that runs nowhere. Runners on a device give a sequence the slot of its seat.

Always: what an array has at a seat is of the sequence that sits there, which sits on the first seat that was free.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice

import numpy as np

from paceline.engine.accept import Verdict
from paceline.engine.sequence import NOBODY, Detokenize, Record, Sequence
from paceline.types import Provenance

VACANT = -(2**62)  # for an arrival
STRIDE = 1024  # positions that records grow by
SAMPLED, ACCEPTED, CORRECTED, BONUS = (np.uint8(kind) for kind in Provenance)
NO_SOURCE = np.uint8(NOBODY)


class Seats:
    def __init__(self, num: int) -> None:
        self.drafters: list[str] = []  # whom `sources` means
        self.sequences: list[Sequence | None] = []
        self.stop_ids: frozenset[int] = frozenset()  # of all who ever sat here: who emits one is looked at
        self.num_risen = self._num_changes = 0
        self._ids = np.zeros(0, np.int64), np.zeros(0, np.int64)  # seats that were asked for last, and whose they are
        self._make(max(1, num), STRIDE)

    def _make(self, num: int, length: int) -> None:
        """Room for more. Those who sit here move, each to the seat of the same number."""
        before, self.sequences = self.sequences, [*self.sequences, *[None] * (num - len(self.sequences))]
        self.length = length
        self.record = Record(length, num)
        self._rows = [self.record.row(i) for i in range(num)]
        self.num_tokens, self.num_computed, self.num_flying = self.record.counts[:3]
        self.arrival = np.full(num, VACANT, np.int64)
        self.request_id, self.noise_key = np.zeros(num, np.int64), np.zeros(num, np.uint64)
        self.limit, self.num_prompt = np.zeros(num, np.int64), np.zeros(num, np.int64)
        self.num_blocks, self.changes = np.zeros(num, np.int64), np.zeros(num, np.int64)  # of its table; see `note`
        self.truncates, self.stops_at_text = np.zeros(num, bool), np.zeros(num, bool)
        seated = [sequence for sequence in before if sequence is not None]
        self._place(seated, [sequence.seat for sequence in seated])

    def _lengthen(self, needed: int) -> None:
        """To twice as many positions, or to what is needed: limits are often far beyond what is ever said."""
        if needed > self.length:
            self._make(len(self.sequences), max(2 * self.length, -(-needed // STRIDE) * STRIDE))

    def sit(self, *new: Sequence) -> None:
        for sequence in new:
            self.rise(sequence)  # where that was interrupted
        self._lengthen(max(sequence.num_tokens for sequence in new))
        while self.sequences.count(None) < len(new):
            self._make(2 * len(self.sequences), self.length)
        self.stop_ids = self.stop_ids.union(*(sequence.stop_ids for sequence in new))
        free = (seat for seat, sequence in enumerate(self.sequences) if sequence is None)
        self._place(new, list(islice(free, len(new))))

    def _place(self, new: Seq[Sequence], seats: list[int]) -> None:
        for sequence, seat in zip(new, seats, strict=True):
            sequence.seat, self.sequences[seat] = seat, sequence
            sequence.move(self._rows[seat])
            sequence.drafters = self.drafters
        at, requests = np.array(seats, np.int64), [sequence.request for sequence in new]
        self.arrival[at] = [sequence.arrival for sequence in new]
        self.request_id[at] = [request.request_id for request in requests]
        self.noise_key[at] = np.array([request.noise_key for request in requests], np.uint64)
        self.limit[at] = [sequence.limit for sequence in new]
        self.num_prompt[at] = [sequence.num_prompt for sequence in new]
        self.truncates[at] = [sequence.truncates for sequence in new]
        self.stops_at_text[at] = [bool(request.sampling.stop) for request in requests]
        self.note(at, np.array([len(sequence.table.blocks) for sequence in new], np.int64))

    def rise(self, sequence: Sequence) -> None:
        """It runs no more, and takes along what is known of it. In this order, so that it can be done again where it
        was interrupted."""
        seat = sequence.seat
        if seat < 0:
            return
        if self.sequences[seat] is sequence:
            sequence.record = sequence.record.copy(sequence.num_tokens)
            sequence.num_flying = 0
            self.arrival[seat], self.sequences[seat] = VACANT, None
        self.num_risen += 1
        sequence.seat = -1

    def note(self, at: np.ndarray | int, num_blocks: np.ndarray | int) -> None:
        """Tables have changed, and now have so many blocks. `changes` never has the same number again at a seat."""
        self._num_changes += 1
        self.num_blocks[at], self.changes[at] = num_blocks, self._num_changes

    def __getitem__(self, seat: int) -> Sequence:
        sequence = self.sequences[seat]
        assert sequence is not None
        return sequence

    def of(self, seats: np.ndarray) -> list[Sequence]:
        return [self[seat] for seat in seats.tolist()]

    def request_ids(self, at: np.ndarray) -> np.ndarray:
        """Whose seats these are: for the same array the same one again."""
        if at is not self._ids[0]:
            self._ids = at, self.request_id[at]
        return self._ids[1]

    def stops(self, tokens: np.ndarray) -> np.ndarray:
        """Which of these tokens may end one sequence or another: bool."""
        if len(self.stop_ids) > 8:
            return np.isin(tokens, list(self.stop_ids))
        found = np.zeros(tokens.shape, bool)
        for token in self.stop_ids:
            found |= tokens == token
        return found

    def number_of(self, drafter: str) -> int:
        if drafter not in self.drafters:
            assert len(self.drafters) < NOBODY, "more drafters than there are numbers for"
            self.drafters.append(drafter)
        return self.drafters.index(drafter)

    # -- what a step brought ----------------------------------------------------------------------------------------

    def take(
        self,
        at: np.ndarray,
        verdict: Verdict,
        num_drafted: np.ndarray,
        drafters: np.ndarray,  # by number
        version: int,
        detokenize: Detokenize | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """For these seats, as `Sequence.take` and `Sequence.book` for one: what was emitted up to the first stop, and
        all that is to be known of it. Returns how many tokens were taken, and which of these sequences are over."""
        self._lengthen(int(self.num_tokens[at].max(initial=0)) + verdict.tokens.shape[1])
        record, drafted = self.record, num_drafted > 0
        start, limit = self.num_tokens[at], self.limit[at]
        counts = np.minimum(verdict.num_accepted + 1, limit - start)
        position = np.arange(verdict.tokens.shape[1])
        over = self._halt(at, verdict.tokens, counts, detokenize)
        taken = np.flatnonzero(position < counts[:, None])
        places = ((at * self.length + start)[:, None] + position).take(taken)
        record.tokens.reshape(-1)[places] = verdict.tokens.take(taken)
        record.logprobs.reshape(-1)[places] = verdict.logprobs.take(taken)
        record.raw_logprobs.reshape(-1)[places] = verdict.raw_logprobs.take(taken)
        record.versions.reshape(-1)[places] = version
        if drafted.any():
            provenance, sources = _whose(position, verdict.num_accepted, num_drafted, drafters)
            record.provenance.reshape(-1)[places] = provenance.take(taken)
            record.sources.reshape(-1)[places] = sources.take(taken)
            record.counts[3, at] += drafted
            record.counts[4, at] += num_drafted
            record.counts[5, at] += np.minimum(counts, verdict.num_accepted) * drafted
        else:
            record.provenance.reshape(-1)[places] = SAMPLED
            record.sources.reshape(-1)[places] = NOBODY
        end = self.num_tokens[at] = start + counts
        full = end == limit
        if full.any():
            for sequence in self.of(at[full & ~over]):
                sequence.finish_reason = "length"
        return counts, over | full

    def _halt(
        self, at: np.ndarray, tokens: np.ndarray, counts: np.ndarray, detokenize: Detokenize | None
    ) -> np.ndarray:
        """Cut counts at the first stop; who came to one."""
        over = np.zeros(len(at), bool)
        suspects = (self.stops(tokens).any(1) | self.stops_at_text[at]).nonzero()[0].tolist()
        try:
            for i in suspects:
                sequence = self[at[i]]
                counts[i] = sequence.up_to_stop(tokens[i, : counts[i]].tolist(), detokenize)
                over[i] = sequence.finish_reason is not None
        except BaseException:
            for i in suspects:  # nothing was taken yet
                self[at[i]].finish_reason = self[at[i]].stop_reason = None
            raise
        return over


def _whose(
    position: np.ndarray, num_accepted: np.ndarray, num_drafted: np.ndarray, drafters: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where emitted tokens come from, and who had drafted there: uint8 [B, W] each."""
    accepted, whole = position < num_accepted[:, None], num_accepted >= num_drafted
    own = np.where(num_drafted > 0, np.where(whole, BONUS, CORRECTED), SAMPLED)
    provenance = np.where(accepted, ACCEPTED, own[:, None])
    return provenance, np.where(accepted | ~whole[:, None], drafters[:, None], NO_SOURCE)
