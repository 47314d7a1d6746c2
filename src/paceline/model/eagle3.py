"""The EAGLE-3 head: one decoder layer that drafts the target's next tokens.

Its inputs at position i are the target's auxiliary hidden states of token i, fused into one state, and the embedding of
token i + 1. It predicts token i + 2. For further draft tokens it uses its own output state in place of the fused one.
Its LM head has a reduced vocabulary; `draft_ids` maps draft tokens to target tokens. The embedding is the target's
(`embed`): it changes with the policy and is not trained here. A head that was trained with another embedding has its
own.

Shapes: T tokens, D hidden, F = target hidden size times number of auxiliary layers, N draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.model.attention import Attention
from paceline.model.config import ModelConfig
from paceline.model.layer import Layer, Linear, Model, init_random
from paceline.model.ops import Ops, TorchOps
from paceline.model.rope import Rope


@dataclass(frozen=True, slots=True)
class HeadConfig:
    layer: ModelConfig  # the head's one layer; its vocab_size is the target's
    draft_vocab_size: int
    layer_ids: tuple[int, ...]  # the auxiliary hidden states: those after this many target layers
    target_hidden_size: int
    norm_before_residual: bool = False  # whether the residual stream starts with the normalised state
    fc_norm: bool = False  # whether each layer's hidden state is normalised before they are fused
    own_embedding: bool = False

    @property
    def aux_hidden_size(self) -> int:
        return len(self.layer_ids) * self.target_hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target layers that it reads the outputs of, counted from 0."""
        return tuple(i - 1 for i in self.layer_ids)


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high, as in vLLM, SGLang and the EAGLE-3 paper; adapted for less than 6 layers."""
    if num_layers < 6:
        return 1, (num_layers + 1) // 2, num_layers
    return 2, num_layers // 2, num_layers - 3


def head_config(target: ModelConfig, draft_vocab_size: int, layer_ids: tuple[int, ...] | None = None) -> HeadConfig:
    """A head with the shape of one target layer. For a Qwen2 target it is of the Llama family: vLLM and SGLang have no
    Qwen2 head."""
    layer = replace(target, num_layers=1, tie_embeddings=False)
    if target.family == "qwen2":
        layer = replace(layer, family="llama", qkv_bias=False)
    ids = layer_ids or default_layer_ids(target.num_layers)
    return HeadConfig(layer, draft_vocab_size, ids, target.hidden_size)


class Eagle3Head(Model):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        c = config.layer
        self.ops: Ops = TorchOps()
        shape = len(config.layer_ids), config.target_hidden_size
        self.fc_norm = nn.Parameter(torch.ones(shape)) if config.fc_norm else None
        self.fc = Linear(config.aux_hidden_size, c.hidden_size)
        self.hidden_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.layer = Layer(c, num_in=2 * c.hidden_size)
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.lm_head = Linear(c.hidden_size, config.draft_vocab_size)
        self.embed = Linear(c.hidden_size, c.vocab_size) if config.own_embedding else None
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))  # int64 [N], ascending
        self.rope = Rope(c)

    def fuse(self, aux_hidden_TF: Tensor) -> Tensor:
        """Fuse the target's auxiliary hidden states into the head's input state: [T, D]."""
        if self.fc_norm is not None:
            parts = aux_hidden_TF.unflatten(-1, self.fc_norm.shape).unbind(-2)
            eps = self.config.layer.norm_eps
            normed = [self.ops.norm(x.contiguous(), w, eps) for x, w in zip(parts, self.fc_norm, strict=True)]
            aux_hidden_TF = torch.cat(normed, -1)
        return self.ops.linear(aux_hidden_TF, self.fc)

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
        # Detached: training a head gives the target's embedding no gradient.
        e = ops.embed(tokens_T, embed).detach() if self.embed is None else ops.embed(tokens_T, self.embed)
        both = ops.norm_concat(e.to(x_TD.dtype), layer.input_norm, x_TD, self.hidden_norm, c.norm_eps)
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

    def to_target_vocab(self, logits_TN: Tensor) -> Tensor:
        """Logits over the target's vocabulary, -inf for tokens that the head does not have: [T, V]."""
        if self.config.draft_vocab_size == self.config.layer.vocab_size:
            return logits_TN
        out = logits_TN.new_full((len(logits_TN), self.config.layer.vocab_size), -torch.inf)
        return out.index_copy_(1, self.draft_ids, logits_TN)


def init_head(
    config: HeadConfig,
    draft_ids: Tensor,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle3Head:
    head = Eagle3Head(config)
    init_random(head.named_parameters(), seed)
    head.draft_ids.copy_(draft_ids)
    return head.to(dtype=dtype, device=device)
