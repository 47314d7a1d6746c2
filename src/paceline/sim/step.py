"""Time of one decode step, from hardware rates and the model's shape (a roofline model).

Time of a forward pass on one device of an engine:

    T = Σ matrices smooth_max(bytes / (B·bandwidth), FLOPs / (F·matmul))    weights are read once
      + smooth_max(KV bytes / (B·attention), FLOPs / (F·matmul))            every row's context is read once
      + activations and logits / (B·bandwidth) + collectives + launches

    smooth_max(a, b) = (a^n + b^n)^(1/n), n = efficiency.knee               close to max(a, b)

n tokens that use a of E experts each read E·(1 − (1 − a/E)^n) experts: verifying more tokens reads more weights, until
all experts are read. Invariants: all functions are elementwise over arrays; more rows, tokens or context never take
less time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from paceline.config_io import ConfigError
from paceline.sim.settings import choice, number
from paceline.sim.specs import ITEMSIZE, Efficiency, Hardware, Model, Software
from paceline.speculation.cost import CostTable, Point

METHODS = ("none", "eagle3", "draft_model", "free", "hybrid")
PRECISIONS = ("fp8", "bf16", "fp32")
DRAFTER_NAMES = {"free": "suffix", "hybrid": "eagle3"}  # method -> drafter name in policies and cost tables
LOGIT_PASSES, LOGIT_BYTES = 3, 4  # float32 logits: one write, and the reads of sampling


@dataclass(frozen=True, slots=True)
class Engine:
    """The devices that serve one copy of a model. Attention and dense matrices are tensor-parallel over `tp` devices;
    experts are spread over all devices. Each group of `tp` devices has its own rows."""

    gpus: int = number(1, low=1, high=4096)
    tp: int = number(1, low=1, high=4096)
    precision: str = choice("bf16", of=PRECISIONS)
    kv_precision: str = choice("bf16", of=PRECISIONS)
    max_rows: int = number(1024, low=1, high=1 << 20)  # in the whole engine
    table: str | None = None  # a cost table with measured steps, instead of this model
    memory_share: float = number(0.9, low=0.05, high=1.0)  # share of device memory for weights and KV cache

    @property
    def num_groups(self) -> int:
        return self.gpus // self.tp


def check_engine(engine: Engine, model: Model, hardware: Hardware) -> None:
    """Raise an error for parallelism that the model or the hardware can't have."""
    if engine.gpus % engine.tp:
        raise ConfigError(f"engine.tp = {engine.tp}: does not divide engine.gpus = {engine.gpus}")
    if not model.experts and engine.gpus != engine.tp:
        raise ConfigError(
            f"engine.gpus = {engine.gpus} with engine.tp = {engine.tp}: {model.name} has no experts to spread over the "
            f"other devices; set engine.gpus = {engine.tp} to run several engines"
        )
    if model.heads % engine.tp:
        raise ConfigError(f"engine.tp = {engine.tp}: does not divide the {model.heads} heads of {model.name}")
    if model.experts and engine.gpus > model.experts:
        raise ConfigError(f"engine.gpus = {engine.gpus}: more than the {model.experts} experts of {model.name}")
    if engine.gpus > hardware.nvlink_gpus and not hardware.network_gb_s:
        raise ConfigError(
            f"engine.gpus = {engine.gpus}: {hardware.name} connects {hardware.nvlink_gpus} by NVLink and has no "
            "network_gb_s; lower engine.gpus or set network_gb_s"
        )
    hardware.flops(engine.precision)


class StepModel:
    def __init__(
        self,
        hardware: Hardware,
        model: Model,
        software: Software,
        efficiency: Efficiency,
        engine: Engine,
        method: str = "none",
        draft_model: Model | None = None,
        head_precision: str = "bf16",
        head_tp: bool = False,  # tensor-parallel like the target; else every device has a full copy
        free_row_us: float = 2.0,
    ) -> None:
        check_engine(engine, model, hardware)
        self.hardware, self.model, self.software, self.efficiency = hardware, model, software, efficiency
        self.engine, self.method, self.draft_model = engine, method, draft_model
        self.head_precision, self.head_tp, self.free_row_us = head_precision, head_tp, free_row_us
        if method in ("eagle3", "hybrid") and model.head is None:
            raise ConfigError(
                f"speculation.method = {method!r}: the spec of {model.name} has no head; add [head] to it"
            )
        if method == "draft_model":
            if draft_model is None:
                raise ConfigError("speculation.draft_model is not set; give the name or path of a model spec")
            if draft_model.heads % engine.tp:
                raise ConfigError(
                    f"engine.tp = {engine.tp}: does not divide the {draft_model.heads} heads of "
                    f"speculation.draft_model, {draft_model.name}"
                )
        if method not in ("none", "free"):
            hardware.flops(head_precision, "speculation.head_precision")
        self._check_memory()

    # -- memory -----------------------------------------------------------------------------------------------------

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of the target's weights on one device."""
        m, e = self.model, self.engine
        dense = m.num_params - m.layers * m.experts * m.expert_params
        size = dense / e.tp + m.layers * m.experts * m.expert_params / e.gpus
        return size * ITEMSIZE[e.precision]

    @property
    def drafter_bytes(self) -> float:
        """Bytes of the draft model's or head's weights on one device."""
        if self.method == "draft_model":
            assert self.draft_model is not None
            num = self.draft_model.num_params / self.engine.tp
        elif self.method in ("eagle3", "hybrid"):
            layer = self._head_layer
            num = layer.attention_params + 3 * layer.hidden * layer.intermediate + layer.vocab * layer.hidden
            num = (num + self._head_extra(reads_features=True)) / self._head_tp
        else:
            num = 0.0
        return num * ITEMSIZE[self.head_precision]

    @property
    def _kv_memory(self) -> float:
        """Bytes for the KV cache on one device."""
        return 1e9 * self.hardware.memory_gb * self.engine.memory_share - self.weight_bytes

    def _check_memory(self) -> None:
        if self._kv_memory <= 0:
            raise ConfigError(
                f"{self.model.name} does not fit: {self.weight_bytes / 1e9:.0f} GB of weights per device, but "
                f"{self.hardware.name} has {self.hardware.memory_gb * self.engine.memory_share:.0f} GB for them; raise "
                f"engine.gpus = {self.engine.gpus} and engine.tp = {self.engine.tp}, or lower engine.precision"
            )
        if self._kv_memory <= self.drafter_bytes:
            raise ConfigError(
                f"speculation.method = {self.method!r}: the drafter does not fit: {self.drafter_bytes / 1e9:.1f} GB of "
                f"weights per device, but {self._kv_memory / 1e9:.1f} GB left beside {self.model.name} on "
                f"{self.hardware.name}; raise engine.gpus = {self.engine.gpus} and engine.tp = {self.engine.tp}, or "
                "choose a smaller drafter"
            )

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into an engine's KV cache."""
        return int(self._kv_memory / self._kv_bytes(self.model, self.engine.tp) * self.engine.num_groups)

    def _kv_bytes(self, model: Model, tp: int) -> float:
        """Bytes of one token on one device; a KV head is not split between devices."""
        return model.kv_bytes(ITEMSIZE[self.engine.kv_precision]) * -(-model.kv_heads // tp) / model.kv_heads

    # -- time -------------------------------------------------------------------------------------------------------

    def step_s(self, rows: ArrayLike, k: ArrayLike, context: ArrayLike, emitted: ArrayLike = 1.0) -> np.ndarray:
        """Time of a step with drafting. `k`: draft tokens, `context`: context tokens, `emitted`: emitted tokens, each
        per row."""
        r, k_, c = np.asarray(rows, np.float64), np.asarray(k, np.float64), np.asarray(context, np.float64)
        device = self.forward_s(r, r * (1 + k_), r * c) + self.draft_s(r, k_, c)
        return device + self.host_s(r, k_, np.asarray(emitted, np.float64))

    def host_s(self, rows: np.ndarray, k: np.ndarray, emitted: np.ndarray) -> np.ndarray:
        s, group_rows = self.software, self._group_rows(rows)
        passes_us = s.host_pass_us * self._num_passes(k)
        return 1e-6 * (s.host_step_us + group_rows * (s.host_row_us + s.host_token_us * emitted) + passes_us)

    def _num_passes(self, k: np.ndarray) -> np.ndarray:
        """The drafter's forward passes for k draft tokens."""
        return np.zeros_like(k) if self.method in ("none", "free") else k

    def forward_s(self, rows: ArrayLike, tokens: ArrayLike, context: ArrayLike) -> np.ndarray:
        """The target's forward pass. Rows, query tokens and context tokens are totals of the whole engine."""
        r, t, c = np.asarray(rows, np.float64), np.asarray(tokens, np.float64), np.asarray(context, np.float64)
        share = self._group_rows(r) / np.maximum(r, 1e-9)
        return self._pass_s(self.model, self.engine.precision, self.engine.tp, self.engine.gpus, r * share, t * share,
                            c * share, t, t * share)  # fmt: skip

    def prefill_s(self, tokens: ArrayLike) -> np.ndarray:
        """Time that `tokens` prompt tokens add to a step."""
        e = self.engine
        flops = 2.0 * self.model.active_params * np.asarray(tokens, np.float64)
        return flops / (self.hardware.flops(e.precision) * self.efficiency.matmul * e.gpus)

    def draft_s(self, rows: ArrayLike, k: ArrayLike, context: ArrayLike) -> np.ndarray:
        """Time to draft k tokens for each row."""
        r, k_, c = np.asarray(rows, np.float64), np.asarray(k, np.float64), np.asarray(context, np.float64)
        if self.method == "none":
            return np.zeros(np.broadcast(r, k_, c).shape)
        r = self._group_rows(r)
        if self.method == "free":
            return np.where(k_ > 0, 1e-6 * self.free_row_us * r, 0.0) + 0 * c
        if self.method == "draft_model":
            assert self.draft_model is not None
            tp = self.engine.tp
            return k_ * self._pass_s(self.draft_model, self.head_precision, tp, tp, r, r, r * c, r, r)
        # The first pass reads the target's features of the verified tokens, the others one draft token per row.
        first = self._head_pass_s(r, r * (1 + k_), r * c, reads_features=True)
        return np.where(k_ > 0, first + np.maximum(0, k_ - 1) * self._head_pass_s(r, r, r * c), 0.0)

    def _head_pass_s(
        self, rows: np.ndarray, tokens: np.ndarray, context: np.ndarray, reads_features: bool = False
    ) -> np.ndarray:
        layer, tp = self._head_layer, self._head_tp
        seconds = self._pass_s(layer, self.head_precision, tp, tp, rows, tokens, context, tokens, rows)
        return seconds + self.matrix_s(self._head_extra(reads_features) / tp, self.head_precision, tokens)

    @property
    def _head_tp(self) -> int:
        return self.engine.tp if self.head_tp else 1

    @property
    def _head_layer(self) -> Model:
        m, head = self.model, self.model.head
        assert head is not None
        return Model(
            f"{m.name}'s head", "", layers=1, hidden=m.hidden, heads=m.heads, kv_heads=m.kv_heads, head_dim=m.head_dim,
            vocab=head.draft_vocab, intermediate=head.intermediate,
        )  # fmt: skip

    def _head_extra(self, reads_features: bool) -> int:
        """Parameters of a head beyond its layer: qkv has a second input vector, and the target's features are projected
        to one vector."""
        m, head = self.model, self.model.head
        assert head is not None
        qkv = m.hidden * (m.heads + 2 * m.kv_heads) * m.head_dim
        return qkv + head.num_features * m.hidden * m.hidden if reads_features else qkv

    def _group_rows(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the busiest group of `tp` devices."""
        return np.minimum(rows, np.maximum(rows / self.engine.num_groups, 1.0))

    def _pass_s(
        self, m: Model, precision: str, tp: int, gpus: int, rows: np.ndarray, tokens: np.ndarray, context: np.ndarray,
        all_tokens: np.ndarray, logit_tokens: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """A forward pass on one device. `rows`, `tokens`, `context`: of its group. `all_tokens`: of the engine, for the
        experts. `logit_tokens`: tokens that need logits."""
        bytes_per_s = self.hardware.bytes_per_s * self.efficiency.bandwidth
        seconds = m.layers * self.matrix_s(m.attention_params / tp, precision, tokens)
        if m.experts:
            active = m.experts * -np.expm1(all_tokens * np.log1p(-min(m.experts_per_token / m.experts, 1 - 1e-12)))
            local = np.maximum(active / gpus, np.minimum(active, 1.0))  # active experts of the busiest device
            local_tokens = all_tokens * m.experts_per_token / gpus
            seconds = seconds + m.layers * self._product_s(
                local * m.expert_params, local_tokens * m.expert_params, precision
            )
            # Each device sends its share of its group's tokens to their experts, and receives the outputs in bfloat16.
            num_values = tokens / tp * m.experts_per_token * m.hidden
            for itemsize in (ITEMSIZE[precision], ITEMSIZE["bf16"]):
                seconds = seconds + m.layers * self._collective_s(gpus, (gpus - 1) / gpus * num_values * itemsize)
        else:
            seconds = seconds + m.layers * self.matrix_s(3 * m.hidden * m.intermediate / tp, precision, tokens)
        seconds = seconds + self.matrix_s(m.vocab * m.hidden / tp, precision, logit_tokens)
        queries = tokens / np.maximum(rows, 1e-9)  # per row
        seconds = seconds + self._smooth_max(
            context * self._kv_bytes(m, tp) / (self.hardware.bytes_per_s * self.efficiency.attention),
            m.attention_flops(1.0) / tp * context * queries / self._flops(precision),
        )
        width = m.intermediate or m.experts_per_token * m.expert_intermediate
        activation_bytes = tokens * m.layers * 2 * (8 * m.hidden + 3 * width / tp)
        logit_bytes = LOGIT_PASSES * LOGIT_BYTES * logit_tokens * m.vocab / tp
        seconds = seconds + (activation_bytes + logit_bytes) / bytes_per_s
        seconds = seconds + m.layers * 2 * self._all_reduce_s(tp, tokens * m.hidden * ITEMSIZE["bf16"])
        launches = m.layers * self.efficiency.layer_us + self.efficiency.pass_us
        return seconds + 1e-6 * self.hardware.launch * launches

    def matrix_s(self, num_params: float, precision: str, tokens: np.ndarray) -> np.ndarray:
        """The product of a matrix with so many tokens."""
        return self._product_s(num_params, num_params * tokens, precision)

    def _product_s(self, num_params: ArrayLike, num_products: np.ndarray, precision: str) -> np.ndarray:
        read_s = np.asarray(num_params) * ITEMSIZE[precision] / (self.hardware.bytes_per_s * self.efficiency.bandwidth)
        return self._smooth_max(read_s, 2 * num_products / self._flops(precision))

    def _flops(self, precision: str) -> float:
        return self.hardware.flops(precision) * self.efficiency.matmul

    def _smooth_max(self, a: ArrayLike, b: ArrayLike) -> np.ndarray:
        high, low = np.maximum(a, b), np.minimum(a, b)
        ratio = low / np.maximum(high, 1e-300)
        return high * (1 + ratio**self.efficiency.knee) ** (1 / self.efficiency.knee)

    # -- collectives: a latency per doubling of the group size, plus bytes over bandwidth ----------------------------

    def _link(self, num: int) -> tuple[float, float]:
        """(bytes per second, latency) of a collective over `num` devices."""
        h = self.hardware
        near = num <= h.nvlink_gpus
        gb_s, us = (h.nvlink_gb_s, h.nvlink_us) if near else (h.network_gb_s, h.network_us)
        if not gb_s:
            raise ConfigError(
                f"{num} devices of {h.name} have no link: set {'nvlink' if near else 'network'}_gb_s in its spec"
            )
        return 1e9 * gb_s * self.efficiency.collective, 1e-6 * us * np.log2(num)

    def _all_reduce_s(self, num: int, num_bytes: np.ndarray) -> np.ndarray:
        # NVLink SHARP reduces in the switch, so each device sends its data once. Elsewhere: ring all-reduce.
        factor = 1.0 if num <= self.hardware.nvlink_gpus else 2 * (num - 1) / num
        return self._collective_s(num, factor * num_bytes)

    def _collective_s(self, num: int, num_bytes: np.ndarray) -> np.ndarray:
        """`num_bytes`: what each of `num` devices sends."""
        if num == 1:
            return np.zeros_like(num_bytes)
        bytes_per_s, latency_s = self._link(num)
        return latency_s + num_bytes / bytes_per_s

    # -- for policies -----------------------------------------------------------------------------------------------

    def cost_table(self, max_rows: int, max_k: int, context: float) -> CostTable:
        """A cost table for policies (speculation/cost.py). It does not include the host time per emitted token: the
        number of emitted tokens is not known before the step, and policies do not decide about it."""
        sizes = sorted({1, max_rows, *(2**i for i in range(max_rows.bit_length())), *(3 * 2**i for i in range(30))})
        sizes = [rows for rows in sizes if rows <= max_rows]
        points, drafts = [], []
        for rows in sizes:
            for k in range(max_k + 1):
                tokens, context_tokens = rows * (1 + k), round(rows * (context + k))
                seconds = self.forward_s(rows, tokens, context_tokens) + self.host_s(
                    np.asarray(float(rows)), np.asarray(0), np.asarray(0)
                )
                points.append(Point(rows, tokens, max(tokens, context_tokens), float(seconds)))
                if k:
                    passes_s = 1e-6 * self.software.host_pass_us * self._num_passes(np.asarray(k))
                    drafts.append((rows, k, float(self.draft_s(rows, k, context) + passes_s)))
        name = DRAFTER_NAMES.get(self.method, self.method)
        # A table has one cost per context token: take it from a full batch, in which all groups have rows.
        more_s = self.forward_s(max_rows, max_rows, 2 * max_rows * context) - self.forward_s(
            max_rows, max_rows, max_rows * context
        )
        per_context_token_s = float(more_s) / (max_rows * context)
        return CostTable(
            "simulated", points, {name: drafts} if self.method != "none" else {}, per_context_token_s, frozen=True
        )
