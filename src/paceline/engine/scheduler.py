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
from contextlib import suppress

import numpy as np

from paceline.engine.lineup import Lineup
from paceline.engine.lineup import Row as Row
from paceline.engine.seats import Seats
from paceline.engine.sequence import Sequence
from paceline.model.kv import BLOCK, BlockTable
from paceline.model.paged import PagedDecoder
from paceline.types import Request


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
        self.seats = Seats(max_num_seqs)
        self._at: np.ndarray | None = None  # the seats of those who run, in order
        self.lookahead = 0  # tokens that a step may write behind those it decides on: drafts for the next
        self._called: set[int] = set()  # arrivals of those whose problem's turn it is; they wait in front

    @property
    def at(self) -> np.ndarray:
        """The seats of those who run, in order: int64."""
        if self._at is None:
            self._at = np.array([sequence.seat for sequence in self.running], np.int64)
        return self._at

    def everybody(self) -> list[Sequence]:
        """Who runs or waits; or sits, which is the same but where somebody was interrupted."""
        seated = [sequence for sequence in self.seats.sequences if sequence is not None]
        return list(dict.fromkeys([*self.running, *self.waiting, *seated]))

    def schedule(self) -> Lineup:
        """The next step's rows, before drafts. Memory for new ones is taken here, for the rest in `reserve`."""
        seats, at = self.seats, self.at
        num_tokens = seats.num_tokens[at]
        pending = num_tokens - seats.num_computed[at]
        # Who may be over when what flies has landed is not launched again.
        wanted = np.where(num_tokens + seats.num_flying[at] < seats.limit[at], pending, 0)
        num_query, budget = wanted, self.max_num_batched_tokens
        if wanted.sum() > budget:
            num_query = np.minimum(wanted, np.maximum(0, budget - (np.cumsum(wanted) - wanted)))
        if not num_query.all():
            runs = num_query > 0
            at, num_query, pending = at[runs], num_query[runs], pending[runs]
        new = self._admit(budget - int(num_query.sum()))
        if new:
            seated = np.array([sequence.seat for sequence, _ in new])
            at, num_query = np.concatenate([at, seated]), np.concatenate([num_query, [num for _, num in new]])
            pending = np.concatenate([pending, seats.num_tokens[seated] - seats.num_computed[seated]])
        return Lineup.make(seats, at, num_query, num_query == pending)

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Who begins, and with how many tokens."""
        if not self.waiting:
            self._called.clear()
        if not (budget and self.waiting and len(self.running) < self.max_num_seqs):
            return []
        # Siblings of a prompt that is being computed wait for it, then share it.
        seats, at = self.seats, self.at
        prefilling = at[seats.num_computed[at] < seats.num_prompt[at] - 1]
        computing = {sequence.request.prompt_ids for sequence in seats.of(prefilling)}
        new, held_back, copies = list[tuple[Sequence, int]](), list[Sequence](), list[tuple[int, int]]()
        try:
            self._choose(budget, computing, new, held_back, copies)
            self._copy(copies)
            if new:
                seats.sit(*(sequence for sequence, _ in new))
                self._at = None
                self.running += [sequence for sequence, _ in new]
        except BaseException:
            running, begin = set(self.running), [sequence for sequence, _ in new]
            held_back = [sequence for sequence in dict.fromkeys([*begin, *held_back]) if sequence not in running]
            for sequence in held_back:
                self._give_back(sequence)
            self._release(copies)
            raise
        finally:
            self.waiting.extendleft(reversed(held_back))
        return new

    def _choose(
        self,
        budget: int,
        computing: set[tuple[int, ...]],
        new: list[tuple[Sequence, int]],
        held_back: list[Sequence],
        copies: list[tuple[int, int]],
    ) -> None:
        """Who is to begin, with memory for it. `computing`: prompts that are. Whoever comes from waiting is among those
        held back until it is chosen. `copies`: blocks, from where to where, before anybody sits."""
        num_places = self.max_num_seqs - len(self.running)
        while budget and self.waiting and len(new) < num_places:
            if self.order is not None and len(new) + len(held_back) >= num_places:
                break  # siblings held back keep their places, or their problem would not begin together
            sequence = self._next(held_back)
            prompt = sequence.request.prompt_ids
            if self.prefix_sharing:
                if prompt in computing:
                    continue
                sequence.num_computed, source = self.pool.share(sequence.table, sequence.tokens[:-1])
                if source is not None:
                    copies.append((source, sequence.table.blocks[-1]))
            num_computed = sequence.num_computed
            num_query = min(sequence.num_tokens - num_computed, budget)
            # A block each for those who run, or the newcomer is soon sent back.
            headroom = len(self.running) + len(new)
            if not self._has_room(sequence.table, num_computed + num_query, headroom):
                self._copy(copies)  # what is held for that may be what is missing
                if not self._has_room(sequence.table, num_computed + num_query, headroom):
                    self._give_back(sequence)
                    break
            budget -= num_query
            new.append((sequence, num_query))
            held_back.pop()
            if num_computed < sequence.num_prompt - 1:
                computing.add(prompt)

    def _has_room(self, table: BlockTable, num_tokens: int, headroom: int) -> bool:
        """Takes it, if so."""
        return self.pool.num_free >= headroom and self.pool.reserve(table, num_tokens)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            assert self.paged.kv is not None, "asleep"
            self.paged.kv.copy_blocks([source for source, _ in copies], [target for _, target in copies])
            self._release(copies)

    def _release(self, copies: list[tuple[int, int]]) -> None:
        while copies:
            self.pool.release(copies.pop(0)[0])

    def _next(self, held_back: list[Sequence]) -> Sequence:
        """The next one from waiting, which is held back so far."""
        front = self.waiting[0]
        if self.order is not None and not front.num_preemptions and front.arrival not in self._called:
            self._call(self.order)
        held_back.append(self.waiting[0])
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

    def reserve(self, rows: Lineup, politely: bool = False) -> tuple[Lineup, list[Sequence]] | None:
        """Take memory for every row; returns the rows that run, and the sequences that were sent back to wait. Nothing
        is taken, `politely`, where somebody would have to give up anything for it."""
        seats, at = self.seats, rows.at
        reach = seats.num_computed[at] + seats.num_flying[at] + rows.num_query
        if self.lookahead:
            reach = np.maximum(reach, np.minimum(reach + self.lookahead, seats.limit[at]))
        need = np.minimum(
            reach + rows.num_draft, seats.limit[at]
        )  # drafts end before it; what is ahead of them may not
        num_blocks, num_held = -(-need // BLOCK), seats.num_blocks[at]
        short = num_blocks > num_held
        if not short.any():
            return rows, []
        at, num_blocks, num_more = at[short], num_blocks[short], (num_blocks - num_held)[short]
        if num_more.sum() > self.pool.num_free:
            return None if politely else self._squeeze(rows, reach)
        self.pool.extend([sequence.table for sequence in seats.of(at)], num_blocks.tolist())
        seats.note(at, num_blocks)
        return rows, []

    def _squeeze(self, rows: Lineup, reach: np.ndarray) -> tuple[Lineup, list[Sequence]]:
        """Row by row: drafts go, then the youngest."""
        kept: list[int] = []
        preempted: list[Sequence] = []
        for i, (sequence, need) in enumerate(zip(self.seats.of(rows.at), reach.tolist(), strict=True)):
            if sequence in preempted:
                continue
            if not self.pool.reserve(sequence.table, min(need + int(rows.num_draft[i]), sequence.limit)):
                rows.num_draft[i] = 0
                while not self.pool.reserve(sequence.table, need):
                    victim = self.running[-1]
                    self.preempt(victim)
                    preempted.append(victim)
                    if victim is sequence:
                        break
            if sequence.seat >= 0:
                self.seats.note(sequence.seat, len(sequence.table.blocks))
                kept.append(i)
        return rows.pick(np.array(kept, np.int64)), preempted

    def preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_flying
        self.finish(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence) -> None:
        """What it has computed can be found from now on, as long as the memory is not needed. Wherever it is, and
        again where this was interrupted: who sits is not yet done with."""
        if self.prefix_sharing:
            self.pool.index(sequence.table, sequence.tokens[: sequence.num_computed])
        try:
            self.running.remove(sequence)
        except ValueError:
            with suppress(ValueError):
                self.waiting.remove(sequence)
        self._give_back(sequence)
        self.seats.rise(sequence)
        self._at = None

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.truncate(sequence.table, 0)
        sequence.num_computed = 0

    def settle(self, rows: Lineup, before: np.ndarray) -> None:
        """After a step, which began with `before` tokens in memory: blocks beyond what is final there go back, but for
        what the steps on their way write. Prompts can be found as they fill blocks, and when they come to their end."""
        seats, at = self.seats, rows.at
        num_computed, num_flying = seats.num_computed[at], seats.num_flying[at]
        final = num_computed + np.where(num_flying > 0, num_flying + self.lookahead, 0)
        num_blocks = -(-final // BLOCK)
        too_many = num_blocks < seats.num_blocks[at]
        if too_many.any():
            for sequence, num in zip(seats.of(at[too_many]), final[too_many].tolist(), strict=True):
                self.pool.truncate(sequence.table, num)
            seats.note(at[too_many], num_blocks[too_many])
        prefills = before < seats.num_prompt[at]
        if self.prefix_sharing and prefills.any():
            found = prefills & ((num_computed // BLOCK > before // BLOCK) | (seats.num_prompt[at] <= num_computed))
            for sequence, num in zip(seats.of(at[found]), num_computed[found].tolist(), strict=True):
                self.pool.index(sequence.table, sequence.tokens[:num])
