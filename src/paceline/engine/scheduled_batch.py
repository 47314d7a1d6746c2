"""The rows of one step, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.engine.sequence import Sequence
from paceline.engine.sequence_table import SequenceTable
from paceline.model.paged import Span


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """R rows. Row i computes num_query[i] tokens of the sequence in slots[i], and its draft drafts[i, :num_draft[i]].
    A row emits tokens if its last query token is the sequence's last token; a chunk of a prompt does not."""

    seq_table: SequenceTable
    slots: np.ndarray  # int64 [R]
    arrivals: np.ndarray  # int64 [R], which sequence was in the slot when the step was scheduled
    num_query: np.ndarray  # int64 [R]
    emits: np.ndarray  # bool [R]
    num_draft: np.ndarray  # int32 [R]
    drafts: np.ndarray  # int32 [R, K]
    drafters: np.ndarray  # uint8 [R], index into seq_table.drafters
    all_emit: bool
    num_removed: int  # seq_table.num_removed when the step was scheduled

    @staticmethod
    def make(seq_table: SequenceTable, slots: np.ndarray, num_query: np.ndarray, emits: np.ndarray) -> ScheduledBatch:
        """Without drafts."""
        num = len(slots)
        return ScheduledBatch(
            seq_table, slots, seq_table.arrival[slots], num_query, emits,
            np.zeros(num, np.int32), np.empty((num, 0), np.int32), np.zeros(num, np.uint8), bool(emits.all()),
            seq_table.num_removed,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.slots)

    def pick(self, rows: np.ndarray) -> ScheduledBatch:
        """Some of the rows: a mask, or their indices."""
        return ScheduledBatch(
            self.seq_table, self.slots[rows], self.arrivals[rows], self.num_query[rows], self.emits[rows],
            self.num_draft[rows], self.drafts[rows], self.drafters[rows], bool(self.emits[rows].all()),
            self.num_removed,
        )  # fmt: skip

    @property
    def emitting(self) -> ScheduledBatch:
        return self if self.all_emit else self.pick(self.emits)

    @property
    def num_prefill(self) -> np.ndarray:
        """Query tokens of each row before the one that emits, int64 [R]. Nothing that is emitted changes their KV."""
        return self.num_query - self.emits

    @property
    def sequences(self) -> list[Sequence]:
        return self.seq_table.of(self.slots)

    def draft(self, i: int) -> np.ndarray:
        return self.drafts[i, : self.num_draft[i]]

    def spans(self) -> list[Span]:
        """What a forward pass computes for each row."""
        spans = []
        for i, (sequence, num) in enumerate(zip(self.sequences, self.num_query.tolist(), strict=True)):
            start, draft = sequence.num_computed, self.draft(i)
            tokens = sequence.tokens[start : start + num]
            if len(draft):
                tokens = np.concatenate([tokens, draft])
            spans.append(Span(tokens, start, sequence.table, 1 + len(draft) if self.emits[i] else 0))
        return spans

    def prefill_spans(self, shift: int = 0) -> list[Span]:
        """Each row's query tokens before the one that emits, without logits. `shift` 1: the token after each of them,
        at its position, which is what a head reads."""
        spans = []
        for sequence, num in zip(self.sequences, self.num_prefill.tolist(), strict=True):
            start = sequence.num_computed
            spans.append(Span(sequence.tokens[start + shift : start + num + shift], start, sequence.table, 0))
        return spans

    def set_drafts(self, drafts: np.ndarray, num_draft: np.ndarray, drafters: np.ndarray | int) -> None:
        """Of the emitting rows."""
        if self.all_emit:
            self.drafts, self.num_draft, self.drafters[:] = drafts, num_draft.astype(np.int32), drafters
            return
        self.drafts = np.zeros((len(self), drafts.shape[1]), np.int32)
        self.num_draft = np.zeros(len(self), np.int32)
        for own, given in ((self.drafts, drafts), (self.num_draft, num_draft), (self.drafters, drafters)):
            own[self.emits] = given

    def limit_drafts(self, num_draft: np.ndarray) -> None:
        """At most so many draft tokens for each emitting row."""
        if self.all_emit:
            self.num_draft = np.minimum(self.num_draft, num_draft)
        else:
            self.num_draft[self.emits] = np.minimum(self.num_draft[self.emits], num_draft)

    @property
    def ended(self) -> np.ndarray | None:
        """Which rows' sequences are no longer in their slots: bool [R]; None: none."""
        if self.num_removed == self.seq_table.num_removed:
            return None
        ended = self.seq_table.arrival[self.slots] != self.arrivals
        return ended if ended.any() else None
