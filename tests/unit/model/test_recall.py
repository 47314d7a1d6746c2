"""What a device is told of history: the host's part of it, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import kernel_rooms

from paceline.speculation.batch import Commits
from paceline.speculation.library import Library, Text
from paceline.types import Request, SamplingParams

NUM_SLOTS = 5


@pytest.fixture(scope="module")
def recall() -> Iterator[Any]:
    """With or without a compiler for its kernels."""
    with kernel_rooms(recall="model.cuda.recall") as rooms:
        yield rooms.recall


def reading(recall: Any, longest: int = 1000) -> Any:
    return recall.Reading(0.5, 1, longest)


def said(history: Any, number: int) -> list[int]:
    start, length = int(history.starts[number]), int(history.lengths[number])
    return history.words[start : start + length].tolist()


def append(history: Any, slot: int, tokens: np.ndarray) -> None:
    """As the device does."""
    number = int(history.text_of[slot])
    if number >= 0:
        start = int(history.starts[number]) + int(history.lengths[number])
        assert start + len(tokens) <= int(history.ends[number])
        history.words[start : start + len(tokens)] = torch.from_numpy(tokens)
        history.lengths[number] += len(tokens)


@pytest.mark.parametrize("max_tokens", [1 << 16, 900])  # of the few not all find a place
@pytest.mark.parametrize("seed", range(3))
def test_the_device_has_what_the_library_has(recall: Any, seed: int, max_tokens: int) -> None:
    dice = np.random.default_rng(seed)
    history = recall.DeviceHistory(SimpleNamespace(), NUM_SLOTS, max_tokens, reading(recall), torch.device("cpu"))
    library = Library(max_versions=2)
    seated: dict[int, Request] = {}
    num_requests = num_shelved = num_without = 0
    for step in range(300):
        for slot in [slot for slot in seated if dice.random() < 0.1]:
            append(history, slot, np.array([99], np.int32))  # a flight too many, of which nobody hears
            library.end(seated.pop(slot).request_id)
        entries, free = [], [slot for slot in range(NUM_SLOTS) if slot not in seated]
        for slot in [slot for slot in free if dice.random() < 0.5]:
            problem = (None, "a", "b", "c")[int(dice.integers(4))]
            prompt = tuple(dice.integers(0, 4, dice.integers(1, 25)).tolist())
            request = Request(num_requests, prompt, SamplingParams(max_tokens=100), problem=problem)
            library.begin(request, step // 25)
            entries.append((slot, request))
            seated[slot], num_requests = request, num_requests + 1
        history.enter(
            recall.Entry(slot, library.live[r.request_id], r.problem, library.texts(r.problem)) for slot, r in entries
        )
        for slot, request in seated.items():
            tokens = dice.integers(0, 4, int(dice.integers(1, 4))).astype(np.int32)
            if library.live[request.request_id].num + len(tokens) < library.live[request.request_id].room:
                append(history, slot, tokens)
                one, none = np.array([len(tokens)], np.int32), np.zeros(1, np.int32)
                library.hear(Commits(np.array([request.request_id]), tokens[None], one, none, none))
        texts = {number: text for text, number in history._numbers.items()}
        for slot, request in seated.items():
            mine, shelf = int(history.text_of[slot]), int(history.shelf_of[slot])
            num_without += mine < 0
            if mine >= 0:
                assert texts[mine] is library.live[request.request_id]
                assert said(history, mine) == texts[mine].said.tolist()
            numbers = history.shelves[shelf, : int(history.num_on[shelf])].tolist()
            known: list[Text] = [texts[number] for number in numbers if number in texts and history.lengths[number] > 0]
            if max_tokens > 5000:
                assert len(known) == len(numbers) and mine in numbers
                assert all(text.problem == request.problem for text in known)
                newest = max(text.version for text in known)
                ages = {text.version: len({t.version for t in known if t.version > text.version}) for text in known}
                assert ages[newest] == 0
                wanted = [0.5 ** ages[text.version] for text in known]
                if slot in dict(entries):
                    assert history.weights[numbers].tolist() == pytest.approx(wanted)
                    ended = [text for text in known if not text.is_live]
                    assert all(said(history, history._numbers[text]) == text.said.tolist() for text in ended)
                num_shelved += len(known)
    assert num_shelved > 1000 or max_tokens < 5000
    assert num_without > 0 or max_tokens > 5000


def test_who_is_not_taken_down_reads_nothing(recall: Any) -> None:
    history = recall.DeviceHistory(SimpleNamespace(), NUM_SLOTS, 4096, reading(recall), torch.device("cpu"))
    library = Library()
    text = library.begin(Request(0, (1, 2), SamplingParams(max_tokens=9), problem="a"), 0)
    history.enter([recall.Entry(3, text, "a", [text])])
    assert history.text_of.tolist() == [-1, -1, -1, 0, -1] and int(history.num_on[history.shelf_of[3]]) == 1
    history.enter([recall.Entry(3, None, "a", [text])])
    assert history.text_of.tolist() == [-1] * 5 and len(history._free_shelves) == NUM_SLOTS


def test_a_text_for_which_there_is_no_room_is_left_out(recall: Any) -> None:
    history = recall.DeviceHistory(SimpleNamespace(), NUM_SLOTS, 256, reading(recall), torch.device("cpu"))
    library = Library()
    long = library.begin(Request(0, (1, 2), SamplingParams(max_tokens=1000), problem="a"), 0)
    short = library.begin(Request(1, (1, 2), SamplingParams(max_tokens=30), problem="a"), 0)
    texts = library.texts("a")
    history.enter([recall.Entry(0, long, "a", texts), recall.Entry(1, short, "a", texts)])
    assert history.text_of.tolist()[:2] == [-1, 0] and int(history.num_on[history.shelf_of[0]]) == 1
    assert said(history, 0) == [1, 2]


def test_there_are_numbers_for_as_many_texts_as_find_a_place(recall: Any) -> None:
    history = recall.DeviceHistory(SimpleNamespace(), 1, 1 << 15, reading(recall), torch.device("cpu"))
    library = Library()
    for i in range(1000):
        text = library.begin(Request(i, (i,), SamplingParams(max_tokens=1), problem=f"{i}"), 0)
        history.enter([recall.Entry(0, text, f"{i}", [text])])
        assert said(history, int(history.text_of[0])) == [i]
        library.end(i)
    assert len(history._numbers) > recall.MAX_TEXTS


def test_a_crowd_that_waits_takes_nobodys_place(recall: Any) -> None:
    """Of a group larger than a shelf some are seated; what was said before is read all the same, and their own."""
    history = recall.DeviceHistory(SimpleNamespace(), NUM_SLOTS, 1 << 16, reading(recall), torch.device("cpu"))
    library = Library()
    for i in range(10):
        library.begin(Request(i, (i,), SamplingParams(max_tokens=9), problem=""), 0)
        library.end(i)
    group = [Request(i, (i,), SamplingParams(max_tokens=9), problem="") for i in range(100, 300)]
    texts = [library.begin(request, 1) for request in group]
    history.enter(recall.Entry(slot, texts[slot], "", library.texts("")) for slot in range(3))
    shelf = int(history.shelf_of[0])
    numbers = history.shelves[shelf, : int(history.num_on[shelf])].tolist()
    assert sorted(said(history, number)[0] for number in numbers) == [*range(10), 100, 101, 102]
    assert history.weights[numbers].tolist() == [1.0] * 3 + [0.5] * 10


def test_nobody_takes_more_room_than_a_context_has(recall: Any) -> None:
    history = recall.DeviceHistory(SimpleNamespace(), NUM_SLOTS, 4096, reading(recall, 500), torch.device("cpu"))
    library = Library()
    text = library.begin(Request(0, (1, 2), SamplingParams(max_tokens=1 << 25), problem="a"), 0)
    history.enter([recall.Entry(0, text, "a", [text])])
    assert history.text_of[0] == 0 and 500 <= int(history.ends[0] - history.starts[0]) < 600
    library.end(0)
    other = library.begin(Request(1, (1, 2), SamplingParams(max_tokens=9), problem="a"), 0)
    empty = recall.DeviceHistory(SimpleNamespace(), NUM_SLOTS, 4096, reading(recall, 500), torch.device("cpu"))
    empty.enter([recall.Entry(0, other, "a", library.texts("a"))])
    start, end = empty.rack.places[text]
    assert end - start == recall.LEAST  # it says no more
