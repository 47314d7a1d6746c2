"""The EAGLE-3 head: one decoder layer that drafts the target's next tokens, one after another.

Its inputs at position i are the target's auxiliary hidden states of token i, fused into one state, and the embedding of
token i + 1. It predicts token i + 2. For further draft tokens it uses its own output state in place of the fused one.
Shapes are in `draft_head.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.model.attention import Attention
from paceline.model.config import ModelConfig
from paceline.model.draft_head import DraftHead, HeadConfig, randomized
from paceline.model.layer import Layer, Linear


@dataclass(frozen=True, slots=True)
class Eagle3Config(HeadConfig):
    """Its layers are one."""

    norm_before_residual: bool = False  # whether the residual stream starts with the normalised state
    fc_norm: bool = False  # whether each layer's hidden state is normalised before they are fused


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high, as in vLLM, SGLang and the EAGLE-3 paper; adapted for less than 6 layers."""
    if num_layers < 6:
        return 1, (num_layers + 1) // 2, num_layers
    return 2, num_layers // 2, num_layers - 3


def head_config(target: ModelConfig, draft_vocab_size: int, layer_ids: tuple[int, ...] | None = None) -> Eagle3Config:
    """A head with the shape of one target layer. For a Qwen2 target it is of the Llama family: vLLM and SGLang have no
    Qwen2 head."""
    layer = replace(target, num_layers=1, tie_embeddings=False)
    if target.family == "qwen2":
        layer = replace(layer, family="llama", qkv_bias=False)
    ids = layer_ids or default_layer_ids(target.num_layers)
    return Eagle3Config(layer, draft_vocab_size, ids, target.hidden_size)


class Eagle3Head(DraftHead):
    architecture = "eagle3"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        c = config.layer
        shape = len(config.layer_ids), config.target_hidden_size
        self.fc_norm = nn.Parameter(torch.ones(shape)) if config.fc_norm else None
        self.layer = Layer(c, num_in=2 * c.hidden_size)

    @property
    def decoder_layers(self) -> Sequence[Layer]:
        return (self.layer,)

    def fuse(self, aux_hidden_TF: Tensor) -> Tensor:
        """The head's input state: [T, D]."""
        if self.fc_norm is not None:
            parts = aux_hidden_TF.unflatten(-1, self.fc_norm.shape).unbind(-2)
            eps = self.config.layer.norm_eps
            normed = [self.ops.norm(x.contiguous(), w, eps) for x, w in zip(parts, self.fc_norm, strict=True)]
            aux_hidden_TF = torch.cat(normed, -1)
        return super().fuse(aux_hidden_TF)

    def forward(
        self,
        x_TD: Tensor,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        embed: Linear,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """From the state at each position and the token after it: the next states, and their norms for `logits`. With
        `wanted`, only for these rows. `embed` is the target's. May overwrite x."""
        ops, layer, c = self.ops, self.layer, self.config.layer
        e = self.embedded(tokens_T, embed, x_TD.dtype)
        both = ops.norm_concat(e, layer.input_norm, x_TD, self.hidden_norm, c.norm_eps)
        residual = ops.norm(x_TD, self.hidden_norm, c.norm_eps) if self.config.norm_before_residual else x_TD
        h = ops.attend(both, layer, positions_T, self.rope.tables(self.norm), attention, 0)
        if wanted is not None:  # all keys and values are written by now
            h, residual = h[wanted], residual[wanted]
        x, h = ops.add_norm(residual, ops.linear(h, layer.o), layer.post_norm, c.norm_eps)
        h = ops.linear(ops.gated(h, layer.gate_up), layer.down)
        return ops.add_norm(x, h, self.norm, c.norm_eps)

    def logits(self, h_TD: Tensor) -> Tensor:
        """Over the draft vocabulary: [T, N]."""
        return self.ops.linear(h_TD, self.lm_head)

    def output_weight(self) -> Tensor:
        assert self.lm_head.weight is not None
        return self.lm_head.weight


def init_head(
    config: Eagle3Config,
    draft_ids: Tensor,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle3Head:
    return randomized(Eagle3Head(config), draft_ids, seed, dtype, device)
