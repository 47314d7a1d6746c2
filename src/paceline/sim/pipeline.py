"""A step of RL: generation, logprobs, training and weight sync, one after the other or side by side.

Step m trains on batch m. A batch may begin under weights that are `lag` updates behind those that it will meet:

    generation begins   g_m = max(g_(m-1) + G, v_(m-lag))     v_j: when version j is there, the start for j <= 0
    generation ends     e_m = g_m + G
    training begins     t_m = max(e_m, end of training m-1)

With lag 0 that is synchronous RL. G is what generation takes for a batch, alone (lag 0 and 1) or in a stream of
overlapping ones. Always: a device does one thing at a time, and what it does not do is counted as idle, never less
than nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config import ConfigError
from paceline.sim.cards import ITEMSIZE, Efficiency, Hardware, Model, Software
from paceline.sim.settings import choice, number

LAYOUTS = ("colocated", "disaggregated")
ROUNDS, MEASURED = 16, 4
FORWARDS = {"logprob": 1.0, "training": 3.0}  # passes over the batch, in forwards; a backward is two


@dataclass(frozen=True, slots=True)
class Pipeline:
    gpus: int = number(low=1, high=1 << 20)
    layout: str = choice("colocated", of=LAYOUTS)
    generation_gpus: int = number(0, low=0, high=1 << 20)  # disaggregated: those that do not train
    lag: int = number(0, low=0, high=64)
    reward_s: float = number(0.0, low=0, high=86_400, unit="s")  # what is left of it when generation ends
    training_precision: str = choice("bf16", of=("fp8", "bf16", "fp32"))
    logprobs: int = number(1, low=0, high=4)  # forwards over the batch before training

    def __post_init__(self) -> None:
        if self.layout == "colocated":
            if self.generation_gpus:
                raise ConfigError(
                    f"pipeline.generation_gpus = {self.generation_gpus}: colocated, all devices do both; leave it out, "
                    'or set pipeline.layout = "disaggregated"'
                )
            if self.lag:
                raise ConfigError(
                    f"pipeline.lag = {self.lag}: devices that do both can't overlap; set pipeline.layout = "
                    '"disaggregated"'
                )
        elif not 0 < self.generation_gpus < self.gpus:
            raise ConfigError(
                f"pipeline.generation_gpus = {self.generation_gpus}: must be from 1 to {self.gpus - 1}, some of "
                f"pipeline.gpus = {self.gpus}"
            )

    @property
    def rollout_gpus(self) -> int:
        return self.gpus if self.layout == "colocated" else self.generation_gpus

    @property
    def training_gpus(self) -> int:
        return self.gpus if self.layout == "colocated" else self.gpus - self.generation_gpus


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of a step, each as if it were alone."""

    data: float
    prepare: float
    generation: float
    reward: float
    logprob: float
    training: float
    sync: float

    @property
    def learning_s(self) -> float:
        """All that follows a batch's generation, up to the next version."""
        return self.data + self.prepare + self.reward + self.logprob + self.training


@dataclass(frozen=True, slots=True)
class Span:
    who: str  # "generation" or "training": the devices
    stage: str
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """A steady step."""

    seconds: float
    exposed_s: float  # that training waits for generation and new weights
    generation_idle: float  # share of the time that the devices which generate do not
    training_idle: float
    timeline: tuple[Span, ...]


def stages_of(
    pipeline: Pipeline, hardware: Hardware, model: Model, software: Software, efficiency: Efficiency,
    rollout_s: float, lengths: np.ndarray, prompts: np.ndarray,
) -> Stages:  # fmt: skip
    """`lengths`, `prompts`: of the batch that is trained on."""
    colocated = pipeline.layout == "colocated"
    stage_s = software.stage_s if colocated else 0.0
    total = (lengths + prompts).astype(np.float64)
    # A token attends to half of its sequence, on average.
    products = model.active_params + model.grouped_params * (1 / efficiency.mfu_experts - 1)
    forward = float(2.0 * products * total.sum() + model.attention_flops(1.0) * (total**2).sum() / 2)
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
    """Weights to the engines: from where they are trained, every receiver's share over its own link."""
    if pipeline.gpus == 1:
        return 0.0
    near = pipeline.gpus <= hardware.nvlink_gpus
    gb_s = hardware.nvlink_gb_s if near else hardware.network_gb_s
    if not gb_s:
        raise ConfigError(
            f"pipeline.gpus = {pipeline.gpus}: weights have no way between devices; give "
            f"{'nvlink' if near else 'network'}_gb_s in the card of {hardware.name}, or set pipeline.gpus = 1"
        )
    senders = pipeline.training_gpus
    return model.num_params * ITEMSIZE["bf16"] / (1e9 * gb_s * efficiency.collective * min(senders, 8))


def steady_step(pipeline: Pipeline, stages: Stages) -> Step:
    """From the start, until it goes on as it did: what is measured are the last rounds of lag + 1 steps."""
    lag = pipeline.lag
    num_steps = ROUNDS * (lag + 1)
    versions = [0.0] * (num_steps + 1)  # when version j is there
    spans: list[Span] = []
    begin, trained = -stages.generation, 0.0
    starts: list[float] = []
    for m in range(num_steps):
        begin = max(begin + stages.generation, versions[max(0, m - lag)])
        spans.append(Span("generation", "generation", m, begin, begin + stages.generation))
        starts.append(max(begin + stages.generation, trained))
        at = starts[-1]
        for stage in ("reward", "data", "prepare", "logprob", "training"):
            taken = getattr(stages, stage)
            spans.append(Span("training", stage, m, at, at + taken))
            at += taken
        trained = at
        versions[m + 1] = trained + stages.sync
    measured = MEASURED * (lag + 1)
    period = (starts[-1] - starts[-1 - measured]) / measured
    busy = stages.generation + stages.learning_s if pipeline.layout == "colocated" else 0.0
    return Step(
        seconds=period,
        exposed_s=max(0.0, period - stages.learning_s),
        generation_idle=_share(period, busy or stages.generation),
        training_idle=_share(period, busy or stages.learning_s),
        timeline=tuple(spans),
    )


def _share(period: float, busy: float) -> float:
    assert busy <= period * (1 + 1e-9), "devices can't do more than one thing at a time"
    return max(0.0, 1 - busy / period)
