"""History drafting on the device: proposes what was emitted for a row's problem after the same tokens.

There is no index. The entries of all problems are in one buffer. A row's last tokens are compared with every position
of its problem's entries; the longest matches vote on the next tokens. A problem has some dozens of entries of some
hundred tokens, so this takes microseconds, and the host takes no part in it.

An entry is the end of a prompt and the tokens emitted after it. The device appends to it as its row emits. When a
sequence is added, the host uploads entries and updates `problem_entries`: the entries of each problem that has a
running sequence, the newest first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.device_state import MAX_DRAFT, DeviceState
from paceline.model.cuda.graph_drafter import DraftStep
from paceline.model.device import to_device
from paceline.model.paged import PagedDecoder, Span

MATCH = 8  # tokens of context that are compared
NUM_PARTS = 8  # programs per row
MATCHES_PER_PART = 8  # the longest ones of each program
BLOCK = 512  # positions that a program compares at a time; blocks without the last token are skipped
MAX_ENTRIES = 128  # of a problem, the newest
ALIGNED = 32  # tokens; an entry starts at a multiple of this
MIN_CAPACITY = 64  # tokens of an entry
IN_FLIGHT = 64  # tokens that steps in flight may append after an entry's last token
PRIOR_WEIGHT = 0.5  # added to the votes' total weight, so that few votes give a lower probability
UPLOAD_TOKENS = 1 << 20  # per copy


class Entry(Protocol):
    """The end of a prompt and the tokens emitted after it."""

    version: int  # of the policy
    capacity: int  # most tokens that it may have
    is_live: bool  # whether its sequence still runs

    @property
    def emitted(self) -> np.ndarray: ...  # int32, the end of the prompt included

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HistorySettings:
    """`recency`: weight of a version's entries, relative to those of the next version. `min_match`: tokens that must
    match. `longest`: most tokens of an entry."""

    recency: float = 0.8
    min_match: int = 1
    longest: int = 1 << 30


@dataclass(slots=True)
class NewSequence:
    """`entry`: None if nothing is recorded and nothing is drafted. `entries`: of its problem, the newest first."""

    slot: int
    entry: Entry | None
    problem: Hashable
    entries: Sequence[Entry]


class Allocator:
    """Allocates regions of a buffer of `size` tokens, one after another and then from the start again. Entries in the
    way are evicted, except live ones."""

    def __init__(self, size: int) -> None:
        self.size, self._next = size, 0
        self.regions: dict[Entry, tuple[int, int]] = {}  # start and end
        self._starts: list[int] = []
        self._at: dict[int, Entry] = {}

    def place(self, entry: Entry, capacity: int) -> list[Entry] | None:
        """Allocate a region. Returns the entries that were evicted for it; None: there is no region."""
        start, has_wrapped = self._next, False
        while True:
            if start + capacity > self.size:
                if has_wrapped or capacity > self.size:
                    return None
                start, has_wrapped = 0, True
                continue
            in_the_way = self._between(start, start + capacity)
            live = [other for other in in_the_way if other.is_live]
            if not live:
                break
            start = self.regions[live[-1]][1]
        for other in in_the_way:
            self.remove(other)
        self.regions[entry], self._at[start], self._next = (start, start + capacity), entry, start + capacity
        insort(self._starts, start)
        return in_the_way

    def remove(self, entry: Entry) -> None:
        start, _ = self.regions.pop(entry)
        del self._at[start]
        self._starts.pop(bisect_left(self._starts, start))

    def _between(self, start: int, end: int) -> list[Entry]:
        """The entries in this range, in order."""
        first = max(0, bisect_left(self._starts, start) - 1)
        some = [self._at[at] for at in self._starts[first : bisect_left(self._starts, end)]]
        return [entry for entry in some if self.regions[entry][1] > start]


class GraphHistory:
    """`max_tokens`: of all entries together."""

    aux_layers: tuple[int, ...] = ()
    may_draft_less = True

    def __init__(self, state: DeviceState, num_slots: int, max_tokens: int, settings: HistorySettings) -> None:
        device = state.length.device

        def full(*size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        self.settings = settings
        self.drafts, self.survival = state.drafts, state.survival  # where it writes its drafts
        num_texts = 1 + max_tokens // MIN_CAPACITY  # at most
        self.tokens = full(max_tokens)
        self.starts, self.ends = full(num_texts, dtype=torch.int64), full(num_texts, dtype=torch.int64)
        self.lengths, self.weights = full(num_texts), full(num_texts, dtype=torch.float32)
        # By slot: the index of its entry, and of its problem.
        self.entry_of, self.problem_of = full(num_slots, value=-1), full(num_slots)
        self.problem_entries, self.num_problem_entries = full(num_slots, MAX_ENTRIES), full(num_slots)
        self.allocator = Allocator(max_tokens)
        self._numbers: dict[Entry, int] = {}
        self._free = deque(range(num_texts))  # longest free first: other problems' lists may still have the index
        self._ended: set[Entry] = set()  # entries that are on the device with their final length
        self._problems: dict[Hashable, tuple[int, set[int]]] = {}  # problem -> its index, and its slots
        self._free_problems = list(range(num_slots))
        self._too_large = 0  # a capacity for which there was no region
        self._problem_of_slot: dict[int, Hashable] = {}

    # -- on the host ------------------------------------------------------------------------------------------------

    def prefill(self, spans: list[Span], paged: PagedDecoder) -> None:
        pass

    def add(self, new_sequences: Iterable[NewSequence]) -> None:
        """Sequences without a step in flight. Uploads their entries and others of their problems."""
        new_sequences, to_upload, evicted = list(new_sequences), dict[Entry, None](), list[int]()
        self._too_large = self.allocator.size + 1
        by_problem, others = dict[int, list[Entry]](), dict[int, Sequence[Entry]]()
        for new in new_sequences:
            self.remove(new.slot)
            if new.entry is None:
                continue
            problem = new.problem if new.problem is not None else ("alone", new.slot)
            if problem not in self._problems:
                self._problems[problem] = self._free_problems.pop(), set()
            problem_index, readers = self._problems[problem]
            readers.add(new.slot)
            self._problem_of_slot[new.slot] = problem
            by_problem[problem_index] = [*by_problem.get(problem_index, ()), new.entry]
            others[problem_index] = new.entries
            if self._place(new.entry, evicted):
                to_upload[new.entry] = None
        for problem_index, entries in by_problem.items():  # the new sequences' own entries first
            entries = list(dict.fromkeys([*entries, *others[problem_index]]))
            by_problem[problem_index] = self._chosen(entries, to_upload, evicted)
        self._put((self.lengths,), evicted, [0] * len(evicted))
        self._upload(to_upload)
        self._list_entries(by_problem)
        problems = [self._problem_of_slot.get(new.slot) for new in new_sequences]
        self._put(
            (self.entry_of, self.problem_of),
            [new.slot for new in new_sequences],
            [-1 if new.entry is None else self._numbers.get(new.entry, -1) for new in new_sequences],
            [0 if problem is None else self._problems[problem][0] for problem in problems],
        )

    def remove(self, slot: int) -> None:
        problem = self._problem_of_slot.pop(slot, None)
        if problem is None:
            return
        problem_index, readers = self._problems[problem]
        readers.discard(slot)
        if not readers:
            del self._problems[problem]
            self._free_problems.append(problem_index)

    def _place(self, entry: Entry, evicted: list[int]) -> bool:
        """Whether the entry has a region. Adds the indices of evicted entries to `evicted`."""
        if entry in self._numbers:
            return True
        capacity = len(entry.emitted)
        if entry.is_live:
            capacity = max(min(entry.capacity, self.settings.longest), capacity) + IN_FLIGHT
        capacity = max(MIN_CAPACITY, -(-capacity // ALIGNED) * ALIGNED)
        others = self.allocator.place(entry, capacity) if capacity < self._too_large else None
        if others is None:
            self._too_large = min(capacity, self._too_large)
            return False
        numbers = [self._numbers.pop(other) for other in others]
        evicted += numbers
        self._free += numbers
        self._ended -= set(others)
        self._numbers[entry] = self._free.popleft()
        return True

    def _chosen(self, entries: Iterable[Entry], to_upload: dict[Entry, None], evicted: list[int]) -> list[Entry]:
        """The entries that are listed for a problem. Adds those that the device does not have yet to `to_upload`."""
        kept = list[Entry]()
        left = self.allocator.size // (2 * len(self._problems))  # tokens; a problem must not evict its own entries
        for entry in entries:
            if len(kept) == MAX_ENTRIES or left <= 0:
                break
            is_new = entry not in self._numbers
            if is_new and (entry.is_live or not self._place(entry, evicted)):
                continue  # the entry of a sequence that waits, or there is no region for it
            left -= len(entry.emitted) if is_new else 0
            if is_new or (not entry.is_live and entry not in self._ended):
                to_upload[entry] = None
            kept.append(entry)
        return kept

    def _list_entries(self, by_problem: Mapping[int, Sequence[Entry]]) -> None:
        """Write `problem_entries`, and the entries' weights."""
        if not by_problem:
            return
        # Some may have been evicted meanwhile.
        kept = [[entry for entry in entries if entry in self._numbers] for entries in by_problem.values()]
        rows = np.zeros((len(kept), max(1, *(len(entries) for entries in kept))), np.int32)
        numbers, weights = list[int](), list[float]()
        for row, entries in zip(rows, kept, strict=True):
            versions = sorted({entry.version for entry in entries}, reverse=True)
            age = {version: age for age, version in enumerate(versions)}
            row[: len(entries)] = own = [self._numbers[entry] for entry in entries]
            numbers += own
            weights += [self.settings.recency ** age[entry.version] for entry in entries]
        problems = self._to_device(np.array([*by_problem], np.int64))
        self.problem_entries[problems, : rows.shape[1]] = self._to_device(rows)
        self._put((self.num_problem_entries,), [*by_problem], [len(entries) for entries in kept])
        self._put((self.weights,), numbers, weights)

    def _upload(self, entries: Iterable[Entry]) -> None:
        entries = [entry for entry in entries if entry in self._numbers]
        if not entries:
            return
        self._ended |= {entry for entry in entries if not entry.is_live}
        regions, emitted = [self.allocator.regions[entry] for entry in entries], [entry.emitted for entry in entries]
        at = np.concatenate([np.arange(start, start + len(x)) for (start, _), x in zip(regions, emitted, strict=True)])
        tokens = np.concatenate(emitted)
        for i in range(0, len(at), UPLOAD_TOKENS):
            self.tokens[self._to_device(at[i : i + UPLOAD_TOKENS])] = self._to_device(tokens[i : i + UPLOAD_TOKENS])
        self._put(
            (self.starts, self.ends, self.lengths),
            [self._numbers[entry] for entry in entries],
            [start for start, _ in regions], [end for _, end in regions], [len(x) for x in emitted],
        )  # fmt: skip

    def _put(self, columns: tuple[Tensor, ...], at: Sequence[int], *values: Sequence[float]) -> None:
        if not at:
            return
        where = self._to_device(np.array(at, np.int64))
        for column, each in zip(columns, values, strict=True):
            column[where] = self._to_device(np.array(each)).to(column.dtype)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return to_device(values, self.tokens.device)

    # -- in a step --------------------------------------------------------------------------------------------------

    def draft(self, step: DraftStep) -> None:
        """Append what the rows emitted to their entries, then draft. A probability of 0: nothing was found."""
        slots, emitted, k = step.inputs.rows.slots, step.emitted, step.draft_length
        num, device = len(slots), slots.device
        _append[(num,)](
            slots, emitted, self.tokens, self.starts, self.ends, self.lengths, self.entry_of, emitted.stride(0),
            WIDTH=triton.next_power_of_2(emitted.shape[1] - 2), num_warps=1,
        )  # fmt: skip
        if not k:
            return
        found = torch.empty(num, NUM_PARTS, MATCHES_PER_PART, 2, dtype=torch.int64, device=device)
        tops = torch.empty(num, NUM_PARTS, 2, dtype=torch.int32, device=device)
        _find_matches[(num, NUM_PARTS)](
            slots, self.tokens, self.starts, self.lengths, self.entry_of, self.problem_of, self.problem_entries,
            self.num_problem_entries, found, tops, MAX_ENTRIES=MAX_ENTRIES, MATCH=MATCH, NUM_PARTS=NUM_PARTS,
            MATCHES_PER_PART=MATCHES_PER_PART, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        _vote[(num,)](
            slots, self.tokens, self.starts, self.lengths, self.weights, found, tops, self.drafts,
            self.survival, step.scores_out, k, min(self.settings.min_match, MATCH), PRIOR_WEIGHT,
            MAX_DRAFT=MAX_DRAFT, NUM_PARTS=NUM_PARTS, MATCHES_PER_PART=MATCHES_PER_PART,
            num_warps=1,  # sums need not wait for other warps
        )  # fmt: skip


@triton.jit
def _append(
    slots, emitted, tokens, starts, ends, lengths, entry_of, stride, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        entry, num = tl.load(entry_of + slot), tl.load(emitted + row * stride)
        if entry >= 0:
            j, length = tl.arange(0, WIDTH), tl.load(lengths + entry)
            to = tl.load(starts + entry) + length
            num = tl.minimum(num, (tl.load(ends + entry) - to).to(tl.int32))
            tl.store(tokens + to + j, tl.load(emitted + row * stride + 2 + j, mask=j < num), mask=j < num)
            tl.store(lengths + entry, length + num)


@triton.jit
def _find_matches(
    slots, tokens, starts, lengths, entry_of, problem_of, problem_entries, num_problem_entries, found, tops,
    MAX_ENTRIES: tl.constexpr, MATCH: tl.constexpr, NUM_PARTS: tl.constexpr, MATCHES_PER_PART: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The longest matches in one part of a row's entries: where each ends, and in which entry."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    best, count = 0, 0
    if slot >= 0:
        own = tl.load(entry_of + slot)
        if own >= 0:
            problem_index, size = tl.load(problem_of + slot), tl.load(lengths + own)
            end = tokens + tl.load(starts + own) + size - 1
            last = tl.load(end)
            kept = found + (row * NUM_PARTS + part) * MATCHES_PER_PART * 2
            for i in range(part, tl.load(num_problem_entries + problem_index), NUM_PARTS):
                entry = tl.load(problem_entries + problem_index * MAX_ENTRIES + i)
                begin, length = tl.load(starts + entry), tl.load(lengths + entry)
                for first in range(0, length - 1, BLOCK):
                    at = first + tl.arange(0, BLOCK)
                    inside = at < length - 1
                    alive = inside & (tl.load(tokens + begin + at, mask=inside, other=-1) == last)
                    if tl.max(alive.to(tl.int32)) > 0:
                        match = alive.to(tl.int32)
                        for m in tl.static_range(1, MATCH):
                            before = tl.load(end - m, mask=m < size, other=-1)
                            alive = alive & (at >= m) & (m < size)
                            alive = alive & (tl.load(tokens + begin + at - m, mask=alive, other=-2) == before)
                            match += alive.to(tl.int32)
                        top = tl.max(match)
                        if top > best:
                            best, count = top, 0
                        if top == best:
                            longest = (match == best).to(tl.int32)
                            place = count + tl.cumsum(longest, 0) - 1
                            fits = (longest > 0) & (place < MATCHES_PER_PART)
                            tl.store(kept + 2 * place, begin + at, mask=fits)
                            number = (entry + tl.zeros([BLOCK], tl.int32)).to(tl.int64)
                            tl.store(kept + 2 * place + 1, number, mask=fits)
                            count = tl.minimum(count + tl.sum(longest), MATCHES_PER_PART)
    tl.store(tops + (row * NUM_PARTS + part) * 2, best)
    tl.store(tops + (row * NUM_PARTS + part) * 2 + 1, count)


@triton.jit(do_not_specialize=["k", "min_match"])
def _vote(
    slots, tokens, starts, lengths, weights, found, tops, drafts, survival, scores_out, k, min_match,
    prior_weight, MAX_DRAFT: tl.constexpr, NUM_PARTS: tl.constexpr, MATCHES_PER_PART: tl.constexpr,
):  # fmt: skip
    """Token by token. Each match votes for its next token, weighted by its entry; on a tie, the token of the first
    match wins. Matches that have another token vote no more."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        i = tl.arange(0, NUM_PARTS * MATCHES_PER_PART)
        of_part = tops + (row * NUM_PARTS + i // MATCHES_PER_PART) * 2
        length = tl.load(of_part)
        alive = (length == tl.max(length)) & (length >= min_match) & (i % MATCHES_PER_PART < tl.load(of_part + 1))
        at = tl.load(found + (row * NUM_PARTS * MATCHES_PER_PART + i) * 2, mask=alive, other=0)
        entry = tl.load(found + (row * NUM_PARTS * MATCHES_PER_PART + i) * 2 + 1, mask=alive, other=0)
        end = tl.load(starts + entry, mask=alive, other=0) + tl.load(lengths + entry, mask=alive, other=0)
        weight = tl.load(weights + entry, mask=alive, other=0.0)
        joint = 1.0
        for j in range(k):
            at += 1
            alive = alive & (at < end)
            token = tl.load(tokens + at, mask=alive, other=-1)
            alive_weight = tl.where(alive, weight, 0.0)
            votes = tl.sum(tl.where(token[:, None] == token[None, :], alive_weight[None, :], 0.0), 1)
            votes = tl.where(alive, votes, 0.0)
            top = tl.max(votes)
            first = tl.min(tl.where(alive & (votes == top), i, NUM_PARTS * MATCHES_PER_PART))
            drafted = tl.sum(tl.where(i == first, token, 0))
            probability = top / (tl.sum(alive_weight) + prior_weight)
            joint = joint * probability
            tl.store(drafts + slot * MAX_DRAFT + j, drafted)
            tl.store(survival + slot * MAX_DRAFT + j, joint)
            tl.store(scores_out + row * MAX_DRAFT + j, probability.to(tl.float64))
            alive = alive & (token == drafted)
