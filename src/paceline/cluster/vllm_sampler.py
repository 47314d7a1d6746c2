"""vLLM's sampling with drafts, tried out before it is trusted.

On a CPU vLLM 0.32 spreads a batch's temperatures over the drafted tokens with a kernel for integers: what it computes
goes into a copy, and logits are divided by whatever memory held. The tokens are then of no distribution at all. Where
the trial shows that, plain torch takes its place.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_sampler(device: torch.device) -> None:
    from vllm.v1.sample import rejection_sampler

    if _spreads(device):
        return
    rejection_sampler.expand_batch_to_tokens = expand
    if not _spreads(device):
        raise ValueError(
            "speculation: this vLLM loses the temperature of drafted tokens, so that its samples are not the policy's; "
            'use another version, or speculation.method = "none"'
        )


def expand(given: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """given[i], or replace_to where it is replace_from, for each of request i's tokens, the last of which is before
    ends[i]."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    each = torch.where(given == replace_from, replace_to, given)
    return each.repeat_interleave(counts, output_size=num_tokens)


def _spreads(device: torch.device) -> bool:
    """Twice, since memory may hold the right numbers by chance once."""
    from vllm.v1.sample import rejection_sampler

    ends = torch.tensor([2, 2, 3], dtype=torch.int32, device=device)
    for a, b in ((0.25, 0.75), (1.5, 0.7)):
        found = rejection_sampler.expand_batch_to_tokens(torch.tensor([a, 3.0, b], device=device), ends, 3)
        if found.tolist() != torch.tensor([a, a, b]).tolist():
            return False
    return True
