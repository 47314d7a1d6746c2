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

from paceline.model.attention import Attention
from paceline.model.config import ModelConfig
from paceline.model.layer import Layer, Linear
from paceline.model.ops import Ops, TorchOps
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

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, taps: tuple[int, ...] = ()
    ) -> Output:
        tapped: dict[int, Tensor] = {}
        x = self.ops.embed(tokens_T, self.embed)
        h = self.ops.norm(x, self.layers[0].input_norm, self.config.norm_eps)
        # use_reentrant: the newer way, which lets parameters outside of the layer's inputs have gradients
        keep = partial(checkpoint, self._layer, use_reentrant=False, preserve_rng_state=False)
        run = keep if self.checkpointing and torch.is_grad_enabled() else self._layer
        for i in range(len(self.layers)):
            x, h = run(i, x, h, positions_T, attention)
            if i in taps:
                tapped[i] = x.clone() if not torch.is_grad_enabled() else x
        return Output(h, tapped)

    def _layer(self, i: int, x: Tensor, h: Tensor, positions_T: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        """The residual stream x after layer i, and its norm as the next layer wants it."""
        ops, layer, eps = self.ops, self.layers[i], self.config.norm_eps
        q, k, v = ops.qkv(h, layer, self.config, positions_T, self.rope.tables(self.norm))
        h = ops.linear(attention(i, q, k, v), layer.o)
        x, h = ops.add_norm(x, h, layer.post_norm, eps)
        h = ops.linear(ops.silu_mul(ops.linear(h, layer.gate_up)), layer.down)
        return ops.add_norm(x, h, self.norm if i == len(self.layers) - 1 else self.layers[i + 1].input_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.lm_head or self.embed)

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
    return shallow
