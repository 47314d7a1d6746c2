"""An RL step: generation, logprobs, training and weight sync, sequential or overlapped.

Step m trains on batch m. Generation of a batch may start with weights that are `lag` updates old:

    generation starts   g_m = max(g_(m-1) + G, v_(m-lag))     v_j: time at which version j is published; 0 for j <= 0
    generation ends     e_m = g_m + G
    training starts     t_m = max(e_m, end of training m-1)

Lag 0 is synchronous RL. G is the generation time of one batch: alone (lag 0 and 1), or in a stream of overlapping
batches. Invariants: a device runs one stage at a time; idle time is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config_io import ConfigError
from paceline.sim.settings import choice, number
from paceline.sim.specs import ITEMSIZE, Efficiency, Hardware, Model, Software

LAYOUTS = ("colocated", "disaggregated")
NUM_ROUNDS, NUM_MEASURED_ROUNDS = 16, 4  # a round is lag + 1 steps
FORWARDS = {"logprob": 1.0, "training": 3.0}  # cost in forward passes over the batch; a backward pass counts as two


@dataclass(frozen=True, slots=True)
class Pipeline:
    gpus: int = number(low=1, high=1 << 20)
    layout: str = choice("colocated", of=LAYOUTS)
    generation_gpus: int = number(0, low=0, high=1 << 20)  # disaggregated only; the others train
    lag: int = number(0, low=0, high=64)
    reward_s: float = number(0.0, low=0, high=86_400, unit="s")  # reward time that does not overlap with generation
    training_precision: str = choice("bf16", of=("fp8", "bf16", "fp32"))
    logprobs: int = number(1, low=0, high=4)  # forward passes over the batch before training

    def __post_init__(self) -> None:
        if self.layout == "colocated":
            if self.generation_gpus:
                raise ConfigError(
                    f"pipeline.generation_gpus = {self.generation_gpus}: with a colocated layout all devices generate; "
                    'remove it, or set pipeline.layout = "disaggregated"'
                )
            if self.lag:
                raise ConfigError(
                    f"pipeline.lag = {self.lag}: generation and training can't overlap on colocated devices; set "
                    'pipeline.layout = "disaggregated"'
                )
        elif not 0 < self.generation_gpus < self.gpus:
            raise ConfigError(
                f"pipeline.generation_gpus = {self.generation_gpus}: must be from 1 to {self.gpus - 1} "
                f"(pipeline.gpus = {self.gpus})"
            )

    @property
    def rollout_gpus(self) -> int:
        return self.gpus if self.layout == "colocated" else self.generation_gpus

    @property
    def training_gpus(self) -> int:
        return self.gpus if self.layout == "colocated" else self.gpus - self.generation_gpus


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of each stage of an RL step, without overlap."""

    data: float
    prepare: float
    generation: float
    reward: float
    logprob: float
    training: float
    sync: float

    @property
    def learning_s(self) -> float:
        """All stages between the end of generation and the next policy version, without weight sync."""
        return self.data + self.prepare + self.reward + self.logprob + self.training


@dataclass(frozen=True, slots=True)
class Span:
    devices: str  # "generation" or "training"
    stage: str
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """An RL step in the steady state."""

    seconds: float
    exposed_s: float  # time in which training waits for generation and weight sync
    generation_idle: float  # share of the time in which the generation devices are idle
    training_idle: float
    timeline: tuple[Span, ...]


def stage_times(
    pipeline: Pipeline, hardware: Hardware, model: Model, software: Software, efficiency: Efficiency,
    rollout_s: float, lengths: np.ndarray, prompts: np.ndarray,
) -> Stages:  # fmt: skip
    """`lengths`, `prompts`: completion and prompt tokens of each request of the batch."""
    colocated = pipeline.layout == "colocated"
    stage_s = software.stage_s if colocated else 0.0
    total = (lengths + prompts).astype(np.float64)
    # On average a token attends to half of its sequence. Expert parameters count more because their MFU is lower.
    params = model.active_params + model.active_expert_params * (1 / efficiency.mfu_experts - 1)
    forward = float(2.0 * params * total.sum() + model.attention_flops(1.0) * (total**2).sum() / 2)
    rate = pipeline.training_gpus * hardware.flops(pipeline.training_precision, "pipeline.training_precision")
    rate *= efficiency.mfu
    return Stages(
        data=software.data_s,
        prepare=software.prepare_s,
        generation=rollout_s + (software.wake_s if colocated else 0.0),
        reward=pipeline.reward_s,
        logprob=pipeline.logprobs * FORWARDS["logprob"] * forward / rate + (stage_s if pipeline.logprobs else 0.0),
        training=FORWARDS["training"] * forward / rate + stage_s,
        sync=_sync_s(pipeline, hardware, model, efficiency),
    )


def _sync_s(pipeline: Pipeline, hardware: Hardware, model: Model, efficiency: Efficiency) -> float:
    """Time to send the weights from the training devices to the engines."""
    if pipeline.gpus == 1:
        return 0.0
    near = pipeline.gpus <= hardware.nvlink_gpus
    gb_s = hardware.nvlink_gb_s if near else hardware.network_gb_s
    if not gb_s:
        raise ConfigError(
            f"pipeline.gpus = {pipeline.gpus}: no link between the devices; set "
            f"{'nvlink' if near else 'network'}_gb_s in the spec of {hardware.name}, or set pipeline.gpus = 1"
        )
    senders = pipeline.training_gpus
    return model.num_params * ITEMSIZE["bf16"] / (1e9 * gb_s * efficiency.collective * min(senders, 8))


def steady_step(pipeline: Pipeline, stages: Stages) -> Step:
    """Simulate NUM_ROUNDS rounds of lag + 1 steps, and measure the last ones, which are in the steady state."""
    lag = pipeline.lag
    num_steps = NUM_ROUNDS * (lag + 1)
    published_s = [0.0] * (num_steps + 1)  # by policy version
    spans: list[Span] = []
    begin, trained = -stages.generation, 0.0
    starts: list[float] = []  # of training
    for m in range(num_steps):
        begin = max(begin + stages.generation, published_s[max(0, m - lag)])
        spans.append(Span("generation", "generation", m, begin, begin + stages.generation))
        starts.append(max(begin + stages.generation, trained))
        at = starts[-1]
        for stage in ("reward", "data", "prepare", "logprob", "training"):
            seconds = getattr(stages, stage)
            spans.append(Span("training", stage, m, at, at + seconds))
            at += seconds
        trained = at
        published_s[m + 1] = trained + stages.sync
    num_measured = NUM_MEASURED_ROUNDS * (lag + 1)
    period = (starts[-1] - starts[-1 - num_measured]) / num_measured
    busy = stages.generation + stages.learning_s if pipeline.layout == "colocated" else 0.0
    return Step(
        seconds=period,
        exposed_s=max(0.0, period - stages.learning_s),
        generation_idle=_idle_share(period, busy or stages.generation),
        training_idle=_idle_share(period, busy or stages.learning_s),
        timeline=tuple(spans),
    )


def _idle_share(period: float, busy: float) -> float:
    assert busy <= period * (1 + 1e-9), "a device runs one stage at a time"
    return max(0.0, 1 - busy / period)
