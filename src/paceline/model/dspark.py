"""The DSpark head (arXiv 2607.05147): a few layers that draft all tokens of a block in one pass.

The context of a block is the target's auxiliary hidden states, fused: every layer computes keys and values of each
context position from the same fused state, and no queries. The block's inputs are the embeddings of the last token of
the sequence, and of a mask token for the other positions. Its positions attend to the whole context and to each other.
Position i predicts the token after it.

Positions of one pass do not know each other's tokens. So a Markov term, of low rank, adds to the logits of a position
what the token drafted before it says about it. A confidence output is trained to predict the probability that a token
is accepted, given that those before it are; drafting does not use it yet.

R is the rank of the Markov term; other shapes are in `draft_head.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from paceline.model.attention import Attention
from paceline.model.config import ModelConfig
from paceline.model.draft_head import DraftHead, HeadConfig, randomized
from paceline.model.layer import Layer, Linear
from paceline.model.ops import upcast

DEFAULT_NUM_LAYERS = 2
DEFAULT_RANK = 32
DEFAULT_BLOCK = 7


@dataclass(frozen=True, slots=True)
class DSparkConfig(HeadConfig):
    mask_token_id: int = 0  # its embedding is the input of the positions after the first
    block_size: int = DEFAULT_BLOCK  # draft tokens that it was trained for
    markov_rank: int = DEFAULT_RANK
    has_confidence: bool = True


def dspark_config(
    target: ModelConfig,
    draft_vocab_size: int,
    layer_ids: tuple[int, ...],
    *,
    num_layers: int = DEFAULT_NUM_LAYERS,
    block_size: int = DEFAULT_BLOCK,
    markov_rank: int = DEFAULT_RANK,
) -> DSparkConfig:
    """A head with layers of the target's shape, always of the Qwen3 family: other libraries have no other layers. The
    mask token is the last of the vocabulary."""
    layer = replace(target, family="qwen3", qk_norm=True, num_layers=num_layers, tie_embeddings=False)
    layer = replace(layer, qkv_bias=False, o_bias=False, mlp_bias=False)
    return DSparkConfig(
        layer, draft_vocab_size, layer_ids, target.hidden_size, False, target.vocab_size - 1, block_size, markov_rank
    )


class DSparkHead(DraftHead):
    architecture = "dspark"
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        c = config.layer
        self.layers = cast(Sequence[Layer], nn.ModuleList(Layer(c) for _ in range(c.num_layers)))
        self.markov_in = Linear(config.markov_rank, c.vocab_size)  # one row per token of the target
        self.markov_out = Linear(config.markov_rank, config.draft_vocab_size)
        self.confidence = Linear(c.hidden_size + config.markov_rank, 1, bias=True) if config.has_confidence else None

    @property
    def decoder_layers(self) -> Sequence[Layer]:
        return self.layers

    def fuse(self, aux_hidden_TF: Tensor) -> Tensor:
        """The context's states: [T, D]."""
        return self.ops.input_norm(super().fuse(aux_hidden_TF), self.hidden_norm, self.config.layer.norm_eps)

    def context(self, fused_TD: Tensor, positions_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The context's keys and values [T, G, E] in each layer."""
        rope = self.rope.tables(self.norm)
        for layer in self.layers:
            _, k, v = self.ops.qkv(fused_TD, layer, positions_T, rope)
            yield k, v

    def block_tokens(self, first_P: Tensor, size: int) -> Tensor:
        """The input tokens of blocks that begin with these tokens: [P, size]."""
        tokens = first_P.new_full((len(first_P), size), self.config.mask_token_id)
        tokens[:, 0] = first_P
        return tokens

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, embed: Linear) -> Tensor:
        """The states at the positions of blocks: [T, D]. `embed` is the target's."""
        x: Tensor = upcast(self.embedded(tokens_T, embed, self.dtype))
        y: Tensor | None = None
        rope = self.rope.tables(self.norm)
        for i, layer in enumerate(self.layers):
            x, y = self.ops.layer(layer, x, y, positions_T, rope, attention, i)
        assert y is not None
        _, h = self.ops.add_norm(x, y, self.norm, self.config.layer.norm_eps)
        return h

    def base_logits(self, h_PD: Tensor) -> Tensor:
        """Without the Markov term: [P, N]."""
        return self.ops.linear(h_PD, self.lm_head)

    def previous(self, tokens_P: Tensor) -> Tensor:
        """What the Markov term and the confidence know of the tokens before: [P, R]."""
        return self.ops.embed(tokens_P, self.markov_in)

    def markov_logits(self, previous_PR: Tensor) -> Tensor:
        return self.ops.linear(previous_PR, self.markov_out)

    def acceptance_logits(self, features_PK: Tensor) -> Tensor | None:
        return None if self.confidence is None else self.ops.linear(features_PK, self.confidence).squeeze(-1)

    def output_weight(self) -> Tensor:
        assert self.lm_head.weight is not None and self.markov_out.weight is not None
        return torch.cat([self.lm_head.weight, self.markov_out.weight], 1)


def init_dspark(
    config: DSparkConfig,
    draft_ids: Tensor,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DSparkHead:
    return randomized(DSparkHead(config), draft_ids, seed, dtype, device)
