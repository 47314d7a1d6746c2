"""Builds vLLM as the engine of a run: translates settings to vLLM's options."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.build.drafter import build_head, check_vocabulary
from paceline.build.model import check_device, default_kv_tokens, itemsize
from paceline.cluster.vllm_names import HISTORY_PROPOSER, HISTORY_SETTINGS
from paceline.cluster.vllm_python import in_this_process
from paceline.config import Config
from paceline.model.head_files import resolve_head
from paceline.model.hf_shape import Shape, read_shape
from paceline.model.store import load_tokenizer, resolve
from paceline.model.weights import ModelError, read_config, read_json

if TYPE_CHECKING:
    from paceline.cluster.vllm_engine import VllmEngine

KV_BLOCK = 128  # tokens; vLLM's largest usual block
HEAD_LAYERS = 3  # target layers that vLLM gives to an EAGLE-3 head
MAX_DRAFT = 128  # draft tokens per row that vLLM's rejection sampler supports; vLLM would fail in the middle of a step
TEMPERATURES = (0.01, 2.0)  # vLLM raises lower temperatures to 0.01 and rejects higher ones


def build_vllm_engine(config: Config) -> VllmEngine:
    check_device(config)
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of this name has no origin
        raise ValueError(
            'engine.kind = "vllm": vLLM is not installed here; run paceline in an environment that has it (`make '
            'setup-vllm` makes .venv-vllm), or use engine.kind = "local"'
        )
    directory = resolve(config.model.name)
    model = read_shape(directory)
    options = vllm_options(config, directory, model)
    is_limited_by_kv = config.engine.kv_tokens == options["max_model_len"] < model.max_positions
    with in_this_process():
        from paceline.cluster.vllm_engine import VllmEngine

        engine = VllmEngine(
            options,
            tokenizer=load_tokenizer(directory, config.model.chat_template),
            eos_token_ids=model.eos_token_ids,
            drafter=config.speculation.method,
            threads=config.engine.threads,
            kv_tokens=config.engine.kv_tokens if is_limited_by_kv else None,
        )
    if engine.patches_transformers and config.learner.model == "transformers" and config.cluster.kind == "none":
        engine.close()
        raise ValueError(
            f'learner.model = "transformers": vLLM computes {config.model.name!r} with transformers\' classes, '
            'which it patches for the whole process; put the learner into another process: cluster.kind = "ray"'
        )
    return engine


def vllm_options(config: Config, directory: Path, model: Shape) -> dict[str, Any]:
    """vLLM's EngineArgs. Settings that vLLM would reject late, or without naming the key, are rejected here."""
    _check(config, directory)
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
    max_model_len = engine.vllm.get("max_model_len", 0)
    if isinstance(max_model_len, int) and max_model_len > options["max_model_len"]:
        raise ValueError(
            f"engine.vllm.max_model_len = {max_model_len}: the model's context and engine.kv_tokens allow "
            f"{options['max_model_len']}; lower it, or leave it out"
        )
    options |= engine.vllm
    if not on_gpu:
        # No chunked prefill: vLLM 0.32 would then rewind the generator of a request with a seed by setting its offset,
        # and CPU generators have none.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], options["max_model_len"])
    return options


def speculative_config(config: Config, directory: Path) -> dict[str, Any] | None:
    """The [speculation] section for vLLM. `load_config` has checked that vLLM supports it without loss."""
    speculation = config.speculation
    if speculation.method == "none":
        return None
    shared = {"num_speculative_tokens": speculation.num_speculative_tokens, "rejection_sample_method": "standard"}
    if speculation.method == "ngram":
        lookup = {name: getattr(speculation, name) for name in ("prompt_lookup_min", "prompt_lookup_max")}
        return {"method": "ngram", **lookup, **shared}
    if speculation.method == "suffix":
        return {"method": "custom_class", "model": HISTORY_PROPOSER, **shared}
    if speculation.method == "draft_model":
        return {"method": "draft_model", "model": str(_checked_draft(config, directory)), **shared}
    assert speculation.method == "eagle3"
    return {"method": "eagle3", "model": str(_checked_head(config, directory)), **shared}


def history_settings(config: Config) -> dict[str, Any]:
    s = config.speculation
    settings = {"min_match": s.suffix_min_match, "max_bytes": s.suffix_max_bytes}
    return {HISTORY_SETTINGS: settings | {"max_versions": s.suffix_max_versions, "recency": s.suffix_recency}}


def _check(config: Config, directory: Path) -> None:
    engine, speculation, (low, high) = config.engine, config.speculation, TEMPERATURES
    for key, value in (
        ("sampling.temperature", config.sampling.temperature),
        ("train.eval_temperature", config.train.eval_temperature),
    ):
        if value and not low <= value <= high:
            raise ValueError(
                f'{key} = {value:g}: with engine.kind = "vllm" it must be 0, or from {low:g} to {high:g}; vLLM '
                "supports no other temperatures"
            )
    if speculation.method != "none" and speculation.num_speculative_tokens > MAX_DRAFT:  # type: ignore[operator]
        raise ValueError(
            f"speculation.num_speculative_tokens = {speculation.num_speculative_tokens}: vLLM verifies at most "
            f"{MAX_DRAFT} draft tokens per row; lower it"
        )
    if engine.vllm.get("pipeline_parallel_size", 1) != 1:
        raise ValueError(
            f"engine.vllm.pipeline_parallel_size = {engine.vllm['pipeline_parallel_size']}: the weights of pipeline "
            "stages can't be checked after a transfer; split the model by engine.tensor_parallel_size"
        )
    if engine.tensor_parallel_size > 1:
        _check_tensor_parallel(engine.tensor_parallel_size, directory)


def _check_tensor_parallel(size: int, directory: Path) -> None:
    hf_config = read_json(directory / "config.json")
    hf_config = hf_config.get("text_config", hf_config)
    for name in ("num_attention_heads", "intermediate_size"):
        if hf_config.get(name, 0) % size:
            raise ValueError(
                f"engine.tensor_parallel_size = {size}: does not divide the model's {name} = {hf_config[name]}; use "
                "one that does"
            )


def _checked_draft(config: Config, target: Path) -> Path:
    """The draft model's directory. Its vocabulary must be the target's, as with the local engine."""
    name = config.speculation.draft_model
    assert name is not None
    try:
        directory = resolve(name)
    except ModelError as error:
        raise ValueError(f"speculation.draft_model: {error}") from None
    # None: it is in a nested config
    draft_size, target_size = (read_json(each / "config.json").get("vocab_size") for each in (directory, target))
    check_vocabulary(name, draft_size, target_size, directory, load_tokenizer(target))
    return directory


def _checked_head(config: Config, target: Path) -> Path:
    """The head's directory. The head is loaded here once, to raise our own error messages."""
    directory = resolve_head(config.speculation.head, config.model.name)
    layers = build_head(config, read_config(target)).config.layer_ids
    if len(layers) != HEAD_LAYERS:
        raise ValueError(
            f'speculation.head = {str(directory)!r} reads the layers {list(layers)}; with engine.kind = "vllm" it must '
            f"read {HEAD_LAYERS} of them: train one with `paceline train-draft`"
        )
    return directory


def _kv_bytes(config: Config, model: Shape, num_tokens: int) -> int:
    """Memory for the KV of the target and the drafter, plus one block that vLLM reserves."""
    num_values = model.num_layers * model.num_kv_heads * model.head_dim
    if config.speculation.method == "eagle3":
        num_values += model.num_kv_heads * model.head_dim
    elif config.speculation.method == "draft_model":
        assert config.speculation.draft_model is not None
        draft = read_shape(resolve(config.speculation.draft_model))
        num_values += draft.num_layers * draft.num_kv_heads * draft.head_dim
    num_blocks = -(-num_tokens // KV_BLOCK) + 1
    return 2 * num_values * itemsize(config) * num_blocks * KV_BLOCK
