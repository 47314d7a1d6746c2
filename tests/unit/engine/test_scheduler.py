"""Random arrivals, lengths, memory and drafts: no block leaks, none is shared wrongly, tokens as of the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LetterTokenizer, check_blocks, naive_generate

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner
from paceline.model.kv import BlockPool, BlockTable
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams
from paceline.verify.drafters import AdversarialDrafter
from paceline.verify.table import Table, TableDecoder, TokenKV

VOCAB = 6
TABLE = Table(VOCAB, seed=3)


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, object]:
    prompts = draw(st.lists(st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=40), min_size=1, max_size=3))
    requests = []
    for i in range(draw(st.integers(1, 10))):
        sampling = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.8, 1.0])),
            top_k=draw(st.sampled_from([0, 3])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            max_tokens=draw(st.integers(1, 40)),
            stop=draw(st.sampled_from([(), ("ab",), ("dca", "bb")])),
        )
        prompt = draw(st.sampled_from(prompts))
        requests.append(Request(i, tuple(prompt), sampling, draw(st.integers(0, 2**64 - 1)), str(prompt)))
    return {
        "requests": requests,
        "arrivals": sorted(draw(st.lists(st.integers(0, 12), min_size=len(requests), max_size=len(requests)))),
        "num_blocks": draw(st.integers(6, 14)),
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_num_batched_tokens": draw(st.integers(1, 40)),
        "prefix_sharing": draw(st.booleans()),
        "k": draw(st.integers(0, 5)),
        "drafter": draw(st.sampled_from(["suffix", "adversarial"])),
        "order": draw(st.sampled_from(["arrival", "longest"])),
    }


def run(workload: dict[str, object], decoder: type[TableDecoder] = TableDecoder) -> list[list[int]]:
    engine = LocalEngine(
        decoder(TABLE, workload["num_blocks"], eos_token_ids=(VOCAB - 1,)),
        drafter=SuffixDrafter() if workload["drafter"] == "suffix" else AdversarialDrafter(VOCAB),
        policy=StaticPolicy(workload["k"]),
        max_num_seqs=workload["max_num_seqs"],
        max_num_batched_tokens=workload["max_num_batched_tokens"],
        prefix_sharing=workload["prefix_sharing"],
        order=workload["order"],
        tokenizer=LetterTokenizer(),
    )
    arriving = list(zip(workload["arrivals"], workload["requests"], strict=True))
    handles = []
    for step in range(5000):
        while arriving and arriving[0][0] <= step:
            handles.append(engine.submit(arriving.pop(0)[1]))
        engine.step()
        check_blocks(engine)
        if not arriving and not engine.has_work:
            break
    assert not engine.has_work, "the engine makes no progress"
    assert not any(engine.paged.pool.ref_counts)
    assert all(t.num_query_tokens <= workload["max_num_batched_tokens"] for t in engine.drain_trace())
    return [h.completion.token_ids.tolist() for h in handles]


def expected(workload: dict[str, object]) -> list[list[int]]:
    return naive_generate(TABLE, workload["requests"], (VOCAB - 1,))


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_equal_to_the_reference_engine(workload: dict[str, object]) -> None:
    assert run(workload) == expected(workload)


TIGHT: dict[str, object] = {
    "requests": [
        Request(i, (0, 1, 2, 3, 4) * 4, SamplingParams(max_tokens=40, ignore_eos=True), 7 * i, "p") for i in range(6)
    ],
    "arrivals": [0] * 6,
    "num_blocks": 9,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "prefix_sharing": True,
    "k": 3,
    "drafter": "suffix",
    "order": "longest",
}


def test_preemption_happens_and_changes_nothing() -> None:
    engine = LocalEngine(TableDecoder(TABLE, 9), drafter=SuffixDrafter(), policy=StaticPolicy(3))
    completions = engine.generate(TIGHT["requests"])
    assert sum(c.num_preemptions for c in completions) > 0
    assert [c.token_ids.tolist() for c in completions] == naive_generate(TABLE, TIGHT["requests"], ())


def test_a_prompt_is_computed_once_for_its_group() -> None:
    prompt, num = tuple([1, 2, 3, 0] * 10), 8
    requests = [Request(i, prompt, SamplingParams(max_tokens=5, ignore_eos=True), i) for i in range(num)]
    counts = {}
    for sharing in (True, False):
        engine = LocalEngine(TableDecoder(TABLE, 64), prefix_sharing=sharing)
        completions = engine.generate(requests)
        counts[sharing] = sum(t.num_query_tokens for t in engine.drain_trace())
        assert [c.token_ids.tolist() for c in completions] == naive_generate(TABLE, requests, ())
    # Shared: the whole prompt once, then its last token for each sibling (that is where they begin to differ).
    assert counts[True] == len(prompt) + (num - 1) + num * 4
    assert counts[False] == num * len(prompt) + num * 4


def test_what_a_copy_holds_is_given_up_in_time() -> None:
    """Two blocks and part of a third are found, and the fourth can only be the one that the part is copied from."""
    prompt, kind = tuple([1, 2, 3, 0] * 16), {"ignore_eos": True}
    first = Request(0, prompt[:42], SamplingParams(max_tokens=16, **kind), 0)
    second = Request(1, prompt[:63], SamplingParams(max_tokens=1, **kind), 1)
    engine = LocalEngine(TableDecoder(TABLE, 4))
    found = [engine.generate([request])[0].token_ids.tolist() for request in (first, second)]
    assert found == naive_generate(TABLE, [first, second], ())


class _CopiesNothing(TokenKV):
    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        pass


class _SharesUncopied(TableDecoder):
    """Broken: the part of a block that siblings share is not copied."""

    def wake(self) -> None:
        self.kv = _CopiesNothing(self.pool.num_blocks)


class _Leaks(BlockPool):
    """Broken: the last block of a truncation is forgotten."""

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        if num_tokens == 0 and table.blocks:
            table.blocks.pop()
        super().truncate(table, num_tokens)


class _LeakyDecoder(TableDecoder):
    def wake(self) -> None:
        super().wake()
        self.pool = _Leaks(self.pool.num_blocks)


class _MatchesTooMuch(BlockPool):
    """Broken: a partial match is taken for one token longer than it is."""

    def match_prefix(self, table: BlockTable, tokens: np.ndarray) -> tuple[int, tuple[int, int] | None]:
        covered, partial = super().match_prefix(table, tokens)
        if partial is not None and covered + partial[1] < len(tokens):
            partial = partial[0], partial[1] + 1
        return covered, partial


class _OptimisticDecoder(TableDecoder):
    def wake(self) -> None:
        super().wake()
        self.pool = _MatchesTooMuch(self.pool.num_blocks)


@pytest.mark.parametrize("broken", [_SharesUncopied, _LeakyDecoder, _OptimisticDecoder])
def test_broken_memory_is_caught(broken: type[TableDecoder]) -> None:
    workload = TIGHT | {
        "requests": [
            *TIGHT["requests"],
            Request(
                9, (0, 1, 2, 3, 4) * 3 + (0, 1, 2, 0, 2, 1), SamplingParams(max_tokens=20, ignore_eos=True), 3, "q"
            ),
        ],
        "arrivals": [*TIGHT["arrivals"], 4],
        "num_blocks": 30,
    }
    assert run(workload) == expected(workload)
    with pytest.raises(AssertionError):
        assert run(workload, broken) == expected(workload)


# -- longest first --------------------------------------------------------------------------------------------------

EOS = VOCAB - 1


def length_model(lengths: dict[str, int]) -> LengthModel:
    """A model that has seen each problem once."""
    model = LengthModel()
    for i, (problem, num_tokens) in enumerate(lengths.items()):
        model.begin(Request(1000 + i, (0,), problem=problem))
        model.end(1000 + i, num_tokens)
    return model


def ordered(order: str, lengths: LengthModel, max_num_seqs: int = 4) -> LocalEngine:
    return LocalEngine(
        TableDecoder(TABLE, 64, eos_token_ids=(EOS,)), max_num_seqs=max_num_seqs, order=order, lengths=lengths
    )


def run_of(engine: LocalEngine, requests: list[Request]) -> tuple[int, list[list[int]], list[str]]:
    """Steps, tokens, and the problems of the requests in the order in which they began."""
    handles, num_steps, began = [engine.submit(r) for r in requests], 0, {}
    while engine.has_work:
        engine.step()
        check_blocks(engine)
        began |= {s.arrival: str(s.request.problem) for s in engine.scheduler.running}
        num_steps += 1
    return num_steps, [h.completion.token_ids.tolist() for h in handles], list(began.values())


def test_longest_first_ends_sooner_with_the_same_tokens() -> None:
    """Many short ones, and a long one that arrives last. Limits are alike: only history distinguishes them."""
    short = [Request(i, (i % 5, 1, 2), SamplingParams(max_tokens=40), i, f"p{i}") for i in range(24)]
    long = Request(99, (3, 1, 2), SamplingParams(max_tokens=40, ignore_eos=True), 99, "long")
    requests = [*short, long]
    outs = naive_generate(TABLE, requests, (EOS,))
    known = {str(r.problem): len(out) for r, out in zip(requests, outs, strict=True)}
    num_tokens = sum(known.values())
    arrival, tokens, _ = run_of(ordered("arrival", length_model(known)), requests)
    longest, same_tokens, _ = run_of(ordered("longest", length_model(known)), requests)
    assert tokens == same_tokens == outs
    assert longest <= max(known["long"], num_tokens / 4) + 12 < arrival - 10
    # Broken variants: a model that has it backwards, and one that knows nothing.
    backwards = length_model({problem: 41 - n for problem, n in known.items()})
    assert run_of(ordered("longest", backwards), requests)[0] > longest + 20
    assert run_of(ordered("longest", LengthModel()), requests)[2][-1] == "long"


@pytest.mark.parametrize("batches_prompts", [False, True])
def test_prompts_start_several_at_a_time_where_they_are_costly(
    batches_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 96 slots, from when three are free until none is; the last ones do not wait for others."""
    monkeypatch.setattr(EagerRunner, "batches_prompts", batches_prompts)
    rng, num = np.random.default_rng(0), 200
    requests = [
        Request(i, (1, 2, i % 4), SamplingParams(max_tokens=int(rng.integers(5, 60)), ignore_eos=True), i, None)
        for i in range(num)
    ]
    engine = LocalEngine(TableDecoder(TABLE, 4000), max_num_seqs=96, max_num_batched_tokens=512, prefix_sharing=False)
    started, admit = list[int](), engine.scheduler._admit

    def counted(budget: int) -> list:
        if new := admit(budget):
            started.append(len(new))
        return new

    monkeypatch.setattr(engine.scheduler, "_admit", counted)
    found = engine.generate(requests)
    assert [c.token_ids.tolist() for c in found] == naive_generate(TABLE, requests, VOCAB - 1)
    assert started[0] == 96 and sum(started) == num
    assert (min(started[:-1]) >= 3) == batches_prompts


def _num_steps_until_all_decode(limit: int | None) -> int:
    requests = [
        Request(i, tuple(np.random.default_rng(i).integers(0, VOCAB - 1, 50).tolist()),
                SamplingParams(max_tokens=500, ignore_eos=True), i)
        for i in range(64)
    ]  # fmt: skip
    engine = LocalEngine(
        TableDecoder(TABLE, 4000), max_num_seqs=64, max_num_batched_tokens=500, max_num_prefill_tokens=limit
    )
    for request in requests:
        engine.submit(request)
    num_steps = 0
    while not all(sequence.num_tokens > sequence.num_prompt for sequence in engine.sequences):
        engine.step()
        num_steps += 1
    return num_steps


def test_a_limit_for_prompts_hardly_delays_a_burst() -> None:
    """64 sequences wait for prompts of 50 tokens; ten of these are in a step without a limit."""
    without, limited = _num_steps_until_all_decode(None), _num_steps_until_all_decode(50)
    assert without == 7 and without < limited <= 3 * without


@pytest.mark.parametrize("order", ["arrival", "longest"])
def test_slots_do_not_stay_free_where_prompts_start_together(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that wait for the prompt of another one: as soon as it is computed, they start."""
    monkeypatch.setattr(EagerRunner, "batches_prompts", True)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            i, (1, 2, i // 8 % 5, 1, i // 40 % 5), SamplingParams(max_tokens=length, ignore_eos=True), i, f"p{i // 8}"
        )
        for i, length in enumerate(rng.integers(20, 60, 400).tolist())
    ]
    engine = LocalEngine(TableDecoder(TABLE, 4000), max_num_seqs=128, max_num_batched_tokens=1024, order=order)
    for request in requests:
        engine.submit(request)
    running = []
    while engine.scheduler.waiting:
        engine.step()
        running.append(len(engine.scheduler.running))
    assert np.mean(running[3:]) > 124, np.mean(running[3:])


def test_all_of_a_problem_begin_together() -> None:
    """More samples than places, arriving mixed: a problem begins in chunks, no other one between them; the longest
    first, equals by arrival."""
    lengths = {"a": 4, "b": 4, "c": 12}
    requests = [
        Request(3 * j + i, (i, 1, 2), SamplingParams(max_tokens=12, ignore_eos=True), i + j, problem)
        for j in range(5)
        for i, problem in enumerate(lengths)
    ]
    for max_num_seqs in (1, 2, 3, 5):
        _, tokens, began = run_of(ordered("longest", length_model(lengths), max_num_seqs), requests)
        assert began == ["c"] * 5 + ["a"] * 5 + ["b"] * 5
        assert tokens == naive_generate(TABLE, requests, ())
    assert run_of(ordered("arrival", length_model(lengths), 3), requests)[2][:3] == ["a", "b", "c"]


def test_those_sent_back_come_first() -> None:
    engine = ordered("longest", length_model({"short": 4, "long": 40}), max_num_seqs=1)
    engine.submit(Request(0, (1, 2), SamplingParams(max_tokens=4, ignore_eos=True), problem="short"))
    engine.step()
    engine.step()
    engine.submit(Request(1, (1, 3), SamplingParams(max_tokens=40, ignore_eos=True), problem="long"))
    engine.scheduler.preempt(engine.scheduler.running[0])
    engine.step()
    assert [s.request.problem for s in engine.scheduler.running] == ["short"]


def test_a_problem_that_has_begun_goes_on() -> None:
    """Its first samples turn out short; the rest of them are not put off for that."""
    requests = [Request(i, (ord(p) % 5, 1, 2), SamplingParams(max_tokens=40), i, p) for i, p in enumerate("ab" * 4)]
    lengths = length_model({"a": 30, "b": 28})
    _, tokens, began = run_of(ordered("longest", lengths, 2), requests)
    assert began == ["a"] * 4 + ["b"] * 4 and tokens == naive_generate(TABLE, requests, (EOS,))
    assert max(map(len, tokens)) < 28, "the example has no short ones"
