"""Settings of `paceline bench learner`, and the text around its table. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.bench.common import check_choices, check_numbers
from paceline.bench.step_settings import machine_name
from paceline.bench.update_flops import Rollouts
from paceline.config import LearnerSection
from paceline.model.shapes import SHAPES

VARIANTS = ("paceline", "hf-compiled", "hf-eager")
AUTO_TOKENS = {"cuda": 8192, "cpu": 2048}  # per microbatch: as a run with enough memory has
DTYPES = ("bfloat16", "float32", "float64")  # a learner refuses float16: it has no loss scaling
MASTERS = ("float32", "none")
COLUMNS = {  # short, so that the table fits a narrow terminal
    "variant": "variant",
    "update_s": "s",
    "tokens_per_s": "tok/s",
    "tflops": "TFLOP/s",
    "matmul_share": "peak",
    "time_ratio": "ratio",
    "memory_gib": "GiB",
    "allocated_gib": "used",
    "mean_logprob": "logprob",
    "logprob_difference": "differs",
}
KERNEL_COLUMNS = {"seconds": "s", "share": "share", "calls": "calls", "name": "kernel"}


@dataclass(frozen=True, slots=True)
class Settings:
    model: str  # a name of SHAPES, with random weights, or a directory
    variants: tuple[str, ...]
    sequences: int = 256
    prompt_tokens: int = 96
    completion_tokens: int = 512
    per_prompt: int = 8
    updates: int = 3
    masters: str = "float32"  # of the hf variants; paceline has float32 masters
    profile: bool = False
    device: str = "cuda"
    dtype: str = "bfloat16"
    learner: LearnerSection = field(default_factory=LearnerSection)

    def __post_init__(self) -> None:
        check_choices(VARIANTS, variants=self.variants)
        check_choices(MASTERS, masters=self.masters)
        check_choices(("cuda", "cpu"), device=self.device)
        check_choices(DTYPES, dtype=self.dtype)
        if self.learner.tokens_per_microbatch == "auto":
            numbers = {"tokens_per_microbatch": AUTO_TOKENS[self.device]}
            object.__setattr__(self, "learner", self.learner.model_copy(update=numbers))
        if self.model not in SHAPES and not Path(self.model).is_dir():
            raise ValueError(f"--model {self.model!r}: neither a directory nor one of {', '.join(SHAPES)}")
        check_numbers(1, sequences=self.sequences, per_prompt=self.per_prompt, updates=self.updates)
        check_numbers(1, prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens)
        if self.sequences % self.per_prompt:
            raise ValueError(f"--sequences {self.sequences}: must be a multiple of --per-prompt {self.per_prompt}")
        if self.device == "cpu" and self.dtype == "bfloat16":
            raise ValueError(f"--dtype {self.dtype}: on a CPU use float32 (or float64)")
        if self.profile and "paceline" not in self.variants:
            raise ValueError("--profile: shows an update of paceline, which is not in --variants; add it")
        for key in ("num_minibatches", "num_iterations"):
            if (value := getattr(self.learner, key)) != 1:
                raise ValueError(f"learner.{key} = {value}: the bench measures one optimizer step; set it to 1")
        if self.learner.model != "paceline":
            raise ValueError(f'learner.model = "{self.learner.model}": remove it; --variants chooses the models')

    @property
    def rollouts(self) -> Rollouts:
        return Rollouts(self.sequences, self.per_prompt, self.prompt_tokens, self.completion_tokens)


def default_variants(device: str) -> tuple[str, ...]:
    """All of them on a GPU. On a CPU, compiling takes longer than a small update saves."""
    return VARIANTS if device == "cuda" else ("paceline", "hf-eager")


def skip_reason(settings: Settings, variant: str) -> str | None:
    """Why this variant can't make the same update; None if it can."""
    if variant == "paceline":
        return None
    if settings.learner.lora_rank:
        return f"learner.lora_rank = {settings.learner.lora_rank}: transformers has no LoRA of its own"
    if settings.learner.optimizer != "adamw":
        return f'learner.optimizer = "{settings.learner.optimizer}": this variant has AdamW only'
    return None


def describe(settings: Settings) -> dict[str, Any]:
    """The settings and the machine."""
    learner = settings.learner.model_dump(mode="json")
    return asdict(settings) | {"learner": learner, "machine": machine_name(settings.device), "version": __version__}


def title(settings: Settings) -> str:
    s = settings
    trained = f"LoRA rank {s.learner.lora_rank}" if s.learner.lora_rank else "all weights"
    rollouts = f"{s.sequences} rollouts of {s.prompt_tokens} + {s.completion_tokens} tokens, {s.per_prompt} per prompt"
    microbatch = f"{s.learner.tokens_per_microbatch} tokens per microbatch"
    return ", ".join([f"{Path(s.model).name}: update", machine_name(s.device), s.dtype, trained, rollouts, microbatch])


def notes(settings: Settings) -> list[str]:
    """Explanations of the columns."""
    masters = "float32 master weights and moments" if settings.masters == "float32" else f"all in {settings.dtype}"
    return [
        "s: per update; tok/s: tokens of completions; TFLOP/s: of forward and backward pass if every prompt is "
        "computed once, with the same FLOPs for all variants; peak: share of the rate of a large matrix product; "
        "ratio: of times, to the first variant",
        f"hf: transformers with sdpa, prompts not shared, {masters}; paceline always has float32 masters",
        "GiB: most memory that torch reserved; used: most that tensors took of it",
        "logprob: mean of the first microbatch before the first update; differs: mean absolute difference of its "
        "logprobs from the first variant",
    ]


def profile_title(profile: Mapping[str, Any]) -> str:
    return f"one update of paceline: kernels {profile['kernels_s']:.3g} s, host {profile['host_s']:.3g} s"
