"""Models of a given shape with random weights, created on the device: for timing without a checkpoint. Weights are
normal with standard deviation 0.02; norms are one."""

from __future__ import annotations

import torch
from torch import nn

from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head, head_config


def random_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).to_empty(device=device).requires_grad_(False)
    _fill(decoder, device, seed=0)
    return decoder


def random_head(target: ModelConfig, draft_vocab_size: int, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """Its vocabulary is every n-th token of the target's."""
    with torch.device("meta"):
        head = Eagle3Head(head_config(target, draft_vocab_size))
    head = head.to(dtype).to_empty(device=device).requires_grad_(False)
    _fill(head, device, seed=1)
    head.draft_ids.copy_(torch.arange(draft_vocab_size, device=device) * target.vocab_size // draft_vocab_size)
    return head


def _fill(module: nn.Module, device: torch.device, seed: int) -> None:
    noise = torch.Generator(device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=noise)
