"""A Python simulation of a CUDA device, for the graph runner's host side on a CPU.

The simulated device knows only what the runner sends: sequences, block tables and row inputs. Its model reads tokens
back from their KV blocks, so that a block that was not sent, or of another sequence, gives other tokens than the naive
engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import check_blocks, kernel_modules, naive_generate

from paceline.drafters import device as device_drafters
from paceline.drafters.device import (
    DeviceDSparkDrafter,
    DeviceEagle3Drafter,
    DeviceHistoryDrafter,
    DeviceHybridDrafter,
)
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner
from paceline.model.kv import BlockTable
from paceline.model.paged import PagedDecoder, Span
from paceline.model.sample import Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.acceptance import NUM_SCORES
from paceline.speculation.device_drafter import MAX_DRAFT
from paceline.speculation.history_store import HistoryStore
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams
from paceline.verify.drafters import AdversarialDrafter
from paceline.verify.table import Table, TableDecoder

VOCAB, EOS, K, NUM_SEQS = 7, 6, 3, 6
TABLE = Table(VOCAB, seed=5)
HISTORY, HEAD = 0, 1  # sources of a hybrid's drafts
MODULES = ("graphs", "device_state", "graph_history", "graph_hybrid", "graph_eagle3", "graph_dspark")


def simulated_cuda() -> Iterator[SimpleNamespace]:
    """The modules with kernels, whether Triton is installed or not; and the simulation in place of CUDA."""
    paths = {name: f"model.cuda.{name}" for name in MODULES}
    with kernel_modules(runner="engine.graph_runner", **paths) as modules, pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules.runner, "Graphs", SimulatedGraphs)
        patch.setattr(modules.runner, "_HostBuffers", HostBuffers)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(device_drafters, "MIN_HISTORY_TOKENS", 1 << 12)
        patch.setattr(device_drafters, "MAX_HISTORY_TOKENS", 1 << 12)
        yield modules


class SimulatedDevice:
    """What all graphs of an engine share."""

    def __init__(self, cuda: SimpleNamespace) -> None:
        self.cuda, self.rng = cuda, np.random.default_rng(0)
        self.stream = 1
        self.truth: dict[int, list[int]] = {}  # noise key -> prompt and the tokens that will be emitted
        self.num_runs = self.num_sent_blocks = self.num_selections = self.num_fitted = 0
        self.num_stopped = self.num_appended = self.num_not_found = 0
        self.draft_lengths: list[int] = []  # of each row of each step


class Decoder(TableDecoder):
    device = torch.device("cpu")
    simulated: SimulatedDevice


class Event:
    """Every launch takes a thousand seconds times its number, so that a time shows which step it belongs to."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.num_runs, self.is_over = device, -1, False

    def record(self, stream: int) -> None:
        assert stream == self.device.stream, "not the stream that the step runs on"
        self.num_runs, self.is_over = self.device.num_runs, False

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, done: Event) -> float:
        num_runs = done.num_runs - self.num_runs  # none if only prompts were computed
        assert done.is_over and num_runs in (0, 1), "another step's"
        return 1e6 * done.num_runs * num_runs


class HostBuffers:
    """In place of `_HostBuffers`, without pinned memory."""

    def __init__(self, graphs: SimulatedGraphs) -> None:
        self.inputs, self.outputs = torch.zeros_like(graphs.input_words), graphs.new_outputs()
        self.input_words = self.inputs.numpy()
        for name in ("tokens", "logprobs", "scores", "sources"):
            setattr(self, name, getattr(self.outputs, name).numpy())
        self.prefill_started, self.started, self.done, self.ended = (Event(graphs.simulated) for _ in range(4))


class SimulatedHead:
    """In place of `GraphHead`. The simulation drafts for it."""

    aux_layers, may_draft_less = (0,), False

    def __init__(self) -> None:
        self.calibration = torch.ones(MAX_DRAFT, NUM_SCORES)

    def prefill(self, spans: list[Span], paged: PagedDecoder) -> None:
        """Each position's hidden states are there: the logits after it, in this decoder."""
        tables = [(span.table, span.start, span.start + len(span.tokens)) for span in spans]
        assert (paged.aux_hidden_states(tables) != 0).any(1).all()


class SimulatedEagle3(DeviceEagle3Drafter):
    def build(self, context: Any) -> Any:
        return SimulatedHead()


class SimulatedDSpark(DeviceDSparkDrafter):
    def build(self, context: Any) -> Any:
        return SimulatedHead()


class SimulatedGraphs:
    """In place of `Graphs`. Drafts k tokens, most of them right: it looks them up."""

    def __init__(self, decoder: Decoder, kv: Any, state: Any, max_rows: int, drafter: Any, *more: Any) -> None:
        self.paged, self.state, self.drafter, self.simulated = decoder, state, drafter, decoder.simulated
        self.cuda = self.simulated.cuda
        self.input_words, self.outputs = torch.zeros(4096, dtype=torch.int32), self.new_outputs()
        self.seconds: dict[Any, float] = {}
        self.num_captured = 0

    def new_outputs(self) -> Any:
        return self.cuda.graphs.OutputBuffers(16)

    @property
    def stream(self) -> int:
        return self.simulated.stream

    def fit(self, size: Any, max_draft_length: int) -> Any:
        self.simulated.num_fitted += 1
        return replace(size, num_tokens=size.num_tokens + 3, draft_length=max_draft_length if size.draft_length else 0)

    def prepare(self, size: Any) -> None:
        pass

    def run(self, size: Any) -> None:
        self.simulated.num_runs += 1
        words, state = self.input_words.numpy(), self.state
        row_inputs = words[: size.num_row_words].reshape(-1, self.cuda.device_state.ROW_WORDS)
        for slot, index, block in words[size.num_row_words : size.num_words - 1].reshape(-1, 3):
            if slot >= 0:
                state.block_tables[slot, index] = int(block)
                self.simulated.num_sent_blocks += 1
        if size.selects_drafts:
            self._select_drafts(row_inputs, int(words[size.num_words - 1]))
        spans, slots = [], []
        for slot, num, last, length, *drafted in row_inputs.tolist():
            if slot < 0:
                continue
            if last < 0:
                last, length = int(state.last[slot]), int(state.length[slot])
            own = [j for j, token in enumerate(drafted[:num]) if token < 0]
            assert (state.survival[slot, own] > 0).all(), "verifies a token that was not drafted"
            draft = [int(state.drafts[slot, j]) if token < 0 else token for j, token in enumerate(drafted[:num])]
            state.length[slot] = length
            table = BlockTable(state.block_tables[slot].tolist())
            spans.append(Span(np.array([last, *draft], np.int32), length - 1, table, 1 + num))
            slots.append(slot)
        assert sum(span.num_logits for span in spans) <= size.num_tokens
        self._commit(slots, spans)
        for row, slot in enumerate(slots):
            if self.drafter is not None:
                self._draft(row, slot, size.draft_length)
            if size.stops_early and self.simulated.rng.random() < 0.3:
                state.survival[slot, 1:] = 0
                self.simulated.num_stopped += 1

    def _select_drafts(self, row_inputs: np.ndarray, budget: int) -> None:
        self.simulated.num_selections += 1
        survival = self.state.survival.numpy()
        candidates = [(-survival[slot, j], r, j) for r, (slot, num) in enumerate(row_inputs[:, :2]) for j in range(num)]
        selected = sorted(each for each in candidates if each[0] < 0)[:budget]
        row_inputs[:, 1] = np.bincount([r for _, r, _ in selected], minlength=len(row_inputs))

    def _commit(self, slots: list[int], spans: list[Span]) -> None:
        state, outputs = self.state, self.outputs
        of = np.repeat(slots, [span.num_logits for span in spans])
        params = SamplingArrays(
            *(getattr(state, name).numpy()[of] for name in ("temperature", "top_k", "top_p", "min_p"))
        )
        positions = np.concatenate([span.start + 1 + np.arange(span.num_logits) for span in spans])
        keys = state.key.numpy()[of].view(np.uint64)
        draws = Sampler().draw(self.paged.forward(spans), keys, positions, params)
        end = 0
        for row, (slot, span) in enumerate(zip(slots, spans, strict=True)):
            begin, end = end, end + span.num_logits
            sampled, draft = draws.tokens[begin:end], span.tokens[1:]
            wrong = np.flatnonzero(sampled[:-1] != draft)
            num = 1 + (int(wrong[0]) if len(wrong) else len(draft))
            outputs.tokens[row, 0], outputs.tokens[row, 1] = num, len(draft)
            outputs.tokens[row, 2 : 2 + num] = torch.from_numpy(sampled[:num])
            outputs.logprobs[row, 0, :num] = torch.from_numpy(draws.logprobs[begin : begin + num])
            outputs.logprobs[row, 1, :num] = torch.from_numpy(draws.raw_logprobs[begin : begin + num])
            state.last[slot], state.length[slot] = int(sampled[num - 1]), span.start + 1 + num
            history = getattr(self.drafter, "history", self.drafter)
            if isinstance(history, self.cuda.graph_history.GraphHistory):
                self._append(history, slot, sampled[:num])

    def _append(self, history: Any, slot: int, emitted: np.ndarray) -> None:
        """An entry must have what its sequence emitted."""
        entry = int(history.entry_of[slot])
        if entry < 0:
            return
        start, length = int(history.starts[entry]), int(history.lengths[entry]) + len(emitted)
        assert start + length <= int(history.ends[entry])
        history.tokens[start + length - len(emitted) : start + length] = torch.from_numpy(emitted)
        history.lengths[entry] = length
        whole = self.simulated.truth.get(int(self.state.key[slot]))
        if whole is not None:  # the step may have run past the sequence's end
            end = int(self.state.length[slot])
            known = whole[max(0, end - length) : end]
            assert history.tokens[start : start + len(known)].tolist() == known
            self.simulated.num_appended += 1

    def _draft(self, row: int, slot: int, k: int) -> None:
        """History often finds nothing, or less than k tokens."""
        simulated, state, outputs = self.simulated, self.state, self.outputs
        simulated.draft_lengths.append(k)
        source, num = HISTORY, int(simulated.rng.integers(k + 1))
        is_hybrid = isinstance(self.drafter, self.cuda.graph_hybrid.GraphHybrid)
        if isinstance(self.drafter, SimulatedHead) or (is_hybrid and (not num or simulated.rng.random() < 0.5)):
            source, num = HEAD, k
        simulated.num_not_found += k - num
        whole, length = simulated.truth.get(int(state.key[slot]), []), int(state.length[slot])
        for j in range(k):
            right = whole[length + j] if length + j < len(whole) else 0
            state.drafts[slot, j] = right if j < num and simulated.rng.random() < 0.7 else 0
            probability = 0.7 if j < num else 0.0
            outputs.scores[row, j] = probability
            state.survival[slot, j] = probability * (1.0 if j == 0 else state.survival[slot, j - 1])
        outputs.sources[row] = source


def make(
    cuda: SimpleNamespace, drafter: str, num_blocks: int = 64, policy: Any = None, runner_class: type | None = None,
    **options: Any,
) -> LocalEngine:  # fmt: skip
    paged = Decoder(TABLE, num_blocks, max_positions=128, eos_token_ids=(EOS,))
    paged.simulated = SimulatedDevice(cuda)
    eager = EagerRunner(paged, Sampler(), RULES["coupled"])
    runner = (runner_class or cuda.runner.GraphRunner)(paged, eager, NUM_SEQS)
    head: Any = SimpleNamespace(config=SimpleNamespace(aux_layers=(0,), block_size=15))
    drafters: dict[str, Any] = {
        "none": None, "random": AdversarialDrafter(VOCAB), "suffix": SuffixDrafter(), "eagle3": SimulatedEagle3(head),
        "dspark": SimulatedDSpark(head), "hybrid": DeviceHybridDrafter(HistoryStore(), SimulatedEagle3(head)),
        "dspark hybrid": DeviceHybridDrafter(HistoryStore(), SimulatedDSpark(head)),
        "history": DeviceHistoryDrafter(HistoryStore()),
    }  # fmt: skip
    return LocalEngine(
        paged, runner=runner, drafter=drafters[drafter], policy=policy or StaticPolicy(K), max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=64, **options,
    )  # fmt: skip


def device(engine: LocalEngine) -> SimulatedDevice:
    return engine.paged.simulated  # type: ignore[attr-defined]


def requests() -> list[Request]:
    rng = np.random.default_rng(2)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.8}]
    return [
        Request(
            i,
            tuple(rng.integers(0, EOS, rng.integers(1, 40)).tolist()),
            SamplingParams(max_tokens=int(rng.integers(1, 60)), ignore_eos=i % 4 > 0, **kinds[i % 3]),
            17 * i,
            str(i % 3),
        )
        for i in range(20)
    ]


@cache
def naive() -> list[list[int]]:
    return naive_generate(TABLE, requests(), (EOS,), 128)


def submit(engine: LocalEngine) -> list[Any]:
    for request, emitted in zip(requests(), naive(), strict=True):
        device(engine).truth[request.noise_key] = [*request.prompt_ids, *emitted]
    return [engine.submit(request) for request in requests()]


def run(engine: LocalEngine) -> list[Completion]:
    handles = submit(engine)
    while engine.has_work:
        device(engine).stream += 1
        engine.step()
        check_blocks(engine)
    assert not any(engine.paged.pool.ref_counts)
    return [handle.completion for handle in handles]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


class Fails:
    """Raises once: after the n-th launch, or in the n-th wait."""

    def __init__(self, cuda: SimpleNamespace, patch: pytest.MonkeyPatch, call: str, n: int) -> None:
        owner = cuda.runner.GraphRunner if call == "launch" else cuda.runner._PendingGraphStep
        real, self.num_calls, self.num_failed = getattr(owner, call), 0, 0

        def failing(*args: Any) -> Any:
            found = real(*args)
            self.num_calls += 1
            if self.num_calls == n:
                self.num_failed += 1
                raise MemoryError
            return found

        patch.setattr(owner, call, failing)


def run_with_failures(engine: LocalEngine) -> list[Completion]:
    handles = submit(engine)
    while engine.has_work:
        try:
            engine.step()
        except MemoryError:
            continue
    return [handle.completion for handle in handles]
