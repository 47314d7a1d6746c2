"""Builds the model of an engine: decoder, sampler and KV cache."""

from __future__ import annotations

import importlib.util
import json
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
from paceline.model.lora import attach
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.weights import load
from paceline.native import NativeUnavailable

if TYPE_CHECKING:
    from paceline.model.cuda.ops import CudaOps

HOPPER = (9, 0)  # compute capability


def check_device(config: Config) -> None:
    device, dtype = config.model.device, config.model.dtype
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device = {device!r}: this machine has no CUDA device; use 'cpu'")
    if device == "cpu" and itemsize(config) < 4:
        raise ValueError(f"model.dtype = {dtype!r}: on a CPU use 'float32' (or 'float64')")
    obstacle = invariant_obstacle(config)
    if config.engine.invariant and obstacle is not None:
        raise ValueError(f"engine.invariant = true: {obstacle}; change that, or remove engine.invariant")


def invariant_obstacle(config: Config) -> str | None:
    """Why there are no batch-invariant GPU kernels for these settings on this machine."""
    engine, model = config.engine, config.model
    required = {"model.dtype": "bfloat16", "engine.kind": "local", "engine.native": True}
    actual = {"model.dtype": model.dtype, "engine.kind": engine.kind, "engine.native": engine.native}
    if not model.device.startswith("cuda"):
        return f'model.device = "{model.device}", but the kernels are for a GPU'
    for key, value in required.items():
        if actual[key] != value:
            return f"{key} = {json.dumps(actual[key])}, but the kernels need {json.dumps(value)}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(model.device) != HOPPER:
        return f"the kernels are for Hopper GPUs (H100, H200), not for {torch.cuda.get_device_name(model.device)}"
    return None


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


def build_decoder(config: Config, directory: Any, with_adapters: bool = False) -> Decoder:
    """The model for inference, with compiled kernels if engine.native is set and they support it; else plain torch.
    `with_adapters`: with the LoRA adapters that the settings train."""
    decoder = load_decoder(config, directory)
    if with_adapters and (learner := config.learner).lora_rank:
        attach(decoder, learner.lora_rank, learner.lora_alpha, learner.lora_targets)
        decoder.requires_grad_(False)
    if config.engine.native and config.model.device == "cpu" and config.model.dtype == "float32":
        try:
            pack_for_inference(decoder)
        except NativeUnavailable as error:
            warnings.warn(f"engine.native: {error}\nUsing plain torch, several times slower.", stacklevel=2)
    if config.engine.native and decoder.device.type == "cuda" and has_kernels(decoder):
        decoder.ops = build_cuda_ops(decoder, uses_invariant_kernels(config))
    if config.engine.invariant and not decoder.ops.is_batch_invariant:
        raise ValueError("engine.invariant = true: the kernels do not support this model; remove engine.invariant")
    return decoder


def uses_invariant_kernels(config: Config) -> bool:
    """Warns if the GPU has none though a user would expect them: in bfloat16, with the setting left open."""
    if config.engine.invariant is not None:
        return config.engine.invariant
    obstacle = invariant_obstacle(config)
    if obstacle is not None and config.model.dtype == "bfloat16":
        warnings.warn(
            f"engine.invariant: {obstacle}. Speculation may change a token where two are nearly equally likely.",
            stacklevel=3,
        )
    return obstacle is None


def build_cuda_ops(decoder: Decoder, invariant: bool) -> CudaOps:
    if invariant:
        from paceline.model.cuda.invariant import InvariantOps

        return InvariantOps(decoder)
    from paceline.model.cuda.ops import CudaOps

    return CudaOps()


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
