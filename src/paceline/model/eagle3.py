"""The EAGLE-3 head: one decoder layer that guesses what the target says next.

It reads the target's states after a few of its layers ("features"), fused into one state per token, and the embedding
of the token after: at position i it sees (feature i, token i + 1) and predicts token i + 2. To guess further it goes
on with its own state in the feature's place. Its LM head knows a reduced vocabulary; `draft_ids` says which target
token each of its tokens is. The embedding is the target's own (`embed`), so that it follows the policy and is never
trained here; a head that was trained with another embedding brings that along.

Shapes: T tokens, D hidden, F = target hidden size times number of tapped layers, N draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.model.attention import Attention
from paceline.model.config import ModelConfig
from paceline.model.layer import Layer, Linear
from paceline.model.ops import Ops, TorchOps
from paceline.model.rope import Rope


@dataclass(frozen=True, slots=True)
class HeadConfig:
    layer: ModelConfig  # the head's one layer; its vocab_size is the target's
    draft_vocab_size: int
    layer_ids: tuple[int, ...]  # the features: states after this many of the target's layers
    target_hidden_size: int
    norm_before_residual: bool = False  # whether the residual stream begins with the normed state
    fc_norm: bool = False  # whether each layer's feature is normed before they are fused
    own_embedding: bool = False

    @property
    def feature_size(self) -> int:
        return len(self.layer_ids) * self.target_hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers, counted from 0, whose outputs it reads."""
        return tuple(i - 1 for i in self.layer_ids)


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Low, middle, high: what vLLM, SGLang and the EAGLE-3 authors use, as far as there are so many layers."""
    if num_layers < 6:
        return 1, (num_layers + 1) // 2, num_layers
    return 2, num_layers // 2, num_layers - 3


def head_config(target: ModelConfig, draft_vocab_size: int, layer_ids: tuple[int, ...] | None = None) -> HeadConfig:
    """A head shaped like one layer of the target; of the Llama family where others know no head of the target's."""
    layer = replace(target, num_layers=1, tie_embeddings=False)
    if target.family == "qwen2":
        layer = replace(layer, family="llama", qkv_bias=False)
    ids = layer_ids or default_layer_ids(target.num_layers)
    return HeadConfig(layer, draft_vocab_size, ids, target.hidden_size)


class Eagle3Head(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        c = config.layer
        self.ops: Ops = TorchOps()
        each = len(config.layer_ids), config.target_hidden_size
        self.fc_norm = nn.Parameter(torch.ones(each)) if config.fc_norm else None
        self.fc = Linear(config.feature_size, c.hidden_size)
        self.hidden_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.layer = Layer(c, num_in=2 * c.hidden_size)
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.lm_head = Linear(c.hidden_size, config.draft_vocab_size)
        self.embed = Linear(c.hidden_size, c.vocab_size) if config.own_embedding else None
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))  # int64 [N], ascending
        self.rope = Rope(c)

    def fuse(self, features_TF: Tensor) -> Tensor:
        """The target's features as the head's state: [T, D]."""
        if self.fc_norm is not None:
            parts = features_TF.unflatten(-1, self.fc_norm.shape).unbind(-2)
            eps = self.config.layer.norm_eps
            normed = [self.ops.norm(x.contiguous(), w, eps) for x, w in zip(parts, self.fc_norm, strict=True)]
            features_TF = torch.cat(normed, -1)
        return self.ops.linear(features_TF, self.fc)

    def forward(
        self,
        x_TD: Tensor,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        embed: Linear,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """From a state at each position and the token after it: the states to go on with, and their norms, which
        `logits` takes; of the `wanted` tokens only, if that is said. `embed` is the target's. May reuse the memory of
        x."""
        ops, layer, c = self.ops, self.layer, self.config.layer
        # Detached: whoever trains a head, the target's embedding gets no gradient.
        e = ops.embed(tokens_T, embed).detach() if self.embed is None else ops.embed(tokens_T, self.embed)
        both = ops.beside(e.to(x_TD.dtype), layer.input_norm, x_TD, self.hidden_norm, c.norm_eps)
        residual = ops.norm(x_TD, self.hidden_norm, c.norm_eps) if self.config.norm_before_residual else x_TD
        h = ops.attend(both, layer, c, positions_T, self.rope.tables(self.norm), attention, 0)
        if wanted is not None:  # all have left their keys and values behind
            h, residual = h[wanted], residual[wanted]
        x, h = ops.add_norm(residual, ops.linear(h, layer.o), layer.post_norm, c.norm_eps)
        h = ops.linear(ops.gated(h, layer.gate_up), layer.down)
        return ops.add_norm(x, h, self.norm, c.norm_eps)

    def logits(self, h_TD: Tensor) -> Tensor:
        """Over the draft vocabulary: [T, N]."""
        return self.ops.linear(h_TD, self.lm_head)

    def spread(self, logits_TN: Tensor) -> Tensor:
        """Over the target's vocabulary, -inf where the head has no token: [T, V]."""
        if self.config.draft_vocab_size == self.config.layer.vocab_size:
            return logits_TN
        out = logits_TN.new_full((len(logits_TN), self.config.layer.vocab_size), -torch.inf)
        return out.index_copy_(1, self.draft_ids, logits_TN)

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype


def init_head(
    config: HeadConfig,
    draft_ids: Tensor,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle3Head:
    """Random weights, the same on every device: normal with deviation 0.02, norms at one."""
    head = Eagle3Head(config)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.02)
        head.draft_ids.copy_(draft_ids)
    return head.to(dtype=dtype, device=device)
