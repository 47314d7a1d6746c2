"""`paceline bench step`: what the engine's decode steps take, for a model's shape, batch sizes and draft lengths.

Always: a figure is of the engine's own steps, from schedule to commit, in which every row of the batch decodes and
verifies k tokens; under the policy `auto` as many as that chooses, at most k. Prompts are random and nothing is shared,
so that every row reads its own keys and values. Weights are random and made on the device: what steps take hardly
depends on them (at its limit of power a card is 1% faster with uniform ones), what is accepted does. Drafts come from
an EAGLE-3 head, which is as random, or from a history that has heard all of it before, so that nearly all stands. With
`imposed_acceptance` drafted tokens stand by lot, each with a chance of its own, which the head knows and `auto` may
choose by. That is for timing, and what is emitted then is nobody's sample; no setting of an engine can ask for it.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from paceline import __version__
from paceline.bench.roofline import H200, Load, Rates, step_s
from paceline.config import HeadDtype
from paceline.model.shapes import SHAPES
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import Request, SamplingParams, StepTrace, noise_key

if TYPE_CHECKING:
    import torch

    from paceline.engine.engine import LocalEngine
    from paceline.engine.runner import Runner
    from paceline.model.decoder import Decoder
    from paceline.model.eagle3 import Eagle3Head
    from paceline.model.paged import PagedDecoder
    from paceline.model.sample import Sampler
    from paceline.speculation.batch import Drafter

DRAFTERS = ("eagle3", "history")
POLICIES = ("static", "auto")
DTYPES = ("bfloat16", "float16", "float32", "float64")
# What the graphs can take: model/cuda/attention.py's MAX_QUERIES less one, the last of model/cuda/graphs.py's SIZES.
MAX_DRAFT, MAX_TOKENS = 15, 8192
PREFILL = 8192  # prompt tokens in a step
ENOUGH, NUM_RUNS = 32, 4  # steps of a cell, and how often its requests are run for them at most
# So hot that the noise alone decides, and a rounding never does: a second run then says what the first one said.
HOT = 1e4
# What a head says of what will stand: its share of the variance (`model/surety.py`). The shipped head of SmolLM2-135M
# has 0.25 at temperature 1, where 66% of its tokens stand, and 0.24 to 0.25 where 77 to 82% do (T = 0.6 and 0.3).
SPREAD = 0.25
NUM_LOTS = 1024
IMPOSED = "imposed acceptance: timing only, these tokens are not the model's"
COLUMNS = {  # short, so that it fits a narrow terminal; what the device takes is the step without the host
    "batch": "batch",
    "num_speculative_tokens": "k",
    "step_ms": "step",
    "host_ms": "host",
    "draft_ms": "draft",
    "roofline_ms": "roof",
    "verified": "verified",
    "step_cost": "cost",
    "mean_acceptance_length": "accept",
    "tokens_per_s": "tok/s",
    "speedup": "speed-up",
    "memory_gib": "GiB",
}


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    batches: tuple[int, ...] = (1, 8, 32)
    draft_lengths: tuple[int, ...] = (0, 3)  # 0: plain
    drafter: str = "eagle3"
    policy: str = "static"
    prompt_tokens: int = 512
    max_tokens: int = 256
    imposed_acceptance: float | None = None
    imposed_spread: float = SPREAD  # 0: all tokens have the same chance
    eager: bool = False  # the same kernels, without graphs
    plain_torch: bool = False  # neither graphs nor kernels
    draft_vocab_size: int = 32000  # at most; never more than the model has
    head_dtype: str = "auto"  # of a head's large products: as speculation.head_dtype
    device: str = "cuda"
    dtype: str = "bfloat16"
    rates: Rates = H200

    def __post_init__(self) -> None:
        for option, given, known in (
            ("model", self.model, tuple(SHAPES)),
            ("drafter", self.drafter, DRAFTERS),
            ("policy", self.policy, POLICIES),
            ("device", self.device, ("cuda", "cpu")),
            ("dtype", self.dtype, DTYPES),
            ("head-dtype", self.head_dtype, get_args(HeadDtype)),
        ):
            if given not in known:
                raise ValueError(f"--{option} {given!r}: not one of {', '.join(known)}")
        if not self.batches or not self.draft_lengths:
            raise ValueError("--batch and --k: give at least one number each")
        for option, number in (
            ("batch", min(self.batches)),
            ("prompt-tokens", self.prompt_tokens),
            ("max-tokens", self.max_tokens),
            ("draft-vocab", self.draft_vocab_size),
            ("copy-rate", self.rates.bytes_per_s),
            ("matmul-rate", self.rates.flops_per_s),
        ):
            if not number >= 1:
                raise ValueError(f"--{option} {number}: must be at least 1")
        if min(self.draft_lengths) < 0 or max(self.draft_lengths) > 256:
            raise ValueError(f"--k {max(self.draft_lengths)}: must be from 0 (plain) to 256")
        longest, context = self.prompt_tokens + self.max_tokens, SHAPES[self.model].max_positions
        if longest > context:
            raise ValueError(
                f"--prompt-tokens {self.prompt_tokens} and --max-tokens {self.max_tokens}: together {longest}, but the "
                f"context of {self.model} is {context}"
            )
        if self.device == "cpu" and self.dtype in ("bfloat16", "float16"):
            raise ValueError(f"--dtype {self.dtype}: on a CPU use float32 (or float64)")
        if self.has_kernels:
            self._check_kernels()
        elif self.eager:
            raise ValueError("--eager: leaves the CUDA graphs out, and without a GPU's kernels there are none")
        if self.head_dtype == "float8" and not self.has_kernels:
            raise ValueError("--head-dtype float8: only the GPU kernels compute in it; use auto or model")
        if self.imposed_acceptance is not None:
            self._check_imposed(self.imposed_acceptance)

    def _check_kernels(self) -> None:
        if self.dtype == "float64":
            raise ValueError("--dtype float64: the GPU kernels have none; use --plain-torch with it")
        k, num = max(self.draft_lengths), max(self.batches) * (1 + max(self.draft_lengths))
        if k > MAX_DRAFT:
            raise ValueError(f"--k {k}: the GPU kernels verify at most {MAX_DRAFT}; use --plain-torch for more")
        if num > MAX_TOKENS:
            raise ValueError(
                f"--batch {max(self.batches)} with --k {k}: a step of {num} tokens, but graphs take at most "
                f"{MAX_TOKENS}; lower one of them, or use --plain-torch"
            )

    def _check_imposed(self, length: float) -> None:
        if not 0 <= self.imposed_spread < 1:
            raise ValueError(f"--imposed-spread {self.imposed_spread:g}: must be from 0 (all alike) to less than 1")
        if not self.has_kernels:
            raise ValueError("--imposed-acceptance: only the GPU kernels can impose it; leave it out on a CPU and with "
                             "--plain-torch")  # fmt: skip
        for k in self.draft_lengths:
            if k:
                chance_of(length, k)

    @property
    def has_kernels(self) -> bool:
        """Whether steps are computed by Triton kernels, as graphs or one by one."""
        return self.device == "cuda" and not self.plain_torch

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(batch, k); of each batch size the plain step first, with which the others are compared."""
        return [(batch, k) for batch in self.batches for k in sorted(set(self.draft_lengths))]


def chance_of(length: float, k: int) -> float:
    """The p of each drafted token under which 1 + p + p² + … + p^k = length, the mean number of tokens of a step."""
    if not 1 <= length <= 1 + k:
        raise ValueError(
            f"--imposed-acceptance {length:g}: with --k {k} a step brings from 1 to {1 + k} tokens; "
            "measure other draft lengths apart, each with a length of its own"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 + sum(middle**i for i in range(1, k + 1)) < length:
            low = middle
        else:
            high = middle
    return high


def lots_of(chance: float, spread: float, num: int = NUM_LOTS) -> np.ndarray:
    """As likely values of a Beta distribution: its mean is the chance, its variance the spread's share of what one toss
    has. Tokens that get one each, apart from each other, stand as deep as if all had the mean."""
    if spread == 0 or chance in (0, 1):
        return np.full(num, chance)
    size = 1 / spread - 1
    found = np.random.default_rng(0).beta(chance * size, (1 - chance) * size, (num, 64))
    lots = np.sort(found.ravel()).reshape(num, -1).mean(1)
    return np.minimum(1, lots * (chance / lots.mean()))


def measure(settings: Settings, progress: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """A row per cell. One for which there is no memory says so, and the next is measured."""
    check_machine(settings)
    progress(f"{settings.model}: random weights on {settings.device}")
    subject = Subject(settings)
    plain: dict[int, dict[str, Any]] = {}
    for batch, k in settings.cells:
        progress(f"batch {batch}, k {k}")
        row = _row(subject, batch, k)
        if k == 0:
            plain[batch] = row
        compare(row, plain.get(batch, {}))
        yield row


def compare(row: dict[str, Any], plain: Mapping[str, Any]) -> None:
    """With the plain step of the same batch size, where that was measured."""
    for key, of in (("step_cost", "step_ms"), ("speedup", "tokens_per_s")):
        row[key] = row[of] / plain[of] if row[of] and plain.get(of) else None


def check_machine(settings: Settings) -> None:
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: this machine has no CUDA device, which the command needs; a small shape can also be "
            "measured with --device cpu --dtype float32"
        )
    if settings.has_kernels and importlib.util.find_spec("triton") is None:
        raise ValueError("--device cuda: triton is not installed; install it, or use --plain-torch")


def describe(settings: Settings) -> dict[str, Any]:
    """What was asked for, and of which machine."""
    marked = {} if settings.imposed_acceptance is None else {"warning": IMPOSED}
    return {**asdict(settings), **marked, "machine": machine_name(settings.device), "version": __version__}


def columns(settings: Settings) -> dict[str, str]:
    return {key: heading for key, heading in COLUMNS.items() if key != "verified" or settings.policy == "auto"}


def title(settings: Settings) -> str:
    s = settings
    how = "plain torch" if s.plain_torch else "without graphs" if s.eager else ""
    lot = f"acceptance imposed: {s.imposed_acceptance:g}" if s.imposed_acceptance is not None else ""
    drafter = f"{s.drafter} ({s.policy})" if any(s.draft_lengths) else ""
    length = f"{s.prompt_tokens} + {s.max_tokens} tokens"
    return ", ".join(filter(None, (f"{s.model}: steps", machine_name(s.device), s.dtype, drafter, length, how, lot)))


def notes(settings: Settings) -> list[str]:
    """What the columns are."""
    rates = settings.rates
    found = [
        "times in ms; step: the engine's whole step; host: what of it is not forward and draws; draft: what "
        "drafting keeps the host from launching the next step, nothing where a GPU's kernels draft",
        f"roof: the least it could be, at {rates.bytes_per_s / 1e12:g} TB/s (--copy-rate) and "
        f"{rates.flops_per_s / 1e12:g} TFLOP/s (--matmul-rate)",
        "cost and speed-up: over the plain step (k = 0) of the same batch size; weights are random, so what is "
        "accepted says nothing about a trained model",
    ]
    if settings.drafter == "history" and any(settings.draft_lengths):
        free = settings.imposed_acceptance is None
        stands = "nearly all that it drafts stands" if free else "it drafts as much as it may"
        found.append(f"history: it has heard these very completions, so {stands}")
        if free and settings.has_kernels:
            found.append(
                "runs may be over before clocks recover from prompts: --imposed-acceptance 2 makes them longer"
            )
    return found


def machine_name(device: str) -> str:
    import platform

    import torch

    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


class Subject:
    """A model of the shape, its head where one drafts, and engines over them, one for each cell."""

    def __init__(self, settings: Settings) -> None:
        import torch

        self.settings, self.config = settings, SHAPES[settings.model]
        self.dtype, self.device = getattr(torch, settings.dtype), torch.device(settings.device)
        try:
            self.decoder, self.head = self._make()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(f"--model {settings.model}: the device has no memory for its weights") from None

    def _make(self) -> tuple[Decoder, Eagle3Head | None]:
        from paceline.bench.random_weights import random_decoder, random_head

        s, config = self.settings, self.config
        decoder, head = random_decoder(config, self.dtype, self.device), None
        if s.drafter == "eagle3" and any(s.draft_lengths):
            head = random_head(config, min(s.draft_vocab_size, config.vocab_size), self.dtype, self.device)
        if s.has_kernels:
            from paceline.model.cuda.float8 import settle_dtype
            from paceline.model.cuda.ops import CudaOps

            decoder.ops = CudaOps()
            if head is not None:
                settle_dtype(head, s.head_dtype)
        elif s.device == "cpu" and s.dtype == "float32" and not s.plain_torch:
            from paceline.model.kernels import pack_for_inference

            pack_for_inference(decoder)
            if head is not None:
                pack_for_inference(head)
        return decoder, head

    @property
    def head_dtype(self) -> torch.dtype:
        """Of its large products."""
        rounded = self.head.lm_head.rounded if self.head is not None else None
        return self.dtype if rounded is None else rounded.weight.dtype

    def steps(self, batch: int, k: int) -> list[StepTrace]:
        """Those of one cell, in which all rows decode with drafts of k tokens."""
        requests = self._requests(batch)
        engine = self._engine(batch, k)
        if k and self.settings.drafter == "history":  # it hears all of it
            policy = engine.policy
            engine.set_drafter(engine.drafter, StaticPolicy(0))
            engine.generate(requests)
            engine.set_drafter(engine.drafter, policy)
            engine.drain_trace()
        if k:  # graphs are captured, those of sizes near the end too; `auto` learns what its drafter is worth
            engine.generate(requests)
            engine.drain_trace()
        found: list[StepTrace] = []
        for _ in range(NUM_RUNS):
            engine.generate(requests)
            found += steady(engine.drain_trace(), self.settings, batch, k)
            if not found or len(found) >= ENOUGH:
                break
        return found

    def _requests(self, batch: int) -> list[Request]:
        s, dice = self.settings, np.random.default_rng(batch)
        temperature = HOT if s.drafter == "history" else 1.0
        sampling = SamplingParams(temperature=temperature, max_tokens=s.max_tokens, ignore_eos=True)
        prompts = dice.integers(0, self.config.vocab_size, (batch, s.prompt_tokens)).tolist()
        return [
            Request(i, tuple(prompt), sampling, noise_key("bench step", batch, i), f"{i}")
            for i, prompt in enumerate(prompts)
        ]

    def _engine(self, batch: int, k: int) -> LocalEngine:
        from paceline.engine.engine import LocalEngine
        from paceline.model.kv import BLOCK
        from paceline.model.paged import PagedDecoder
        from paceline.model.sample import Sampler

        s = self.settings
        # Two steps may be on their way; and a newcomer wants a block for each that runs.
        num_blocks = batch * (-(-(s.prompt_tokens + s.max_tokens + 2 * (1 + k)) // BLOCK) + 2)
        paged = PagedDecoder(self.decoder, num_blocks)
        sampler = Sampler(native=self.decoder.embed.panels is not None)
        runner = self._runner(paged, sampler, batch, k)
        drafter = self._drafter(sampler, num_blocks) if k else None
        policy: SpeculationPolicy = StaticPolicy(k)
        if k and s.policy == "auto":
            paged.tap(drafter.wants_hidden if drafter is not None else ())
            runner.equip(drafter)
            policy = AutoPolicy(self._costs(paged, runner, batch, k), k, self._method)
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
        return "eagle3" if self.head is not None else "suffix"

    def _costs(self, paged: PagedDecoder, runner: Runner, batch: int, k: int) -> CostTable:
        """Of steps with all rows and up to k tokens each, as an engine measures them when it is built."""
        from paceline.build.cost import NUM_ROUNDS, measure_drafts, time_step
        from paceline.build.drafter import head_cost

        context = self.settings.prompt_tokens
        points, timer = [], partial(time_step, paged, runner)
        for queries in range(1, k + 2):
            seconds = min(timer(batch, queries, context) for _ in range(NUM_ROUNDS))
            points.append(Point(batch, batch * queries, batch * (context + queries), seconds))
        drafts = {}
        if self.head is not None:
            each_s = head_cost(self.head, self.config) * points[0].seconds
            drafts[self._method] = [(batch, depth, depth * each_s) for depth in (1, 8)]
        if runner.has_head:
            room = self.settings.prompt_tokens + self.settings.max_tokens
            drafts[self._method] = measure_drafts(timer, lambda rows: room, [batch], k)
        return CostTable("bench step", points, drafts)

    def _drafter(self, sampler: Sampler, num_blocks: int) -> Drafter:
        if self.head is None and self.settings.has_kernels:
            from paceline.drafters.ahead import HistoryAhead
            from paceline.speculation.library import Library

            return HistoryAhead(Library())
        if self.head is None:
            from paceline.drafters.suffix import SuffixDrafter

            return SuffixDrafter()
        if self.settings.has_kernels:
            from paceline.drafters.ahead import Eagle3Ahead

            return Eagle3Ahead(self.head)
        from paceline.drafters.eagle3 import Eagle3Drafter

        return Eagle3Drafter(self.head, self.decoder.embed, sampler, num_blocks)

    def _runner(self, paged: PagedDecoder, sampler: Sampler, batch: int, k: int) -> Runner:
        from paceline.engine.accept import RULES
        from paceline.engine.runner import EagerRunner

        s, plain = self.settings, EagerRunner(paged, sampler, RULES["coupled"])
        if not s.has_kernels:
            return plain
        from paceline.engine.graph_runner import GraphRunner

        imposed = None
        if k and s.imposed_acceptance is not None:
            imposed = lots_of(chance_of(s.imposed_acceptance, k), s.imposed_spread)
        return GraphRunner(paged, plain, batch, eager=s.eager, imposed=imposed)


def steady(traces: Sequence[StepTrace], s: Settings, batch: int, k: int) -> list[StepTrace]:
    """Of the middle half of what is generated: so contexts are the same however many tokens a step brings, and what
    reading prompts did to clocks and caches is over, but where steps bring so many that a run is."""
    whole = [t for t in traces if t.num_rows == batch and t.num_query_tokens == batch + t.num_draft_tokens]
    found = [t for t in whole if (k and s.policy == "auto") or t.num_draft_tokens == batch * k]
    least, most = (batch * (s.prompt_tokens + s.max_tokens * share) for share in (1 / 4, 3 / 4))
    return [t for t in found if least <= t.num_context_tokens <= most] or found[len(found) // 2 :]


def _row(subject: Subject, batch: int, k: int) -> dict[str, Any]:
    s, steps, note = subject.settings, list[StepTrace](), None
    start_memory(subject.device)
    try:
        steps = subject.steps(batch, k)
        if not steps:
            note = f"no step in which all {batch} rows verified {k} tokens; raise --max-tokens"
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        note = "out of device memory"
    memory_gib = peak_gib(subject.device)
    figures = dict.fromkeys(("step_ms", "mean_step_ms", "device_ms", "host_ms", "draft_ms", "roofline_ms", "context",
                             "mean_acceptance_length", "verified", "tokens_per_s"))  # fmt: skip
    return {
        "model": s.model,
        "drafter": s.drafter if k else "none",
        "policy": s.policy if k else "none",
        "batch": batch,
        "num_speculative_tokens": k,
        "imposed_acceptance": s.imposed_acceptance if k else None,
        "head_dtype": str(subject.head_dtype).removeprefix("torch.") if k and subject.head is not None else None,
        "memory_gib": memory_gib,
        "num_steps": len(steps),
        "note": note,
        **(figures if not steps else _figures(subject, steps, batch, k)),
    }


def _figures(subject: Subject, steps: list[StepTrace], batch: int, k: int) -> dict[str, float]:
    """Medians, in ms. A runner that does not fly says apart what its forward and its draws took; here both are the
    device's."""
    total_s = statistics.median(t.total_s for t in steps)
    device_s = statistics.median(t.forward_s + t.sample_s for t in steps)
    context = statistics.mean(t.num_context_tokens for t in steps) / batch
    num_drafts = sum(t.num_drafts for t in steps)
    verified = round(statistics.mean(t.num_draft_tokens for t in steps) / batch)  # k, or what `auto` chose
    load = Load(batch, verified, context, subject.dtype.itemsize)
    head = subject.head.config if subject.head is not None and k else None
    return {
        "step_ms": total_s * 1e3,
        "mean_step_ms": statistics.mean(t.total_s for t in steps) * 1e3,
        "device_ms": device_s * 1e3,
        "host_ms": max(0.0, total_s - device_s) * 1e3,
        "draft_ms": statistics.median(t.draft_s for t in steps) * 1e3,
        "roofline_ms": step_s(subject.config, load, subject.settings.rates, head, subject.head_dtype.itemsize) * 1e3,
        "context": context,
        "mean_acceptance_length": 1 + sum(t.num_accepted_tokens for t in steps) / num_drafts if num_drafts else 1.0,
        "verified": statistics.mean(t.num_draft_tokens for t in steps) / batch,
        "tokens_per_s": sum(t.num_emitted for t in steps) / _typical_s(steps),
    }


def _typical_s(steps: list[StepTrace]) -> float:
    """What they took together, were each the median of those of its size: `auto` has several. What a busy host or a hot
    card did to one of them is left out, as it is from a step's time."""
    sizes = defaultdict[tuple[int, int], list[float]](list)
    for t in steps:
        sizes[t.num_query_tokens, t.num_guessed].append(t.total_s)
    return sum(len(each) * statistics.median(each) for each in sizes.values())


# ---- memory ----


def start_memory(device: torch.device) -> None:
    """What the cell before took is given back, whatever became of it."""
    import gc

    import torch

    gc.collect()  # graphs and their runner hold each other
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    """Of the device, weights included; None on a CPU."""
    import torch

    return torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Or because of that: a graph that was being captured fails in words of its own."""
    import torch

    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
