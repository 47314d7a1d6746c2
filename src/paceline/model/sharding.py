"""Shard a model's parameters over the ranks of a process group with FSDP2: each rank holds some rows of every tensor.

A layer's parameters are gathered for its forward and backward pass and freed afterwards. Those outside of layers
(embedding, final norm, LM head) stay gathered from the forward pass to the end of the backward pass, because the loss
needs the LM head. Gradients are summed over ranks, not averaged: a batch's loss is a sum over its sequences.

Of a 16-bit model, ranks hold the trained parameters in float32. They are gathered in 16 bits. Gradients are computed in
16 bits, and summed and kept in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def shard(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Shard in place, over all ranks of the default process group. All ranks have the same weights, on any device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import get_world_size
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (get_world_size(),))
    dtypes = {parameter.dtype for parameter in model.parameters()}
    half = next((dtype for dtype in dtypes if dtype.itemsize < 4), None)
    if half is not None and len(dtypes) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f'the model has parameters in {names}; to shard it, set model.dtype = "float32"')
    precision = MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False)
    for module in (*blocks, model):
        for parameter in module.parameters() if half else ():
            if parameter.requires_grad and not is_sharded(parameter):
                parameter.data = parameter.data.float()
        fully_shard(module, mesh=mesh, mp_policy=precision)
        assert isinstance(module, FSDPModule)
        # Both are needed: with the factor alone, the reduction itself computes it, which gloo does not support.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass leaves gathered."""
    if method := getattr(model, "reshard", None):
        method()


def full_tensor(tensor: Tensor) -> Tensor:
    """All rows. For a sharded tensor this is a collective call: all ranks must make it."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local_tensor(tensor: Tensor) -> Tensor:
    """A view of the rows that this rank holds."""
    part: Any = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def first_row(tensor: Tensor) -> int:
    """The index of this rank's first row of a sharded tensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0]
