"""Models of a given shape with random weights, created on the device: for timing without a checkpoint."""

from __future__ import annotations

import torch

from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head, head_config
from paceline.model.layer import init_random


def random_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).to_empty(device=device).requires_grad_(False)
    init_random(decoder.named_parameters(), 0, device)
    return decoder


def random_head(target: ModelConfig, draft_vocab_size: int, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """Its vocabulary is every n-th token of the target's."""
    with torch.device("meta"):
        head = Eagle3Head(head_config(target, draft_vocab_size))
    head = head.to(dtype).to_empty(device=device).requires_grad_(False)
    init_random(head.named_parameters(), 1, device)
    head.draft_ids.copy_(torch.arange(draft_vocab_size, device=device) * target.vocab_size // draft_vocab_size)
    return head
