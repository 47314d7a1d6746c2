"""The graph runner's host side, on a CPU: over a device that does by its orders, in Python, what the kernels do.

The device knows no more than it is told: slots, pages and orders. Its model reads tokens back from their pages, so that
a page that was not told, or of another sequence, gives other tokens than the naive twin's.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import check_blocks, kernel_rooms, naive_table, tiny_decoder, tiny_head

from paceline.build.cost import time_step
from paceline.build.drafter import _ahead
from paceline.config import load_config
from paceline.drafters.ahead import MOST, Eagle3Ahead, HistoryAhead
from paceline.drafters.hybrid import HybridAhead
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine import naive as one_by_one
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.lineup import Row
from paceline.engine.runner import EagerRunner
from paceline.engine.sequence import Sequence
from paceline.model.kv import BLOCK, BlockTable, PagedKV
from paceline.model.paged import PagedDecoder, Span
from paceline.model.sample import Sampler, SamplingArrays
from paceline.speculation.batch import DraftBatch
from paceline.speculation.library import Library
from paceline.speculation.policy import StaticPolicy, level
from paceline.types import Completion, Provenance, Request, SamplingParams
from paceline.verify.drafters import AdversarialDrafter
from paceline.verify.table import Table, TableDecoder

VOCAB, EOS, K = 7, 6, 3
TABLE = Table(VOCAB, seed=5)


@pytest.fixture(scope="module")
def cuda() -> Iterator[SimpleNamespace]:
    """The rooms that define kernels, whether there is a compiler for them or not."""
    paths = {name: f"model.cuda.{name}" for name in ("graphs", "slots", "recall")}
    with kernel_rooms(runner="engine.graph_runner", **paths) as rooms:
        yield rooms


class Event:
    """A thousand seconds a launch, so that a time says whose it is."""

    def __init__(self, device: Device) -> None:
        self.device, self.num_runs, self.is_over = device, -1, False

    def record(self, stream: int) -> None:
        assert stream == self.device.stream, "not where the step runs"
        self.num_runs, self.is_over = self.device.num_runs, False

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, done: Event) -> float:
        assert done.is_over and self.num_runs + 1 == done.num_runs, "another step's"
        return 1e6 * done.num_runs


class Decoder(TableDecoder):
    device = torch.device("cpu")


class Device:
    """In the place of `Graphs`. As its head it guesses k tokens, of which most are right: it looks them up."""

    head: Any = None  # but for a history, which is one's own on a CPU too: it is only read by kernels

    def __init__(self, cuda: SimpleNamespace, paged: Decoder, slots: Any, guess: Callable[[int], int]) -> None:
        self.cuda, self.paged, self.slots, self.guess = cuda, paged, slots, guess
        self.words, self.letter = torch.zeros(4096, dtype=torch.int32), cuda.graphs.Letter(16)
        self.truth: dict[int, list[int]] = {}  # by noise key: prompt and what will be emitted
        self.num_told = self.num_auctions = self.num_fitted = self.num_away = self.num_runs = self.num_taken_down = 0
        self.stream = 1
        self.away: set[int] = set()  # slots whose drafts are none: it did not look
        self.seconds: dict[Any, float] = {}
        self.dice = np.random.default_rng(0)

    def fit(self, size: Any, most_guesses: int) -> Any:
        self.num_fitted += 1
        return replace(size, num_tokens=size.num_tokens + 3, num_guesses=most_guesses if size.num_guesses else 0)

    def prepare(self, size: Any) -> None:
        pass

    def run(self, size: Any) -> None:
        self.num_runs += 1
        words, slots, header = self.words.numpy(), self.slots, self.cuda.slots.HEADER
        orders = words[: size.num_order_words].reshape(-1, self.cuda.slots.ORDER)
        for slot, index, page in words[size.num_order_words : size.num_words - 1].reshape(-1, 3):
            if slot >= 0:
                slots.tables[slot, index] = int(page)
                self.num_told += 1
        if size.auctions:
            self._auction(orders, words[size.num_words - 1])
        assert not any(slot in self.away for slot, num in orders[:, :2].tolist() if num > 0)
        spans, at = [], []
        for slot, num, last, length, *drafted in orders.tolist():
            if slot < 0:
                continue
            if last < 0:
                last, length = int(slots.last[slot]), int(slots.length[slot])
            own = slots.drafts[slot].tolist()
            guessed = [own[j] if token < 0 else token for j, token in enumerate(drafted[:num])]
            slots.length[slot] = length
            table = BlockTable(slots.tables[slot].tolist())
            spans.append(Span(np.array([last, *guessed], np.int32), length - 1, table, 1 + num))
            at.append(slot)
        self._settle(at, spans, header, size.num_guesses)
        away = {slot for slot in at if self.dice.random() < 0.3} if size.looks_away else set()
        self.away = (self.away - set(at)) | away
        self.num_away += len(away)

    def _auction(self, orders: np.ndarray, num_slots: int) -> None:
        self.num_auctions += 1
        takes_part = [order[0] >= 0 and order[0] not in self.away for order in orders]
        bids = [(r, j) for r, order in enumerate(orders) if takes_part[r] for j in range(order[1])]
        kept = sorted(bids, key=lambda bid: bid[1])[: int(num_slots)]
        orders[:, 1] = np.bincount([r for r, _ in kept], minlength=len(orders))

    def _settle(self, at: list[int], spans: list[Span], header: int, num_guesses: int) -> None:
        slots, letter = self.slots, self.letter
        sizes = [span.num_logits for span in spans]
        of = np.repeat(at, sizes)
        params = SamplingArrays(
            *(getattr(slots, name).numpy()[of] for name in ("temperature", "top_k", "top_p", "min_p"))
        )
        places = np.concatenate([span.start + 1 + np.arange(span.num_logits) for span in spans])
        keys = slots.key.numpy()[of].view(np.uint64)
        draws = Sampler().draw(self.paged.forward(spans), keys, places, params)
        end = 0
        for row, (slot, span) in enumerate(zip(at, spans, strict=True)):
            begin, end = end, end + span.num_logits
            found, guessed = draws.tokens[begin:end], span.tokens[1:]
            wrong = np.flatnonzero(found[:-1] != guessed)
            num = 1 + (int(wrong[0]) if len(wrong) else len(guessed))
            letter.tokens[row, 0], letter.tokens[row, 1] = num, len(guessed)
            letter.tokens[row, 2 : 2 + num] = torch.from_numpy(found[:num])
            letter.logprobs[row, 0, :num] = torch.from_numpy(draws.logprobs[begin : begin + num])
            letter.logprobs[row, 1, :num] = torch.from_numpy(draws.raw_logprobs[begin : begin + num])
            slots.last[slot], slots.length[slot] = int(found[num - 1]), span.start + 1 + num
            if self.head is not None:
                self._take_down(slot, found[:num])
            self._draft(slot, num_guesses)
            letter.chances[row] = 0.7

    def _take_down(self, slot: int, said: np.ndarray) -> None:
        """What a text has must be what its row said, wherever it comes from and whoever was there before."""
        history, text = self.head, int(self.head.text_of[slot])
        if text < 0:
            return
        start, length = int(history.starts[text]), int(history.lengths[text]) + len(said)
        assert start + length <= int(history.ends[text])
        history.words[start + length - len(said) : start + length] = torch.from_numpy(said)
        history.lengths[text] = length
        whole = self.truth.get(int(self.slots.key[slot]))
        if whole is not None:  # a row may have flown past its end
            end = int(self.slots.length[slot])
            known = whole[max(0, end - length) : end]
            assert history.words[start : start + len(known)].tolist() == known
            self.num_taken_down += 1

    def _draft(self, slot: int, k: int) -> None:
        whole = self.truth.get(int(self.slots.key[slot]), [])
        length = int(self.slots.length[slot])
        for j in range(k):
            right = whole[length + j] if length + j < len(whole) else 0
            self.slots.drafts[slot, j] = self.guess(right)


def make(
    cuda: SimpleNamespace, drafter: str, num_blocks: int = 64, policy: Any = None, broken: type | None = None
) -> LocalEngine:
    dice = np.random.default_rng(1)
    paged = Decoder(TABLE, num_blocks, max_positions=128, eos_token_ids=(EOS,))

    class Runner(broken or cuda.runner.GraphRunner):  # type: ignore[misc]
        num_prepared = 0

        def _ready(self) -> Any:
            return self.device

        def _run(self, graphs: Any, line: Any, orders: Any, *more: Any) -> Any:
            self.num_prepared += orders is not None
            return super()._run(graphs, line, orders, *more)

    runner = Runner(paged, EagerRunner(paged, Sampler(), RULES["coupled"]), 6)
    runner.device = Device(cuda, paged, runner.slots, lambda right: right if dice.random() < 0.7 else 0)
    if drafter == "history":
        recall = cuda.recall
        runner.device.head = recall.DeviceHistory(runner.slots, 6, 1 << 12, recall.Reading(), Decoder.device)
    for _ in range(cuda.runner.FLYING):
        letter, words = cuda.graphs.Letter(16), torch.zeros_like(runner.device.words)
        parts = {name: getattr(letter, name).numpy() for name in ("tokens", "logprobs", "chances")}
        runner._mail.append(
            SimpleNamespace(
                words=words,
                array=words.numpy(),
                letter=letter,
                started=Event(runner.device),
                done=Event(runner.device),
                **parts,
            )
        )
    head: Any = SimpleNamespace(config=SimpleNamespace(taps=(0,)))
    drafters: dict[str, Any] = {
        "none": None, "random": AdversarialDrafter(VOCAB), "suffix": SuffixDrafter(), "ahead": Eagle3Ahead(head),
        "hybrid": HybridAhead(SuffixDrafter(), Eagle3Ahead(head), 0.1), "history": HistoryAhead(Library()),
    }  # fmt: skip
    return LocalEngine(
        paged, runner=runner, drafter=drafters[drafter], policy=policy or StaticPolicy(K), max_num_seqs=6,
        max_num_batched_tokens=64,
    )  # fmt: skip


def requests() -> list[Request]:
    dice = np.random.default_rng(2)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.8}]
    return [
        Request(
            i,
            tuple(dice.integers(0, EOS, dice.integers(1, 40)).tolist()),
            SamplingParams(max_tokens=int(dice.integers(1, 60)), ignore_eos=i % 4 > 0, **kinds[i % 3]),
            17 * i,
            str(i % 3),
        )
        for i in range(20)
    ]


@cache
def naive() -> list[list[int]]:
    return naive_table(TABLE, requests(), (EOS,), 128)


def run(engine: LocalEngine) -> list[Completion]:
    wanted = requests()
    for request, said in zip(wanted, naive(), strict=True):
        engine.runner.device.truth[request.noise_key] = [*request.prompt_ids, *said]
    handles = [engine.submit(request) for request in wanted]
    while engine.has_work:
        engine.runner.device.stream += 1
        engine.step()
        check_blocks(engine)
    assert not any(engine.paged.pool.references)
    return [handle.completion for handle in handles]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


class Half(StaticPolicy):
    """Half of what is drafted, whatever it is."""

    reads_drafts = takes_best = True

    def select(self, drafts: DraftBatch) -> np.ndarray:
        return drafts.num // 2


def test_what_was_not_looked_for_is_not_verified(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that at times takes all: there is an auction then too, if the head has looked away."""
    monkeypatch.setattr(cuda.graphs, "CROWD", 3)

    class Moody(Half):
        num_chosen = 0

        def select(self, drafts: DraftBatch) -> np.ndarray:
            self.num_chosen += 1
            return drafts.num // 2 if self.num_chosen % 3 else drafts.num

    policy = Moody(K)
    policy.reads_drafts = True
    engine = make(cuda, "ahead", policy=policy)
    assert tokens(run(engine)) == naive()
    assert engine.runner.device.num_away > 20


@pytest.mark.parametrize("num_blocks", [64, 9])
@pytest.mark.parametrize("kind", ["none", "random", "suffix", "ahead", "hybrid", "auction", "history"])
def test_tokens_are_the_naive_twins(cuda: SimpleNamespace, kind: str, num_blocks: int) -> None:
    policy = Half(K) if kind == "auction" else None
    if policy is not None:
        policy.reads_drafts = True
    engine = make(cuda, "ahead" if kind == "auction" else kind, num_blocks, policy)
    found = run(engine)
    assert tokens(found) == naive()
    traces, device = engine.drain_trace(), engine.runner.device
    assert sum(trace.num_emitted for trace in traces) == sum(len(c.token_ids) for c in found)
    launches = [launch for trace in traces if (launch := round(trace.forward_s / 1e3))]
    assert launches == list(range(1, device.num_runs + 1)) and launches[-1] * 1e3 in device.seconds.values()
    assert device.num_told > 8 and bool(device.num_fitted) == (kind == "auction")
    assert bool(device.num_auctions) == (kind in ("auction", "history"))
    assert (sum(trace.num_preempted for trace in traces) > 0) == (num_blocks == 9)
    if kind == "suffix":
        assert engine.runner.num_prepared > 10  # launched with orders that were laid out while a step flew
    if kind == "history":
        library = engine.drafter.library
        assert not library.live and [len(text.said) for text in library.texts("0")]
        assert device.num_taken_down > 100
    if kind in ("ahead", "hybrid", "auction", "history"):
        assert engine.runner.has_head
        num, stood = (sum(getattr(c, f"num_{what}_tokens") for c in found) for what in ("draft", "accepted"))
        assert num > 100 and 0.4 < stood / num < 0.9
        assert num == sum(trace.num_draft_tokens for trace in traces)


def test_what_the_device_is_not_told_is_missed(cuda: SimpleNamespace) -> None:
    """Broken: new pages are kept to itself; whoever comes to a slot is taken for who was there; a slot is told of what
    flies as if it had landed."""
    base = cuda.runner.GraphRunner

    class NoPages(base):  # type: ignore[misc]
        def _turn_pages(self, seats: Any, slots: np.ndarray) -> None:
            pass

    class NoStrangers(base):  # type: ignore[misc]
        def _enter(self, seats: Any, slots: np.ndarray) -> None:
            super()._enter(seats, slots[self._known[slots] < 0])

        def leave(self, sequence: Any) -> None:
            pass

    class Hasty(base):  # type: ignore[misc]
        def _address(self, graphs: Any, line: Any, mail: Any) -> Any:
            flying, line.seats.num_flying = line.seats.num_flying, np.zeros_like(line.seats.num_flying)
            orders = super()._address(graphs, line, mail)
            line.seats.num_flying = flying
            return orders

    for broken in (NoPages, NoStrangers, Hasty):
        assert tokens(run(make(cuda, "none", broken=broken))) != naive(), broken


@pytest.fixture
def graphs(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Capturing one takes a second."""
    made = object.__new__(cuda.graphs.Graphs)
    made.eager = made._is_tight = False
    made.num_captured = 0
    made._paid_s, made._captured, made.seconds, made._price_s = Counter(), OrderedDict(), {}, math.inf
    made._capture, now = (lambda size: lambda: None), count()
    monkeypatch.setattr(cuda.graphs, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    return made


def test_a_larger_graph_will_do_until_its_padding_has_cost_a_graph(graphs: Any, cuda: SimpleNamespace) -> None:
    size = cuda.graphs.Size
    wanted = size(96, 256, 4, 2)
    others = {
        "rows": size(128, 256, 4, 2), "too many": size(96, 640, 4, 2), "fewer tokens": size(96, 192, 4, 2),
        "queries": size(96, 256, 2, 2), "fewer guesses": size(96, 256, 4, 1), "none": size(96, 256, 4, 0),
        "guesses without pages": size(96, 256, 4, 4),
    }  # fmt: skip
    good = [size(96, 512, 8, 2, True, True), size(96, 384, 4, 3)]
    for one in (*others.values(), *good):
        graphs.prepare(one)
    graphs.seconds[good[1]] = 0.11
    # A third of its work (384 + 96 x 3, not 256 + 96 x 2) is padding: a second is paid with the 29th step.
    assert [graphs.fit(wanted, 3) for _ in range(40)] == [good[1]] * 28 + [wanted] * 12
    assert graphs.fit(replace(wanted, auctions=True), 3) == good[0]
    assert graphs.fit(size(96, 96, 1), 3) == size(96, 96, 1), "nothing is guessed: there may be no pages"


def test_the_first_graph_of_so_many_rows_is_a_wide_one(graphs: Any, cuda: SimpleNamespace) -> None:
    """So that one serves for nearly all: 8 rows, whatever a policy gives them."""
    size, dice = cuda.graphs.Size, np.random.default_rng(0)
    first = graphs.fit(size(8, 16, 2, 1), 3)
    assert first == size(8, 32, 4, 3, False, True)
    graphs.prepare(first)
    for _ in range(100):
        num_tokens, guesses = int(dice.choice([12, 16, 24, 32])), int(dice.integers(1, 4))
        assert graphs.fit(size(8, num_tokens, 4, guesses, auctions=bool(dice.integers(2))), 3) == first
    assert graphs.fit(size(8, 8, 1, 3), 3).num_tokens == 16, "not more than twice as many"
    assert not graphs.fit(size(2048, 4096, 2, 1), 3).auctions, "they are too many to bid"


def test_where_there_is_no_memory_for_a_wide_graph_a_narrow_one_does(graphs: Any, cuda: SimpleNamespace) -> None:
    size, tried, prepare = cuda.graphs.Size, [], graphs.prepare

    def short(wanted: Any) -> None:
        tried.append(wanted.num_tokens)
        if wanted.num_tokens > 16:
            raise ValueError("no device memory")
        prepare(wanted)

    graphs.prepare = short
    for wanted in (size(8, 16, 2, 1), size(16, 32, 2, 1)):
        assert graphs.fit(wanted, 3) == wanted
    assert tried == [32], "and it is not tried again"


class Wild(StaticPolicy):
    """Some tokens for all rows or for one, other numbers now and then, of which some are verified."""

    reads_drafts = takes_best = True

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.reads_drafts = True
        self.most, self.dice, self.num_steps, self.k = most, np.random.default_rng(most), 0, 0

    def plan(self, rows: Any) -> np.ndarray:
        super().plan(rows)
        self.budget = rows.draft_budget
        if self.num_steps % 3 == 0:
            self.k = int(self.dice.integers(self.most + 1))
        self.num_steps += 1
        caps = np.full(len(rows), self.k, np.int32)
        if self.dice.random() < 0.3:
            caps[np.arange(len(rows)) != self.dice.integers(len(rows))] = 0
        return caps

    def select(self, drafts: DraftBatch) -> np.ndarray:
        lengths = (drafts.num * self.dice.random()).astype(np.int32)
        return lengths if lengths.sum() <= self.budget else level(lengths, self.budget)


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_a_head_writes_into_its_rows_own_pages_alone(cuda: SimpleNamespace, graphs: Any, num_blocks: int) -> None:
    """Whatever graphs there are: of a policy that was bolder, of steps that were timed, of another drafter with the
    same head. Page by page, of all that is guessed behind a row's end."""
    engine = make(cuda, "ahead", num_blocks, Wild(7))
    device, seats, wrong, num_checked = engine.runner.device, engine.scheduler.seats, [], 0
    graphs._capture = lambda size: lambda: None
    device.fit, device.prepare, draft = graphs.fit, graphs.prepare, device._draft

    def checked(slot: int, k: int) -> None:
        nonlocal num_checked
        draft(slot, k)
        sequence, length, limit = seats.sequences[slot], int(device.slots.length[slot]), int(device.slots.limit[slot])
        if sequence is None:  # timed
            return
        for i in range(1, k):
            index = min(length - 2 + i, limit - 1) // BLOCK
            held = sequence.table.blocks
            num_checked += 1
            if index >= len(held) or held[index] != int(device.slots.tables[slot, index]):
                wrong.append((slot, k, engine.scheduler.lookahead))

    device._draft = checked
    for num_rows in (1, 2, 3, 4, 6):
        time_step(engine.paged, engine.runner, num_rows, 1, 16, 7)
    for most in (2, 7, 2):
        engine.set_drafter(Eagle3Ahead(engine.drafter.head), Wild(most))
        assert tokens(run(engine)) == naive()
    assert not wrong and num_checked > 1000


@pytest.mark.parametrize("kind", ["none", "suffix", "ahead"])
def test_steps_that_were_held_up_by_a_capture_say_so(cuda: SimpleNamespace, kind: str) -> None:
    """The one that needed it, and the one that flew meanwhile."""

    class Captures(cuda.runner.GraphRunner):  # type: ignore[misc]
        num_launched, num_captured = 0, 0

        def launch(self, *step: Any) -> Any:
            self.num_launched += 1
            self.num_captured += self.num_launched in (9, 15)
            return super().launch(*step)

    engine = make(cuda, kind, broken=Captures)
    run(engine)
    captured = {trace.step for trace in engine.drain_trace() if trace.num_captured}
    own = {8, 14}  # counted from 0
    assert own <= captured <= own | {7, 13} and (captured > own or kind == "suffix")


def test_whoever_comes_again_has_no_drafts_yet(cuda: SimpleNamespace) -> None:
    """The same request twice: its prompt's last token is not verified with what was drafted for the first one."""
    engine = make(cuda, "ahead")
    request = requests()[1]
    first, again = (engine.generate([request])[0] for _ in range(2))
    assert first.provenance[0] == again.provenance[0] == Provenance.SAMPLED
    assert tokens([first]) == tokens([again]) == [naive()[1]] and again.num_drafts > 3


@pytest.mark.parametrize("kind", ["none", "ahead", "history"])
def test_steps_are_timed_with_what_a_head_drafts_and_nobody_remembers_them(cuda: SimpleNamespace, kind: str) -> None:
    engine = make(cuda, kind)
    paged, runner, guessed = engine.paged, engine.runner, list[int]()
    draft = runner.device._draft
    runner.device._draft = lambda slot, k: guessed.append(k) or draft(slot, k)
    for num in (0, 3, 0):
        assert time_step(paged, runner, 2, 1, 16, num) > 0
    wanted = 0 if kind == "none" else 3
    assert guessed == [0, 0, wanted, wanted, 0, 0] and not any(paged.pool.references)
    assert time_step(paged, runner, 2, 1 + K, 16) > 0 and not runner.device.num_auctions  # these drafts are the host's
    assert (runner._known == cuda.runner.VACANT).all()
    assert tokens(run(engine)) == naive()


@pytest.mark.parametrize("kind", ["none", "suffix", "ahead"])
def test_to_the_end_of_the_context(cuda: SimpleNamespace, kind: str) -> None:
    """No page is wanted beyond what a slot's table holds."""
    prompt = tuple(np.random.default_rng(3).integers(0, EOS, 102).tolist())
    wanted = [Request(i, prompt, SamplingParams(max_tokens=200, ignore_eos=True), i, "long") for i in range(3)]
    found = make(cuda, kind).generate(wanted)
    assert tokens(found) == naive_table(TABLE, wanted, (EOS,), 128) and {len(c.token_ids) for c in found} == {26}


@pytest.mark.parametrize("kind", ["none", "suffix", "ahead"])
@pytest.mark.parametrize("fails_at", [2, 5, 9])
def test_a_launch_that_fails_when_the_device_is_off(cuda: SimpleNamespace, kind: str, fails_at: int) -> None:
    """The device has gone a step of which the host knows nothing: it is told anew where sequences stand."""

    class Fails(cuda.runner.GraphRunner):  # type: ignore[misc]
        num_launched = 0

        def launch(self, *step: Any) -> Any:
            flight = super().launch(*step)
            self.num_launched += 1
            if self.num_launched == fails_at:
                raise MemoryError
            return flight

    engine = make(cuda, kind, broken=Fails)
    handles = [engine.submit(request) for request in requests()]
    failed = 0
    while engine.has_work:
        try:
            engine.step()
        except MemoryError:
            failed += 1
    assert failed == 1 and tokens([handle.completion for handle in handles]) == naive()


def test_a_policy_that_wishes_for_more_than_there_is_room_for(cuda: SimpleNamespace) -> None:
    assert MOST == cuda.slots.MAX_DRAFT
    engine = make(cuda, "ahead", policy=StaticPolicy(MOST + 5))
    asked = list[int]()
    draft = engine.runner.device._draft
    engine.runner.device._draft = lambda slot, k: asked.append(k) or draft(slot, k)
    assert tokens(run(engine)) == naive() and max(asked) == MOST


def test_rows_without_drafts_here_and_there_need_no_graph_of_their_own(cuda: SimpleNamespace) -> None:
    def size(rows: int, tokens: int, fills: bool = True) -> tuple[int, int]:
        found = cuda.runner._size(rows, tokens, 4, 3, fills=fills)
        return found.num_rows, found.num_tokens

    assert {size(rows, 4 * rows - lacks) for rows in (100, 110, 128) for lacks in (0, 6, 40)} == {(128, 512)}
    assert {size(rows, 4 * rows - lacks) for rows in (13, 16) for lacks in (0, 5, 20)} == {(16, 64)}
    assert size(128, 300) == (128, 384) and size(16, 30) == (16, 32)  # most have none: that would be too much
    assert size(100, 360, fills=False) == (128, 384) and size(13, 40, fills=False) == (16, 48)
    # What rounding up the rows adds is not filled: nobody is there who might have it.
    for rows, queries, wanted in ((100, 1, 128), (600, 1, 640), (140, 4, 640), (40, 6, 256), (140, 6, 896)):
        assert cuda.runner._size(rows, rows * queries, queries, fills=True).num_tokens == wanted


def test_whose_history_it_is_makes_no_graphs_anew(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits bring a drafter of their own each time; and one that is gone leaves its address to the next."""
    monkeypatch.setattr(cuda.runner, "Graphs", lambda *args: SimpleNamespace(head=args[4]))
    monkeypatch.setattr(cuda.runner, "_Mail", lambda graphs: None)
    monkeypatch.setattr(cuda.runner, "LEAST_TOLD", 1 << 12)
    paged = Decoder(TABLE, 16, max_positions=128, eos_token_ids=(EOS,))
    paged.decoder, paged.kv = SimpleNamespace(device=Decoder.device, config=SimpleNamespace(max_positions=128)), "kv"
    runner, found = cuda.runner.GraphRunner(paged, None, 2), []
    for recency in (0.8, 0.8, 0.5, 0.8):
        runner.equip(HistoryAhead(Library(), recency))
        found.append(runner._ready())
    assert found[0] is found[1] is found[3] is not found[2] and found[2].head.reading.recency == 0.5
    runner.equip(None)
    assert runner._ready().head is None


@pytest.mark.parametrize("given", ["16", "{ 1 = 16, 8 = 2 }"])
def test_longer_drafts_than_a_slot_has_room_for_are_refused(cuda: SimpleNamespace, given: str) -> None:
    head = SimpleNamespace(config=SimpleNamespace(taps=(0,)))
    for length, refused in ((given, True), ("15", False)):
        wishes = ["method=eagle3", f"num_speculative_tokens={length}", "head_dtype=model"]
        config = load_config(None, [f"speculation.{wish}" for wish in wishes])
        with pytest.raises(ValueError, match="at most 15; lower it") if refused else nullcontext():
            _ahead(config, None, head)  # type: ignore[arg-type]


def head_kv(cuda: SimpleNamespace, prompt: tuple[int, ...], draft: list[int]) -> tuple[torch.Tensor, ...]:
    """A prefill row with this draft goes by the eager runner; what the device's head then has of it, by position, and
    how many positions that are."""
    decoder = tiny_decoder()
    head, paged = tiny_head(decoder), PagedDecoder(decoder, 16)
    paged.tap(head.config.taps)
    sequence = Sequence(Request(0, prompt, SamplingParams(max_tokens=30, ignore_eos=True), 5), 0, 256, ())
    assert paged.pool.reserve(sequence.table, len(prompt) + len(draft) + 1)
    eager = EagerRunner(paged, Sampler(), RULES["coupled"])
    rows = [Row(sequence, len(prompt), True, np.array(draft, np.int32))]
    landed = eager.launch(rows, {}).land()
    runner: Any = object.__new__(cuda.runner.GraphRunner)
    runner.paged, runner._device = paged, torch.device("cpu")
    kv = PagedKV(head.config.layer, 16, decoder.dtype, "cpu")
    runner._take_in(SimpleNamespace(head=head, embed=decoder.embed, kv=kv), rows, landed)
    emitted = landed.verdict.tokens[0, : landed.verdict.num_accepted[0] + 1]
    num = len(prompt) + len(emitted) - 1
    return (*kv.read(0, torch.tensor(sequence.table.blocks), num), torch.from_numpy(emitted.copy()))


@pytest.mark.parametrize("num_right", [0, 2, 3])
def test_a_head_has_no_holes_where_a_prefill_row_verified_a_draft(cuda: SimpleNamespace, num_right: int) -> None:
    """What was accepted behind a prompt is in the head's KV, as if it had been part of the prompt."""
    prompt = tuple(range(1, 21))
    plain = one_by_one.generate(
        tiny_decoder(), [Request(0, prompt, SamplingParams(max_tokens=4, ignore_eos=True), 5)]
    )[0].token_ids.tolist()  # fmt: skip
    draft = [*plain[:num_right], *((token + 1) % 60 for token in plain[num_right:3])]
    keys, values, emitted = head_kv(cuda, prompt, draft)
    assert emitted.tolist() == plain[: num_right + 1] and len(keys) == 20 + num_right
    whole_keys, whole_values, last = head_kv(cuda, (*prompt, *plain[:num_right]), [])
    assert last.tolist() == plain[num_right : num_right + 1]
    torch.testing.assert_close(keys, whole_keys)
    torch.testing.assert_close(values, whole_values)
    assert keys.abs().amin(0).max() > 0 and (keys.abs().sum((1, 2)) > 0).all(), "a position that was never written"


def test_the_number_of_captured_graphs_is_bounded(
    graphs: Any, cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was not used for longest goes, and is captured again when it is needed."""
    monkeypatch.setattr(cuda.graphs, "MAX_GRAPHS", 3)
    sizes = [cuda.graphs.Size(1, n, n) for n in range(1, 6)]
    for size in sizes[:3]:
        graphs.prepare(size)
        graphs.seconds[size] = 1.0
    graphs.run(sizes[0])
    graphs.prepare(sizes[3])
    assert list(graphs._captured) == [sizes[2], sizes[0], sizes[3]] and sizes[1] not in graphs.seconds
    graphs.prepare(sizes[1])
    assert graphs.num_captured == 5 and list(graphs._captured) == [sizes[0], sizes[3], sizes[1]]


def test_graphs_of_the_last_drafters_are_kept(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make_graphs(*parts: Any) -> Any:
        made.append(SimpleNamespace(num_captured=2, head=parts[4]))
        return made[-1]

    monkeypatch.setattr(cuda.runner, "Graphs", make_graphs)
    monkeypatch.setattr(cuda.runner, "DeviceHistory", type("None", (), {"__init__": lambda self, *parts: None}))
    runner: Any = object.__new__(cuda.runner.GraphRunner)
    decoder = SimpleNamespace(config=SimpleNamespace(max_positions=64), device="cpu")
    runner.paged = SimpleNamespace(kv=object(), decoder=decoder)
    runner.slots = runner.imposed = None
    runner.max_num_seqs, runner._num_dropped, runner.eager, runner._device = 4, 0, False, "cpu"
    runner._graphs, runner._mail, runner.ahead = {}, [object()], object()
    for i in range(6):
        runner._historian = SimpleNamespace(recency=0.1 * i, min_match=1)
        assert runner._ready() is made[-1] and runner._ready() is made[-1]
    assert len(made) == 6 and len(runner._graphs) == cuda.runner.MAX_DRAFTERS and runner.num_captured == 12
