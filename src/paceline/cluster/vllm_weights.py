"""Read back the weights that a vLLM worker's model holds, under the learner's names.

vLLM fuses matrices (qkv, gate and up), splits them into shards and, on a CPU, packs them for its kernels and drops the
originals. This module reverses all of it, so that the checksum covers the weights that vLLM computes with. A packed
matrix is read by multiplying the identity with it. That is exact: every sum has one nonzero term.

All workers of a tensor-parallel group must read at the same time, because shards are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from paceline.model.weights import EMBED, LM_HEAD

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def read_model(model: nn.Module, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Named as in `model.weights.hf_state`. A tied LM head is left out if it equals the embedding. One that differs was
    not updated; it is yielded as an extra tensor, so that the checksum shows it."""
    embedding: Tensor | None = None
    for name, tensor in _parameters(model):
        if name == EMBED:
            embedding = tensor
        if tied and name == LM_HEAD and embedding is not None and torch.equal(tensor, embedding):
            continue
        yield name, tensor


def read_head(head: nn.Module, policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Named as in `model.head_files.head_state`. An embedding that the head shares with the policy is left out."""
    tensors, policy_modules = dict(_parameters(head)), {id(module) for module in policy.modules()}
    if id(head.get_submodule("model.embed_tokens")) in policy_modules:
        tensors.pop(EMBED)
    offsets = tensors.pop("draft_id_to_target_id", None)
    for name, tensor in tensors.items():
        yield name.removeprefix("model."), tensor
    if offsets is not None:
        vocab_size = policy.get_submodule("model.embed_tokens").org_vocab_size
        in_draft = torch.zeros(vocab_size, dtype=torch.bool, device=offsets.device)  # type: ignore
        yield "d2t", offsets
        yield "t2d", in_draft.index_fill_(0, offsets + torch.arange(len(offsets), device=offsets.device), True)


def with_negative_zeros(tensor: Tensor, indices: Tensor | None) -> Tensor:
    """Restore the sign of zeros that were sent as -0.0: reading by multiplication loses this bit."""
    if indices is None or not len(indices):
        return tensor
    flat = tensor.reshape(-1).clone()
    flat[indices] = torch.where(flat[indices] == 0, -0.0, flat[indices])
    return flat.view(tensor.shape)


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        if isinstance(module, LinearBase):
            yield from _linear(path, module)
        elif isinstance(module, VocabParallelEmbedding):
            matrix = _matrix(module) if isinstance(module, ParallelLMHead) else module.weight.detach()
            yield f"{path}.weight", _gather(matrix, 0)[: module.org_vocab_size]
        else:
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}" if path else name, parameter.detach()


def _linear(path: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    bias = getattr(module, "bias", None)
    kinds = [("weight", _matrix(module)), *([("bias", bias.detach())] if bias is not None else [])]
    for kind, tensor in kinds:
        if isinstance(module, QKVParallelLinear | MergedColumnParallelLinear):
            for name, part in zip(_part_names(path), _parts(module, tensor), strict=True):
                yield f"{name}.{kind}", part
        elif isinstance(module, ColumnParallelLinear):
            yield f"{path}.{kind}", _gather(tensor, 0)
        elif isinstance(module, RowParallelLinear) and kind == "weight":
            yield f"{path}.{kind}", _gather(tensor, 1)
        else:
            yield f"{path}.{kind}", tensor


def _part_names(path: str) -> Sequence[str]:
    parent, _, last = path.rpartition(".")
    if last not in FUSED:
        raise ValueError(f"vLLM's {path} is a fused layer of unknown parts; its weights can't be checked")
    return [f"{parent}.{name}" for name in FUSED[last]]


def _parts(module: Any, tensor: Tensor) -> Iterator[Tensor]:
    """The unsharded parts of a fused tensor."""
    if not isinstance(module, QKVParallelLinear):
        for part in tensor.split(module.output_partition_sizes):
            yield _gather(part, 0)
        return
    q, kv = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    for part, num_replicas in zip(tensor.split([q, kv, kv]), (1, *2 * (module.num_kv_head_replicas,)), strict=True):
        shards = _gather(part, 0).split(len(part))  # with more workers than KV heads, some hold the same head
        yield torch.cat(shards[::num_replicas])


def _matrix(module: Any) -> Tensor:
    """[out, in]. On a CPU, read from the packed matrix."""
    if not hasattr(module, "cpu_linear"):
        return module.weight.detach()
    if isinstance(module, ParallelLMHead):
        width, dtype = module.embedding_dim, module.weight.dtype
    else:
        width, dtype = getattr(module, "input_size_per_partition", module.input_size), module.params_dtype
    return module.cpu_linear(torch.eye(width, dtype=dtype), module.weight, None).t()


def _gather(tensor: Tensor, dim: int) -> Tensor:
    return tensor_model_parallel_all_gather(tensor.contiguous(), dim)
