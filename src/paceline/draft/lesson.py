"""What a head learns from: sequences with the target's states along them.

S sequences padded to L tokens, F feature size, D the target's hidden size, N draft vocabulary. Everything is detached:
no gradient leads from here into the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.model.attention import PaddedAttention
from paceline.model.decoder import Decoder

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. `chosen` marks the tokens that the target itself chose, which are those worth guessing; all of
    them where the text is not its own."""

    tokens: np.ndarray  # int32
    chosen: np.ndarray  # bool


@dataclass(slots=True)
class Lesson:
    tokens_SL: Tensor  # int64
    chosen_SL: Tensor  # bool; False where padded
    features_SLF: Tensor
    hidden_SLD: Tensor  # the target's last states, after its norm
    logits: Head  # the target's LM head

    def __post_init__(self) -> None:
        assert not self.features_SLF.requires_grad and not self.hidden_SLD.requires_grad


@torch.no_grad()
def teach(decoder: Decoder, examples: Sequence[Example], taps: tuple[int, ...]) -> Lesson:
    """One forward of the target over the examples."""
    device = decoder.device
    length = max(len(example.tokens) for example in examples)
    tokens = np.zeros((len(examples), length), np.int64)
    chosen = np.zeros((len(examples), length), bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        chosen[row, : len(example.tokens)] = example.chosen
    tokens_SL = torch.as_tensor(tokens, device=device)
    positions_T = torch.arange(length, device=device).repeat(len(examples))
    out = decoder(tokens_SL.flatten(), positions_T, PaddedAttention(len(examples)), taps)
    shape = len(examples), length, -1
    features = torch.cat([out.taps[i] for i in taps], -1)
    return Lesson(
        tokens_SL, torch.as_tensor(chosen, device=device), features.view(shape), out.hidden.view(shape), decoder.logits
    )
