"""The decoder's arithmetic and the draw of tokens in C (csrc/), for float32 inference on CPUs.

What always holds: a row's results have the same bits whatever other rows are in the batch, however a prompt was cut
into chunks and however many threads run. `ops.TorchOps`, `attention.PagedAttention` and `sample.Sampler` are the slow
twins. Weights lie in panels of 16 outputs, [ceil(N / 16), K, 16], which one pass reads from end to end.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline import native
from paceline.model.config import ModelConfig
from paceline.model.kv import BatchPlan, PagedKV
from paceline.model.layer import Linear
from paceline.model.ops import Composed

if TYPE_CHECKING:
    from paceline.model.decoder import Decoder
    from paceline.model.eagle3 import Eagle3Head
    from paceline.model.layer import Layer

WIDTH = 16  # outputs per panel, positions per KV block
TILE = 20  # (query, head) pairs that share one reading of a row's keys and values

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Plan(ctypes.Structure):
    """csrc/decoder.c: Plan"""

    _fields_ = [(name, _P) for name in ("k", "v", "slots", "query_start", "context", "tables", "tiles")] + [
        (name, _I)
        for name in (
            *("num_blocks", "max_blocks", "num_tiles", "num_tokens", "num_heads", "num_kv_heads", "dim"),
            *("q_stride", "k_stride", "v_stride"),
        )
    ]


@cache
def _decoder() -> ctypes.CDLL:
    return _declare(
        native.load("decoder"),
        linear=(_P, _P, _P, _P, _I, _I, _I),
        embed=(_P, _P, _P, _I, _I),
        norm=(_P, _P, _F, _P, _I, _I),
        add_norm=(_P, _P, _P, _F, _I, _I),
        silu_mul=(_P, _P, _I, _I),
        rotate=(_P, _P, _P, _F, _P, _P, _P, _I, _I, _I, _I),
        attention=(_P, _I, _P, _P, _P, _P),
    )


@cache
def _sample() -> ctypes.CDLL:
    return _declare(
        native.load("sample"),
        draw=(_P, _I, _I, _P, _P, ctypes.c_uint32, _P, _P, _P, _P, _P, _P, _P, _P),
        race=(_P, _I, _I, _P, _P, ctypes.c_uint32, _P),
        uniform=(_I, _P, _P, ctypes.c_uint32, _P),
    )


@cache
def _weights() -> ctypes.CDLL:
    return _declare(
        native.load("weights"),
        pack=(_P, _P, _I, _I, _I),
        unpack=(_P, _P, _I, _I),
        sums=(_P, _I, _I, _P, _I, _P),
    )


def _declare(library: ctypes.CDLL, **signatures: tuple[type, ...]) -> ctypes.CDLL:
    for name, argtypes in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, None
    return library


def pack(weight_NK: Tensor) -> Tensor:
    """[N, K] -> panels [ceil(N / 16), K, 16], zeros after the last output."""
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
    _weights().pack(rows_NK.data_ptr(), panels.data_ptr(), first, num_rows, num_in)


def unpack(panels: Tensor, num_out: int) -> Tensor:
    """The first num_out outputs' weights, [N, K]."""
    assert panels.dtype == torch.float32 and panels.is_contiguous() and num_out <= len(panels) * WIDTH
    weight = panels.new_empty(num_out, panels.shape[1])
    _weights().unpack(panels.data_ptr(), weight.data_ptr(), *weight.shape)
    return weight


def sums(words: Tensor, high: np.ndarray) -> np.ndarray:
    """weights._sums of int8, int16 or int32 words: uint64, one for every len(high) words and one for the rest."""
    assert words.is_contiguous() and words.itemsize <= 4 and high.dtype == np.uint32
    out = np.empty(len(words) // len(high) + 1, np.uint64)
    _weights().sums(words.data_ptr(), words.itemsize, len(words), high.ctypes.data, len(high), out.ctypes.data)
    return out


def pack_for_inference(model: Decoder | Eagle3Head) -> None:
    """Turn a float32 CPU model into one for inference: weights into panels, ops into C."""
    assert model.device.type == "cpu" and model.dtype == torch.float32
    _sample()
    ops = NativeOps()
    for module in model.modules():
        if isinstance(module, Linear) and module.weight is not None:
            module.panels = pack(module.weight.detach())
            module.weight = None
    model.ops = ops
    # A step looks up some three hundred submodules and parameters, each time by way of nn.Module.__getattr__, a
    # microsecond or more. As plain attributes too they are found at once (assigning to one puts it right again).
    for module in model.modules():
        vars(module).update(module._modules | module._parameters)


class NativeOps(Composed):
    """ops.Ops over packed weights."""

    is_cuda = False

    def __init__(self) -> None:
        self.c = c = _decoder()
        self._linear, self._add_norm, self._silu_mul, self._rotate = c.linear, c.add_norm, c.silu_mul, c.rotate

    def embed(self, tokens_T: Tensor, table: Linear) -> Tensor:
        assert table.panels is not None
        y = table.panels.new_empty(len(tokens_T), table.num_in)
        self.c.embed(tokens_T.data_ptr(), table.panels.data_ptr(), y.data_ptr(), len(tokens_T), table.num_in)
        return y

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
        return y

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

    def qkv(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
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
    """attention.PagedAttention with the row's queries and the group's heads over one reading of the keys and values."""

    def __init__(self, kv: PagedKV, plan: BatchPlan) -> None:
        _, num_blocks, groups, dim, block = kv.k.shape
        assert block == WIDTH
        self.kv = kv
        self.query_start = np.ascontiguousarray(plan.query_start, np.int32)
        self.context = np.ascontiguousarray(plan.context, np.int32)
        self.tables = np.ascontiguousarray(plan.block_tables, np.int32)
        self.slots = np.ascontiguousarray(plan.slots(), np.int64)
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
        self._attention = _decoder().attention

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        if not self.c.num_heads:  # the first layer of this forward; the others have the same shapes and strides
            self.c.q_stride, self.c.k_stride, self.c.v_stride = q_THE.stride(0), k_TGE.stride(0), v_TGE.stride(0)
            self._shape = q_THE.shape[0], q_THE.shape[1] * q_THE.shape[2]
            self._cut(q_THE.shape[1])
        out = q_THE.new_empty(*self._shape)
        self._attention(self._address, layer, q_THE.data_ptr(), k_TGE.data_ptr(), v_TGE.data_ptr(), out.data_ptr())
        return out

    def _cut(self, num_heads: int) -> None:
        """Every row's (query, head of a group) pairs in equal tiles: (row, first pair, number of pairs)."""
        num_pairs = np.diff(self.query_start) * (num_heads // self.c.num_kv_heads)
        num_tiles = -(-num_pairs // TILE)
        row = np.repeat(np.arange(len(num_pairs)), num_tiles)
        size = -(-num_pairs // num_tiles)[row]
        first = (np.arange(len(row)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)) * size
        self.tiles = np.stack([row, first, np.minimum(size, num_pairs[row] - first)], 1).astype(np.int32)
        self.tiles = np.ascontiguousarray(self.tiles[self.tiles[:, 2] > 0])
        self.c.num_heads, self.c.num_tiles, self.c.tiles = num_heads, len(self.tiles), self.tiles.ctypes.data


def draw(
    logits_PV: Tensor,
    keys: np.ndarray,
    positions: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    stream: int = 0,
    leads: bool = False,
) -> tuple[np.ndarray, ...]:
    """sample.Sampler.draw: tokens, their logprobs under the processed distribution, the raw ones, and, if they are
    asked for, the leads."""
    num_rows, vocab = logits_PV.shape
    logits_PV = logits_PV.contiguous()
    arrays = [
        np.ascontiguousarray(array, dtype)
        for array, dtype in (
            (keys, np.uint64),
            (positions, np.int64),
            (temperature, np.float64),
            (top_k, np.int32),
            (top_p, np.float64),
            (min_p, np.float64),
        )
    ]
    assert all(len(array) == num_rows for array in arrays)
    outs = [np.empty(num_rows, np.int32)] + [np.empty(num_rows) for _ in range(3 if leads else 2)]
    pointers = [array.ctypes.data for array in (*arrays, *outs)] + ([] if leads else [None])
    _sample().draw(logits_PV.data_ptr(), num_rows, vocab, *pointers[:2], stream, *pointers[2:])
    return tuple(outs)


def race(weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """sample.PhiloxNoise.race: one token per row of non-negative weights."""
    num_rows, vocab = weights_PV.shape
    weights_PV = weights_PV.contiguous()
    keys, positions = np.ascontiguousarray(keys, np.uint64), np.ascontiguousarray(positions, np.int64)
    tokens = np.empty(num_rows, np.int32)
    _sample().race(
        weights_PV.data_ptr(), num_rows, vocab, keys.ctypes.data, positions.ctypes.data, stream, tokens.ctypes.data
    )
    return tokens


def uniform(keys: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """One uniform per position, float64: what sample.PhiloxNoise.coin compares with."""
    keys, positions = np.ascontiguousarray(keys, np.uint64), np.ascontiguousarray(positions, np.int64)
    out = np.empty(len(keys))
    _sample().uniform(len(keys), keys.ctypes.data, positions.ctypes.data, stream, out.ctypes.data)
    return out
