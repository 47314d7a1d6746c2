"""vLLM as the engine of a run: our settings in its words."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from paceline.build.engine import check_device, default_kv_tokens
from paceline.config import Config

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.cluster.vllm_engine import VllmEngine
    from paceline.model.hf_shape import Shape

KV_BLOCK = 128  # tokens; vLLM's largest usual block
HEAD_LAYERS = 3  # that an EAGLE-3 head reads, as vLLM loads it


def build_vllm_engine(config: Config) -> VllmEngine:
    from paceline.cluster.vllm_python import in_this_process
    from paceline.model.hf_shape import read_shape
    from paceline.model.store import load_tokenizer, resolve

    check_device(config)
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a mere folder of this name is none
        raise ValueError(
            'engine.kind = "vllm": vLLM is not installed here; run paceline in an environment that has it (`make '
            'test-vllm` makes .venv-vllm), or use engine.kind = "local"'
        )
    directory = resolve(config.model.name)
    model = read_shape(directory)
    options = vllm_options(config, directory, model)
    with in_this_process():
        from paceline.cluster.vllm_engine import VllmEngine

        engine = VllmEngine(
            options,
            tokenizer=load_tokenizer(directory),
            eos_token_ids=model.eos_token_ids,
            drafter=config.speculation.method,
            threads=config.engine.threads,
        )
    if engine.changes_transformers and config.learner.model == "transformers" and config.cluster.kind == "none":
        engine.close()
        raise ValueError(
            f'learner.model = "transformers": vLLM computes {config.model.name!r} with transformers\' own classes, '
            'which it changes for the whole process; put the learner into another one: cluster.kind = "ray"'
        )
    return engine


def vllm_options(config: Config, directory: Path, model: Shape) -> dict[str, Any]:
    """EngineArgs."""
    engine, on_gpu = config.engine, config.model.device.startswith("cuda")
    options: dict[str, Any] = {
        "model": str(directory),
        "dtype": config.model.dtype,
        "load_format": "safetensors",
        "seed": 0,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": max(engine.max_num_batched_tokens, engine.max_num_seqs),
        "max_model_len": model.max_positions,
        "enable_prefix_caching": engine.prefix_sharing,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": not engine.graphs,
        "enable_sleep_mode": on_gpu and engine.sleep is not False,
        "speculative_config": speculative_config(config, directory),
        "additional_config": history_settings(config),
    }
    if engine.kv_tokens is not None or not on_gpu:
        num_tokens = engine.kv_tokens or default_kv_tokens(config, model)
        options["kv_cache_memory_bytes"] = _kv_bytes(config, model, num_tokens)
        options["max_model_len"] = min(model.max_positions, num_tokens)
    options |= engine.vllm
    if not on_gpu:
        # vLLM 0.32 can't take back what a request's own seed was used for when its prompt comes in pieces: on a CPU it
        # asks the generator for an offset, which it has not. So prompts come whole there.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], options["max_model_len"])
    return options


def speculative_config(config: Config, directory: Path) -> dict[str, Any] | None:
    """The [speculation] table; the config has made sure that vLLM can do it without loss."""
    from paceline.cluster.vllm_names import HISTORY

    speculation = config.speculation
    if speculation.method == "none":
        return None
    shared = {"num_speculative_tokens": speculation.num_speculative_tokens, "rejection_sample_method": "standard"}
    if speculation.method == "ngram":
        lookup = {name: getattr(speculation, name) for name in ("prompt_lookup_min", "prompt_lookup_max")}
        return {"method": "ngram", **lookup, **shared}
    if speculation.method == "suffix":
        return {"method": "custom_class", "model": HISTORY, **shared}
    if speculation.method == "draft_model":
        from paceline.model.store import resolve

        assert speculation.draft_model is not None
        return {"method": "draft_model", "model": str(resolve(speculation.draft_model)), **shared}
    assert speculation.method == "eagle3"
    return {"method": "eagle3", "model": str(_checked_head(config, directory)), **shared}


def history_settings(config: Config) -> dict[str, Any]:
    from paceline.cluster.vllm_names import SETTINGS

    s = config.speculation
    given = {"min_match": s.suffix_min_match, "max_bytes": s.suffix_max_bytes}
    return {SETTINGS: given | {"max_versions": s.suffix_max_versions, "recency": s.suffix_recency}}


def _checked_head(config: Config, target: Path) -> Path:
    """The head's directory. It is loaded once here, so that what is wrong with it is told in our words."""
    from paceline.build.drafter import build_head
    from paceline.model.head_files import resolve_head
    from paceline.model.weights import read_config

    directory = resolve_head(config.speculation.head, config.model.name)
    layers = build_head(config, read_config(target)).config.layer_ids
    if len(layers) != HEAD_LAYERS:
        raise ValueError(
            f'speculation.head = {str(directory)!r} reads the layers {list(layers)}; with engine.kind = "vllm" it must '
            f"read {HEAD_LAYERS} of them: train one with `paceline train-draft`"
        )
    return directory


def _kv_bytes(config: Config, model: Shape, num_tokens: int) -> int:
    """Of the target's KV and the drafter's; vLLM keeps a block to itself."""
    itemsize = {"float32": 4}.get(config.model.dtype, 2)
    num_layers = model.num_layers
    if config.speculation.method == "eagle3":
        num_layers += 1
    elif config.speculation.method == "draft_model":
        from paceline.model.hf_shape import read_shape
        from paceline.model.store import resolve

        assert config.speculation.draft_model is not None
        num_layers += read_shape(resolve(config.speculation.draft_model)).num_layers
    blocks = -(-num_tokens // KV_BLOCK) + 1
    return 2 * num_layers * model.num_kv_heads * model.head_dim * itemsize * blocks * KV_BLOCK
