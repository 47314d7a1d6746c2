"""History on the device: what siblings and earlier rollouts of a row's problem said after the same words.

There is no index. Texts lie side by side in memory, and a row's last tokens are compared with every place of its
problem's texts; those that match longest vote on what comes next. A problem has some dozens of texts of some hundred
tokens, which take microseconds to read, and nothing on the host stands between two steps.

A text is written where it lies: by the device as its row speaks, by the host when a sequence enters. `shelves` say
which texts a problem has, the newest first; the host writes them where someone enters.
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

from paceline.model.cuda.slots import MAX_DRAFT, Inputs, Slots

MATCH = 8  # tokens of context that count
PARTS = 8  # programs of a row
EACH = 8  # matches that one of them keeps
BLOCK = 512  # places that it compares at a time: those without the last token are passed over together
MAX_TEXTS = 128  # of a problem, the newest
ALIGNED = 32  # tokens: where texts begin
LEAST = 64  # tokens of a text's place
WIDE = 64  # tokens that a row may say after its last, by steps that fly: they are not to be found
DOUBT = 0.5  # of a vote
PIECE = 1 << 20  # tokens that are told at a time


class Text(Protocol):
    """As who keeps it has it."""

    version: int
    room: int  # tokens that it may come to
    is_live: bool  # whether a sequence speaks there still

    @property
    def said(self) -> np.ndarray: ...  # int32

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """What counts, and how much: a version's texts, compared to the next one's; how many tokens must be alike; how many
    a text may come to, whatever it says."""

    recency: float = 0.8
    min_match: int = 1
    longest: int = 1 << 30


@dataclass(slots=True)
class Entry:
    """A sequence that sits down, its text (None: nobody takes it down, and nothing is drafted), its problem if it has
    one, and that one's texts, the newest first."""

    slot: int
    text: Text | None
    problem: Hashable
    texts: Sequence[Text]


class Rack:
    """Where texts lie: regions of a memory of `size` tokens, taken one after another and around again. Whose place is
    wanted for another goes, but for those who speak."""

    def __init__(self, size: int) -> None:
        self.size, self._next = size, 0
        self.places: dict[Text, tuple[int, int]] = {}  # start and end
        self._starts: list[int] = []
        self._at: dict[int, Text] = {}

    def place(self, text: Text, room: int) -> list[Text] | None:
        """A place for it; who had to go for that. None: there is none."""
        start, has_turned = self._next, False
        while True:
            if start + room > self.size:
                if has_turned or room > self.size:
                    return None
                start, has_turned = 0, True
                continue
            blocking = self._between(start, start + room)
            speaking = [other for other in blocking if other.is_live]
            if not speaking:
                break
            start = self.places[speaking[-1]][1]
        for other in blocking:
            self.remove(other)
        self.places[text], self._at[start], self._next = (start, start + room), text, start + room
        insort(self._starts, start)
        return blocking

    def remove(self, text: Text) -> None:
        start, _ = self.places.pop(text)
        del self._at[start]
        self._starts.pop(bisect_left(self._starts, start))

    def _between(self, start: int, end: int) -> list[Text]:
        """Who lies there, in order."""
        first = max(0, bisect_left(self._starts, start) - 1)
        some = [self._at[at] for at in self._starts[first : bisect_left(self._starts, end)]]
        return [text for text in some if self.places[text][1] > start]


class DeviceHistory:
    """Of so many slots; `max_tokens` in all texts."""

    taps: tuple[int, ...] = ()

    def __init__(self, slots: Slots, num_slots: int, max_tokens: int, reading: Reading, device: torch.device) -> None:
        def full(*size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        self.slots, self.reading = slots, reading
        num_texts = 1 + max_tokens // LEAST  # more never lie there
        self.words = full(max_tokens)
        self.starts, self.ends = full(num_texts, dtype=torch.int64), full(num_texts, dtype=torch.int64)
        self.lengths, self.weights = full(num_texts), full(num_texts, dtype=torch.float32)
        # A text's number, by slot; and a shelf's, which is the slot of one of those who share it.
        self.text_of, self.shelf_of = full(num_slots, value=-1), full(num_slots)
        self.shelves, self.num_on = full(num_slots, MAX_TEXTS), full(num_slots)
        self.rack = Rack(max_tokens)
        self._numbers: dict[Text, int] = {}
        self._free = deque(range(num_texts))  # who was free longest first: others' shelves may have it still
        self._ended: set[Text] = set()  # whose length the device knows to be final
        self._shelf: dict[Hashable, tuple[int, set[int]]] = {}  # by problem: its shelf, and the slots that read there
        self._free_shelves = list(range(num_slots))
        self._too_large = 0  # tokens for which there was no place a moment ago
        self._reads: dict[int, Hashable] = {}  # by slot: which problem's

    # -- by the host ------------------------------------------------------------------------------------------------

    def enter(self, entries: Iterable[Entry]) -> None:
        """These sequences sit down, of which nothing flies; what they and others said to their problems is told."""
        entries, told, gone = list(entries), dict[Text, None](), list[int]()
        self._too_large = self.rack.size + 1
        shelved, others = dict[int, list[Text]](), dict[int, Sequence[Text]]()
        for entry in entries:
            self.leave(entry.slot)
            if entry.text is None:
                continue
            problem = entry.problem if entry.problem is not None else ("alone", entry.slot)
            if problem not in self._shelf:
                self._shelf[problem] = self._free_shelves.pop(), set()
            shelf, readers = self._shelf[problem]
            readers.add(entry.slot)
            self._reads[entry.slot] = problem
            shelved[shelf] = [*shelved.get(shelf, ()), entry.text]
            others[shelf] = entry.texts
            if self._place(entry.text, gone):
                told[entry.text] = None
        for shelf, texts in shelved.items():  # their own first, whoever else there may be
            shelved[shelf] = self._chosen(dict.fromkeys([*texts, *others[shelf]]), told, gone)
        self._put((self.lengths,), gone, [0] * len(gone))
        self._tell(told)
        self._arrange(shelved)
        problems = [self._reads.get(entry.slot) for entry in entries]
        self._put(
            (self.text_of, self.shelf_of),
            [entry.slot for entry in entries],
            [-1 if entry.text is None else self._numbers.get(entry.text, -1) for entry in entries],
            [0 if problem is None else self._shelf[problem][0] for problem in problems],
        )

    def leave(self, slot: int) -> None:
        problem = self._reads.pop(slot, None)
        if problem is None:
            return
        shelf, readers = self._shelf[problem]
        readers.discard(slot)
        if not readers:
            del self._shelf[problem]
            self._free_shelves.append(shelf)

    def _place(self, text: Text, gone: list[int]) -> bool:
        """Whether there is one. `gone`: the numbers of those who had to go for it."""
        if text in self._numbers:
            return True
        room = max(min(text.room, self.reading.longest), len(text.said)) + WIDE if text.is_live else len(text.said)
        room = max(LEAST, -(-room // ALIGNED) * ALIGNED)
        others = self.rack.place(text, room) if room < self._too_large else None
        if others is None:
            self._too_large = min(room, self._too_large)
            return False
        numbers = [self._numbers.pop(other) for other in others]
        gone += numbers
        self._free += numbers
        self._ended -= set(others)
        self._numbers[text] = self._free.popleft()
        return True

    def _chosen(self, texts: Iterable[Text], told: dict[Text, None], gone: list[int]) -> list[Text]:
        """Those that come on the shelf; of these, those that are new here are to be told."""
        kept, left = list[Text](), self.rack.size // (2 * len(self._shelf))  # or a problem would drive out its own
        for text in texts:
            if len(kept) == MAX_TEXTS or left <= 0:
                break
            is_new = text not in self._numbers
            if is_new and (text.is_live or not self._place(text, gone)):
                continue  # a live one that waits, or found no place when it entered, is not written down
            left -= len(text.said) if is_new else 0
            if is_new or (not text.is_live and text not in self._ended):
                told[text] = None
            kept.append(text)
        return kept

    def _arrange(self, shelved: Mapping[int, Sequence[Text]]) -> None:
        if not shelved:
            return
        # But for those who went for another's sake meanwhile.
        kept = [[text for text in texts if text in self._numbers] for texts in shelved.values()]
        rows = np.zeros((len(kept), max(1, *(len(texts) for texts in kept))), np.int32)
        numbers, weights = list[int](), list[float]()
        for row, texts in zip(rows, kept, strict=True):
            versions = sorted({text.version for text in texts}, reverse=True)
            age = {version: age for age, version in enumerate(versions)}
            row[: len(texts)] = mine = [self._numbers[text] for text in texts]
            numbers += mine
            weights += [self.reading.recency ** age[text.version] for text in texts]
        self.shelves[self._over(np.array([*shelved], np.int64)), : rows.shape[1]] = self._over(rows)
        self._put((self.num_on,), [*shelved], [len(texts) for texts in kept])
        self._put((self.weights,), numbers, weights)

    def _tell(self, texts: Iterable[Text]) -> None:
        texts = [text for text in texts if text in self._numbers]
        if not texts:
            return
        self._ended |= {text for text in texts if not text.is_live}
        places, said = [self.rack.places[text] for text in texts], [text.said for text in texts]
        at = np.concatenate([np.arange(start, start + len(x)) for (start, _), x in zip(places, said, strict=True)])
        words = np.concatenate(said)
        for i in range(0, len(at), PIECE):
            self.words[self._over(at[i : i + PIECE])] = self._over(words[i : i + PIECE])
        self._put(
            (self.starts, self.ends, self.lengths),
            [self._numbers[text] for text in texts],
            [start for start, _ in places], [end for _, end in places], [len(x) for x in said],
        )  # fmt: skip

    def _put(self, columns: tuple[Tensor, ...], at: Sequence[int], *values: Sequence[float]) -> None:
        if not at:
            return
        where = self._over(np.array(at, np.int64))
        for column, each in zip(columns, values, strict=True):
            column[where] = self._over(np.array(each)).to(column.dtype)

    def _over(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values).to(self.words.device, non_blocking=True)

    # -- in a step --------------------------------------------------------------------------------------------------

    def draft(self, inputs: Inputs, emitted: Tensor, k: int, chances_out: Tensor) -> None:
        """emitted int32 [R, 2 + MAX_QUERIES], as `Slots.settle` tells it. What the rows have said is taken down; then k
        tokens are drafted for each, into its slot, and how sure they are, for the host too: chances_out float64
        [R, MAX_DRAFT]; 0 where nothing was found, which is worth nothing in an auction."""
        places = inputs.rows.places
        num, device = len(places), places.device
        _append[(num,)](
            places, emitted, self.words, self.starts, self.ends, self.lengths, self.text_of, emitted.stride(0),
            WIDTH=triton.next_power_of_2(emitted.shape[1] - 2), num_warps=1,
        )  # fmt: skip
        if not k:
            return
        found = torch.empty(num, PARTS, EACH, 2, dtype=torch.int64, device=device)
        tops = torch.empty(num, PARTS, 2, dtype=torch.int32, device=device)
        _recall[(num, PARTS)](
            places, self.words, self.starts, self.lengths, self.text_of, self.shelf_of, self.shelves, self.num_on,
            found, tops, MAX_TEXTS=MAX_TEXTS, MATCH=MATCH, PARTS=PARTS, EACH=EACH, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        _vote[(num,)](
            places, self.words, self.starts, self.lengths, self.weights, found, tops, self.slots.drafts,
            self.slots.worth, chances_out, k, min(self.reading.min_match, MATCH), DOUBT,
            MAX_DRAFT=MAX_DRAFT, PARTS=PARTS, EACH=EACH, num_warps=1,  # no sum waits for other warps
        )  # fmt: skip


@triton.jit
def _append(
    places, emitted, words, starts, ends, lengths, text_of, stride, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(places + row)
    if slot >= 0:
        text, num = tl.load(text_of + slot), tl.load(emitted + row * stride)
        if text >= 0:
            j, length = tl.arange(0, WIDTH), tl.load(lengths + text)
            to = tl.load(starts + text) + length
            num = tl.minimum(num, (tl.load(ends + text) - to).to(tl.int32))
            tl.store(words + to + j, tl.load(emitted + row * stride + 2 + j, mask=j < num), mask=j < num)
            tl.store(lengths + text, length + num)


@triton.jit
def _recall(
    places, words, starts, lengths, text_of, shelf_of, shelves, num_on, found, tops,
    MAX_TEXTS: tl.constexpr, MATCH: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The longest matches in one part of a row's texts: where each ends, and in which text."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(places + row)
    best, count = 0, 0
    if slot >= 0:
        mine = tl.load(text_of + slot)
        if mine >= 0:
            shelf, size = tl.load(shelf_of + slot), tl.load(lengths + mine)
            end = words + tl.load(starts + mine) + size - 1
            last = tl.load(end)
            kept = found + (row * PARTS + part) * EACH * 2
            for i in range(part, tl.load(num_on + shelf), PARTS):
                text = tl.load(shelves + shelf * MAX_TEXTS + i)
                begin, length = tl.load(starts + text), tl.load(lengths + text)
                for first in range(0, length - 1, BLOCK):
                    at = first + tl.arange(0, BLOCK)
                    inside = at < length - 1
                    alive = inside & (tl.load(words + begin + at, mask=inside, other=-1) == last)
                    if tl.max(alive.to(tl.int32)) > 0:
                        match = alive.to(tl.int32)
                        for m in tl.static_range(1, MATCH):
                            before = tl.load(end - m, mask=m < size, other=-1)
                            alive = alive & (at >= m) & (m < size)
                            alive = alive & (tl.load(words + begin + at - m, mask=alive, other=-2) == before)
                            match += alive.to(tl.int32)
                        top = tl.max(match)
                        if top > best:
                            best, count = top, 0
                        if top == best:
                            longest = (match == best).to(tl.int32)
                            place = count + tl.cumsum(longest, 0) - 1
                            fits = (longest > 0) & (place < EACH)
                            tl.store(kept + 2 * place, begin + at, mask=fits)
                            tl.store(kept + 2 * place + 1, (text + tl.zeros([BLOCK], tl.int32)).to(tl.int64), mask=fits)
                            count = tl.minimum(count + tl.sum(longest), EACH)
    tl.store(tops + (row * PARTS + part) * 2, best)
    tl.store(tops + (row * PARTS + part) * 2 + 1, count)


@triton.jit(do_not_specialize=["k", "min_match"])
def _vote(
    places, words, starts, lengths, weights, found, tops, drafts, worth, chances_out, k, min_match, doubt,
    MAX_DRAFT: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Token by token: who agrees with the most goes on to the next. Of equals the one that was found first counts."""
    row = tl.program_id(0)
    slot = tl.load(places + row)
    if slot >= 0:
        i = tl.arange(0, PARTS * EACH)
        of_part = tops + (row * PARTS + i // EACH) * 2
        length = tl.load(of_part)
        alive = (length == tl.max(length)) & (length >= min_match) & (i % EACH < tl.load(of_part + 1))
        at = tl.load(found + (row * PARTS * EACH + i) * 2, mask=alive, other=0)
        text = tl.load(found + (row * PARTS * EACH + i) * 2 + 1, mask=alive, other=0)
        end = tl.load(starts + text, mask=alive, other=0) + tl.load(lengths + text, mask=alive, other=0)
        weight = tl.load(weights + text, mask=alive, other=0.0)
        now = 1.0
        for j in range(k):
            at += 1
            alive = alive & (at < end)
            token = tl.load(words + at, mask=alive, other=-1)
            voice = tl.where(alive, weight, 0.0)
            votes = tl.sum(tl.where(token[:, None] == token[None, :], voice[None, :], 0.0), 1)
            votes = tl.where(alive, votes, 0.0)
            top = tl.max(votes)
            first = tl.min(tl.where(alive & (votes == top), i, PARTS * EACH))
            said = tl.sum(tl.where(i == first, token, 0))
            chance = top / (tl.sum(voice) + doubt)
            now = now * chance
            tl.store(drafts + slot * MAX_DRAFT + j, said)
            tl.store(worth + slot * MAX_DRAFT + j, now)
            tl.store(chances_out + row * MAX_DRAFT + j, chance.to(tl.float64))
            alive = alive & (token == said)
