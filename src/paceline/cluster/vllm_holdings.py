"""What a vLLM worker's model really holds, under the names that the learner knows.

vLLM fuses (qkv, gate and up), cuts into shards and, on a CPU, packs matrices for its kernels and throws the originals
away. Here all that is taken back, so that the checksum is of what is computed with: a packed matrix is read by
multiplying the identity with it, which is exact, since every sum has one term that is not zero.

All workers of a tensor-parallel group must read together: shards are gathered.
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


def policy_holdings(model: nn.Module, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """As `model.weights.hf_state` names them. A tied LM head is left out if it is the embedding; one that stayed behind
    is told, as a tensor too many."""
    embedding: Tensor | None = None
    for name, tensor in _parameters(model):
        if name == EMBED:
            embedding = tensor
        if tied and name == LM_HEAD and embedding is not None and torch.equal(tensor, embedding):
            continue
        yield name, tensor


def head_holdings(head: nn.Module, policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `model.head_files.head_state` names them. The embedding is the head's own unless it is the policy's."""
    parts, shared = dict(_parameters(head)), {id(module) for module in policy.modules()}
    if id(head.get_submodule("model.embed_tokens")) in shared:
        parts.pop(EMBED)
    offsets = parts.pop("draft_id_to_target_id", None)
    for name, tensor in parts.items():
        yield name.removeprefix("model."), tensor
    if offsets is not None:
        known = torch.zeros(policy.get_submodule("model.embed_tokens").org_vocab_size, dtype=torch.bool)  # type: ignore
        known = known.to(offsets.device)
        yield "d2t", offsets
        yield "t2d", known.index_fill_(0, offsets + torch.arange(len(offsets), device=offsets.device), True)


def with_negative_zeros(tensor: Tensor, where: Tensor | None) -> Tensor:
    """-0.0 where that was sent and zero is held: the one bit that reading by multiplication loses."""
    if where is None or not len(where):
        return tensor
    flat = tensor.reshape(-1).clone()
    flat[where] = torch.where(flat[where] == 0, -0.0, flat[where])
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
            for name, part in zip(_names(path), _parts(module, tensor), strict=True):
                yield f"{name}.{kind}", part
        elif isinstance(module, ColumnParallelLinear):
            yield f"{path}.{kind}", _gather(tensor, 0)
        elif isinstance(module, RowParallelLinear) and kind == "weight":
            yield f"{path}.{kind}", _gather(tensor, 1)
        else:
            yield f"{path}.{kind}", tensor


def _names(path: str) -> Sequence[str]:
    parent, _, last = path.rpartition(".")
    if last not in FUSED:
        raise ValueError(f"vLLM's {path} is fused of parts that are not known here; its weights can't be checked")
    return [f"{parent}.{name}" for name in FUSED[last]]


def _parts(module: Any, tensor: Tensor) -> Iterator[Tensor]:
    """A fused tensor's parts, each whole."""
    if not isinstance(module, QKVParallelLinear):
        for part in tensor.split(module.output_partition_sizes):
            yield _gather(part, 0)
        return
    q, kv = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    for part, copies in zip(tensor.split([q, kv, kv]), (1, *2 * (module.num_kv_head_replicas,)), strict=True):
        shards = _gather(part, 0).split(len(part))  # where there are more workers than heads, some hold the same
        yield torch.cat(shards[::copies])


def _matrix(module: Any) -> Tensor:
    """[out, in]; on a CPU what its kernel multiplies with."""
    if not hasattr(module, "cpu_linear"):
        return module.weight.detach()
    if isinstance(module, ParallelLMHead):
        width, dtype = module.embedding_dim, module.weight.dtype
    else:
        width, dtype = getattr(module, "input_size_per_partition", module.input_size), module.params_dtype
    return module.cpu_linear(torch.eye(width, dtype=dtype), module.weight, None).t()


def _gather(tensor: Tensor, dim: int) -> Tensor:
    return tensor_model_parallel_all_gather(tensor.contiguous(), dim)
