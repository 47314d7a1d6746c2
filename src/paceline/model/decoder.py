"""The decoder: one definition for the Llama, Qwen2 and Qwen3 families, for training and for decoding.

`forward` receives all it needs: tokens and positions of every row laid end to end, and an `attention` that knows
which tokens may see which (packed sequences when training, paged KV when decoding). Shapes: T tokens in all rows,
D hidden, H query heads, G key/value heads, E head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.model.attention import Attention, PackedAttention, VarlenAttention, has_varlen
from paceline.model.config import ModelConfig
from paceline.model.layer import Layer, Linear
from paceline.model.ops import Ops, TorchOps, wide
from paceline.model.rope import Rope


@dataclass(slots=True)
class Output:
    hidden: Tensor  # [T, D], after the final norm
    taps: dict[int, Tensor]  # layer index -> that layer's output [T, D]


class Decoder(nn.Module):
    """Parameters are fused (qkv, gate_up); `weights.py` translates from and to Hugging Face names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.ops: Ops = TorchOps()
        self.embed = Linear(config.hidden_size, config.vocab_size)  # a row per token; the LM head too where tied
        self.layers = cast(Sequence[Layer], nn.ModuleList(Layer(config) for _ in range(config.num_layers)))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.checkpointing = False  # recompute each layer in the backward pass instead of keeping its insides
        self.rope = Rope(config)
        self.shares_weights = False  # whether another decoder owns them and updates them: `first_layers`

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, taps: tuple[int, ...] = ()
    ) -> Output:
        tapped: dict[int, Tensor] = {}
        # use_reentrant: the newer way, which lets parameters outside of the layer's inputs have gradients
        keep = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        keeps = self.checkpointing and torch.is_grad_enabled()
        x = wide(self.ops.embed(tokens_T, self.embed))
        y: Tensor | None = None
        rope = self.rope.tables(self.norm)
        for i, layer in enumerate(self.layers):
            args = (self.ops.layer, self.config, x, y, positions_T, rope, attention, i)
            x, y = keep(layer, *args) if keeps else layer(*args)
            if i in taps:
                tapped[i] = self.ops.rounded_sum(x, y, self.dtype)
        assert y is not None
        _, h = self.ops.add_norm(x, y, self.norm, self.config.norm_eps)
        return Output(h, tapped)

    def attention(self, lengths: Sequence[int], prefixes: Sequence[int | None]) -> Attention:
        """For packed sequences: in one kernel where the device has one."""
        if has_varlen(self.device, self.dtype, self.config.head_dim):
            return VarlenAttention(lengths, prefixes, self.device)
        return PackedAttention(lengths, prefixes)

    def logits(self, hidden: Tensor) -> Tensor:
        """In float32 or better."""
        return self.ops.logits(hidden, self.lm_head or self.embed)

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype


def first_layers(decoder: Decoder, num_layers: int) -> Decoder:
    """A shallower decoder of the same weights: it shares them, and follows when they change."""
    with torch.device("meta"):
        shallow = Decoder(replace(decoder.config, num_layers=num_layers))
    for name in ("ops", "embed", "norm", "lm_head"):
        setattr(shallow, name, getattr(decoder, name))
    shallow.layers = decoder.layers[:num_layers]
    shallow.shares_weights = True
    return shallow
