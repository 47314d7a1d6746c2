"""A model's parameters divided among the ranks of a process group: each holds some rows of every tensor (FSDP2).

A block (a layer) is gathered when it computes, and let go of afterwards; what lies outside of blocks (embedding, final
norm, LM head) stays gathered from the forward pass to the end of the backward pass, for the loss needs the LM head.
Gradients are summed over ranks, not averaged: a batch's loss is a sum over its sequences, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def shard(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
    """In place, over all ranks of the default process group; all of them have the same weights, on any device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import get_world_size
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (get_world_size(),))
    half = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
        assert isinstance(module, FSDPModule)
        # Both: a factor alone is computed in the reduction itself, which gloo can't.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def rest(model: nn.Module) -> None:
    """Let go of what a forward pass without a backward pass has left gathered."""
    if reshard := getattr(model, "reshard", None):
        reshard()


def whole(tensor: Tensor) -> Tensor:
    """All rows. Where they are divided, all ranks ask at the same time."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, the same memory."""
    part: Any = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def first_row(tensor: Tensor) -> int:
    """Where this rank's rows of a divided tensor begin."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0]
