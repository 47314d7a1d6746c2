"""Parts of the reference implementations of heads, in plain torch, one position at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.draft.head_batch import Example
from paceline.model.draft_head import DraftHead

VOCAB = 61


def some_examples(lengths: Sequence[int] = (13, 7, 10), seed: int = 0) -> list[Example]:
    """Sequences with a prompt, and a token in the middle that is not in the loss mask."""
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        loss_mask = np.arange(length) >= rng.integers(1, 4)
        loss_mask[length // 2] = False
        found.append(Example(rng.integers(0, VOCAB, length).astype(np.int32), loss_mask))
    return found


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean() + eps).sqrt()


def rotated(x: Tensor, position: int, head: DraftHead) -> Tensor:
    """One head's vector [E] at a position, the angles rounded as the model's are."""
    half = x.shape[-1] // 2
    exponents = torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half)
    angles = torch.tensor(float(position)) * (1 / head.config.layer.rope_theta**exponents)
    cos, sin = angles.cos().double(), angles.sin().double()
    return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


def some_ids(seed: int) -> Tensor:
    """A draft vocabulary of 40 tokens."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:40].sort().values


def enlarge(head: DraftHead, seed: int) -> None:
    """Give a random head large weights, and norm weights that differ from one."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("norm"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64))
            else:
                parameter.mul_(10)
