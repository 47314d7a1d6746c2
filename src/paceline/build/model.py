"""Builds the model of an engine: decoder, sampler and KV cache."""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import Config
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.device import use_device, use_expandable_segments
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
    if device == "cpu" and itemsize(config) < 4:
        raise ValueError(f"model.dtype = {dtype!r}: on a CPU use 'float32' (or 'float64')")
    on_gpu = device.startswith("cuda") and dtype == "bfloat16" and config.engine.native
    if config.engine.invariant and not (on_gpu and config.engine.kind == "local"):
        raise ValueError(
            'engine.invariant = true: only with model.device = "cuda", model.dtype = "bfloat16", engine.kind = "local" '
            "and engine.native = true; set these, or set it to false"
        )


def itemsize(config: Config) -> int:
    """Bytes of a weight."""
    size: int = getattr(torch, config.model.dtype).itemsize
    return size


def check_training_dtype(config: Config) -> None:
    if config.model.dtype == "float16":
        raise ValueError(
            'model.dtype = "float16": small gradients would round to 0, since there is no loss scaling; train in '
            '"bfloat16" or "float32"'
        )


def prepare_device(config: Config, device: str) -> None:
    """Before anything is allocated on it."""
    check_device(config)
    if config.engine.kind == "local":  # vLLM's sleep mode refuses expandable segments
        use_expandable_segments(device)
    use_device(device)


def load_decoder(config: Config, directory: Any, device: str | None = None) -> Decoder:
    """The model as it is on disk, with the context extended by model.yarn_factor. `device` None: model.device. It
    becomes the current device: the model's kernels can be launched."""
    device, dtype = device or config.model.device, getattr(torch, config.model.dtype)
    prepare_device(config, device)
    return load(directory, dtype, device, config.model.yarn_factor).requires_grad_(False)


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

    if torch.cuda.get_device_capability(decoder.device) != (9, 0):
        raise ValueError("engine.invariant = true: only on a Hopper GPU (H100, H200); set it to false")
    return InvariantOps(decoder)


def has_kernels(decoder: Decoder) -> bool:
    """Whether the Triton kernels support this model. Warns if not, except for float64."""
    obstacle = kernel_obstacle(decoder.config)
    if importlib.util.find_spec("triton") is None:
        obstacle = "triton is not installed"
    if obstacle is None:
        return decoder.dtype != torch.float64  # float64 is used for exactness, not for speed
    warnings.warn(f"Triton kernels: {obstacle}. Using plain torch, several times slower.", stacklevel=3)
    return False


def kernel_obstacle(model: ModelConfig) -> str | None:
    """Why the Triton kernels do not support a model of this shape."""
    is_power = model.head_dim >= 16 and model.head_dim & (model.head_dim - 1) == 0
    return None if is_power else f"head_dim = {model.head_dim} is not a power of two >= 16"


def build_sampler(decoder: Decoder) -> Sampler:
    if decoder.ops.is_cuda and decoder.ops.is_batch_invariant:
        from paceline.model.cuda.sampler import CudaSampler

        return CudaSampler()
    return Sampler(native=decoder.embed.panels is not None)


def build_paged(config: Config, decoder: Decoder) -> PagedDecoder:
    num_tokens = config.engine.kv_tokens or default_kv_tokens(config, decoder.config)
    try:
        return PagedDecoder(decoder, -(-num_tokens // BLOCK))
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when out of memory
        raise ValueError(
            f"engine.kv_tokens = {num_tokens}: not enough memory for so many tokens; lower it ({str(error)[:80]})"
        ) from None


def ample_kv_tokens(config: Config, model: ModelConfig | Shape) -> int:
    """Enough for max_num_seqs rows of 4096 tokens (or of the whole context, if it is shorter), and for one whole
    context."""
    return max(model.max_positions, config.engine.max_num_seqs * min(model.max_positions, 4096))


def default_kv_tokens(config: Config, model: ModelConfig | Shape) -> int:
    """`ample_kv_tokens`, up to 2 GiB, or on a GPU a third of its memory. On a CPU at least one whole context."""
    ample = ample_kv_tokens(config, model)
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize(config)
    if config.model.device.startswith("cuda"):
        return min(ample, torch.cuda.get_device_properties(config.model.device).total_memory // 3 // bytes_per_token)
    return max(model.max_positions, min(ample, 2 * 2**30 // bytes_per_token))
