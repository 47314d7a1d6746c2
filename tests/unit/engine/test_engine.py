"""What an engine promises its callers, on targets small enough to check by hand."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import LetterTokenizer, check_blocks, naive_generate, tiny_decoder

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.engine.sequence import Record, Sequence
from paceline.model.attention import PackedAttention
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.weights import checksum, hf_state
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.metrics import summarise
from paceline.speculation.policy import Decision, StaticPolicy
from paceline.types import Provenance, Request, SamplingParams, StepTrace
from paceline.verify.table import Table, TableDecoder

VOCAB = 6
TABLE = Table(VOCAB, seed=3)
EOS = (VOCAB - 1,)


class Oracle(SuffixDrafter):
    """Knows the future: drafts what the request will emit, then something wrong."""

    def __init__(self, futures: dict[int, list[int]], num_right: int) -> None:
        super().__init__()
        self.futures, self.num_right = futures, num_right

    def propose(self, rows, caps):
        drafts = super().propose(rows, np.zeros_like(caps))
        width = int(caps.max())
        drafts.tokens, drafts.scores = (
            np.zeros((len(rows), width), np.int32),
            np.ones((len(rows), width), np.float32),
        )
        for i, (request_id, tokens) in enumerate(zip(rows.request_ids.tolist(), rows.tokens, strict=True)):
            future = self.futures[request_id][len(tokens) - 3 :]
            draft = [*future[: self.num_right], *((t + 1) % VOCAB for t in future[self.num_right :])][: caps[i]]
            drafts.tokens[i, : len(draft)] = draft
            drafts.num[i] = len(draft)
        return drafts


def requests(num: int, **sampling: object) -> list[Request]:
    return [Request(i, (0, 1, 2), SamplingParams(**sampling), 11 * i, "p") for i in range(num)]


def engine(num_right: int, k: int, wanted: list[Request], **options: object) -> LocalEngine:
    futures = dict(enumerate(naive_generate(TABLE, wanted, EOS)))
    return LocalEngine(
        TableDecoder(TABLE, eos_token_ids=EOS),
        drafter=Oracle(futures, num_right),
        policy=StaticPolicy(k),
        tokenizer=LetterTokenizer(),
        **options,
    )


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 17])
@pytest.mark.parametrize("k", [1, 4])
def test_the_length_limit_is_exact(max_tokens: int, k: int) -> None:
    wanted = requests(4, max_tokens=max_tokens, ignore_eos=True)
    found = engine(k, k, wanted).generate(wanted)
    assert [c.token_ids.tolist() for c in found] == naive_generate(TABLE, wanted, EOS)
    assert all(len(c.token_ids) == max_tokens and c.finish_reason == "length" for c in found)


def test_the_context_is_a_limit_too() -> None:
    wanted = requests(2, max_tokens=50, ignore_eos=True)
    decoder = TableDecoder(TABLE, max_positions=20)
    found = LocalEngine(decoder, drafter=NgramDrafter(1, 3), policy=StaticPolicy(4)).generate(wanted)
    assert all(len(c.token_ids) == 17 and c.finish_reason == "length" for c in found)


def test_a_stop_inside_an_accepted_draft_ends_it_there() -> None:
    wanted = requests(64, max_tokens=40, stop=("ab", "cd"), stop_token_ids=(4,))
    for k in (0, 6):
        running = engine(6, k, wanted)
        found = running.generate(wanted)
        assert [c.token_ids.tolist() for c in found] == naive_generate(TABLE, wanted, EOS)
        assert not any(running.paged.pool.ref_counts)
    reasons = {c.stop_reason for c in found}
    assert {4, 5, "ab", "cd"} <= reasons
    for c in found:
        text = LetterTokenizer().decode(c.token_ids.tolist())
        if isinstance(c.stop_reason, str):
            assert text.endswith(c.stop_reason)
            assert not any(s in text[:-1] for s in ("ab", "cd"))


def test_a_stop_string_of_many_tokens_per_character_is_seen() -> None:
    """Byte-level tokenizers spend up to four tokens on a character."""

    class ByteTokenizer:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    stop = "𓀀" * 10
    sequence = Sequence(Request(0, (1,), SamplingParams(max_tokens=99, stop=(stop,))), 0, 200, ())
    tokens = list(("so: " + stop + " and on").encode())
    assert sequence.find_stop(tokens, 1, ByteTokenizer().decode) == (len(("so: " + stop).encode()), stop)


def test_provenance_and_metrics_tell_what_happened() -> None:
    wanted = requests(1, max_tokens=9, ignore_eos=True)
    S, A, C, B = Provenance.SAMPLED, Provenance.ACCEPTED, Provenance.CORRECTED, Provenance.BONUS
    running = engine(2, 3, wanted)
    (found,) = running.generate(wanted)
    # Nine tokens, drafts of three of which two are right: two accepted, one corrected; the last draft is shorter (no
    # more than what may still be emitted before its last token) and right.
    assert found.provenance.tolist() == [A, A, C, A, A, C, A, A, B]
    assert found.sources.tolist() == [0] * 8 + [255]
    assert found.drafters == ("suffix",)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 8, 6)
    metrics = summarise([found], running.drain_trace())
    assert metrics["mean_acceptance_length"] == metrics["mean_acceptance_length_per_request"] == 3.0
    assert metrics["draft_acceptance_rate"] == 6 / 8
    assert metrics["acceptance_rate_per_position"] == [1.0, 1.0, 0.0]
    (found,) = engine(3, 3, wanted).generate(wanted)
    assert found.provenance.tolist() == [A, A, A, B, A, A, A, B, S]
    assert found.sources.tolist() == [0, 0, 0, 255, 0, 0, 0, 255, 255]


def test_request_weighted_metrics_count_requests_alike() -> None:
    wanted = [
        Request(0, (0, 1, 2), SamplingParams(max_tokens=40, ignore_eos=True), 0),
        Request(1, (0, 1, 2), SamplingParams(max_tokens=4, ignore_eos=True), 11),
    ]
    running = engine(3, 3, wanted)
    running.drafter.futures[0] = [(t + 1) % VOCAB for t in running.drafter.futures[0]]  # never right
    metrics = summarise(running.generate(wanted), running.drain_trace())
    assert metrics["mean_acceptance_length"] < 1.2
    assert metrics["mean_acceptance_length_per_request"] == 2.5


def test_logprobs_are_the_targets_processed_and_raw() -> None:
    wanted = requests(3, max_tokens=8, temperature=0.5, top_k=3, ignore_eos=True)
    for c in engine(4, 4, wanted).generate(wanted):
        tokens = [0, 1, 2]
        for token, logprob, raw in zip(c.token_ids, c.logprobs, c.raw_logprobs, strict=True):
            z = TABLE.logits_after(np.array(tokens))
            kept = np.where(z >= np.sort(z)[-3], z / 0.5, -np.inf)
            assert logprob == pytest.approx(kept[token] - np.log(np.exp(kept).sum()), rel=0, abs=1e-12)
            assert raw == pytest.approx(z[token] - np.log(np.exp(z).sum()), rel=0, abs=1e-12)
            tokens.append(int(token))


def test_abort_keeps_what_was_emitted_and_frees_the_rest() -> None:
    running = LocalEngine(TableDecoder(TABLE), drafter=SuffixDrafter(), policy=StaticPolicy(2), max_num_seqs=2)
    handles = [running.submit(r) for r in requests(3, max_tokens=30, ignore_eos=True)]
    for _ in range(4):
        running.step()
    running.abort(0)
    running.abort(2)  # still waiting
    check_blocks(running)
    assert handles[0].completion.finish_reason == "abort"
    assert len(handles[0].completion.token_ids) >= 4
    assert len(handles[2].completion.token_ids) == 0
    while running.has_work:
        running.step()
    assert handles[1].completion.finish_reason == "length"
    assert not any(running.paged.pool.ref_counts)
    with pytest.raises(ValueError, match="not running"):
        running.abort(0)


def test_an_interrupted_generate_leaves_nothing_behind() -> None:
    running = LocalEngine(TableDecoder(TABLE), drafter=SuffixDrafter())

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.generate(requests(3, max_tokens=30), interrupt)
    assert not running.has_work
    assert not any(running.paged.pool.ref_counts)
    assert len(running.generate(requests(3, max_tokens=5))) == 3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, (1,) * 32), "context is 32"),
        (Request(0, (1, 99)), "token id 99 is not in the vocabulary"),
        (Request(0, (1,), SamplingParams(stop=("x",), max_tokens=4)), "stop strings need a tokenizer"),
        (Request(0, (1,), SamplingParams(max_tokens=30)), "engine.kv_tokens = 16"),
    ],
)
def test_requests_that_cannot_run_are_refused(request_: Request, message: str) -> None:
    running = LocalEngine(TableDecoder(TABLE, 1, max_positions=32))
    with pytest.raises(ValueError, match=message):
        running.submit(request_)
    assert not running.has_work


def test_a_running_id_is_refused() -> None:
    running = LocalEngine(TableDecoder(TABLE))
    running.submit(requests(1)[0])
    with pytest.raises(ValueError, match="still running"):
        running.submit(requests(1)[0])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"min_p": -0.2},
        {"min_p": float("nan")},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_bad_sampling_parameters_name_themselves(params: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"sampling.{next(iter(params))} = "):
        SamplingParams(**params)


# -- weights change between steps -------------------------------------------------------------------------------------


def other_weights(seed: int = 5) -> list[tuple[str, torch.Tensor]]:
    return list(hf_state(tiny_decoder(seed=seed)))


def test_new_weights_come_with_a_receipt_and_a_version_per_token() -> None:
    decoder = tiny_decoder()
    running = LocalEngine(PagedDecoder(decoder, 32), version=3)
    handle = running.submit(Request(0, (1, 2, 3), SamplingParams(max_tokens=10, ignore_eos=True), 5))
    for _ in range(4):
        running.step()
    sent = other_weights()
    receipt = running.update_weights(sent, version=4)
    assert receipt.version == 4
    assert receipt.checksum == checksum(sent) != checksum(hf_state(tiny_decoder()))
    assert receipt.num_tensors == len(sent)
    while running.has_work:
        running.step()
    assert handle.completion.versions.tolist() == [3] * 4 + [4] * 6


def test_recompute_gives_what_the_new_weights_say_of_the_whole_past_and_keep_does_not() -> None:
    found = {}
    for inflight in ("recompute", "keep"):
        running = LocalEngine(PagedDecoder(tiny_decoder(), 32))
        handle = running.submit(Request(0, (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True), 5))
        for _ in range(4):
            running.step()
        running.update_weights(other_weights(), 1, inflight)
        while running.has_work:
            running.step()
        found[inflight] = handle.completion
    first = found["recompute"].token_ids[:4]
    assert first.tolist() == found["keep"].token_ids[:4].tolist()
    # The same as a fresh engine with the new weights that is handed prompt and first tokens: noise goes by position.
    fresh = LocalEngine(PagedDecoder(tiny_decoder(seed=5), 32))
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    (rest,) = fresh.generate([Request(0, (1, 2, 3, *first.tolist()), sampling, 5)])
    assert rest.token_ids.tolist() == found["recompute"].token_ids[4:].tolist()
    assert np.abs(rest.raw_logprobs - found["recompute"].raw_logprobs[4:]).max() < 1e-6
    assert np.abs(rest.raw_logprobs[:1] - found["keep"].raw_logprobs[4:5]).max() > 1e-4


def test_kv_of_old_weights_is_not_shared_with_new_requests() -> None:
    prompt = tuple(range(1, 40))
    running = LocalEngine(PagedDecoder(tiny_decoder(), 64))
    wanted = Request(0, prompt, SamplingParams(max_tokens=8, ignore_eos=True), 5)
    running.generate([wanted])
    running.update_weights(other_weights(), 1)
    (found,) = running.generate([wanted])
    (expected,) = LocalEngine(PagedDecoder(tiny_decoder(seed=5), 64)).generate([wanted])
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert np.abs(found.raw_logprobs - expected.raw_logprobs).max() < 1e-6


def test_a_transfer_with_a_missing_tensor_changes_nothing() -> None:
    running = LocalEngine(PagedDecoder(tiny_decoder(), 32))
    before = checksum(hf_state(running.paged.decoder))
    with pytest.raises(ValueError, match="missing"):
        running.update_weights(other_weights()[:-1], 1)
    assert checksum(hf_state(running.paged.decoder)) == before
    assert running.version == 0


def test_drafter_weights_and_drafters_are_swapped_between_steps() -> None:
    wanted = [Request(i, (1, 2, 3), SamplingParams(max_tokens=24, ignore_eos=True), i, "p") for i in range(3)]
    plain = LocalEngine(PagedDecoder(tiny_decoder(), 64)).generate(wanted)
    drafter = DraftModelDrafter(PagedDecoder(tiny_decoder(num_layers=1), 64), Sampler())
    running = LocalEngine(PagedDecoder(tiny_decoder(), 64), drafter=drafter, policy=StaticPolicy(3))
    handles = [running.submit(r) for r in wanted]
    for _ in range(3):
        running.step()
    update = list(hf_state(tiny_decoder(seed=9, num_layers=1)))
    receipt = running.update_drafter(update, 7)
    assert (receipt.version, receipt.checksum) == (7, checksum(update))
    for _ in range(2):
        running.step()
    last = running.drain_trace()[-1]
    assert last.drafter_version == 7 and last.num_history_bytes == 0
    history = SuffixDrafter()
    running.set_drafter(history)
    while running.has_work:
        running.step()
    assert running.drain_trace()[-1].num_history_bytes == history.num_bytes > 0
    assert [h.completion.token_ids.tolist() for h in handles] == [c.token_ids.tolist() for c in plain]
    assert handles[0].completion.drafters[0] == "draft_model"
    for c in (h.completion for h in handles):
        assert all(source == 255 or source < len(c.drafters) for source in c.sources)
    assert not any(drafter.paged.pool.ref_counts)
    with pytest.raises(ValueError, match="no weights"):
        running.update_drafter(update, 8)


def test_sleep_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []  # whether the KV tensors were freed before torch's cache was
    running = LocalEngine(PagedDecoder(tiny_decoder(), 32))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(running.paged.kv is None))
    wanted = [Request(0, (1, 2, 3), SamplingParams(max_tokens=6), 5)]
    before = running.generate(wanted)
    running.sleep()
    assert running.paged.kv is None and emptied == [True]
    running.wake()
    assert running.generate(wanted)[0].token_ids.tolist() == before[0].token_ids.tolist()
    running.submit(wanted[0])
    with pytest.raises(ValueError, match="still running"):
        running.sleep()


class Asking(SuffixDrafter):
    """Compares the features it is offered with those of a plain forward over the whole sequence."""

    aux_layers = (0, 2)

    def __init__(self, decoder) -> None:
        super().__init__()
        self.decoder, self.num_compared, self.wrong = decoder, 0, 0

    def propose(self, rows, caps):
        for i, tokens in enumerate(rows.tokens):
            count = int(rows.num_computed[i])
            if count:
                plain = self.decoder(
                    torch.as_tensor(tokens[:count]).long(), torch.arange(count), PackedAttention([count]), (0, 2)
                )
                expected = torch.cat([plain.aux_hidden_states[0], plain.aux_hidden_states[2]], -1)
                self.wrong += not torch.allclose(rows.aux_hidden_states([(i, 0, count)]), expected, atol=1e-9)
                self.num_compared += 1
        return super().propose(rows, caps)


def asking_engine(decoder, num_blocks: int = 64, **settings) -> tuple[LocalEngine, Asking]:
    drafter = Asking(decoder)
    paged = PagedDecoder(decoder, num_blocks)
    return LocalEngine(paged, drafter=drafter, policy=StaticPolicy(2), **settings), drafter


def test_features_are_the_targets_states_through_chunks_sharing_and_preemption() -> None:
    wanted = [
        Request(i, tuple(range(1, 38)), SamplingParams(max_tokens=60, ignore_eos=True), i, "same") for i in range(6)
    ]
    running, drafter = asking_engine(tiny_decoder(), num_blocks=12, max_num_batched_tokens=16)
    completions = running.generate(wanted)
    assert sum(c.num_preemptions for c in completions) > 0
    assert drafter.num_compared > 50
    assert drafter.wrong == 0


def test_a_drafter_that_comes_later_finds_features_too() -> None:
    running = LocalEngine(PagedDecoder(tiny_decoder(), 64), policy=StaticPolicy(2))
    handle = running.submit(Request(0, (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True), 5))
    for _ in range(6):
        running.step()
    drafter = Asking(tiny_decoder())
    running.set_drafter(drafter)
    while not handle.done:
        running.step()
    assert drafter.num_compared > 3
    assert drafter.wrong == 0


def test_features_of_the_wrong_layer_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagedDecoder.set_aux_layers
    monkeypatch.setattr(PagedDecoder, "set_aux_layers", lambda self, layers: right(self, (0, 1) if layers else ()))
    running, drafter = asking_engine(tiny_decoder())
    running.generate([Request(0, (1, 2, 3), SamplingParams(max_tokens=8, ignore_eos=True), 5)])
    assert drafter.wrong > 0


def test_a_stop_string_is_looked_for_in_the_tail_alone() -> None:
    """A step's cost must not grow with the completion: a list of all of its 200 000 tokens takes 1.6 MB."""
    sampling = SamplingParams(max_tokens=200_100, stop=("xyz",))
    sequence = Sequence(Request(0, (1, 2), sampling, 0), 0, 300_000, ())
    sequence.move(Record(200_010))
    sequence.record.tokens[2:] = 3
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return LetterTokenizer().decode(ids)

    tracemalloc.start()
    assert sequence.find_stop([4, 5], 200_000, decode) == (2, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000 and max(seen) <= len("xyz") + 16
    sequence.record.tokens[200_000:200_002] = [23, 24]
    assert sequence.find_stop([25, 4], 200_002, decode) == (1, "xyz")


class Lengthy(StaticPolicy):
    """One that keeps something of every request, as `das` does."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.live: set[int] = set()
        self.committed: list[object] = []
        self.observed: list[object] = []

    def begin(self, request: Request) -> None:
        self.live.add(request.request_id)

    def end(self, request_id: int) -> None:
        self.live.remove(request_id)

    def plan(self, rows: Rows) -> np.ndarray:
        assert self.live >= set(rows.request_ids.tolist())
        caps = super().plan(rows)
        self.decision = replace(self.decision, about=self)
        return caps

    def launched(self, decision: Decision) -> None:
        self.committed.append(decision)

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        assert decision.about is self, "another policy's decision"
        self.observed.append(decision)


def test_a_policy_is_replaced_while_requests_run() -> None:
    wanted = requests(3, max_tokens=20, ignore_eos=True)
    running, second = engine(2, 3, wanted), Lengthy(2)
    first = Lengthy(3)
    running.policy = first
    handles = [running.submit(request) for request in wanted]
    for _ in range(3):
        running.step()
    running.policy = second
    assert not first.live and second.live == {0, 1, 2}
    while running.has_work:
        running.step()
    assert not second.live and first.observed == first.committed and second.observed == second.committed
    assert len(first.observed) == 3 and second.observed
    assert [h.completion.token_ids.tolist() for h in handles] == naive_generate(TABLE, wanted, EOS)


def test_a_policy_that_a_rule_does_not_bear_is_refused_later_too() -> None:
    running = LocalEngine(TableDecoder(TABLE), drafter=NgramDrafter(), policy=StaticPolicy(2), rule="rejection")
    before = running.policy
    with pytest.raises(ValueError, match="rule = 'rejection' is biased by a policy"):
        running.policy = StaticPolicy(2, min_confidence=0.5)
    assert running.policy is before
