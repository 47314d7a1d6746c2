"""`paceline bench step`: the time of the engine's decode steps, by model shape, batch size and draft length.

Times are of the engine's own steps, from schedule to commit, in which every row of the batch decodes and verifies k
tokens; with policy `auto` as many as it chooses, at most k. Prompts are random and share no prefix, so that every row
reads its own keys and values. Weights are random and created on the device. Step times hardly depend on them (at its
power limit a GPU is 1% faster with uniform weights); acceptance does. Drafts come from a random EAGLE-3 or DSpark head,
or from a history that has these completions already, so that nearly all draft tokens are accepted. With
`imposed_acceptance` each draft token is accepted at random with a given probability; the probability is the head's
confidence, and `auto` uses it. This is for timing only: the emitted tokens are not samples of the model. No engine
setting can turn it on.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.bench.common import decode_steps
from paceline.bench.memory import is_out_of_memory, peak_memory_gib, reset_memory
from paceline.bench.random_weights import add_random_adapters, random_decoder, random_dspark, random_head
from paceline.bench.roofline import Load, step_s
from paceline.bench.step_settings import Settings, beta_probabilities, imposed_probability
from paceline.build.cost import NUM_ROUNDS, measure_drafts, time_step
from paceline.build.drafter import head_cost
from paceline.build.model import HOPPER, build_cuda_ops
from paceline.drafters.device import DeviceHistoryDrafter, device_head_drafter
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner, Runner
from paceline.model.decoder import Decoder
from paceline.model.device import use_expandable_segments
from paceline.model.draft_head import DraftHead
from paceline.model.dspark import DSparkHead
from paceline.model.kernels import pack_for_inference
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.shapes import SHAPES
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.batch import Drafter
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.history_store import HistoryStore
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import Request, SamplingParams, StepTrace, noise_key

PREFILL = 8192  # prompt tokens in a step
NUM_STEPS, NUM_RUNS = 32, 4  # steps to measure per case, and the most runs of its requests to get them
# The noise alone determines the tokens and rounding does not, so a second run emits the same tokens as the first.
HIGH_TEMPERATURE = 1e4


def measure(settings: Settings, progress: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """Yields one row per cell. If a cell runs out of memory, its row has a note and the next cell is measured."""
    check_machine(settings)
    progress(f"{settings.model}: random weights on {settings.device}")
    model = BenchModel(settings)
    plain: dict[int, dict[str, Any]] = {}
    for batch, k in settings.cells:
        progress(f"batch {batch}, k {k}")
        row = _row(model, batch, k)
        if k == 0:
            plain[batch] = row
        compare(row, plain.get(batch, {}))
        yield row


def compare(row: dict[str, Any], plain: Mapping[str, Any]) -> None:
    """Add the ratios to the plain step of the same batch size, if that was measured."""
    for key, of in (("step_cost", "step_ms"), ("speedup", "tokens_per_s")):
        row[key] = row[of] / plain[of] if row[of] and plain.get(of) else None


def check_machine(settings: Settings) -> None:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: this machine has no CUDA device; a small shape can also be measured with "
            "--device cpu --dtype float32"
        )
    if settings.has_kernels and importlib.util.find_spec("triton") is None:
        raise ValueError("--device cuda: triton is not installed; install it, or use --plain-torch")


class BenchModel:
    """A model of the given shape, its head if the drafter has one, and an engine for each cell."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.config = settings, SHAPES[settings.model]
        self.dtype, self.device = getattr(torch, settings.dtype), torch.device(settings.device)
        try:
            self.decoder, self.head = self._make()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(f"--model {settings.model}: its weights do not fit in device memory") from None

    def _make(self) -> tuple[Decoder, DraftHead | None]:
        s, config = self.settings, self.config
        use_expandable_segments(self.device)
        decoder = random_decoder(config, self.dtype, self.device)
        if s.lora_rank:
            add_random_adapters(decoder, s.lora_rank)
        head = self._make_head() if any(s.draft_lengths) else None
        if s.has_kernels:
            from paceline.model.cuda.float8 import apply_head_dtype  # needs Triton

            by_default = s.dtype == "bfloat16" and torch.cuda.get_device_capability(self.device) == HOPPER
            decoder.ops = build_cuda_ops(decoder, by_default if s.invariant is None else s.invariant)
            if head is not None:
                apply_head_dtype(head, s.head_dtype)
        elif s.device == "cpu" and s.dtype == "float32" and not s.plain_torch:
            pack_for_inference(decoder)
            if head is not None:
                pack_for_inference(head)
        return decoder, head

    def _make_head(self) -> DraftHead | None:
        s, where = self.settings, (self.dtype, self.device)
        vocab = min(s.draft_vocab_size, self.config.vocab_size)
        if s.drafter == "eagle3":
            return random_head(self.config, vocab, *where)
        if s.drafter == "dspark":
            return random_dspark(self.config, vocab, s.head_layers, s.markov_rank, *where)
        return None

    @property
    def head_dtype(self) -> torch.dtype:
        """The dtype of the head's large products."""
        float8 = self.head.lm_head.float8 if self.head is not None else None
        return self.dtype if float8 is None else float8.weight.dtype

    def steps(self, batch: int, k: int) -> list[StepTrace]:
        """The measured steps of one cell."""
        requests = self._requests(batch)
        engine = self._engine(batch, k)
        if k and self.settings.drafter == "history":  # fill the history with all completions
            policy = engine.policy
            engine.set_drafter(engine.drafter, StaticPolicy(0))
            engine.generate(requests)
            engine.set_drafter(engine.drafter, policy)
            engine.drain_trace()
        if k:  # capture graphs, also of the sizes near the end; `auto` measures its drafter's acceptance
            engine.generate(requests)
            engine.drain_trace()
        found: list[StepTrace] = []
        for _ in range(NUM_RUNS):
            engine.generate(requests)
            found += middle_steps(engine.drain_trace(), self.settings, batch, k)
            if not found or len(found) >= NUM_STEPS:
                break
        return found

    def _requests(self, batch: int) -> list[Request]:
        s, rng = self.settings, np.random.default_rng(batch)
        temperature = HIGH_TEMPERATURE if s.drafter == "history" else 1.0
        sampling = SamplingParams(temperature=temperature, max_tokens=s.max_tokens, ignore_eos=True)
        prompts = rng.integers(0, self.config.vocab_size, (batch, s.prompt_tokens)).tolist()
        return [
            Request(i, tuple(prompt), sampling, noise_key("bench step", batch, i), f"{i}")
            for i, prompt in enumerate(prompts)
        ]

    def _engine(self, batch: int, k: int) -> LocalEngine:
        s = self.settings
        # Two steps may be in flight; and a request is admitted only if there is a free block for each running sequence.
        num_blocks = batch * (-(-(s.prompt_tokens + s.max_tokens + 2 * (1 + k)) // BLOCK) + 2)
        paged = PagedDecoder(self.decoder, num_blocks)
        sampler = Sampler(native=self.decoder.embed.panels is not None)
        runner = self._runner(paged, sampler, batch, k)
        drafter = self._drafter(sampler, num_blocks) if k else None
        policy: SpeculationPolicy = StaticPolicy(k)
        if k and s.policy == "auto":
            paged.set_aux_layers(drafter.aux_layers if drafter is not None else ())
            runner.set_drafter(drafter)
            policy = AutoPolicy(self._costs(paged, runner, batch, k), k, self._method, self._model)
        return LocalEngine(
            paged,
            sampler=sampler,
            runner=runner,
            drafter=drafter,
            policy=policy,
            max_num_seqs=batch,
            max_num_batched_tokens=max(PREFILL, batch * (1 + k)),
            prefix_sharing=False,
        )

    @property
    def _method(self) -> str:
        return "suffix" if self.head is None else self.head.architecture

    @property
    def _model(self) -> str | None:
        return None if self.head is None else self._method

    def _costs(self, paged: PagedDecoder, runner: Runner, batch: int, k: int) -> CostTable:
        """The cost table of steps with all rows and up to k draft tokens each, measured as when an engine is built."""
        context = self.settings.prompt_tokens
        points, timer = [], partial(time_step, paged, runner)
        for queries in range(1, k + 2):
            seconds = min(timer(batch, queries, context) for _ in range(NUM_ROUNDS))
            points.append(Point(batch, batch * queries, batch * (context + queries), seconds))
        drafts = {}
        if self.head is not None:
            each_s = head_cost(self.head, self.config) * points[0].seconds
            drafts[self._method] = [(batch, depth, depth * each_s) for depth in (1, 8)]
        if runner.drafts_on_device:
            longest = self.settings.prompt_tokens + self.settings.max_tokens
            drafts[self._method] = measure_drafts(timer, lambda rows: longest, [batch], k)
        return CostTable("bench step", points, drafts)

    def _drafter(self, sampler: Sampler, num_blocks: int) -> Drafter:
        if self.head is None:
            return DeviceHistoryDrafter(HistoryStore()) if self.settings.has_kernels else SuffixDrafter()
        if self.settings.has_kernels:
            return device_head_drafter(self.head)
        if isinstance(self.head, DSparkHead):
            return DSparkDrafter(self.head, self.decoder.embed, sampler, num_blocks)
        return Eagle3Drafter(self.head, self.decoder.embed, sampler, num_blocks)

    def _runner(self, paged: PagedDecoder, sampler: Sampler, batch: int, k: int) -> Runner:
        s, eager = self.settings, EagerRunner(paged, sampler, RULES["coupled"])
        if not s.has_kernels:
            return eager
        from paceline.engine.graph_runner import GraphRunner  # needs Triton

        imposed = None
        if k and s.imposed_acceptance is not None:
            imposed = beta_probabilities(imposed_probability(s.imposed_acceptance, k), s.imposed_spread)
        return GraphRunner(paged, eager, batch, enforce_eager=s.eager, imposed=imposed)


def middle_steps(traces: Sequence[StepTrace], s: Settings, batch: int, k: int) -> list[StepTrace]:
    """Steps with all rows and k draft tokens each, in the middle half of the completions. Their contexts are then the
    same for any acceptance length, and the prefill no longer affects clocks and caches. If no step is in the middle
    half, the second half of the steps."""
    found = [t for t in decode_steps(traces, batch) if (k and s.policy == "auto") or t.num_draft_tokens == batch * k]
    low, high = (batch * (s.prompt_tokens + s.max_tokens * share) for share in (1 / 4, 3 / 4))
    return [t for t in found if low <= t.num_context_tokens <= high] or found[len(found) // 2 :]


def _row(model: BenchModel, batch: int, k: int) -> dict[str, Any]:
    s, steps, note = model.settings, list[StepTrace](), None
    reset_memory(model.device)
    try:
        steps = model.steps(batch, k)
        if not steps:
            note = f"no step in which all {batch} rows verified {k} tokens; raise --max-tokens"
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        note = "out of device memory"
    figures = dict.fromkeys(("step_ms", "mean_step_ms", "device_ms", "host_ms", "draft_ms", "roofline_ms", "context",
                             "mean_acceptance_length", "verified", "tokens_per_s"))  # fmt: skip
    return {
        "model": s.model,
        "drafter": s.drafter if k else "none",
        "policy": s.policy if k else "none",
        "batch": batch,
        "num_speculative_tokens": k,
        "imposed_acceptance": s.imposed_acceptance if k else None,
        "head_dtype": str(model.head_dtype).removeprefix("torch.") if k and model.head is not None else None,
        "memory_gib": peak_memory_gib(model.device),
        "num_steps": len(steps),
        "note": note,
        **(figures if not steps else _figures(model, steps, batch, k)),
    }


def _figures(model: BenchModel, steps: list[StepTrace], batch: int, k: int) -> dict[str, float]:
    """Medians in ms. An eager runner reports forward pass and sampling separately; the device time is their sum."""
    total_s = statistics.median(t.total_s for t in steps)
    device_s = statistics.median(t.forward_s + t.sample_s for t in steps)
    context = statistics.mean(t.num_context_tokens for t in steps) / batch
    num_drafts = sum(t.num_drafts for t in steps)
    verified = round(statistics.mean(t.num_draft_tokens for t in steps) / batch)  # k, or what `auto` chose
    load = Load(batch, verified, context, model.dtype.itemsize)
    head = model.head.config if model.head is not None and k else None
    return {
        "step_ms": total_s * 1e3,
        "mean_step_ms": statistics.mean(t.total_s for t in steps) * 1e3,
        "device_ms": device_s * 1e3,
        "host_ms": max(0.0, total_s - device_s) * 1e3,
        "draft_ms": statistics.median(t.draft_s for t in steps) * 1e3,
        "roofline_ms": step_s(model.config, load, model.settings.rates, head, model.head_dtype.itemsize) * 1e3,
        "context": context,
        "mean_acceptance_length": 1 + sum(t.num_accepted_tokens for t in steps) / num_drafts if num_drafts else 1.0,
        "verified": statistics.mean(t.num_draft_tokens for t in steps) / batch,
        "tokens_per_s": sum(t.num_emitted for t in steps) / _sum_of_medians_s(steps),
    }


def _sum_of_medians_s(steps: list[StepTrace]) -> float:
    """The total time, with each step replaced by the median of the steps of its size (`auto` has several sizes). This
    removes outliers from a busy host or a hot GPU."""
    sizes = defaultdict[tuple[int, int], list[float]](list)
    for t in steps:
        sizes[t.num_query_tokens, t.num_drafted_on_device].append(t.total_s)
    return sum(len(each) * statistics.median(each) for each in sizes.values())
