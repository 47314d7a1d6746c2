"""The rows of a step. A `Row` is one of them, a `Lineup` all of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeVar, overload

import numpy as np

from paceline.engine.seats import Seats
from paceline.engine.sequence import Sequence
from paceline.model.paged import Span

NO_DRAFT = np.empty(0, np.int32)
Thing = TypeVar("Thing")


@dataclass(slots=True)
class Row:
    sequence: Sequence
    num_query: int  # committed tokens to compute
    decides: bool  # new tokens; a prefill chunk that stops short does not
    draft: np.ndarray = field(default_factory=lambda: NO_DRAFT)  # drafted tokens to verify behind them

    def span(self) -> Span:
        sequence = self.sequence
        start = sequence.num_computed
        tokens = sequence.tokens[start : start + self.num_query]
        if len(self.draft):
            tokens = np.concatenate([tokens, self.draft])
        return Span(tokens, start, sequence.table, 1 + len(self.draft) if self.decides else 0)


class Each(Seq[Thing]):
    """One of each, made when it is asked for."""

    def __init__(self, num: int, make: Callable[[int], Thing]) -> None:
        self._num, self._make = num, make

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, i: int) -> Thing: ...
    @overload
    def __getitem__(self, i: slice) -> list[Thing]: ...
    def __getitem__(self, i: int | slice) -> Thing | list[Thing]:
        if isinstance(i, slice):
            return [self._make(j) for j in range(*i.indices(self._num))]
        return self._make(range(self._num)[i])

    def __iter__(self) -> Iterator[Thing]:
        return map(self._make, range(self._num))


@dataclass(slots=True, eq=False)
class Lineup(Seq[Row]):
    """R rows. A row's draft is drafts[i, : num_draft[i]]."""

    seats: Seats
    at: np.ndarray  # int64 [R], whose rows they are: seats, …
    arrivals: np.ndarray  # int64 [R], … and who sat there when the step was made up
    num_query: np.ndarray  # int64 [R]
    decides: np.ndarray  # bool [R]
    num_draft: np.ndarray  # int32 [R]
    drafts: np.ndarray  # int32 [R, K]
    drafters: np.ndarray  # uint8 [R], whose draft it is: a number in seats.drafters
    all_decide: bool
    num_risen: int  # of the seats, when the step was made up

    @staticmethod
    def make(seats: Seats, at: np.ndarray, num_query: np.ndarray, decides: np.ndarray) -> Lineup:
        """Without drafts."""
        num = len(at)
        return Lineup(
            seats, at, seats.arrival[at], num_query, decides,
            np.zeros(num, np.int32), np.empty((num, 0), np.int32), np.zeros(num, np.uint8), bool(decides.all()),
            seats.num_risen,
        )  # fmt: skip

    @staticmethod
    def of(rows: Seq[Row]) -> Lineup:
        """Rows of sequences that no scheduler knows: they sit down here."""
        if isinstance(rows, Lineup):
            return rows
        seats = Seats(len(rows))
        seats.sit(*(row.sequence for row in rows))
        made = Lineup.make(
            seats, np.array([row.sequence.seat for row in rows]), np.array([row.num_query for row in rows]),
            np.array([row.decides for row in rows]),
        )  # fmt: skip
        made.num_draft = np.array([len(row.draft) for row in rows], np.int32)
        made.drafts = np.zeros((len(rows), int(made.num_draft.max())), np.int32)
        for i, row in enumerate(rows):
            made.drafts[i, : len(row.draft)] = row.draft
        return made

    def __len__(self) -> int:
        return len(self.at)

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> list[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | list[Row]:
        return Each(len(self), self._row)[i]

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, range(len(self)))

    def _row(self, i: int) -> Row:
        draft = self.drafts[i, : self.num_draft[i]]
        return Row(self.seats[self.at[i]], int(self.num_query[i]), bool(self.decides[i]), draft)

    def pick(self, which: np.ndarray) -> Lineup:
        """Some of its rows: a mask, or their places."""
        return Lineup(
            self.seats, self.at[which], self.arrivals[which], self.num_query[which], self.decides[which],
            self.num_draft[which], self.drafts[which], self.drafters[which], bool(self.decides[which].all()),
            self.num_risen,
        )  # fmt: skip

    @property
    def deciding(self) -> Lineup:
        return self if self.all_decide else self.pick(self.decides)

    def give(self, drafts: np.ndarray, num_draft: np.ndarray, drafters: np.ndarray | int) -> None:
        """Drafts, for the rows that decide."""
        if self.all_decide:
            self.drafts, self.num_draft, self.drafters[:] = drafts, num_draft.astype(np.int32), drafters
            return
        self.drafts = np.zeros((len(self), drafts.shape[1]), np.int32)
        self.num_draft = np.zeros(len(self), np.int32)
        for mine, given in ((self.drafts, drafts), (self.num_draft, num_draft), (self.drafters, drafters)):
            mine[self.decides] = given

    def cut(self, num_draft: np.ndarray) -> None:
        """No more than so many drafted tokens, for the rows that decide."""
        if self.all_decide:
            self.num_draft = np.minimum(self.num_draft, num_draft)
        else:
            self.num_draft[self.decides] = np.minimum(self.num_draft[self.decides], num_draft)

    @property
    def left(self) -> np.ndarray | None:
        """Which of them have left since the step was made up: bool [R]; None: nobody has."""
        if self.num_risen == self.seats.num_risen:
            return None
        gone = self.seats.arrival[self.at] != self.arrivals
        return gone if gone.any() else None
