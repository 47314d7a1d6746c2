"""`paceline bench learner`: the time of one policy update, of our learner and of transformers on the same tokens.

Each variant runs in its own process, so that its peak memory is its own. All of them have the same weights: random ones
of the same seed, drawn on the same device, or those of a directory. The first update compiles kernels and is not timed.
It also shows that the variants agree: in the logprobs before it and in its gradient norm.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.bench.learner_settings import Settings, skip_reason
from paceline.bench.process import WorkerError, WorkerProcess
from paceline.bench.update_flops import update_flops
from paceline.model.config import ModelConfig
from paceline.model.shapes import SHAPES

WORKER = Path(__file__).with_name("learner_worker.py")
FIGURES = (
    "update_s", "updates_s", "tokens_per_s", "tflops", "matmul_tflops", "matmul_share", "time_ratio", "memory_gib",
    "allocated_gib", "mean_logprob", "logprob_difference", "grad_norm", "profile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """What the worker of a variant has measured."""

    logprobs: list[float]  # of the first microbatch, before the first update
    grad_norm: float  # of the first update
    updates_s: list[float]
    memory_gib: float | None  # reserved
    allocated_gib: float | None
    profile: dict[str, Any] | None

    @property
    def update_s(self) -> float:
        return statistics.median(self.updates_s)


def measure(settings: Settings, progress: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """Yields one row per variant. A variant that can't be measured has a note instead of figures."""
    check_machine(settings)
    shape = model_shape(settings.model)
    longest = settings.prompt_tokens + settings.completion_tokens
    if longest > shape.max_positions:
        raise ValueError(
            f"--prompt-tokens {settings.prompt_tokens} and --completion-tokens {settings.completion_tokens}: together "
            f"{longest}, but the context of {settings.model} is {shape.max_positions}"
        )
    progress("matrix products")
    with closing(WorkerProcess(WORKER)) as worker:
        flops_per_s = worker.call("matmul_rate", device=settings.device, dtype=settings.dtype)["flops_per_s"]
    first: Measured | None = None
    for variant in settings.variants:
        row: dict[str, Any] = {"model": settings.model, "variant": variant, "note": skip_reason(settings, variant)}
        row |= dict.fromkeys(FIGURES)
        if row["note"] is None:
            try:
                measured = _measure(settings, variant, shape, progress)
                first = first or measured
                row |= _figures(settings, shape, measured, first, flops_per_s)
            except WorkerError as error:
                row["note"] = str(error)
        yield row


def check_machine(settings: Settings) -> None:
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: this machine has no CUDA device; a small model can also be measured with "
            "--device cpu --dtype float32"
        )


def model_shape(model: str) -> ModelConfig:
    if model in SHAPES:
        return SHAPES[model]
    from paceline.model.weights import read_config

    return read_config(model)


def _measure(settings: Settings, variant: str, shape: ModelConfig, progress: Callable[[str], None]) -> Measured:
    s = settings
    with closing(WorkerProcess(WORKER)) as worker:
        progress(f"{variant}: first update")
        first = worker.call(
            "load",
            variant=variant,
            shape=asdict(shape),
            directory=None if s.model in SHAPES else s.model,
            rollouts=asdict(s.rollouts),
            learner=s.learner.model_dump(mode="json"),
            masters=s.masters,
            device=s.device,
            dtype=s.dtype,
        )
        updates_s = []
        for i in range(s.updates):
            progress(f"{variant}: update {i + 1} of {s.updates}")
            updates_s.append(worker.call("update")["seconds"])
        memory, profile = worker.call("memory"), None
        if s.profile and variant == "paceline":
            progress(f"{variant}: profile")
            profile = worker.call("profile")
        return Measured(**first, updates_s=updates_s, **memory, profile=profile)


def _figures(
    settings: Settings, shape: ModelConfig, measured: Measured, first: Measured, flops_per_s: float
) -> dict[str, Any]:
    flops = update_flops(shape, settings.rollouts, bool(settings.learner.lora_rank)) / measured.update_s
    differences = [abs(a - b) for a, b in zip(measured.logprobs, first.logprobs, strict=True)]
    return {
        "update_s": measured.update_s,
        "updates_s": measured.updates_s,
        "tokens_per_s": settings.rollouts.num_completion_tokens / measured.update_s,
        "tflops": flops / 1e12,
        "matmul_tflops": flops_per_s / 1e12,
        "matmul_share": flops / flops_per_s,
        "time_ratio": measured.update_s / first.update_s,
        "memory_gib": measured.memory_gib,
        "allocated_gib": measured.allocated_gib,
        "mean_logprob": statistics.mean(measured.logprobs),
        "logprob_difference": statistics.mean(differences),
        "grad_norm": measured.grad_norm,
        "profile": measured.profile,
    }
