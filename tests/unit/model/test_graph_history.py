"""History on the device: the host's side, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import kernel_modules

from paceline.speculation.batch import Commits
from paceline.speculation.history_store import Entry, HistoryStore
from paceline.types import Request, SamplingParams

NUM_SLOTS = 5


@pytest.fixture(scope="module")
def graph_history() -> Iterator[Any]:
    """The module, whether Triton is installed or not."""
    with kernel_modules(graph_history="model.cuda.graph_history") as modules:
        yield modules.graph_history


def make(graph_history: Any, max_tokens: int, num_slots: int = NUM_SLOTS, longest: int = 1000) -> Any:
    state = SimpleNamespace(length=torch.zeros(num_slots, dtype=torch.int32), drafts=None, survival=None)
    return graph_history.GraphHistory(
        state, num_slots, max_tokens, graph_history.HistorySettings(0.5, 1, longest)
    )  # fmt: skip


def request(number: int, max_tokens: int, problem: str | None = "a", prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request(number, prompt, SamplingParams(max_tokens=max_tokens), problem=problem)


def entry_on_device(history: Any, number: int) -> list[int]:
    start, length = int(history.starts[number]), int(history.lengths[number])
    return history.tokens[start : start + length].tolist()


def listed(history: Any, slot: int) -> list[int]:
    """The entries of this slot's problem."""
    problem = int(history.problem_of[slot])
    return history.problem_entries[problem, : int(history.num_problem_entries[problem])].tolist()


def append(history: Any, slot: int, tokens: np.ndarray) -> None:
    """Like the device's kernel."""
    number = int(history.entry_of[slot])
    if number >= 0:
        start = int(history.starts[number]) + int(history.lengths[number])
        assert start + len(tokens) <= int(history.ends[number])
        history.tokens[start : start + len(tokens)] = torch.from_numpy(tokens)
        history.lengths[number] += len(tokens)


@pytest.mark.parametrize("max_tokens", [1 << 16, 900])  # 900: not all entries fit
@pytest.mark.parametrize("seed", range(3))
def test_the_device_has_the_entries_of_the_store(graph_history: Any, seed: int, max_tokens: int) -> None:
    rng, history, store = np.random.default_rng(seed), make(graph_history, max_tokens), HistoryStore(max_versions=2)
    running: dict[int, Request] = {}  # by slot
    num_requests = num_listed = num_without = 0
    for step in range(300):
        for slot in [slot for slot in running if rng.random() < 0.1]:
            append(history, slot, np.array([99], np.int32))  # a step in flight, whose tokens are not committed
            store.end(running.pop(slot).request_id)
        added, free = [], [slot for slot in range(NUM_SLOTS) if slot not in running]
        for slot in [slot for slot in free if rng.random() < 0.5]:
            problem = (None, "a", "b", "c")[int(rng.integers(4))]
            prompt = tuple(rng.integers(0, 4, rng.integers(1, 25)).tolist())
            new = request(num_requests, 100, problem, prompt)
            store.begin(new, step // 25)
            added.append((slot, new))
            running[slot], num_requests = new, num_requests + 1
        history.add(
            graph_history.NewSequence(slot, store.live[r.request_id], r.problem, store.entries(r.problem))
            for slot, r in added
        )
        for slot, each in running.items():
            tokens = rng.integers(0, 4, int(rng.integers(1, 4))).astype(np.int32)
            if store.live[each.request_id].num + len(tokens) < store.live[each.request_id].capacity:
                append(history, slot, tokens)
                one, none = np.array([len(tokens)], np.int32), np.zeros(1, np.int32)
                store.observe(Commits(np.array([each.request_id]), tokens[None], one, none, none))
        entries = {number: entry for entry, number in history._numbers.items()}
        for slot, each in running.items():
            own, numbers = int(history.entry_of[slot]), listed(history, slot)
            num_without += own < 0
            if own >= 0:
                assert entries[own] is store.live[each.request_id]
                assert entry_on_device(history, own) == entries[own].emitted.tolist()
            known: list[Entry] = [
                entries[number] for number in numbers if number in entries and history.lengths[number] > 0
            ]
            if max_tokens > 5000:
                assert len(known) == len(numbers) and own in numbers
                assert all(entry.problem == each.problem for entry in known)
                newest = max(entry.version for entry in known)
                ages = {entry.version: len({t.version for t in known if t.version > entry.version}) for entry in known}
                assert ages[newest] == 0
                expected = [0.5 ** ages[entry.version] for entry in known]
                if slot in dict(added):
                    assert history.weights[numbers].tolist() == pytest.approx(expected)
                    ended = [entry for entry in known if not entry.is_live]
                    assert all(entry_on_device(history, history._numbers[t]) == t.emitted.tolist() for t in ended)
                num_listed += len(known)
    assert num_listed > 1000 or max_tokens < 5000
    assert num_without > 0 or max_tokens > 5000


def test_a_sequence_without_a_text_reads_nothing(graph_history: Any) -> None:
    history, store = make(graph_history, 4096), HistoryStore()
    entry = store.begin(request(0, 9), 0)
    history.add([graph_history.NewSequence(3, entry, "a", [entry])])
    assert history.entry_of.tolist() == [-1, -1, -1, 0, -1] and listed(history, 3) == [0]
    history.add([graph_history.NewSequence(3, None, "a", [entry])])
    assert history.entry_of.tolist() == [-1] * 5 and len(history._free_problems) == NUM_SLOTS


def test_a_text_that_does_not_fit_is_left_out(graph_history: Any) -> None:
    history, store = make(graph_history, 256), HistoryStore()
    long, short = store.begin(request(0, 1000), 0), store.begin(request(1, 30), 0)
    entries = store.entries("a")
    history.add([graph_history.NewSequence(0, long, "a", entries), graph_history.NewSequence(1, short, "a", entries)])
    assert history.entry_of.tolist()[:2] == [-1, 0] and listed(history, 0) == [0]
    assert entry_on_device(history, 0) == [1, 2]


def test_there_are_indices_for_all_entries_that_fit(graph_history: Any) -> None:
    history, store = make(graph_history, 1 << 15, num_slots=1), HistoryStore()
    for i in range(1000):
        entry = store.begin(request(i, 1, f"{i}", (i,)), 0)
        history.add([graph_history.NewSequence(0, entry, f"{i}", [entry])])
        assert entry_on_device(history, int(history.entry_of[0])) == [i]
        store.end(i)
    assert len(history._numbers) > graph_history.MAX_ENTRIES


def test_waiting_sequences_take_no_region(graph_history: Any) -> None:
    """A group is larger than MAX_ENTRIES, and three of it run: these and the earlier entries are listed."""
    history, store = make(graph_history, 1 << 16), HistoryStore()
    for i in range(10):
        store.begin(request(i, 9, "", (i,)), 0)
        store.end(i)
    entries = [store.begin(request(i, 9, "", (i,)), 1) for i in range(100, 300)]
    history.add(graph_history.NewSequence(slot, entries[slot], "", store.entries("")) for slot in range(3))
    numbers = listed(history, 0)
    assert sorted(entry_on_device(history, number)[0] for number in numbers) == [*range(10), 100, 101, 102]
    assert history.weights[numbers].tolist() == [1.0] * 3 + [0.5] * 10


def test_a_region_is_no_larger_than_the_context(graph_history: Any) -> None:
    history, store = make(graph_history, 4096, longest=500), HistoryStore()
    entry = store.begin(request(0, 1 << 25), 0)
    history.add([graph_history.NewSequence(0, entry, "a", [entry])])
    assert history.entry_of[0] == 0 and 500 <= int(history.ends[0] - history.starts[0]) < 600
    store.end(0)
    other, empty = store.begin(request(1, 9), 0), make(graph_history, 4096, longest=500)
    empty.add([graph_history.NewSequence(0, other, "a", store.entries("a"))])
    start, end = empty.allocator.regions[entry]
    assert end - start == graph_history.MIN_CAPACITY  # it emits no more
