"""Specs of hardware, models, software and efficiency: one TOML file each, with the source of its numbers.

A spec is named by the stem of a shipped file (in spec_files/) or by the path of your own TOML file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.config_io import ConfigError, read_toml
from paceline.sim.settings import number, parse_settings

SPEC_FILES = Path(__file__).parent / "spec_files"
MAX_EFFICIENCY = 1.05  # share of a peak rate; above 1 because datasheets round
ITEMSIZE = {"fp8": 1, "bf16": 2, "fp32": 4}
Spec = TypeVar("Spec", "Hardware", "Model", "Software", "Efficiency")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator and its links. Rates are dense (no sparsity); link bandwidths are for one direction."""

    name: str
    source: str
    memory_gb: float = number(low=1, high=4000, unit="GB")
    memory_tb_s: float = number(low=0.005, high=100, unit="TB/s")
    bf16_tflops: float = number(0.0, low=0, high=100_000, unit="TFLOP/s")  # 0: not supported
    fp8_tflops: float = number(0.0, low=0, high=200_000, unit="TFLOP/s")
    fp32_tflops: float = number(0.0, low=0, high=10_000, unit="TFLOP/s")
    nvlink_gb_s: float = number(0.0, low=0, high=10_000, unit="GB/s")
    nvlink_us: float = number(1.0, low=0.01, high=1000, unit="µs")  # latency per doubling of the group size
    nvlink_gpus: int = number(1, low=1, high=4096)  # devices in one NVLink domain
    network_gb_s: float = number(0.0, low=0, high=10_000, unit="GB/s")
    network_us: float = number(5.0, low=0.01, high=10_000, unit="µs")
    launch: float = number(1.0, low=0.01, high=1000)  # time of small kernels, relative to an H200
    usd_per_hour: float = number(0.0, low=0, high=1000, unit="US dollars")

    def flops(self, precision: str, key: str = "engine.precision") -> float:
        """`key`: the config key that sets the precision, for the error message."""
        tflops: float = getattr(self, f"{precision}_tflops")
        if not tflops:
            raise ConfigError(f"{key} = {precision!r}: {self.name} has no {precision}; choose another precision")
        return 1e12 * tflops

    @property
    def bytes_per_s(self) -> float:
        return 1e12 * self.memory_tb_s


@dataclass(frozen=True, slots=True)
class Head:
    """A model's EAGLE-3 head: one decoder layer with two input vectors per token, and its own draft vocabulary."""

    intermediate: int = number(low=1, high=1_000_000)
    draft_vocab: int = number(32000, low=1, high=10_000_000)
    num_features: int = number(3, low=1, high=16)  # target layers that it reads hidden states of


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's shape. `intermediate` is 0 for a mixture of experts."""

    name: str
    source: str
    layers: int = number(low=1, high=10_000)
    hidden: int = number(low=1, high=1_000_000)
    heads: int = number(low=1, high=10_000)
    kv_heads: int = number(low=1, high=10_000)
    head_dim: int = number(low=1, high=10_000)
    vocab: int = number(low=1, high=10_000_000)
    intermediate: int = number(0, low=0, high=1_000_000)
    tied: bool = False  # embedding and LM head share their weights
    experts: int = number(0, low=0, high=100_000)
    experts_per_token: int = number(0, low=0, high=1000)
    expert_intermediate: int = number(0, low=0, high=1_000_000)
    max_positions: int = number(1 << 30, low=1, high=1 << 30)
    head: Head | None = None

    def __post_init__(self) -> None:
        if bool(self.experts) != bool(self.experts_per_token) or bool(self.experts) != bool(self.expert_intermediate):
            raise ConfigError(f"{self.name}: set experts, experts_per_token and expert_intermediate together")
        if bool(self.intermediate) == bool(self.experts):
            raise ConfigError(f"{self.name}: give either intermediate or experts")
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"{self.name}: experts_per_token = {self.experts_per_token}, but experts = {self.experts}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.name}: heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's qkv and o matrices."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.expert_intermediate

    @property
    def num_params(self) -> int:
        """Parameters of all matrices, including embedding and LM head."""
        mlp = 3 * self.hidden * self.intermediate + self.experts * (self.expert_params + self.hidden)
        return self.layers * (self.attention_params + mlp) + (2 - self.tied) * self.vocab * self.hidden

    @property
    def active_params(self) -> int:
        """Parameters that are used for one token, including the LM head but not the embedding."""
        mlp = 3 * self.hidden * self.intermediate + self.experts_per_token * self.expert_params
        mlp += self.experts * self.hidden
        return self.layers * (self.attention_params + mlp) + self.vocab * self.hidden

    @property
    def active_expert_params(self) -> int:
        """The part of `active_params` that is in experts."""
        return self.layers * self.experts_per_token * self.expert_params

    def kv_bytes(self, itemsize: int) -> int:
        """KV cache bytes of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def attention_flops(self, context: float) -> float:
        """FLOPs of one query token over `context` tokens, in all layers: q·k and the weighted sum of v."""
        return 4.0 * self.layers * self.heads * self.head_dim * context


@dataclass(frozen=True, slots=True)
class Software:
    """Host time that serving and training software adds to device time. All zeros: the whole step runs on the device,
    and the next step is launched before the last one finishes."""

    name: str
    source: str
    host_step_us: float = number(0.0, low=0, high=1e6, unit="µs")  # per engine step
    host_row_us: float = number(0.0, low=0, high=1e5, unit="µs")  # per row of a step
    host_token_us: float = number(0.0, low=0, high=1e5, unit="µs")  # per emitted token: detokenization, streaming
    host_pass_us: float = number(0.0, low=0, high=1e6, unit="µs")  # per forward pass of the drafter
    wake_s: float = number(0.0, low=0, high=3600, unit="s")  # colocated: time to switch to generation, once per RL step
    stage_s: float = number(0.0, low=0, high=3600, unit="s")  # colocated: time to switch to another stage
    data_s: float = number(0.0, low=0, high=3600, unit="s")
    prepare_s: float = number(0.0, low=0, high=3600, unit="s")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Which share of the hardware's peak rates is reached. Fitted once for all hardware (docs/how-to/simulator.md)."""

    name: str
    source: str
    bandwidth: float = number(low=0.01, high=MAX_EFFICIENCY)  # of memory bandwidth, in matrix products of few tokens
    matmul: float = number(low=0.01, high=MAX_EFFICIENCY)  # of peak FLOP/s, in matrix products of many tokens
    knee: float = number(low=1, high=50)  # exponent of the transition between the two (sim/step.py)
    attention: float = number(low=0.01, high=MAX_EFFICIENCY)  # of memory bandwidth, when reading the KV cache
    collective: float = number(low=0.01, high=MAX_EFFICIENCY)  # of link bandwidth
    layer_us: float = number(low=0.01, high=1e5, unit="µs")  # small kernels of one layer, on an H200
    pass_us: float = number(low=0.01, high=1e6, unit="µs")  # fixed time of one forward pass, on an H200
    mfu: float = number(low=0.01, high=1.0)  # model FLOPs utilization in training
    mfu_experts: float = number(low=0.01, high=1.2)  # of expert layers, relative to `mfu`


FOLDERS = {Hardware: "hardware", Model: "models", Software: "software", Efficiency: "efficiency"}


def shipped_specs(kind: type[Spec]) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (SPEC_FILES / FOLDERS[kind]).glob("*.toml")))


def load_spec(kind: type[Spec], name: str, key: str) -> Spec:
    """Load a shipped spec by name, or any spec by path. `key`: the config key that named it, for error messages."""
    if name in shipped_specs(kind):
        return parse_settings(kind, read_toml(SPEC_FILES / FOLDERS[kind] / f"{name}.toml"), name)
    path = Path(name).expanduser()
    if path.suffix != ".toml":
        raise ConfigError(
            f"{key} = {name!r}: no such spec; choose one of {', '.join(shipped_specs(kind))}, or give a .toml file"
        )
    return parse_settings(kind, read_toml(path), str(path))
