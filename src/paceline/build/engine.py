"""An engine with its model: packed for the CPU kernels where they can run, plain torch elsewhere."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from paceline.config import Config
from paceline.native import NativeUnavailable

if TYPE_CHECKING:
    from paceline.engine.engine import LocalEngine
    from paceline.engine.runner import Runner
    from paceline.model.config import ModelConfig
    from paceline.model.decoder import Decoder
    from paceline.model.hf_shape import Shape
    from paceline.model.paged import PagedDecoder
    from paceline.model.sample import Sampler


def build_engine(config: Config) -> LocalEngine:
    """A local engine with its model, tokenizer, drafter and policy."""
    import torch

    from paceline.build.cost import measured_costs
    from paceline.build.drafter import build_drafter, drafting_cost
    from paceline.build.policy import build_policy
    from paceline.engine.engine import LocalEngine
    from paceline.model.store import load_tokenizer, resolve
    from paceline.speculation.auto import HEADS
    from paceline.speculation.cost_files import cost_table_of

    if config.engine.kind != "local":
        raise ValueError(f'engine.kind = "{config.engine.kind}": is for `paceline train`; here use "local"')
    if config.speculation.cost_table is not None:
        cost_table_of(config.speculation.cost_table)  # a mistake in it is told before a model is loaded
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    directory = resolve(config.model.name)
    tokenizer = load_tokenizer(directory)
    decoder = build_decoder(config, directory)
    sampler = build_sampler(decoder)
    paged = build_paged(config, decoder)
    drafter = build_drafter(config, decoder, tokenizer)
    paged.tap(drafter.wants_hidden if drafter is not None else ())  # what is measured is what will run
    runner = build_runner(config, paged, sampler)
    runner.equip(drafter)
    heads, method = dict[str, float](), config.speculation.method
    if (cost := drafting_cost(config, drafter, decoder.config)) or runner.has_head:
        heads[HEADS.get(method, method)] = cost
    return LocalEngine(
        paged,
        sampler=sampler,
        runner=runner,
        drafter=drafter,
        policy=build_policy(config.speculation, lambda: measured_costs(paged, runner, config, heads)),
        rule=config.speculation.rule,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        prefix_sharing=config.engine.prefix_sharing,
        order=config.engine.order,
        tokenizer=tokenizer,
        seed=config.sampling.seed,
    )


def check_device(config: Config) -> None:
    import torch

    device, dtype = config.model.device, config.model.dtype
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device = {device!r}: this machine has no CUDA device; use 'cpu'")
    if device == "cpu" and getattr(torch, dtype).itemsize < 4:
        raise ValueError(f"model.dtype = {dtype!r}: on a CPU use 'float32' (or 'float64')")


def load_decoder(config: Config, directory: Any, device: str | None = None) -> Decoder:
    """The model as it is on disk, its context stretched where model.yarn_factor says so; on model.device, if no other
    is given."""
    import torch

    from paceline.model.weights import load

    check_device(config)
    dtype = getattr(torch, config.model.dtype)
    return load(directory, dtype, device or config.model.device, config.model.yarn_factor).requires_grad_(False)


def build_decoder(config: Config, directory: Any) -> Decoder:
    """The model for inference: packed for the CPU kernels where they can run, plain torch elsewhere."""
    decoder = load_decoder(config, directory)
    if config.engine.native and config.model.device == "cpu" and config.model.dtype == "float32":
        from paceline.model.kernels import pack_for_inference

        try:
            pack_for_inference(decoder)
        except NativeUnavailable as error:
            warnings.warn(f"engine.native: {error}\nGoing on in plain torch, several times slower.", stacklevel=2)
    if config.engine.native and decoder.device.type == "cuda" and has_kernels(decoder):
        from paceline.model.cuda.ops import CudaOps

        decoder.ops = CudaOps()
    return decoder


def has_kernels(decoder: Decoder) -> bool:
    """Whether the Triton kernels can compute it; if they should but can't, that is said."""
    import importlib.util

    config = decoder.config
    is_power = config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif not is_power:
        reason = f"head_dim = {config.head_dim} is not a power of two from 16 on"
    else:
        return str(decoder.dtype) != "torch.float64"  # which is asked for where exactness counts
    warnings.warn(f"engine.native: {reason}. Going on in plain torch, several times slower.", stacklevel=3)
    return False


def build_runner(config: Config, paged: PagedDecoder, sampler: Sampler) -> Runner:
    from paceline.engine.accept import RULES
    from paceline.engine.runner import EagerRunner

    rule = config.speculation.rule
    eager = EagerRunner(paged, sampler, RULES[rule])
    if not paged.decoder.ops.is_cuda or rule != "coupled":
        return eager
    from paceline.engine.graph_runner import GraphRunner

    return GraphRunner(paged, eager, config.engine.max_num_seqs, eager=not config.engine.graphs)


def build_sampler(decoder: Decoder) -> Sampler:
    from paceline.model.sample import Sampler

    return Sampler(native=decoder.embed.panels is not None)


def build_paged(config: Config, decoder: Decoder) -> PagedDecoder:
    from paceline.model.kv import BLOCK
    from paceline.model.paged import PagedDecoder

    num_tokens = config.engine.kv_tokens or default_kv_tokens(config, decoder.config)
    try:
        return PagedDecoder(decoder, -(-num_tokens // BLOCK))
    except (MemoryError, RuntimeError) as error:  # torch's own out-of-memory is a RuntimeError
        raise ValueError(
            f"engine.kv_tokens = {num_tokens}: no memory for that many tokens' KV; lower it ({str(error)[:80]})"
        ) from None


def default_kv_tokens(config: Config, model: ModelConfig | Shape) -> int:
    """Room for every row at the model's whole context or 4096 tokens each, but no more than 2 GiB, or on a GPU a third
    of its memory; on a CPU one whole context in any case."""
    each = min(model.max_positions, 4096)
    itemsize = {"float64": 8, "float32": 4}.get(config.model.dtype, 2)
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    if config.model.device.startswith("cuda"):
        import torch

        most = torch.cuda.get_device_properties(config.model.device).total_memory // 3 // bytes_per_token
        return min(max(model.max_positions, config.engine.max_num_seqs * each), most)
    return max(model.max_positions, min(config.engine.max_num_seqs * each, 2 * 2**30 // bytes_per_token))
