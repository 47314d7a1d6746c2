"""Attach low-rank adapters (LoRA, arXiv 2106.09685) to a decoder. Only the adapters are trained.

A starts random and B at zero, so attaching adapters does not change the outputs. `hf_state` of a decoder with adapters
yields merged weights: only the learner knows about adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from paceline.model.decoder import Decoder
from paceline.model.layer import Lora


def attach(decoder: Decoder, rank: int, alpha: float, targets: Sequence[str], seed: int = 0) -> None:
    """Add adapters to these linear maps of every layer ("qkv", "o", "gate_up", "down") and freeze everything else.
    A fused map has one A for all its parts. The same seed gives the same A on every device."""
    decoder.requires_grad_(False)
    noise = torch.Generator().manual_seed(seed)
    for layer in decoder.layers:
        for name in targets:
            linear = getattr(layer, name)
            lora = Lora(linear.num_in, linear.num_out, rank, alpha / rank)
            with torch.no_grad():
                bound = linear.num_in**-0.5  # as in the paper's code: the default initialisation of nn.Linear
                lora.down.copy_((2 * torch.rand(lora.down.shape, generator=noise) - 1) * bound)
            linear.lora = lora.to(decoder.device, decoder.dtype)


@contextmanager
def adapters_off(decoder: nn.Module) -> Iterator[None]:
    """Disable all adapters: the decoder computes with its base weights."""
    adapters = [module for module in decoder.modules() if isinstance(module, Lora)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
