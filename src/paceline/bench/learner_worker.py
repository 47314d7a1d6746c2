"""A variant of `paceline bench learner` as a bench worker: one model, one batch, and updates on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paceline.bench.memory import peak_allocated_gib, peak_memory_gib, reset_memory
from paceline.bench.random_weights import random_decoder
from paceline.bench.update_flops import Rollouts
from paceline.build.learner import use_train_kernels
from paceline.config import AlgorithmSection, LearnerSection
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.device import use_expandable_segments
from paceline.model.weights import load
from paceline.rl.algorithms import make_algorithm
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner
from paceline.types import Group, Rollout

NUM_STEPS = 1000  # of the learning rate's schedule
NUM_PRODUCTS = 20
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
NUM_KERNELS = 25
NAME_LENGTH = 100  # of a kernel


class Worker:
    def matmul_rate(self, device: str, dtype: str) -> dict[str, Any]:
        """FLOPs per second of a large square matrix product, the median of several."""
        size = PRODUCT_SIZE[device]
        a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        torch.mm(a, b)  # loads the kernels
        seconds = statistics.median(_timed(lambda: torch.mm(a, b), device) for _ in range(NUM_PRODUCTS))
        return {"flops_per_s": 2 * size**3 / seconds}

    def load(
        self,
        variant: str,
        shape: dict[str, Any],
        directory: str | None,
        rollouts: dict[str, int],
        learner: dict[str, Any],
        masters: str,
        device: str,
        dtype: str,
    ) -> dict[str, Any]:
        """Make the learner and its first update. Returns that update's results: the logprobs of the first microbatch of
        the hf variants, and the gradient norm."""
        self.device, section, data = torch.device(device), LearnerSection(**learner), Rollouts(**rollouts)
        use_expandable_segments(self.device)  # of all variants
        decoder = make_decoder(ModelConfig(**shape), directory, getattr(torch, dtype), self.device)
        groups = random_groups(decoder.config.vocab_size, data)
        assert section.tokens_per_microbatch != "auto"
        size = data.sequences_per_microbatch(section.tokens_per_microbatch)
        if variant == "paceline":
            self.learner: BenchLearner = PacelineLearner(decoder, section, groups)
        else:
            from paceline.bench.hf_learner import HFLearner  # needs transformers

            self.learner = HFLearner(decoder, section, *grpo_batch(groups), size, masters, variant == "hf-compiled")
        del decoder
        reset_memory(self.device)  # an hf variant has copied the weights
        logprobs_T, grad_norm = self.learner.update()
        return {"logprobs": logprobs_T[: size * data.completion_tokens].tolist(), "grad_norm": grad_norm}

    def update(self) -> dict[str, Any]:
        return {"seconds": _timed(self.learner.update, self.device.type)}

    def memory(self) -> dict[str, Any]:
        return {"memory_gib": peak_memory_gib(self.device), "allocated_gib": peak_allocated_gib(self.device)}

    def profile(self) -> dict[str, Any]:
        """The kernels of one update that take most time; on a CPU, the operations."""
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as profiler:
            self.update()
        events = profiler.key_averages()
        kernels = [_kernel(event, on_gpu) for event in events if not on_gpu or _is_kernel(event)]
        total_s = sum(kernel["seconds"] for kernel in kernels)
        kernels = sorted(kernels, key=lambda kernel: -kernel["seconds"])[:NUM_KERNELS]
        return {
            "host_s": sum(event.self_cpu_time_total for event in events) / 1e6,
            "kernels_s": total_s,
            "kernels": [kernel | {"share": kernel["seconds"] / total_s} for kernel in kernels],
        }


class BenchLearner(Protocol):
    def update(self) -> tuple[Tensor, float]:
        """Returns the logprobs before the update, and the norm of its gradient."""


class PacelineLearner:
    """Our learner with the loss of GRPO."""

    def __init__(self, decoder: Decoder, section: LearnerSection, groups: list[Group]) -> None:
        if decoder.device.type == "cuda":
            use_train_kernels(decoder)
        self.learner = Learner(decoder, section, num_steps=NUM_STEPS)
        self.rollouts, self.batch = grpo_batch(groups)
        self.algorithm = make_algorithm(AlgorithmSection(name="grpo"), len(self.rollouts[0].token_ids))

    def update(self) -> tuple[Tensor, float]:
        report = self.learner.update(self.rollouts, self.batch, self.algorithm.loss, self.algorithm.weights)
        return report.logprobs_T, report.grad_norm


def make_decoder(shape: ModelConfig, directory: str | None, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The same weights in every process."""
    if directory is None:
        return random_decoder(shape, dtype, device)
    return load(directory, dtype, device).requires_grad_(False)


def random_groups(vocab_size: int, data: Rollouts) -> list[Group]:
    """Random tokens. The rewards of a group alternate between 1 and -1."""
    rng = np.random.default_rng(0)
    groups = []
    for index in range(data.num_prompts):
        prompt_ids = tuple(rng.integers(0, vocab_size, data.prompt_tokens).tolist())
        completions = rng.integers(0, vocab_size, (data.per_prompt, data.completion_tokens), np.int32)
        rollouts = [_rollout(i, prompt_ids, token_ids) for i, token_ids in enumerate(completions)]
        groups.append(Group(index, str(index), "", rollouts))
    return groups


def _rollout(sample: int, prompt_ids: tuple[int, ...], token_ids: np.ndarray) -> Rollout:
    num = len(token_ids)
    return Rollout(
        sample=sample,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        mask=np.ones(num, bool),
        logprobs=np.zeros(num),
        versions=np.zeros(num, np.int32),
        provenance=np.zeros(num, np.uint8),
        sources=np.full(num, 255, np.uint8),
        drafters=(),
        finish_reason="stop",
        reward=1.0 - 2 * (sample % 2),
    )


def grpo_batch(groups: list[Group]) -> tuple[list[Rollout], TokenBatch]:
    """The rollouts, and a batch whose advantages are the rewards."""
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    batch.advantages_T = batch.reward_S[batch.sequence_T]
    batch.weights_T = make_algorithm(AlgorithmSection(name="grpo"), len(rollouts[0].token_ids)).weights(batch)
    return rollouts, batch


def _is_kernel(event: Any) -> bool:
    """Annotations, such as an optimizer's step, span kernels that are listed too."""
    return event.device_type.name == "CUDA" and not event.is_user_annotation


def _kernel(event: Any, on_gpu: bool) -> dict[str, Any]:
    microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
    return {"name": event.key[:NAME_LENGTH], "calls": event.count, "seconds": microseconds / 1e6}


def _timed(function: Callable[[], object], device: str) -> float:
    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start
