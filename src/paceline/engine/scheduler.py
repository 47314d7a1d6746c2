"""Chooses the rows of the next step and allocates their KV blocks.

A row is (sequence, number of query tokens): a prefill chunk, a decode step and a verification are the same thing. Rows
keep arrival order. When KV blocks run out, drafts are dropped first; then the youngest sequence is preempted. It loses
its blocks and keeps its tokens, which are computed again later (or found in the prefix cache).

Waiting sequences start in order of arrival. Given `order`, they start problem by problem, the one with the longest
expected completion first, because the longest completion decides when a batch ends. All sequences of a problem start
together, as far as there are slots: they share their prompt and feed each other's history. Preempted sequences always
come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.engine.sequence_table import SequenceTable
from paceline.model.kv import BLOCK, BlockTable
from paceline.model.paged import PagedDecoder
from paceline.types import Request

START_SHARE = 1 / 32  # of the slots: if prompts are batched, sequences start when so many are free
MANY_DECODING = 8  # sequences that decode for each one that waits for its prompt: then the limit for prompts holds


class Scheduler:
    """Continuous batching with chunked prefill: each step has all running sequences, within the token budget."""

    def __init__(
        self,
        paged: PagedDecoder,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_sharing: bool = True,
        order: Callable[[Request], float] | None = None,  # a request's expected length; None: order of arrival
        max_num_prefill_tokens: int | None = None,
        batches_prompts: bool = False,  # see `Runner.batches_prompts`
    ) -> None:
        if max_num_batched_tokens < 1:
            raise ValueError(f"engine.max_num_batched_tokens = {max_num_batched_tokens}: must be >= 1 token a step")
        if max_num_seqs < 1:
            raise ValueError(f"engine.max_num_seqs = {max_num_seqs}: must be >= 1 sequence")
        if max_num_prefill_tokens is not None and max_num_prefill_tokens < 1:
            raise ValueError(f"engine.max_num_prefill_tokens = {max_num_prefill_tokens}: must be >= 1 token a step")
        self.paged, self.pool = paged, paged.pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_prefill_tokens = max_num_prefill_tokens  # while sequences decode; None: no limit
        self.prefix_sharing = prefix_sharing
        self.batches_prompts = batches_prompts
        self.order = order
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.seq_table = SequenceTable(max_num_seqs)
        self._slots: np.ndarray | None = None  # of the running sequences, in order
        self.lookahead = 0  # tokens that a step may write after those it verifies: a device's drafts for the next step
        self._in_front: set[int] = set()  # arrivals of the sequences whose problem starts next; they wait in front
        self._is_starting = False  # if prompts are batched: sequences start until no slot is free

    @property
    def slots(self) -> np.ndarray:
        """Of the running sequences, in order: int64."""
        if self._slots is None:
            self._slots = np.array([sequence.slot for sequence in self.running], np.int64)
        return self._slots

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Start again with these sequences waiting, without KV blocks. For after an exception, so nothing that is there
        is relied on but the sequences' tokens."""
        self.pool.reset()
        drafters = self.seq_table.drafters  # the sources of emitted tokens are numbers of these
        self.seq_table = SequenceTable(self.max_num_seqs)
        self.seq_table.drafters = drafters
        self.running, self._slots, self.lookahead, self._is_starting = [], None, 0, False
        self._in_front.clear()
        self.waiting = deque(sorted(sequences, key=lambda sequence: sequence.arrival))
        for sequence in self.waiting:
            sequence.record = sequence.record.copy(sequence.num_tokens)
            sequence.table, sequence.slot = BlockTable(), -1
            sequence.num_computed = sequence.num_in_flight = 0

    def schedule(self) -> ScheduledBatch:
        """The rows of the next step, without drafts. New sequences get KV blocks here, the others in `reserve`."""
        seq_table, slots = self.seq_table, self.slots
        num_tokens = seq_table.num_tokens[slots]
        pending = num_tokens - seq_table.num_computed[slots]
        # A sequence that may end with the steps in flight is not scheduled again.
        wanted = np.where(num_tokens + seq_table.num_in_flight[slots] < seq_table.limit[slots], pending, 0)
        budget, num_decoding = self.max_num_batched_tokens, int((pending == 1).sum())
        num_new = budget  # query tokens of new sequences, at most
        if self.max_num_prefill_tokens is not None and num_decoding:
            # Prompts delay the sequences that decode. A delay is worth it if many sequences wait for their prompt, as
            # after new weights or a burst of requests.
            num_free = self.max_num_seqs - len(self.running)
            num_prefilling = len(pending) - num_decoding + min(len(self.waiting), num_free)
            limit = self.max_num_prefill_tokens * max(1, MANY_DECODING * num_prefilling // num_decoding)
            prefills = wanted > 1
            wanted[prefills] = _in_order(wanted[prefills], limit)
            num_new = max(0, limit - int(wanted[prefills].sum()))
        num_query = _in_order(wanted, budget)
        if not num_query.all():
            runs = num_query > 0
            slots, num_query, pending = slots[runs], num_query[runs], pending[runs]
        new = self._admit(min(num_new, budget - int(num_query.sum())))
        if new:
            added = np.array([sequence.slot for sequence, _ in new])
            slots, num_query = np.concatenate([slots, added]), np.concatenate([num_query, [num for _, num in new]])
            pending = np.concatenate([pending, seq_table.num_tokens[added] - seq_table.num_computed[added]])
        return ScheduledBatch.make(seq_table, slots, num_query, num_query == pending)

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Start waiting sequences. Returns them, each with its number of query tokens."""
        if not self.waiting:
            self._in_front.clear()
        num_free = self.max_num_seqs - len(self.running)
        if not self._may_start(num_free) or not budget:
            return []
        # Sequences wait while their prompt is being computed for another one, then share it.
        seq_table, slots = self.seq_table, self.slots
        prefilling = slots[seq_table.num_computed[slots] < seq_table.num_prompt[slots] - 1]
        computing = {sequence.request.prompt_ids for sequence in seq_table.of(prefilling)}
        new, held_back, copies = list[tuple[Sequence, int]](), list[Sequence](), list[tuple[int, int]]()
        while budget and self.waiting and len(new) < num_free:
            if self.order is not None and len(new) + len(held_back) >= num_free:
                break  # the sequences held back keep their places, or their problem would not start together
            sequence = self._next()
            prompt = sequence.request.prompt_ids
            if self.prefix_sharing:
                if prompt in computing:
                    held_back.append(sequence)
                    continue
                sequence.num_computed, source = self.pool.share_prefix(sequence.table, sequence.tokens[:-1])
                if source is not None:
                    copies.append((source, sequence.table.blocks[-1]))
            num_computed = sequence.num_computed
            num_query = min(sequence.num_tokens - num_computed, budget)
            # Leave one block for each running sequence, or the new one would soon be preempted.
            headroom = len(self.running) + len(new)
            if not self._try_reserve(sequence.table, num_computed + num_query, headroom):
                self._copy(copies)  # releases the sources' blocks
                if not self._try_reserve(sequence.table, num_computed + num_query, headroom):
                    self._release(sequence)
                    held_back.append(sequence)
                    break
            budget -= num_query
            new.append((sequence, num_query))
            if num_computed < sequence.num_prompt - 1:
                computing.add(prompt)
        self._copy(copies)
        self._is_starting &= len(new) < num_free
        self.waiting.extendleft(reversed(held_back))
        if new:
            seq_table.add(*(sequence for sequence, _ in new))
            self._slots = None
            self.running += [sequence for sequence, _ in new]
        return new

    def _may_start(self, num_free: int) -> bool:
        """If prompts are batched, sequences start when several slots are free, and then until none is. Preempted ones
        do not wait for this. With a limit for the prompt tokens of a step, prompts are not batched."""
        if not self.waiting or not num_free:
            self._is_starting = False
            return False
        if not self.batches_prompts or self.max_num_prefill_tokens is not None or not self.running:
            return True
        enough = min(len(self.waiting), int(START_SHARE * self.max_num_seqs))
        self._is_starting |= num_free >= enough or self.waiting[0].num_preemptions > 0
        return self._is_starting

    def _try_reserve(self, table: BlockTable, num_tokens: int, headroom: int) -> bool:
        return self.pool.num_free >= headroom and self.pool.reserve(table, num_tokens)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy partly filled blocks of the prefix cache, source to target."""
        if not copies:
            return
        assert self.paged.kv is not None, "asleep"
        self.paged.kv.copy_blocks([source for source, _ in copies], [target for _, target in copies])
        for source, _ in copies:
            self.pool.release(source)
        copies.clear()

    def _next(self) -> Sequence:
        front = self.waiting[0]
        if self.order is not None and not front.num_preemptions and front.arrival not in self._in_front:
            self._move_to_front(self.order)
        return self.waiting.popleft()

    def _move_to_front(self, order: Callable[[Request], float]) -> None:
        """Move a problem's sequences to the front: the one with the longest expected completion, the first on a tie."""
        problems: dict[object, list[Sequence]] = {}
        for sequence in self.waiting:
            problem = sequence.request.problem
            problems.setdefault(sequence.request.prompt_ids if problem is None else problem, []).append(sequence)
        longest = max(problems.values(), key=lambda group: order(group[0].request))
        called = {sequence.arrival for sequence in longest}
        self._in_front |= called
        self.waiting = deque([*longest, *(s for s in self.waiting if s.arrival not in called)])

    def reserve(self, batch: ScheduledBatch, preempt: bool = True) -> tuple[ScheduledBatch, list[Sequence]] | None:
        """Allocate KV blocks for every row. Returns the rows that run and the sequences that were preempted for them.
        Without `preempt`: None, and nothing is allocated, if there are not enough blocks."""
        seq_table, slots = self.seq_table, batch.slots
        reach = seq_table.num_computed[slots] + seq_table.num_in_flight[slots] + batch.num_query
        if self.lookahead:
            reach = np.maximum(reach, np.minimum(reach + self.lookahead, seq_table.limit[slots]))
        # Drafts end before the limit; what a device writes after them need not be stored.
        need = np.minimum(reach + batch.num_draft, seq_table.limit[slots])
        num_blocks, num_held = -(-need // BLOCK), seq_table.num_blocks[slots]
        short = num_blocks > num_held
        if not short.any():
            return batch, []
        slots, num_blocks, num_more = slots[short], num_blocks[short], (num_blocks - num_held)[short]
        if num_more.sum() > self.pool.num_free:
            return self._reserve_by_row(batch, reach) if preempt else None
        self.pool.extend([sequence.table for sequence in seq_table.of(slots)], num_blocks.tolist())
        seq_table.set_num_blocks(slots, num_blocks)
        return batch, []

    def _reserve_by_row(self, batch: ScheduledBatch, reach: np.ndarray) -> tuple[ScheduledBatch, list[Sequence]]:
        """Drop drafts, then preempt the youngest sequence, until there are enough blocks."""
        kept: list[int] = []
        preempted: list[Sequence] = []
        for i, (sequence, need) in enumerate(zip(batch.sequences, reach.tolist(), strict=True)):
            if sequence in preempted:
                continue
            if not self.pool.reserve(sequence.table, min(need + int(batch.num_draft[i]), sequence.limit)):
                batch.num_draft[i] = 0
                while not self.pool.reserve(sequence.table, need):
                    victim = self.running[-1]
                    self.preempt(victim)
                    preempted.append(victim)
                    if victim is sequence:
                        break
            if sequence.slot >= 0:
                self.seq_table.set_num_blocks(sequence.slot, len(sequence.table.blocks))
                kept.append(i)
        return batch.pick(np.array(kept, np.int64)), preempted

    def preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_in_flight
        self.remove(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """From waiting or running. Its computed blocks stay in the prefix cache until the blocks are needed."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        if self.prefix_sharing:
            self.pool.cache_blocks(sequence.table, sequence.tokens[: sequence.num_computed])
        self.running.remove(sequence)
        self._release(sequence)
        self.seq_table.remove(sequence)
        self._slots = None

    def _release(self, sequence: Sequence) -> None:
        self.pool.truncate(sequence.table, 0)
        sequence.num_computed = 0

    def count_prefill(self, batch: ScheduledBatch) -> None:
        """Count the tokens that a launched step computes before those that emit. Steps run in the order of their
        launch, so later steps can read this KV: other sequences may share it from now on."""
        num_prefill = batch.num_prefill
        if num_prefill.any():
            before = self.seq_table.num_computed[batch.slots]
            self.seq_table.num_computed[batch.slots] = before + num_prefill
            self._cache_prompts(batch.slots, before)

    def release_unused(self, batch: ScheduledBatch, num_computed_before: np.ndarray) -> None:
        """After a step: free blocks that hold only rejected tokens, except what steps in flight write."""
        seq_table, slots = self.seq_table, batch.slots
        num_computed, num_in_flight = seq_table.num_computed[slots], seq_table.num_in_flight[slots]
        final = num_computed + np.where(num_in_flight > 0, num_in_flight + self.lookahead, 0)
        num_blocks = -(-final // BLOCK)
        too_many = num_blocks < seq_table.num_blocks[slots]
        if too_many.any():
            for sequence, num in zip(seq_table.of(slots[too_many]), final[too_many].tolist(), strict=True):
                self.pool.truncate(sequence.table, num)
            seq_table.set_num_blocks(slots[too_many], num_blocks[too_many])
        self._cache_prompts(slots, num_computed_before)

    def _cache_prompts(self, slots: np.ndarray, num_computed_before: np.ndarray) -> None:
        """Add prompts to the prefix cache as they fill blocks, and when they can be shared: up to the last token."""
        num_prompt, num_computed = self.seq_table.num_prompt[slots], self.seq_table.num_computed[slots]
        prefills = (num_computed_before < num_prompt) & (num_computed > num_computed_before)
        if not (self.prefix_sharing and prefills.any()):
            return
        is_complete = num_prompt - 1 <= num_computed
        filled = prefills & ((num_computed // BLOCK > num_computed_before // BLOCK) | is_complete)
        for sequence, num in zip(self.seq_table.of(slots[filled]), num_computed[filled].tolist(), strict=True):
            self.pool.cache_blocks(sequence.table, sequence.tokens[:num])


def _in_order(wanted: np.ndarray, budget: int) -> np.ndarray:
    """As many tokens of each row as the budget allows, the first rows first."""
    if wanted.sum() <= budget:
        return wanted
    allowed: np.ndarray = np.minimum(wanted, np.maximum(0, budget - (np.cumsum(wanted) - wanted)))
    return allowed
