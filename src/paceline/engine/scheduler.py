"""Who runs in the next step, and with which memory.

A row is (sequence, number of queries): a prefill chunk, a decode step and a verification are the same thing. Rows
keep arrival order; when memory runs out, drafts go first, then the youngest sequence is sent back to wait. It gives
up its blocks, not its tokens: when it comes back they are computed again (or found still in memory).

Who waits begins in order of arrival or, given an `order`, problem by problem, that which is expected to be longest
first: the tail of a batch is what it ends with, so it should not also begin last. All of a problem begin together, in
chunks where there are more of them than places: they share their prompt, and feed each other's drafts. Those sent back
to wait come first in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.engine.sequence import Sequence
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder, Span
from paceline.types import Request

NO_DRAFT = np.empty(0, np.int32)


@dataclass(slots=True)
class Row:
    sequence: Sequence
    num_query: int  # committed tokens to compute
    decides: bool  # new tokens; a prefill chunk that stops short does not
    draft: np.ndarray = field(default_factory=lambda: NO_DRAFT)  # drafted tokens to verify behind them
    drafter: str | None = None  # whose draft it is

    def span(self) -> Span:
        sequence = self.sequence
        start = sequence.num_computed
        tokens = sequence.tokens[start : start + self.num_query]
        if len(self.draft):
            tokens = np.concatenate([tokens, self.draft])
        return Span(tokens, start, sequence.table, 1 + len(self.draft) if self.decides else 0)


class Scheduler:
    def __init__(
        self,
        paged: PagedDecoder,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_sharing: bool = True,
        order: Callable[[Request], float] | None = None,  # a request's expected length; None: order of arrival
    ) -> None:
        self.paged, self.pool = paged, paged.pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_sharing = prefix_sharing
        self.order = order
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.lookahead = 0  # tokens that a step may write behind those it decides on: drafts for the next
        self._called: set[int] = set()  # arrivals of those whose problem's turn it is; they wait in front

    def schedule(self) -> list[Row]:
        """The next step's rows, before drafts. Memory for new ones is taken here, for the rest in `reserve`."""
        budget = self.max_num_batched_tokens
        rows: list[Row] = []
        for sequence in self.running:
            pending = sequence.num_tokens - sequence.num_computed
            num_query = min(pending, budget)
            # Who may be over when what flies has landed is not launched again.
            if num_query and sequence.num_tokens + sequence.num_flying < sequence.limit:
                rows.append(Row(sequence, num_query, num_query == pending))
                budget -= num_query
        return rows + self._admit(budget)

    def _admit(self, budget: int) -> list[Row]:
        if not self.waiting:
            self._called.clear()
        if not (budget and self.waiting and len(self.running) < self.max_num_seqs):
            return []
        rows: list[Row] = []
        # Siblings of a prompt that is being computed wait for it, then share it.
        computing = {s.request.prompt_ids for s in self.running if s.num_computed < s.num_prompt - 1}
        held_back: list[Sequence] = []
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            if self.order is not None and len(self.running) + len(held_back) >= self.max_num_seqs:
                break  # siblings held back keep their places, or their problem would not begin together
            sequence = self._next()
            if self.prefix_sharing:
                if sequence.request.prompt_ids in computing:
                    held_back.append(sequence)
                    continue
                sequence.num_computed = self.paged.adopt(sequence.table, sequence.tokens[:-1])
            num_query = min(sequence.num_pending, budget)
            headroom = len(self.running)  # a block each for those who run, or the newcomer is soon sent back
            if self.pool.num_free < headroom or not self.pool.reserve(
                sequence.table, sequence.num_computed + num_query
            ):
                self._give_back(sequence)
                held_back.append(sequence)
                break
            budget -= num_query
            self.running.append(sequence)
            if sequence.num_computed < sequence.num_prompt - 1:
                computing.add(sequence.request.prompt_ids)
            rows.append(Row(sequence, num_query, num_query == sequence.num_pending))
        self.waiting.extendleft(reversed(held_back))
        return rows

    def _next(self) -> Sequence:
        """The next one from waiting."""
        front = self.waiting[0]
        if self.order is not None and not front.num_preemptions and front.arrival not in self._called:
            self._call(self.order)
        return self.waiting.popleft()

    def _call(self, order: Callable[[Request], float]) -> None:
        """Put a problem in front: of those that wait the one expected to be longest, at a tie that which came first."""
        problems: dict[object, list[Sequence]] = {}
        for sequence in self.waiting:
            problem = sequence.request.problem
            problems.setdefault(sequence.request.prompt_ids if problem is None else problem, []).append(sequence)
        longest = max(problems.values(), key=lambda siblings: order(siblings[0].request))
        called = {sequence.arrival for sequence in longest}
        self._called |= called
        self.waiting = deque([*longest, *(s for s in self.waiting if s.arrival not in called)])

    def has_room(self, rows: list[Row]) -> bool:
        """Whether nobody need give up anything for these rows."""
        need = 0
        for row in rows:
            num_tokens = self._reach(row) + len(row.draft)
            need += max(0, -(-num_tokens // BLOCK) - len(row.sequence.table.blocks))
        return need <= self.pool.num_free

    def _reach(self, row: Row) -> int:
        """Tokens that it may need memory for, but for its draft."""
        sequence = row.sequence
        reach = sequence.num_computed + sequence.num_flying + row.num_query
        return max(reach, min(reach + self.lookahead, sequence.limit))

    def reserve(self, rows: list[Row]) -> tuple[list[Row], list[Sequence]]:
        """Take memory for every row; returns the rows that run, and the sequences that were sent back to wait."""
        kept: list[Row] = []
        preempted: list[Sequence] = []
        for row in rows:
            sequence = row.sequence
            if preempted and sequence in preempted:
                continue
            need = self._reach(row)
            has_it = need + len(row.draft) <= BLOCK * len(sequence.table.blocks)
            if has_it or self.pool.reserve(sequence.table, need + len(row.draft)):
                kept.append(row)
                continue
            row.draft = NO_DRAFT
            while not self.pool.reserve(sequence.table, need):
                victim = self.running[-1]
                self.preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                kept.append(row)
        return kept, preempted

    def preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_flying
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.truncate(sequence.table, 0)
        sequence.num_computed = 0

    def settle(self, sequence: Sequence, before: int) -> None:
        """After a step, which began with `before` tokens in memory: blocks beyond what is final there go back, but for
        what the steps on their way write."""
        num_computed = sequence.num_computed
        flying = sequence.num_flying + self.lookahead if sequence.num_flying else 0
        self.pool.truncate(sequence.table, num_computed + flying)
        if self.prefix_sharing:
            filled_block = num_computed // BLOCK > before // BLOCK
            if filled_block or before < sequence.num_prompt <= num_computed:
                self.pool.index(sequence.table, sequence.tokens[:num_computed])
