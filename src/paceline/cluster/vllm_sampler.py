"""Check vLLM's sampling with drafts before using it, and replace the part that is known to be broken.

On a CPU, vLLM 0.32 expands a batch's temperatures to draft tokens with a kernel for integers. The kernel writes its
result into a copy, and the logits are divided by uninitialized memory: the tokens have the wrong distribution. If the
check finds this, an implementation in plain torch replaces the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_sampler(device: torch.device) -> None:
    from vllm.v1.sample import rejection_sampler

    if _expands_correctly(device):
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    if not _expands_correctly(device):
        raise ValueError(
            "speculation: this vLLM loses the temperature of draft tokens, so its samples do not have the policy's "
            'distribution; use another version, or speculation.method = "none"'
        )


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """vLLM's function: repeat x[i] for each token of request i, with replace_from replaced by replace_to.
    cu_num_tokens[i] is the end of request i's tokens."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


def _expands_correctly(device: torch.device) -> bool:
    """Tested twice: uninitialized memory may contain the right numbers once."""
    from vllm.v1.sample import rejection_sampler

    cu_num_tokens = torch.tensor([2, 2, 3], dtype=torch.int32, device=device)
    for a, b in ((0.25, 0.75), (1.5, 0.7)):
        found = rejection_sampler.expand_batch_to_tokens(torch.tensor([a, 3.0, b], device=device), cu_num_tokens, 3)
        if found.tolist() != torch.tensor([a, a, b]).tolist():
            return False
    return True
