"""Builds the model of an engine: decoder, sampler and KV cache."""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import Config
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.hf_shape import Shape
from paceline.model.kernels import pack_for_inference
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.weights import load
from paceline.native import NativeUnavailable

if TYPE_CHECKING:
    from paceline.model.cuda.ops import CudaOps


def check_device(config: Config) -> None:
    device, dtype = config.model.device, config.model.dtype
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device = {device!r}: this machine has no CUDA device; use 'cpu'")
    if device == "cpu" and getattr(torch, dtype).itemsize < 4:
        raise ValueError(f"model.dtype = {dtype!r}: on a CPU use 'float32' (or 'float64')")


def load_decoder(config: Config, directory: Any, device: str | None = None) -> Decoder:
    """The model as it is on disk, with the context extended by model.yarn_factor. `device` None: model.device."""
    check_device(config)
    dtype = getattr(torch, config.model.dtype)
    return load(directory, dtype, device or config.model.device, config.model.yarn_factor).requires_grad_(False)


def build_decoder(config: Config, directory: Any) -> Decoder:
    """The model for inference, with compiled kernels if engine.native is set and they support it; else plain torch."""
    decoder = load_decoder(config, directory)
    if config.engine.native and config.model.device == "cpu" and config.model.dtype == "float32":
        try:
            pack_for_inference(decoder)
        except NativeUnavailable as error:
            warnings.warn(f"engine.native: {error}\nUsing plain torch, several times slower.", stacklevel=2)
    if config.engine.native and decoder.device.type == "cuda" and has_kernels(decoder):
        decoder.ops = build_cuda_ops(decoder, config.engine.invariant)
    return decoder


def build_cuda_ops(decoder: Decoder, invariant: bool) -> CudaOps:
    if not invariant:
        from paceline.model.cuda.ops import CudaOps

        return CudaOps()
    from paceline.model.cuda.invariant import InvariantOps

    if decoder.dtype != torch.bfloat16:
        raise ValueError(
            f'engine.invariant = true: only with model.dtype = "bfloat16", not {str(decoder.dtype)[6:]!r}; set it to '
            "false"
        )
    return InvariantOps(decoder)


def has_kernels(decoder: Decoder) -> bool:
    """Whether the Triton kernels support this model. Warns if not, except for float64."""
    config = decoder.config
    is_power = config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif not is_power:
        reason = f"head_dim = {config.head_dim} is not a power of two >= 16"
    else:
        return decoder.dtype != torch.float64  # float64 is used for exactness, not for speed
    warnings.warn(f"Triton kernels: {reason}. Using plain torch, several times slower.", stacklevel=3)
    return False


def build_sampler(decoder: Decoder) -> Sampler:
    return Sampler(native=decoder.embed.panels is not None)


def build_paged(config: Config, decoder: Decoder) -> PagedDecoder:
    num_tokens = config.engine.kv_tokens or default_kv_tokens(config, decoder.config)
    try:
        return PagedDecoder(decoder, -(-num_tokens // BLOCK))
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when out of memory
        raise ValueError(
            f"engine.kv_tokens = {num_tokens}: not enough memory for so many tokens; lower it ({str(error)[:80]})"
        ) from None


def default_kv_tokens(config: Config, model: ModelConfig | Shape) -> int:
    """Enough for max_num_seqs rows of 4096 tokens (or of the whole context, if it is shorter), up to 2 GiB, or on a GPU
    a third of its memory. On a CPU at least one whole context."""
    row_tokens = min(model.max_positions, 4096)
    itemsize = {"float64": 8, "float32": 4}.get(config.model.dtype, 2)
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    if config.model.device.startswith("cuda"):
        max_tokens = torch.cuda.get_device_properties(config.model.device).total_memory // 3 // bytes_per_token
        return min(max(model.max_positions, config.engine.max_num_seqs * row_tokens), max_tokens)
    return max(model.max_positions, min(config.engine.max_num_seqs * row_tokens, 2 * 2**30 // bytes_per_token))
