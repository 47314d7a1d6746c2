"""Causal attention over packed segments with torch's flash attention kernels (a GPU, 16 bits), with gradients.

torch's backward kernel has two variants: the default adds the gradients of the queries atomically, in any order; the
other one is deterministic. torch selects it by a flag of the process, which is set here only while the kernel is
launched. Other threads see it too. So nothing that an engine runs beside the learner may be an operation that torch
refuses under the flag. Others have slower kernels under it, with the same results; only
`scaled_dot_product_attention` in 16 bits may use a kernel that rounds differently. The Triton engine does not call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Segments:
    """A segment's queries are the last positions of its keys."""

    cu_seqlens_q: Tensor  # int32 [S + 1], the first query of each segment, and their number
    cu_seqlens_k: Tensor  # int32 [S + 1], the same of the keys
    max_seqlen_q: int  # of any segment
    max_seqlen_k: int
    deterministic: bool = True  # the backward pass


def flash_attention(q_THE: Tensor, k_KGE: Tensor, v_KGE: Tensor, segments: Segments) -> Tensor:
    """[T, H, E]"""
    out: Tensor = _FlashAttention.apply(q_THE, k_KGE, v_KGE, segments)
    return out


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THE: Tensor, k_KGE: Tensor, v_KGE: Tensor, segments: Segments) -> Tensor:
        out, logsumexp = flash_forward(q_THE, k_KGE, v_KGE, segments)
        ctx.save_for_backward(q_THE, k_KGE, v_KGE, out, logsumexp)
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THE, k_KGE, v_KGE, out, logsumexp = ctx.saved_tensors
        return *flash_backward(grads[0], q_THE, k_KGE, v_KGE, out, logsumexp, ctx.segments), None


def flash_forward(q_THE: Tensor, k_KGE: Tensor, v_KGE: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """The output and, for the backward pass, the logsumexp of each query's scores."""
    s = segments
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        q_THE, k_KGE, v_KGE, s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q, s.max_seqlen_k, 0.0, False,
        return_debug_mask=False, window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    return out, logsumexp


def flash_backward(
    grad_THE: Tensor, q_THE: Tensor, k_KGE: Tensor, v_KGE: Tensor, out_THE: Tensor, logsumexp: Tensor,
    segments: Segments,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    s = segments
    dropout_state = torch.zeros(2, dtype=torch.uint64, device=q_THE.device)  # there is no dropout
    with _deterministic() if s.deterministic else nullcontext():
        q_grad, k_grad, v_grad = torch.ops.aten._flash_attention_backward(
            grad_THE, q_THE, k_KGE, v_KGE, out_THE, logsumexp, s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q,
            s.max_seqlen_k, 0.0, False, dropout_state, torch.empty(0, device=q_THE.device),
            window_size_left=-1, window_size_right=0,
        )  # fmt: skip
    return q_grad, k_grad, v_grad


@contextmanager
def _deterministic() -> Iterator[None]:
    """Set torch's flag. Not by `torch.use_deterministic_algorithms`: it also changes a setting of Inductor, for good.
    With the flag torch would also fill new memory, which takes time."""
    settings: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill
