"""Settings of `paceline bench step`, and the text around its table. Does not import torch."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from paceline import __version__
from paceline.bench.common import check_choices, check_numbers
from paceline.bench.roofline import H200, Rates
from paceline.config import HeadDtype
from paceline.model.shapes import SHAPES
from paceline.types import acceptance_probability

DRAFTERS = ("eagle3", "dspark", "history")
POLICIES = ("static", "auto")
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Limits of the CUDA graphs: MAX_QUERIES of model/cuda/attention.py less one, the last of SIZES in model/cuda/graphs.py.
MAX_DRAFT, MAX_TOKENS = 15, 8192
# How much of the variance of acceptance a head's confidence explains (`model/confidence.py`). The shipped head of
# SmolLM2-135M has 0.25 at temperature 1, where 66% of its tokens are accepted, and 0.24 to 0.25 at temperatures 0.6 and
# 0.3, where 77 to 82% are.
SPREAD = 0.25
NUM_PROBABILITIES = 1024
IMPOSED = "imposed acceptance: timing only, these tokens are not the model's"
COLUMNS = {  # short, so that the table fits a narrow terminal; the device time is step - host
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
    imposed_spread: float = SPREAD  # 0: all draft tokens have the same acceptance probability
    eager: bool = False  # the same kernels, without graphs
    plain_torch: bool = False  # neither graphs nor kernels
    invariant: bool | None = None  # batch-invariant kernels; None: where a run uses them
    lora_rank: int = 0  # the model has adapters of this rank beside its weights
    draft_vocab_size: int = 32000  # limited to the model's vocabulary
    head_layers: int = 2  # of a DSpark head
    markov_rank: int = 256  # of a DSpark head
    head_dtype: str = "auto"  # as speculation.head_dtype
    device: str = "cuda"
    dtype: str = "bfloat16"
    rates: Rates = H200

    def __post_init__(self) -> None:
        check_choices(tuple(SHAPES), model=self.model)
        check_choices(DRAFTERS, drafter=self.drafter)
        check_choices(POLICIES, policy=self.policy)
        check_choices(("cuda", "cpu"), device=self.device)
        check_choices(DTYPES, dtype=self.dtype)
        check_choices(get_args(HeadDtype), head_dtype=self.head_dtype)
        check_numbers(0, 256, k=self.draft_lengths)
        check_numbers(1, batch=self.batches, prompt_tokens=self.prompt_tokens, max_tokens=self.max_tokens)
        check_numbers(1, draft_vocab=self.draft_vocab_size, head_layers=self.head_layers, markov_rank=self.markov_rank)
        check_numbers(0, lora_rank=self.lora_rank)
        check_numbers(1, copy_rate=self.rates.bytes_per_s, matmul_rate=self.rates.flops_per_s)
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
            raise ValueError("--eager: turns CUDA graphs off, and without the GPU kernels there are none")
        if self.invariant and (self.dtype != "bfloat16" or not self.has_kernels):
            raise ValueError(
                "--invariant: only for the GPU kernels in bfloat16; remove it, or change the other options"
            )
        if self.head_dtype == "float8" and not self.has_kernels:
            raise ValueError("--head-dtype float8: only the GPU kernels support it; use auto or model")
        if self.imposed_acceptance is not None:
            self._check_imposed(self.imposed_acceptance)

    def _check_kernels(self) -> None:
        if self.dtype == "float64":
            raise ValueError("--dtype float64: the GPU kernels do not support it; use --plain-torch")
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
            raise ValueError(f"--imposed-spread {self.imposed_spread:g}: must be at least 0 and less than 1")
        if not self.has_kernels:
            raise ValueError("--imposed-acceptance: only the GPU kernels support it; remove it on a CPU and with "
                             "--plain-torch")  # fmt: skip
        for k in self.draft_lengths:
            if k:
                imposed_probability(length, k)

    @property
    def has_kernels(self) -> bool:
        """Whether the Triton kernels compute the steps, with or without CUDA graphs."""
        return self.device == "cuda" and not self.plain_torch

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(batch, k), with the plain step of each batch size first: the others are compared with it."""
        return [(batch, k) for batch in self.batches for k in sorted(set(self.draft_lengths))]


def imposed_probability(length: float, k: int) -> float:
    """The acceptance probability p of each draft token for a mean acceptance length of 1 + p + p² + … + p^k."""
    if not 1 <= length <= 1 + k:
        raise ValueError(
            f"--imposed-acceptance {length:g}: with --k {k} the acceptance length is from 1 to {1 + k}; "
            "measure each draft length separately, with its own acceptance length"
        )
    return acceptance_probability(length, k)


def beta_probabilities(mean: float, spread: float, num: int = NUM_PROBABILITIES) -> np.ndarray:
    """`num` equally likely values of a Beta distribution with this mean and the variance spread · mean · (1 - mean). If
    each draft token gets one of them independently, the acceptance length is as if all had the mean."""
    if spread == 0 or mean in (0, 1):
        return np.full(num, mean)
    size = 1 / spread - 1
    values = np.random.default_rng(0).beta(mean * size, (1 - mean) * size, (num, 64))
    probabilities = np.sort(values.ravel()).reshape(num, -1).mean(1)
    return np.minimum(1, probabilities * (mean / probabilities.mean()))


def describe(settings: Settings) -> dict[str, Any]:
    """The settings and the machine."""
    warning = {} if settings.imposed_acceptance is None else {"warning": IMPOSED}
    return {**asdict(settings), **warning, "machine": machine_name(settings.device), "version": __version__}


def columns(settings: Settings) -> dict[str, str]:
    return {key: heading for key, heading in COLUMNS.items() if key != "verified" or settings.policy == "auto"}


def title(settings: Settings) -> str:
    s = settings
    mode = "plain torch" if s.plain_torch else "without graphs" if s.eager else ""
    if s.invariant is not None:
        mode = f"{'batch-invariant' if s.invariant else 'not batch-invariant'}, {mode}".rstrip(", ")
    imposed = f"acceptance imposed: {s.imposed_acceptance:g}" if s.imposed_acceptance is not None else ""
    drafter = f"{s.drafter} ({s.policy})" if any(s.draft_lengths) else ""
    length = f"{s.prompt_tokens} + {s.max_tokens} tokens"
    lora = f"LoRA adapters of rank {s.lora_rank}" if s.lora_rank else ""
    parts = (f"{s.model}: steps", machine_name(s.device), s.dtype, lora, drafter, length, mode, imposed)
    return ", ".join(filter(None, parts))


def notes(settings: Settings) -> list[str]:
    """Explanations of the columns."""
    rates = settings.rates
    found = [
        "times in ms; step: the engine's whole step; host: its part outside of forward pass and sampling; draft: host "
        "time for drafting before the next step is launched, 0 if the GPU kernels draft",
        f"roof: the minimum time of a step at {rates.bytes_per_s / 1e12:g} TB/s (--copy-rate) and "
        f"{rates.flops_per_s / 1e12:g} TFLOP/s (--matmul-rate)",
        "cost and speed-up: relative to the plain step (k = 0) of the same batch size; weights are random, so the "
        "acceptance is not that of a trained model",
    ]
    if settings.drafter == "history" and any(settings.draft_lengths):
        free = settings.imposed_acceptance is None
        result = "nearly all draft tokens are accepted" if free else "every draft has the full length"
        found.append(f"history: it has these completions already, so {result}")
        if free and settings.has_kernels:
            found.append(
                "a run may end before the GPU's clocks recover from the prefill: --imposed-acceptance 2 makes it longer"
            )
    return found


def machine_name(device: str) -> str:
    if device != "cuda":
        return platform.machine()
    import torch

    return torch.cuda.get_device_name()
