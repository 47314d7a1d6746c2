"""History drafting on a CUDA device: its drafts equal those of a slow reference implementation."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.speculation.batch import Commits
from paceline.speculation.history_store import HistoryStore
from paceline.types import Request, SamplingParams

pytestmark = pytest.mark.gpu

NUM_SLOTS = 5


def match(entry: Sequence[int], at: int, context: Sequence[int], most: int) -> int:
    num = 0
    while num < min(most, at + 1, len(context)) and entry[at - num] == context[-1 - num]:
        num += 1
    return num


def longest(graph_history: Any, entries: Sequence[Sequence[int]], context: Sequence[int]) -> list[tuple[int, int]]:
    """(text, position) of the longest matches, as the programs of a row find them."""
    found = []
    for part in range(graph_history.NUM_PARTS):
        best, kept = 0, list[tuple[int, int]]()
        for number in range(part, len(entries), graph_history.NUM_PARTS):
            lengths = [
                match(entries[number], at, context, graph_history.MATCH) for at in range(len(entries[number]) - 1)
            ]
            for first in range(0, len(lengths), graph_history.BLOCK):
                some = lengths[first : first + graph_history.BLOCK]
                if max(some) > best:
                    best, kept = max(some), []
                kept += [(number, first + i) for i, length in enumerate(some) if length == best > 0]
        found.append((best, kept[: graph_history.MATCHES_PER_PART]))
    top = max(best for best, _ in found)
    return [place for best, kept in found if best == top for place in kept]


def reference_draft(
    graph_history: Any,
    entries: Sequence[Sequence[int]],
    weights: Sequence[float],
    context: Sequence[int],
    k: int,
    threshold: int,
) -> tuple[list[int], list[float]]:
    matches, drafted, probabilities = longest(graph_history, entries, context), list[int](), list[float]()
    matches = [(n, at) for n, at in matches if match(entries[n], at, context, graph_history.MATCH) >= threshold]
    for j in range(1, k + 1):
        matches = [(number, at) for number, at in matches if at + j < len(entries[number])]
        votes: dict[int, float] = {}
        for number, at in matches:
            votes[entries[number][at + j]] = votes.get(entries[number][at + j], 0.0) + weights[number]
        most = max(votes.values(), default=0.0)
        token = next((t for t in (entries[n][at + j] for n, at in matches) if votes[t] > most - 1e-6), 0)
        drafted.append(token)
        probabilities.append(most / (sum(votes.values()) + graph_history.PRIOR_WEIGHT))
        matches = [(number, at) for number, at in matches if entries[number][at + j] == token]
    return drafted, probabilities


@pytest.mark.parametrize("max_tokens", [1 << 16, 900])  # 900: not all entries fit
@pytest.mark.parametrize("seed", range(3))
def test_drafts_equal_those_of_the_reference(seed: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.model.cuda import graph_history

    for name, value in {"BLOCK": 16, "NUM_PARTS": 2, "MATCHES_PER_PART": 4, "MAX_ENTRIES": 12}.items():
        monkeypatch.setattr(graph_history, name, value)
    device, rng, min_match = torch.device("cuda"), np.random.default_rng(seed), 1 + 2 * (seed % 2)
    state: Any = SimpleNamespace(
        length=torch.zeros(NUM_SLOTS, dtype=torch.int32, device=device),
        drafts=torch.zeros(NUM_SLOTS, 15, dtype=torch.int32, device=device),
        survival=torch.zeros(NUM_SLOTS, 15, device=device),
    )
    store, settings = HistoryStore(max_versions=2), graph_history.HistorySettings(0.8, min_match)
    history = graph_history.GraphHistory(state, NUM_SLOTS, max_tokens, settings)
    running: dict[int, int] = {}  # slot -> request
    num_requests = num_drafts = 0
    for step in range(40):
        for slot in [slot for slot in running if rng.random() < 0.12]:
            store.end(running.pop(slot))
        new = []
        for slot in [slot for slot in range(NUM_SLOTS) if slot not in running and rng.random() < 0.5]:
            problem = (None, "a", "b")[int(rng.integers(3))]
            prompt = tuple(rng.integers(0, 4, rng.integers(1, 25)).tolist())
            request = Request(num_requests, prompt, SamplingParams(max_tokens=60), problem=problem)
            new.append((slot, store.begin(request, step // 10), problem))
            running[slot], num_requests = num_requests, num_requests + 1
        if new:
            history.add(graph_history.NewSequence(*each, store.entries(each[2])) for each in new)
        if not running:
            continue
        slots, k = [*running, -1], int(rng.integers(1, 5))
        emitted = np.zeros((len(slots), 18), np.int32)
        emitted[:-1, 0] = rng.integers(1, 5, len(running))
        emitted[:, 2:] = rng.integers(0, 4, (len(slots), 16))
        probabilities = torch.full((len(slots), 15), -1.0, dtype=torch.float64, device=device)
        rows = SimpleNamespace(slots=torch.tensor(slots, dtype=torch.int32, device=device))
        draft_step: Any = SimpleNamespace(
            inputs=SimpleNamespace(rows=rows),
            emitted=torch.from_numpy(emitted).to(device),
            draft_length=k,
            scores_out=probabilities,
        )
        history.draft(draft_step)
        none = np.zeros(len(running), np.int32)
        store.observe(Commits(np.array([*running.values()]), emitted[:-1, 2:], emitted[:-1, 0], none, none))
        on_device: dict[int, Any] = {number: entry for entry, number in history._numbers.items()}
        for row, (slot, request_id) in enumerate(running.items()):
            own, problem_index = int(history.entry_of[slot]), int(history.problem_of[slot])
            numbers = history.problem_entries[problem_index, : int(history.num_problem_entries[problem_index])].tolist()
            if own < 0 or not on_device.keys() >= set(numbers):
                continue
            assert on_device[own] is store.live[request_id] and int(history.lengths[own]) == on_device[own].num
            entries, weights = [on_device[n].emitted.tolist() for n in numbers], history.weights[numbers].tolist()
            context = on_device[own].emitted.tolist()
            drafted, expected = reference_draft(graph_history, entries, weights, context, k, min_match)
            assert state.drafts[slot, :k].tolist() == drafted
            assert probabilities[row, :k].tolist() == pytest.approx(expected, abs=1e-6)
            num_drafts += any(expected)
    assert num_drafts > 40


def make_engine(policy: Any = None) -> Any:
    from support import tiny_decoder

    from paceline.drafters.device import DeviceHistoryDrafter
    from paceline.engine.accept import RULES
    from paceline.engine.engine import LocalEngine
    from paceline.engine.graph_runner import GraphRunner
    from paceline.engine.runner import EagerRunner
    from paceline.model.cuda.ops import CudaOps
    from paceline.model.paged import PagedDecoder
    from paceline.model.sample import Sampler
    from paceline.speculation.policy import StaticPolicy

    decoder = tiny_decoder(torch.float32, num_heads=8, num_kv_heads=2, head_dim=32).to("cuda")
    decoder.ops = CudaOps()
    paged = PagedDecoder(decoder, 256)
    runner = GraphRunner(paged, EagerRunner(paged, Sampler(), RULES["coupled"]), 8)
    drafter = DeviceHistoryDrafter(HistoryStore())
    runner.set_drafter(drafter)
    made = StaticPolicy(3) if policy is None else policy(paged, runner)
    return LocalEngine(paged, runner=runner, drafter=drafter, policy=made, max_num_seqs=8)


def requests() -> list[Request]:
    sampling = SamplingParams(max_tokens=48, ignore_eos=True)
    return [Request(i, (1, 2, 3 + i), sampling, 7 * i, str(i % 4)) for i in range(16)]


def test_completions_of_earlier_requests_are_drafted() -> None:
    """The same requests again: nearly all draft tokens are accepted, and the host takes no part in drafting. Also after
    the device's history was freed, and after another drafter was used in between."""
    engine, wanted = make_engine(), requests()
    first = [c.token_ids.tolist() for c in engine.generate(wanted)]
    for between in (lambda: None, engine.sleep, lambda: engine.set_drafter(None)):
        history = engine.drafter
        between()
        if engine.drafter is None:
            assert [c.token_ids.tolist() for c in engine.generate(wanted)] == first
            engine.set_drafter(history)
        engine.wake()
        engine.drain_trace()
        again = engine.generate(wanted)
        assert [c.token_ids.tolist() for c in again] == first and engine.drafting.overlaps
        drafted, accepted = (sum(getattr(c, f"num_{what}_tokens") for c in again) for what in ("draft", "accepted"))
        assert drafted > 300 and accepted > 0.8 * drafted


@pytest.mark.parametrize("kind", ["auto", "das"])
def test_policies_with_measured_costs(kind: str) -> None:
    """Step times are measured with rows that add nothing to the history. The policies then get fixed times, and do not
    adapt them: by measured ones, drafting might not pay while other processes use the GPU."""
    from paceline.build.cost import measure_drafts, time_step
    from paceline.speculation.auto import AutoPolicy
    from paceline.speculation.cost import CostTable, Point
    from paceline.speculation.das import DasPolicy

    def make_policy(paged: Any, runner: Any) -> Any:
        def timer(*step: int) -> float:
            return time_step(paged, runner, *step)

        assert all(timer(rows, q, 16) > 0 for rows in (1, 8) for q in (1, 4))
        drafts = measure_drafts(timer, lambda rows: 64, [1, 8], 3)
        measured = [(rows, length) for rows, length, _ in drafts]
        assert measured == [(1, 1), (1, 3), (8, 1), (8, 3)]
        points = [Point(rows, rows * q, rows * (16 + q), 1e-3) for rows in (1, 8) for q in (1, 4)]
        costs = CostTable("fixed", points, {"suffix": [(*each, 1e-6) for each in measured]}, frozen=True)
        return AutoPolicy(costs, 3, "suffix") if kind == "auto" else DasPolicy(costs, 3)

    plain, engine, wanted = make_engine(), make_engine(make_policy), requests()
    plain.set_drafter(None)
    first = [c.token_ids.tolist() for c in plain.generate(wanted)]
    rounds = [engine.generate(wanted) for _ in range(3)]
    assert all([c.token_ids.tolist() for c in found] == first for found in rounds)
    drafted, accepted = (
        [sum(getattr(c, f"num_{what}_tokens") for c in found) for found in rounds] for what in ("draft", "accepted")
    )
    assert sum(drafted) > 0 and (accepted[-1] > 0 or kind == "das")  # das has no probes: it may stop drafting
