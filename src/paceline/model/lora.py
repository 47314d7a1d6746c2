"""Low-rank adapters (LoRA, arXiv 2106.09685): a linear map's W becomes W + alpha / rank * B A, and only A and B learn.

A starts random and B at zero, so that attaching adapters changes nothing. `hf_state` of a decoder with adapters gives
merged weights: to everyone but the learner such a decoder is a plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.sharding import whole

if TYPE_CHECKING:
    from paceline.model.decoder import Decoder


class Lora(nn.Module):
    def __init__(self, num_in: int, num_out: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.enabled = True
        self.down = nn.Parameter(torch.empty(rank, num_in))  # A
        self.up = nn.Parameter(torch.zeros(num_out, rank))  # B

    def forward(self, x_TK: Tensor) -> Tensor:
        """What is added to the map's output."""
        return F.linear(F.linear(x_TK, self.down), self.up) * self.scale

    def merged(self, weight_NK: Tensor) -> Tensor:
        """W + scale * B A, computed in float32 or better."""
        wide = torch.promote_types(weight_NK.dtype, torch.float32)
        up, down = (whole(part.detach()).to(wide) for part in (self.up, self.down))
        return torch.addmm(weight_NK.to(wide), up, down, alpha=self.scale).to(weight_NK.dtype)


def attach(decoder: Decoder, rank: int, alpha: float, targets: Sequence[str], seed: int = 0) -> None:
    """Adapters on these maps of every layer ("qkv", "o", "gate_up", "down"); everything else is frozen. The fused maps
    have one A for all their parts. The same seed gives the same A on every device."""
    decoder.requires_grad_(False)
    noise = torch.Generator().manual_seed(seed)
    for layer in decoder.layers:
        for name in targets:
            linear = getattr(layer, name)
            lora = Lora(linear.num_in, linear.num_out, rank, alpha / rank)
            with torch.no_grad():
                bound = (
                    linear.num_in**-0.5
                )  # as the authors do: uniform, with the deviation of a linear map's own start
                lora.down.copy_((2 * torch.rand(lora.down.shape, generator=noise) - 1) * bound)
            linear.lora = lora.to(decoder.device, decoder.dtype)


@contextmanager
def adapters_off(decoder: nn.Module) -> Iterator[None]:
    """The decoder as it was before adapters were attached."""
    adapters = [module for module in decoder.modules() if isinstance(module, Lora)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
