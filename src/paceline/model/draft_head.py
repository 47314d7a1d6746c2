"""What draft heads have in common: small models that draft the target's next tokens from its hidden states.

A head fuses the target's auxiliary hidden states of a token into one state. Its LM head has a reduced vocabulary;
`draft_ids` maps draft tokens to target tokens. The embedding is the target's (`embed`): it changes with the policy and
is not trained here. A head that was trained with another embedding has its own.

Shapes: T tokens, P draft positions, D hidden, F = target hidden size times number of auxiliary layers, N draft
vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.model.layer import Layer, Linear, Model, init_random
from paceline.model.ops import Ops, TorchOps
from paceline.model.rope import Rope

Head = TypeVar("Head", bound="DraftHead")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    layer: ModelConfig  # the head's layers; its vocab_size is the target's
    draft_vocab_size: int
    layer_ids: tuple[int, ...]  # the auxiliary hidden states: those after this many target layers
    target_hidden_size: int
    own_embedding: bool = False

    @property
    def aux_hidden_size(self) -> int:
        return len(self.layer_ids) * self.target_hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target layers that it reads the outputs of, counted from 0."""
        return tuple(i - 1 for i in self.layer_ids)


class DraftHead(Model, ABC):
    architecture: str  # its name in settings and records

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        c = config.layer
        self.ops: Ops = TorchOps()
        self.fc = Linear(config.aux_hidden_size, c.hidden_size)
        self.hidden_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.lm_head = Linear(c.hidden_size, config.draft_vocab_size)
        self.embed = Linear(c.hidden_size, c.vocab_size) if config.own_embedding else None
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))  # int64 [N], ascending
        self.rope = Rope(c)

    @property
    @abstractmethod
    def decoder_layers(self) -> Sequence[Layer]: ...

    def fuse(self, aux_hidden_TF: Tensor) -> Tensor:
        """Fuse the target's auxiliary hidden states into one state: [T, D]."""
        return self.ops.linear(aux_hidden_TF, self.fc)

    def embedded(self, tokens_T: Tensor, embed: Linear, dtype: torch.dtype) -> Tensor:
        """`embed` is the target's. Detached: training a head gives the target's embedding no gradient."""
        e = self.ops.embed(tokens_T, embed).detach() if self.embed is None else self.ops.embed(tokens_T, self.embed)
        return e.to(dtype)

    def to_target_vocab(self, logits_PN: Tensor) -> Tensor:
        """Logits over the target's vocabulary, -inf for tokens that the head does not have: [P, V]."""
        if self.config.draft_vocab_size == self.config.layer.vocab_size:
            return logits_PN
        out = logits_PN.new_full((len(logits_PN), self.config.layer.vocab_size), -torch.inf)
        return out.index_copy_(1, self.draft_ids, logits_PN)

    @abstractmethod
    def output_weight(self) -> Tensor:
        """For training: the weight [N, K] that maps the K features of a draft position to its logits."""

    def acceptance_logits(self, features_PK: Tensor) -> Tensor | None:
        """The logit of the probability that the position's token is accepted: [P]. None: the head does not predict
        it."""
        return None


def randomized(head: Head, draft_ids: Tensor, seed: int, dtype: torch.dtype, device: torch.device | str) -> Head:
    """The head with random weights and this draft vocabulary."""
    init_random(head.named_parameters(), seed)
    head.draft_ids.copy_(draft_ids)
    return head.to(dtype=dtype, device=device)
