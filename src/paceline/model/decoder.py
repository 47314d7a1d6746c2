"""The decoder: one definition for the Llama, Qwen2 and Qwen3 families, for training and for decoding.

`forward` receives everything it needs: the concatenated tokens and positions of all rows, and an `attention` that
defines which tokens attend to which (packed sequences in training, paged KV in decoding). Shapes: T tokens in all
rows, D hidden, H query heads, G key/value heads, E head dimension, V vocabulary.
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
from paceline.model.layer import Layer, Linear, Model
from paceline.model.ops import Ops, TorchOps, upcast
from paceline.model.rope import Rope


@dataclass(slots=True)
class Output:
    hidden: Tensor  # [T, D], after the final norm
    aux_hidden_states: dict[int, Tensor]  # layer index -> that layer's output [T, D]


class Decoder(Model):
    """Parameters are fused (qkv, gate_up); `weights.py` converts from and to Hugging Face names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.ops: Ops = TorchOps()
        self.embed = Linear(config.hidden_size, config.vocab_size)  # one row per token; also the LM head if tied
        self.layers = cast(Sequence[Layer], nn.ModuleList(Layer(config) for _ in range(config.num_layers)))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.checkpointing = False  # activation checkpointing: recompute each layer in the backward pass
        self.deterministic = True  # the backward pass on a GPU
        self.rope = Rope(config)
        self.shares_weights = False  # whether another decoder owns and updates them: `first_layers`

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, aux_layers: tuple[int, ...] = ()
    ) -> Output:
        aux_hidden_states: dict[int, Tensor] = {}
        # Not reentrant: that variant computes no gradients of a layer's parameters if its inputs need none.
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        checkpointing = self.checkpointing and torch.is_grad_enabled()
        x = upcast(self.ops.embed(tokens_T, self.embed))
        y: Tensor | None = None
        rope = self.rope.tables(self.norm)
        for i, layer in enumerate(self.layers):
            args = (self.ops.layer, x, y, positions_T, rope, attention, i)
            x, y = recompute(layer, *args) if checkpointing else layer(*args)
            if i in aux_layers:
                aux_hidden_states[i] = self.ops.rounded_sum(x, y, self.dtype)
        assert y is not None
        _, h = self.ops.add_norm(x, y, self.norm, self.config.norm_eps)
        return Output(h, aux_hidden_states)

    def attention(self, lengths: Sequence[int], prefixes: Sequence[int | None]) -> Attention:
        """Attention over packed sequences, in one kernel if the device has one."""
        if has_varlen(self.device, self.dtype, self.config.head_dim):
            return VarlenAttention(lengths, prefixes, self.device, self.deterministic)
        return PackedAttention(lengths, prefixes)

    def logits(self, hidden: Tensor) -> Tensor:
        """In at least float32."""
        return self.ops.logits(hidden, self.lm_head or self.embed)


def with_shared_weights(decoder: Decoder) -> Decoder:
    """A decoder with the same weights, in the same memory, without the adapters. For two that train none of them."""
    with torch.device("meta"):
        other = Decoder(decoder.config)
    for name, _ in list(other.named_parameters()):
        module, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(module), leaf, getattr(decoder.get_submodule(module), leaf))
    return other


def first_layers(decoder: Decoder, num_layers: int) -> Decoder:
    """A decoder of the first layers only. It shares the weights, so it changes when they are updated."""
    with torch.device("meta"):
        shallow = Decoder(replace(decoder.config, num_layers=num_layers))
    for name in ("ops", "embed", "norm", "lm_head"):
        setattr(shallow, name, getattr(decoder, name))
    shallow.layers = decoder.layers[:num_layers]
    shallow.shares_weights = True
    return shallow
