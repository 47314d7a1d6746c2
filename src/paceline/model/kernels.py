"""The decoder's operations and the sampling of tokens in C (csrc/), for float32 inference on CPUs.

Invariant: a row's results are bit-identical for every batch, every chunking of a prompt and every number of threads.
`ops.TorchOps`, `attention.PagedAttention` and `sample.Sampler` are the reference implementations. Weights are packed in
panels of 16 outputs, [ceil(N / 16), K, 16], which the kernel reads sequentially.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline import native
from paceline.model.decoder import Decoder
from paceline.model.draft_head import DraftHead
from paceline.model.kv import BatchPlan, PagedKV
from paceline.model.layer import Layer, Linear, Lora
from paceline.model.ops import Ops
from paceline.model.rope import Tables
from paceline.model.sampling_arrays import SamplingArrays

WIDTH = 16  # outputs per panel, positions per KV block
TILE = 20  # (query, head) pairs that share one read of a row's keys and values

_P, _I, _U, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float


class _Plan(ctypes.Structure):
    """csrc/decoder.c: Plan"""

    _fields_ = [(name, _P) for name in ("k", "v", "slots", "query_start", "context", "tables", "tiles")] + [
        (name, _I)
        for name in (
            *("num_blocks", "max_blocks", "num_tiles", "num_tokens", "num_heads", "num_kv_heads", "dim"),
            *("q_stride", "k_stride", "v_stride"),
        )
    ]


SIGNATURES: dict[str, dict[str, tuple[Any, ...]]] = {
    "decoder": {
        "linear": (_P, _P, _P, _P, _I, _I, _I),
        "add_adapter": (_P, _P, _F, _P, _I, _I, _I, _I, _I),
        "embed": (_P, _P, _P, _I, _I),
        "norm": (_P, _P, _F, _P, _I, _I),
        "add_norm": (_P, _P, _P, _F, _I, _I),
        "silu_mul": (_P, _P, _I, _I),
        "rotate": (_P, _P, _P, _F, _P, _P, _P, _I, _I, _I, _I),
        "attention": (_P, _I, _P, _P, _P, _P),
    },
    "sample": {
        "draw": (_P, _I, _I, _P, _P, _U, _P, _P, _P, _P, _P, _P, _P, _P),
        "race": (_P, _I, _I, _P, _P, _U, _P),
        "uniform": (_I, _P, _P, _U, _P),
    },
    "weights": {"pack": (_P, _P, _I, _I, _I), "unpack": (_P, _P, _I, _I), "sums": (_P, _I, _I, _P, _I, _P)},
}


@cache
def _library(name: str) -> ctypes.CDLL:
    library = native.load(name)
    for function, argtypes in SIGNATURES[name].items():
        getattr(library, function).argtypes, getattr(library, function).restype = argtypes, None
    return library


def pack(weight_NK: Tensor) -> Tensor:
    """[N, K] -> panels [ceil(N / 16), K, 16], padded with zeros."""
    num_out, num_in = weight_NK.shape
    panels = weight_NK.new_zeros(-(-num_out // WIDTH), num_in, WIDTH)
    pack_rows(weight_NK, panels, 0)
    return panels


def pack_rows(rows_NK: Tensor, panels: Tensor, first: int) -> None:
    """Overwrite the outputs `first`, first + 1, ... of panels."""
    num_rows, num_in = rows_NK.shape
    rows_NK = rows_NK.contiguous()
    assert rows_NK.dtype == panels.dtype == torch.float32 and panels.is_contiguous() and num_in == panels.shape[1]
    assert first >= 0 and first + num_rows <= len(panels) * WIDTH
    _library("weights").pack(rows_NK.data_ptr(), panels.data_ptr(), first, num_rows, num_in)


def pack_adapters(lora: Lora) -> None:
    """Pack the adapters' current values."""
    with torch.no_grad():
        lora.panels = [pack(lora.down.detach()), *(pack(up.detach()) for up in lora.ups(lora.up))]


def unpack(panels: Tensor, num_out: int) -> Tensor:
    """The first num_out outputs' weights, [N, K]."""
    assert panels.dtype == torch.float32 and panels.is_contiguous() and num_out <= len(panels) * WIDTH
    weight = panels.new_empty(num_out, panels.shape[1])
    _library("weights").unpack(panels.data_ptr(), weight.data_ptr(), *weight.shape)
    return weight


def sums(words: Tensor, high: np.ndarray) -> np.ndarray:
    """`weights._sums` of int8, int16 or int32 words: uint64, one per len(high) words and one for the remainder."""
    assert words.is_contiguous() and words.itemsize <= 4 and high.dtype == np.uint32
    out = np.empty(len(words) // len(high) + 1, np.uint64)
    _library("weights").sums(words.data_ptr(), words.itemsize, len(words), high.ctypes.data, len(high), out.ctypes.data)
    return out


def pack_for_inference(model: Decoder | DraftHead) -> None:
    """Convert a float32 CPU model for inference, in place: packed weights and C kernels."""
    assert model.device.type == "cpu" and model.dtype == torch.float32
    _library("sample")
    ops = NativeOps()
    for module in model.modules():
        if isinstance(module, Linear) and module.weight is not None:
            module.panels = pack(module.weight.detach())
            module.weight = None
        if isinstance(module, Lora):
            pack_adapters(module)
    model.ops = ops
    # A step looks up about 300 submodules and parameters through nn.Module.__getattr__, which takes a microsecond or
    # more each. Plain attributes are faster. (Assigning to one through nn.Module removes the plain attribute.)
    for module in model.modules():
        vars(module).update(module._modules | module._parameters)


class NativeOps(Ops):
    """`ops.Ops` with packed weights."""

    is_cuda = False
    is_batch_invariant = True

    def __init__(self) -> None:
        self.c = c = _library("decoder")
        self._linear, self._add_norm, self._silu_mul, self._rotate = c.linear, c.add_norm, c.silu_mul, c.rotate

    def embed(self, tokens_T: Tensor, table: Linear) -> Tensor:
        assert table.panels is not None
        y = table.panels.new_empty(len(tokens_T), table.num_in)
        self.c.embed(tokens_T.data_ptr(), table.panels.data_ptr(), y.data_ptr(), len(tokens_T), table.num_in)
        return y

    def paged_attention(self, kv: PagedKV, plan: BatchPlan) -> NativePagedAttention:
        return NativePagedAttention(kv, plan)

    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        panels, bias = linear.panels, linear.bias
        assert panels is not None and x_TK.is_contiguous()
        num_rows, num_in = x_TK.shape
        num_out = linear.num_out
        y = x_TK.new_empty(num_rows, num_out)
        self._linear(
            x_TK.data_ptr(),
            panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            num_rows,
            num_in,
            num_out,
        )
        if linear.lora is not None:
            self._add_adapters(x_TK, linear.lora, y)
        return y

    def _add_adapters(self, x_TK: Tensor, lora: Lora, y_TN: Tensor) -> None:
        down, *ups = lora.panels
        num_rows, num_in = x_TK.shape
        num_inner, num_out, rank = len(lora.parts) * lora.rank, y_TN.shape[1], lora.rank
        inner = x_TK.new_empty(num_rows, num_inner)
        self._linear(x_TK.data_ptr(), down.data_ptr(), None, inner.data_ptr(), num_rows, num_in, num_inner)
        for i, (part, up) in enumerate(zip(lora.parts, ups, strict=True)):
            self.c.add_adapter(
                inner.data_ptr() + 4 * i * rank, up.data_ptr(), lora.scale, y_TN.data_ptr() + 4 * part.first,
                num_rows, rank, part.size, num_inner, num_out,
            )  # fmt: skip

    def logits(self, h_TD: Tensor, linear: Linear) -> Tensor:
        return self.linear(h_TD, linear)

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        assert x_TD.is_contiguous()
        y = torch.empty_like(x_TD)
        self.c.norm(x_TD.data_ptr(), weight_D.data_ptr(), eps, y.data_ptr(), *x_TD.shape)
        return y

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert x_TD.is_contiguous() and y_TD.is_contiguous()
        self._add_norm(x_TD.data_ptr(), y_TD.data_ptr(), weight_D.data_ptr(), eps, *x_TD.shape)
        return x_TD, y_TD

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        assert gate_up_TI.is_contiguous()
        num_rows, width = gate_up_TI.shape
        y = gate_up_TI.new_empty(num_rows, width // 2)
        self._silu_mul(gate_up_TI.data_ptr(), y.data_ptr(), num_rows, width // 2)
        return y

    def qkv(self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables) -> tuple[Tensor, Tensor, Tensor]:
        config = layer.config
        heads, groups, dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_norm, k_norm = layer.q_norm, layer.k_norm
        qkv = self.linear(h_TD, layer.qkv)
        num_rows = qkv.shape[0]
        self._rotate(
            qkv.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            config.norm_eps,
            rope[0].data_ptr(),
            rope[1].data_ptr(),
            positions_T.data_ptr(),
            num_rows,
            heads,
            groups,
            dim,
        )
        q, k, v = qkv.view(num_rows, heads + 2 * groups, dim).split_with_sizes([heads, groups, groups], 1)
        return q, k, v


class NativePagedAttention:
    """`attention.PagedAttention`: a row's queries and a group's heads share one read of the keys and values."""

    def __init__(self, kv: PagedKV, plan: BatchPlan) -> None:
        _, num_blocks, groups, dim, block = kv.k.shape
        assert block == WIDTH
        self.kv = kv
        self.query_start = np.ascontiguousarray(plan.query_start, np.int32)
        self.context = np.ascontiguousarray(plan.context, np.int32)
        self.tables = np.ascontiguousarray(plan.block_tables, np.int32)
        self.slots = np.ascontiguousarray(plan.slot_mapping(), np.int64)
        self.c = _Plan(
            k=kv.k.data_ptr(),
            v=kv.v.data_ptr(),
            slots=self.slots.ctypes.data,
            query_start=self.query_start.ctypes.data,
            context=self.context.ctypes.data,
            tables=self.tables.ctypes.data,
            num_blocks=num_blocks,
            max_blocks=self.tables.shape[1],
            num_tokens=len(self.slots),
            num_kv_heads=groups,
            dim=dim,
        )
        self._address = ctypes.addressof(self.c)
        self._attention = _library("decoder").attention

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        if not self.c.num_heads:  # the first layer of this forward pass; all have the same shapes and strides
            self.c.q_stride, self.c.k_stride, self.c.v_stride = q_THE.stride(0), k_TGE.stride(0), v_TGE.stride(0)
            self._shape = q_THE.shape[0], q_THE.shape[1] * q_THE.shape[2]
            self._make_tiles(q_THE.shape[1])
        out = q_THE.new_empty(*self._shape)
        self._attention(self._address, layer, q_THE.data_ptr(), k_TGE.data_ptr(), v_TGE.data_ptr(), out.data_ptr())
        return out

    def _make_tiles(self, num_heads: int) -> None:
        """Split every row's (query, head of a group) pairs into equal tiles: (row, first pair, number of pairs)."""
        num_pairs = np.diff(self.query_start) * (num_heads // self.c.num_kv_heads)
        num_tiles = -(-num_pairs // TILE)
        row = np.repeat(np.arange(len(num_pairs)), num_tiles)
        size = -(-num_pairs // num_tiles)[row]
        first = (np.arange(len(row)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)) * size
        self.tiles = np.stack([row, first, np.minimum(size, num_pairs[row] - first)], 1).astype(np.int32)
        self.tiles = np.ascontiguousarray(self.tiles[self.tiles[:, 2] > 0])
        self.c.num_heads, self.c.num_tiles, self.c.tiles = num_heads, len(self.tiles), self.tiles.ctypes.data


def draw(
    logits_PV: Tensor, keys: np.ndarray, positions: np.ndarray, params: SamplingArrays, stream: int, margins: bool
) -> tuple[np.ndarray, ...]:
    """`sample.Sampler.draw`: tokens, their logprobs under the processed distribution, their raw logprobs and, if
    requested, their margins."""
    num_rows, vocab = logits_PV.shape
    logits_PV = logits_PV.contiguous()
    given = keys, positions, params.temperature, params.top_k, params.top_p, params.min_p
    dtypes = np.uint64, np.int64, np.float64, np.int32, np.float64, np.float64
    arrays = [np.ascontiguousarray(array, dtype) for array, dtype in zip(given, dtypes, strict=True)]
    assert all(len(array) == num_rows for array in arrays)
    outs = [np.empty(num_rows, np.int32)] + [np.empty(num_rows) for _ in range(3 if margins else 2)]
    pointers = [array.ctypes.data for array in (*arrays, *outs)] + ([] if margins else [None])
    _library("sample").draw(logits_PV.data_ptr(), num_rows, vocab, *pointers[:2], stream, *pointers[2:])
    return tuple(outs)


def race(weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
    """`sample.PhiloxNoise.race`: one token per row of non-negative weights."""
    num_rows, vocab = weights_PV.shape
    weights_PV = weights_PV.contiguous()
    keys, positions = np.ascontiguousarray(keys, np.uint64), np.ascontiguousarray(positions, np.int64)
    tokens = np.empty(num_rows, np.int32)
    _library("sample").race(
        weights_PV.data_ptr(), num_rows, vocab, keys.ctypes.data, positions.ctypes.data, stream, tokens.ctypes.data
    )
    return tokens


def uniform(keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
    """One uniform number per position, float64, for `sample.PhiloxNoise.bernoulli`."""
    keys, positions = np.ascontiguousarray(keys, np.uint64), np.ascontiguousarray(positions, np.int64)
    out = np.empty(len(keys))
    _library("sample").uniform(len(keys), keys.ctypes.data, positions.ctypes.data, stream, out.ctypes.data)
    return out
