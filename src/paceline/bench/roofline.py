"""The least time that a decode step can take: what it must read, and what it must compute, at the rates of a machine.

A pass reads its matrices once, and of every row the keys and values of its context once; it multiplies every token with
the matrices, and attends. It takes at least the longer of the two. A head's passes wait for one another, so their times
add up. What is small is left out: embeddings, norms, activations, the draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.model.config import ModelConfig

if TYPE_CHECKING:
    from paceline.model.eagle3 import HeadConfig


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a machine, as measured: copying memory, and multiplying large matrices."""

    bytes_per_s: float
    flops_per_s: float


H200 = Rates(4.26e12, 775e12)  # bfloat16


@dataclass(frozen=True, slots=True)
class Load:
    """A decode step: rows with 1 + k tokens each, and about `context` tokens in memory."""

    num_rows: int
    num_draft_tokens: int  # k, of each row
    context: float
    itemsize: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * (1 + self.num_draft_tokens)


def step_s(
    target: ModelConfig,
    load: Load,
    rates: Rates = H200,
    head: HeadConfig | None = None,
    head_itemsize: int | None = None,
) -> float:
    """`head`: the one that drafts the k tokens of the next step, if one does; its products in numbers of so many bytes,
    if that is not the load's."""
    passes = [_target_pass(target, load)]
    if head is not None:
        passes += _head_passes(head, load, head_itemsize or load.itemsize)
    return sum(max(num_bytes / rates.bytes_per_s, num_flops / rates.flops_per_s) for num_bytes, num_flops in passes)


def _target_pass(target: ModelConfig, load: Load) -> tuple[float, float]:
    num = load.num_tokens
    matrices = [
        (target.num_layers * _layer_size(target, target.hidden_size), num),
        (target.hidden_size * target.vocab_size, num),  # every token of the step is judged
    ]
    return _pass(target, load, matrices, num, load.itemsize)


def _head_passes(head: HeadConfig, load: Load, itemsize: int) -> Iterator[tuple[float, float]]:
    """It takes in the whole step and guesses a token for each row, then another k - 1 times one."""
    c = head.layer
    layer, guess = _layer_size(c, 2 * c.hidden_size), (c.hidden_size * head.draft_vocab_size, load.num_rows)
    for i in range(load.num_draft_tokens):
        num = load.num_rows if i else load.num_tokens
        fuse = [] if i else [(head.feature_size * c.hidden_size, num)]
        yield _pass(c, load, [*fuse, (layer, num), guess], num, itemsize)


def _layer_size(c: ModelConfig, num_in: int) -> int:
    """Parameters in a layer's matrices: qkv, o, gate and up, down."""
    qkv = num_in * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return qkv + c.num_heads * c.head_dim * c.hidden_size + 3 * c.hidden_size * c.intermediate_size


def _pass(
    c: ModelConfig, load: Load, matrices: list[tuple[int, int]], num_tokens: int, itemsize: int
) -> tuple[float, float]:
    """Bytes and FLOPs, from (parameters, tokens that meet them); those of half the bytes count half."""
    keys = c.num_layers * c.num_kv_heads * c.head_dim * load.context * load.num_rows
    attention = 4 * c.num_layers * c.num_heads * c.head_dim * load.context * num_tokens  # q·k, and its sum over v
    num_bytes = itemsize * sum(size for size, _ in matrices) + load.itemsize * 2 * keys
    return num_bytes, sum(2 * size * num for size, num in matrices) * itemsize / load.itemsize + attention
