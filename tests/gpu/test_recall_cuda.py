"""History on a CUDA device: what it drafts is what a slow reader of the same texts would."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.speculation.batch import Commits
from paceline.speculation.library import Library
from paceline.types import Request, SamplingParams

pytestmark = pytest.mark.gpu

NUM_SLOTS = 5


def match(text: Sequence[int], at: int, context: Sequence[int], most: int) -> int:
    num = 0
    while num < min(most, at + 1, len(context)) and text[at - num] == context[-1 - num]:
        num += 1
    return num


def longest(recall: Any, texts: Sequence[Sequence[int]], context: Sequence[int]) -> list[tuple[int, int]]:
    """(text, place) of each, as the programs of a row come to know them."""
    found = []
    for part in range(recall.PARTS):
        best, kept = 0, list[tuple[int, int]]()
        for number in range(part, len(texts), recall.PARTS):
            lengths = [match(texts[number], at, context, recall.MATCH) for at in range(len(texts[number]) - 1)]
            for first in range(0, len(lengths), recall.BLOCK):
                some = lengths[first : first + recall.BLOCK]
                if max(some) > best:
                    best, kept = max(some), []
                kept += [(number, first + i) for i, length in enumerate(some) if length == best > 0]
        found.append((best, kept[: recall.EACH]))
    top = max(best for best, _ in found)
    return [place for best, kept in found if best == top for place in kept]


def slow(
    recall: Any, texts: Sequence[Sequence[int]], weights: Sequence[float], context: Sequence[int], k: int, least: int
) -> tuple[list[int], list[float]]:
    voters, drafted, chances = longest(recall, texts, context), list[int](), list[float]()
    voters = [(number, at) for number, at in voters if match(texts[number], at, context, recall.MATCH) >= least]
    for j in range(1, k + 1):
        voters = [(number, at) for number, at in voters if at + j < len(texts[number])]
        votes: dict[int, float] = {}
        for number, at in voters:
            votes[texts[number][at + j]] = votes.get(texts[number][at + j], 0.0) + weights[number]
        most = max(votes.values(), default=0.0)
        said = next((t for t in (texts[n][at + j] for n, at in voters) if votes[t] > most - 1e-6), 0)
        drafted.append(said)
        chances.append(most / (sum(votes.values()) + recall.DOUBT))
        voters = [(number, at) for number, at in voters if texts[number][at + j] == said]
    return drafted, chances


@pytest.mark.parametrize("max_tokens", [1 << 16, 900])  # of the few not all find a place
@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_a_slow_readers(seed: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.model.cuda import recall

    for name, value in {"BLOCK": 16, "PARTS": 2, "EACH": 4, "MAX_TEXTS": 12}.items():
        monkeypatch.setattr(recall, name, value)
    device, dice, min_match = torch.device("cuda"), np.random.default_rng(seed), 1 + 2 * (seed % 2)
    slots: Any = SimpleNamespace(
        drafts=torch.zeros(NUM_SLOTS, 15, dtype=torch.int32, device=device),
        worth=torch.zeros(NUM_SLOTS, 15, device=device),
    )
    history, library = (
        recall.DeviceHistory(slots, NUM_SLOTS, max_tokens, recall.Reading(0.8, min_match), device),
        Library(max_versions=2),
    )
    seated: dict[int, int] = {}
    num_requests = num_drafts = 0
    for step in range(40):
        for slot in [slot for slot in seated if dice.random() < 0.12]:
            library.end(seated.pop(slot))
        entries = []
        for slot in [slot for slot in range(NUM_SLOTS) if slot not in seated and dice.random() < 0.5]:
            problem = (None, "a", "b")[int(dice.integers(3))]
            prompt = tuple(dice.integers(0, 4, dice.integers(1, 25)).tolist())
            request = Request(num_requests, prompt, SamplingParams(max_tokens=60), problem=problem)
            entries.append((slot, library.begin(request, step // 10), problem))
            seated[slot], num_requests = num_requests, num_requests + 1
        if entries:
            history.enter(recall.Entry(*entry, library.texts(entry[2])) for entry in entries)
        if not seated:
            continue
        places, k = [*seated, -1], int(dice.integers(1, 5))
        emitted = np.zeros((len(places), 18), np.int32)
        emitted[:-1, 0] = dice.integers(1, 5, len(seated))
        emitted[:, 2:] = dice.integers(0, 4, (len(places), 16))
        chances = torch.full((len(places), 15), -1.0, dtype=torch.float64, device=device)
        rows = SimpleNamespace(places=torch.tensor(places, dtype=torch.int32, device=device))
        history.draft(SimpleNamespace(rows=rows), torch.from_numpy(emitted).to(device), k, chances)  # type: ignore[arg-type]
        none = np.zeros(len(seated), np.int32)
        library.hear(Commits(np.array([*seated.values()]), emitted[:-1, 2:], emitted[:-1, 0], none, none))
        known = {number: text for text, number in history._numbers.items()}
        for row, (slot, request_id) in enumerate(seated.items()):
            mine, shelf = int(history.text_of[slot]), int(history.shelf_of[slot])
            numbers = history.shelves[shelf, : int(history.num_on[shelf])].tolist()
            if mine < 0 or not known.keys() >= set(numbers):
                continue
            assert known[mine] is library.live[request_id] and int(history.lengths[mine]) == known[mine].num
            texts, weights = [known[n].said.tolist() for n in numbers], history.weights[numbers].tolist()
            drafted, sure = slow(recall, texts, weights, known[mine].said.tolist(), k, min_match)
            assert slots.drafts[slot, :k].tolist() == drafted
            assert chances[row, :k].tolist() == pytest.approx(sure, abs=1e-6)
            num_drafts += any(sure)
    assert num_drafts > 40


def make_engine(policy: Any = None) -> Any:
    from support import tiny_decoder

    from paceline.drafters.ahead import HistoryAhead
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
    drafter = HistoryAhead(Library())
    runner.equip(drafter)
    made = StaticPolicy(3) if policy is None else policy(paged, runner)
    return LocalEngine(paged, runner=runner, drafter=drafter, policy=made, max_num_seqs=8)


def requests() -> list[Request]:
    sampling = SamplingParams(max_tokens=48, ignore_eos=True)
    return [Request(i, (1, 2, 3 + i), sampling, 7 * i, str(i % 4)) for i in range(16)]


def test_what_was_said_before_is_drafted() -> None:
    """The same requests again: nearly all that is drafted stands, and nobody on the host had a part in it. Also when
    the device has forgotten it all meanwhile, and when another drafted in between."""
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
        verified, stood = (sum(getattr(c, f"num_{what}_tokens") for c in again) for what in ("draft", "accepted"))
        assert verified > 300 and stood > 0.8 * verified


@pytest.mark.parametrize("kind", ["auto", "das"])
def test_policies_that_go_by_the_clock(kind: str) -> None:
    """They are told what a step takes by rows of which nobody takes anything down."""
    from paceline.build.cost import measure_drafts, time_step
    from paceline.speculation.auto import AutoPolicy
    from paceline.speculation.cost import CostTable, Point
    from paceline.speculation.das import DasPolicy

    def by_clock(paged: Any, runner: Any) -> Any:
        def timer(*step: int) -> float:
            return time_step(paged, runner, *step)

        points = [Point(rows, rows * q, rows * (16 + q), timer(rows, q, 16)) for rows in (1, 8) for q in (1, 4)]
        drafts = measure_drafts(timer, lambda rows: 64, [1, 8], 3)
        assert len(drafts) == 4 and all(seconds < 1e-3 for _, _, seconds in drafts)
        if kind == "auto":
            return AutoPolicy(CostTable("here", points, {"suffix": drafts}), 3, "suffix")
        return DasPolicy(CostTable("here", points, {}), 3)

    plain, engine, wanted = make_engine(), make_engine(by_clock), requests()
    plain.set_drafter(None)
    first = [c.token_ids.tolist() for c in plain.generate(wanted)]
    rounds = [engine.generate(wanted) for _ in range(3)]
    assert all([c.token_ids.tolist() for c in found] == first for found in rounds)
    verified, stood = (
        [sum(getattr(c, f"num_{w}_tokens") for c in found) for found in rounds] for w in ("draft", "accepted")
    )
    assert sum(verified) > 0 and (stood[-1] > 0 or kind == "das")  # which does not try again what did not pay
