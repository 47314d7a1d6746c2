"""Roofline: the minimum time of a decode step, from the bytes it reads, the FLOPs it computes and a machine's rates.

A forward pass reads its matrices once, and the keys and values of each row's context once. It multiplies each token
with the matrices and computes attention. It takes at least the longer of the memory time and the compute time. A head's
passes run one after another, so their times add up. Embeddings, norms, activations and sampling are small and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.model.config import ModelConfig, num_matrix_weights

if TYPE_CHECKING:
    from paceline.model.draft_head import HeadConfig
    from paceline.model.dspark import DSparkConfig


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of a machine: copying memory, and multiplying large matrices."""

    bytes_per_s: float
    flops_per_s: float


H200 = Rates(4.26e12, 775e12)  # bfloat16


@dataclass(frozen=True, slots=True)
class Load:
    """A decode step: rows of 1 + k query tokens each, with `context` tokens in the KV cache."""

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
    """The minimum time of a step. `head` drafts the k tokens of the next step; `head_itemsize` is the size of its
    weights in bytes, if it differs from the target's."""
    passes = [_target_pass(target, load)]
    if head is not None:
        passes += _head_passes(head, load, head_itemsize or load.itemsize)
    return sum(max(num_bytes / rates.bytes_per_s, num_flops / rates.flops_per_s) for num_bytes, num_flops in passes)


def _target_pass(target: ModelConfig, load: Load) -> tuple[float, float]:
    num = load.num_tokens
    matrices = [
        (target.num_layers * num_matrix_weights(target), num),
        (target.hidden_size * target.vocab_size, num),  # logits of every query token
    ]
    return _pass(target, load, matrices, num, load.itemsize)


def _head_passes(head: HeadConfig, load: Load, itemsize: int) -> Iterator[tuple[float, float]]:
    from paceline.model.dspark import DSparkConfig  # here: it imports torch

    passes = _dspark_passes if isinstance(head, DSparkConfig) else _eagle3_passes
    return passes(head, load, itemsize)  # type: ignore[arg-type]


def _eagle3_passes(head: HeadConfig, load: Load, itemsize: int) -> Iterator[tuple[float, float]]:
    """The first pass processes all tokens of the step and drafts one token per row; each of k - 1 further passes
    processes and drafts one token per row."""
    c = head.layer
    layer, lm_head = num_matrix_weights(c, 2 * c.hidden_size), (c.hidden_size * head.draft_vocab_size, load.num_rows)
    for i in range(load.num_draft_tokens):
        num = load.num_rows if i else load.num_tokens
        fuse = [] if i else [(head.aux_hidden_size * c.hidden_size, num)]
        yield _pass(c, load, [*fuse, (layer, num), lm_head], num, itemsize)


def _dspark_passes(head: DSparkConfig, load: Load, itemsize: int) -> Iterator[tuple[float, float]]:
    """The context's keys and values for all tokens of the step; the blocks of all rows; and the Markov term of each of
    the k tokens, one after another."""
    if not load.num_draft_tokens:
        return
    c, num, num_block = head.layer, load.num_tokens, load.num_rows * load.num_draft_tokens
    keys = 2 * c.num_layers * c.num_kv_heads * c.head_dim
    context = [(head.aux_hidden_size * c.hidden_size, num), (c.hidden_size * keys, num)]
    yield _products(context, load, itemsize)
    layers = c.num_layers * num_matrix_weights(c)
    yield _pass(c, load, [(layers, num_block), (c.hidden_size * head.draft_vocab_size, num_block)], num_block, itemsize)
    for _ in range(load.num_draft_tokens):
        yield _products([(head.markov_rank * head.draft_vocab_size, load.num_rows)], load, itemsize)


def _pass(
    c: ModelConfig, load: Load, matrices: list[tuple[int, int]], num_tokens: int, itemsize: int
) -> tuple[float, float]:
    """Bytes and FLOPs of a pass. `matrices`: (parameters, tokens multiplied with them)."""
    num_bytes, num_flops = _products(matrices, load, itemsize)
    keys = c.num_layers * c.num_kv_heads * c.head_dim * load.context * load.num_rows
    attention = 4 * c.num_layers * c.num_heads * c.head_dim * load.context * num_tokens  # q·k, and the sum over v
    return num_bytes + load.itemsize * 2 * keys, num_flops + attention


def _products(matrices: list[tuple[int, int]], load: Load, itemsize: int) -> tuple[float, float]:
    """FLOPs with weights of half the load's itemsize count half."""
    num_flops = sum(2 * size * num for size, num in matrices) * itemsize / load.itemsize
    return itemsize * sum(size for size, _ in matrices), num_flops
