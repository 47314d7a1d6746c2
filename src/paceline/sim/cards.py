"""What is known of machines, models and serving software: data files, one each, with the source of their numbers.

A card is named by its file's stem (those in cards/) or by the path of a TOML file of one's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.config import ConfigError
from paceline.sim.settings import number, of_tree, read_toml

CARDS = Path(__file__).parent / "cards"
MOST = 1.05  # of a machine's rate: none attains more, but cards round theirs
ITEMSIZE = {"fp8": 1, "bf16": 2, "fp32": 4}
Card = TypeVar("Card", "Hardware", "Model", "Software", "Efficiency")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator, and how it reaches others. Dense rates, without sparsity; links in one direction."""

    name: str
    source: str
    memory_gb: float = number(low=1, high=4000, unit="GB")
    memory_tb_s: float = number(low=0.005, high=100, unit="TB/s")
    bf16_tflops: float = number(0.0, low=0, high=100_000, unit="TFLOP/s")  # 0: has none
    fp8_tflops: float = number(0.0, low=0, high=200_000, unit="TFLOP/s")
    fp32_tflops: float = number(0.0, low=0, high=10_000, unit="TFLOP/s")
    nvlink_gb_s: float = number(0.0, low=0, high=10_000, unit="GB/s")
    nvlink_us: float = number(1.0, low=0.01, high=1000, unit="µs")  # per doubling of the devices that meet
    nvlink_gpus: int = number(1, low=1, high=4096)  # devices that it joins
    network_gb_s: float = number(0.0, low=0, high=10_000, unit="GB/s")
    network_us: float = number(5.0, low=0.01, high=10_000, unit="µs")
    launch: float = number(1.0, low=0.01, high=1000)  # what small kernels take, against an H200's
    usd_per_hour: float = number(0.0, low=0, high=1000, unit="US dollars")

    def flops(self, precision: str, key: str = "engine.precision") -> float:
        """`key`: the setting that asks for it."""
        found: float = getattr(self, f"{precision}_tflops")
        if not found:
            raise ConfigError(f"{key} = {precision!r}: {self.name} has no {precision}; choose another")
        return 1e12 * found

    @property
    def bytes_per_s(self) -> float:
        return 1e12 * self.memory_tb_s


@dataclass(frozen=True, slots=True)
class Head:
    """A model's EAGLE-3 head: one decoder layer over two vectors per token, and a vocabulary of its own."""

    intermediate: int = number(low=1, high=1_000_000)
    draft_vocab: int = number(32000, low=1, high=10_000_000)
    num_features: int = number(3, low=1, high=16)  # target layers that it reads


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's shape. `intermediate` is 0 where every layer has experts instead."""

    name: str
    source: str
    layers: int = number(low=1, high=10_000)
    hidden: int = number(low=1, high=1_000_000)
    heads: int = number(low=1, high=10_000)
    kv_heads: int = number(low=1, high=10_000)
    head_dim: int = number(low=1, high=10_000)
    vocab: int = number(low=1, high=10_000_000)
    intermediate: int = number(0, low=0, high=1_000_000)
    tied: bool = False  # embedding and LM head are one
    experts: int = number(0, low=0, high=100_000)
    experts_per_token: int = number(0, low=0, high=1000)
    expert_intermediate: int = number(0, low=0, high=1_000_000)
    max_positions: int = number(1 << 30, low=1, high=1 << 30)
    head: Head | None = None

    def __post_init__(self) -> None:
        if bool(self.experts) != bool(self.experts_per_token) or bool(self.experts) != bool(self.expert_intermediate):
            raise ConfigError(f"{self.name}: experts, experts_per_token and expert_intermediate go together")
        if bool(self.intermediate) == bool(self.experts):
            raise ConfigError(f"{self.name}: give either intermediate or experts")
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"{self.name}: experts_per_token = {self.experts_per_token}, but experts = {self.experts}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.name}: heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}")

    @property
    def attention_params(self) -> int:
        """Of a layer's matrices: qkv and o."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.expert_intermediate

    @property
    def num_params(self) -> int:
        """Of all matrices, embedding and LM head included."""
        mlp = 3 * self.hidden * self.intermediate + self.experts * (self.expert_params + self.hidden)
        return self.layers * (self.attention_params + mlp) + (2 - self.tied) * self.vocab * self.hidden

    @property
    def active_params(self) -> int:
        """Of the matrices that a token meets, the LM head included."""
        mlp = 3 * self.hidden * self.intermediate + self.experts_per_token * self.expert_params
        mlp += self.experts * self.hidden
        return self.layers * (self.attention_params + mlp) + self.vocab * self.hidden

    @property
    def grouped_params(self) -> int:
        """Of those, in experts."""
        return self.layers * self.experts_per_token * self.expert_params

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def attention_flops(self, context: float) -> float:
        """Of one query over so many tokens, all layers: q·k, and its sum over v."""
        return 4.0 * self.layers * self.heads * self.head_dim * context


@dataclass(frozen=True, slots=True)
class Software:
    """What serving and training software adds to what the devices compute. Zero is an engine whose whole step is on
    the device, and where the next is launched before the last has landed."""

    name: str
    source: str
    host_step_us: float = number(0.0, low=0, high=1e6, unit="µs")  # of a step
    host_row_us: float = number(0.0, low=0, high=1e5, unit="µs")  # of a row in it
    host_token_us: float = number(0.0, low=0, high=1e5, unit="µs")  # of an emitted token: stop checks, text, streams
    host_pass_us: float = number(0.0, low=0, high=1e6, unit="µs")  # of a drafter's forward
    wake_s: float = number(0.0, low=0, high=3600, unit="s")  # colocated: to make generation ready, once a step
    stage_s: float = number(0.0, low=0, high=3600, unit="s")  # colocated: to make another stage ready
    data_s: float = number(0.0, low=0, high=3600, unit="s")
    prepare_s: float = number(0.0, low=0, high=3600, unit="s")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is attained of a machine's rates: few numbers, for all machines, fitted (docs/simulator.md)."""

    name: str
    source: str
    bandwidth: float = number(low=0.01, high=MOST)  # of memory's, by matrix products of few tokens
    matmul: float = number(low=0.01, high=MOST)  # of the peak, by those of many
    knee: float = number(low=1, high=50)  # how sharply one takes over from the other
    attention: float = number(low=0.01, high=MOST)  # of memory's bandwidth, reading keys and values
    collective: float = number(low=0.01, high=MOST)  # of a link's bandwidth
    layer_us: float = number(low=0.01, high=1e5, unit="µs")  # a layer's small kernels, on an H200
    pass_us: float = number(low=0.01, high=1e6, unit="µs")  # a forward's beginning and end, on an H200
    mfu: float = number(low=0.01, high=1.0)  # of the peak, in training
    mfu_experts: float = number(low=0.01, high=1.2)  # of what others reach in training, by products with experts


FOLDERS = {Hardware: "hardware", Model: "models", Software: "software", Efficiency: "efficiency"}


def shipped(kind: type[Card]) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (CARDS / FOLDERS[kind]).glob("*.toml")))


def card(kind: type[Card], name: str, key: str) -> Card:
    """A shipped card by its name, or any by its path. `key`: the setting that named it."""
    if name in shipped(kind):
        return of_tree(kind, read_toml(CARDS / FOLDERS[kind] / f"{name}.toml"), name)
    path = Path(name).expanduser()
    if path.suffix != ".toml":
        raise ConfigError(
            f"{key} = {name!r}: no such card; shipped are {', '.join(shipped(kind))}, or give a .toml file"
        )
    return of_tree(kind, read_toml(path), str(path))
