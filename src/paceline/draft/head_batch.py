"""A training batch of a draft head: sequences with the target's hidden states.

S sequences padded to L tokens, F size of the concatenated auxiliary hidden states, D the target's hidden size. All
tensors are detached: no gradient reaches the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.model.attention import PaddedAttention
from paceline.model.decoder import Decoder

LogitsFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. `loss_mask` marks the tokens that the head learns to predict: those that the target sampled, or all
    tokens of a text without a prompt."""

    tokens: np.ndarray  # int32
    loss_mask: np.ndarray  # bool


@dataclass(slots=True)
class HeadBatch:
    tokens_SL: Tensor  # int64
    loss_mask_SL: Tensor  # bool; False for padding
    aux_hidden_SLF: Tensor
    hidden_SLD: Tensor  # the target's final hidden states, after the norm
    logits: LogitsFunction  # the target's LM head

    def __post_init__(self) -> None:
        assert not self.aux_hidden_SLF.requires_grad and not self.hidden_SLD.requires_grad


@torch.no_grad()
def make_head_batch(decoder: Decoder, examples: Sequence[Example], aux_layers: tuple[int, ...]) -> HeadBatch:
    """Run the target's forward pass over the examples."""
    device = decoder.device
    length = max(len(example.tokens) for example in examples)
    tokens = np.zeros((len(examples), length), np.int64)
    loss_mask = np.zeros((len(examples), length), bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        loss_mask[row, : len(example.tokens)] = example.loss_mask
    tokens_SL = torch.as_tensor(tokens, device=device)
    positions_T = torch.arange(length, device=device).repeat(len(examples))
    out = decoder(tokens_SL.flatten(), positions_T, PaddedAttention(len(examples)), aux_layers)
    shape = len(examples), length, -1
    aux_hidden = torch.cat([out.aux_hidden_states[i] for i in aux_layers], -1)
    loss_mask_SL = torch.as_tensor(loss_mask, device=device)
    return HeadBatch(tokens_SL, loss_mask_SL, aux_hidden.view(shape), out.hidden.view(shape), decoder.logits)
