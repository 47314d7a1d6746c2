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
MAX_DRAFT = 128  # tokens that vLLM's rejection sampler takes of a row; it finds out in the middle of a step
TEMPERATURES = (0.01, 2.0)  # vLLM draws at 0.01 where less is asked for, and refuses more than 2


def build_vllm_engine(config: Config) -> VllmEngine:
    from paceline.cluster.vllm_python import in_this_process
    from paceline.model.hf_shape import read_shape
    from paceline.model.store import load_tokenizer, resolve

    check_device(config)
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a mere folder of this name is none
        raise ValueError(
            'engine.kind = "vllm": vLLM is not installed here; run paceline in an environment that has it (`make '
            'setup-vllm` makes .venv-vllm), or use engine.kind = "local"'
        )
    directory = resolve(config.model.name)
    model = read_shape(directory)
    options = vllm_options(config, directory, model)
    cut_by_kv = config.engine.kv_tokens == options["max_model_len"] < model.max_positions
    with in_this_process():
        from paceline.cluster.vllm_engine import VllmEngine

        engine = VllmEngine(
            options,
            tokenizer=load_tokenizer(directory),
            eos_token_ids=model.eos_token_ids,
            drafter=config.speculation.method,
            threads=config.engine.threads,
            kv_tokens=config.engine.kv_tokens if cut_by_kv else None,
        )
    if engine.changes_transformers and config.learner.model == "transformers" and config.cluster.kind == "none":
        engine.close()
        raise ValueError(
            f'learner.model = "transformers": vLLM computes {config.model.name!r} with transformers\' own classes, '
            'which it changes for the whole process; put the learner into another one: cluster.kind = "ray"'
        )
    return engine


def vllm_options(config: Config, directory: Path, model: Shape) -> dict[str, Any]:
    """EngineArgs. What vLLM would refuse late, or in words that name no key, is refused here."""
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
    longest = engine.vllm.get("max_model_len", 0)
    if isinstance(longest, int) and longest > options["max_model_len"]:
        raise ValueError(
            f"engine.vllm.max_model_len = {longest}: the model's context and engine.kv_tokens allow "
            f"{options['max_model_len']}; lower it, or leave it out"
        )
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
        return {"method": "draft_model", "model": str(_checked_draft(config, directory)), **shared}
    assert speculation.method == "eagle3"
    return {"method": "eagle3", "model": str(_checked_head(config, directory)), **shared}


def history_settings(config: Config) -> dict[str, Any]:
    from paceline.cluster.vllm_names import SETTINGS

    s = config.speculation
    given = {"min_match": s.suffix_min_match, "max_bytes": s.suffix_max_bytes}
    return {SETTINGS: given | {"max_versions": s.suffix_max_versions, "recency": s.suffix_recency}}


def _check(config: Config, directory: Path) -> None:
    engine, speculation, low_high = config.engine, config.speculation, TEMPERATURES
    for key, value in (
        ("sampling.temperature", config.sampling.temperature),
        ("train.eval_temperature", config.train.eval_temperature),
    ):
        if value and not low_high[0] <= value <= low_high[1]:
            raise ValueError(
                f'{key} = {value:g}: with engine.kind = "vllm" it must be 0, or from {low_high[0]:g} to '
                f"{low_high[1]:g}; vLLM draws from no other distribution"
            )
    if speculation.method != "none" and speculation.num_speculative_tokens > MAX_DRAFT:  # type: ignore[operator]
        raise ValueError(
            f"speculation.num_speculative_tokens = {speculation.num_speculative_tokens}: vLLM verifies at most "
            f"{MAX_DRAFT} drafted tokens of a row; lower it"
        )
    if engine.vllm.get("pipeline_parallel_size", 1) != 1:
        raise ValueError(
            f"engine.vllm.pipeline_parallel_size = {engine.vllm['pipeline_parallel_size']}: what a pipeline's stages "
            "hold can't be checked after a transfer; cut the model by engine.tensor_parallel_size"
        )
    if engine.tensor_parallel_size > 1:
        _check_cut(engine.tensor_parallel_size, directory)


def _check_cut(num_parts: int, directory: Path) -> None:
    from paceline.model.weights import read_json

    told = read_json(directory / "config.json")
    told = told.get("text_config", told)
    for name in ("num_attention_heads", "intermediate_size"):
        if told.get(name, 0) % num_parts:
            raise ValueError(
                f"engine.tensor_parallel_size = {num_parts}: does not divide the model's {name} = {told[name]}; use "
                "one that does"
            )


def _checked_draft(config: Config, target: Path) -> Path:
    """The draft model's directory: as for our own engine, its tokens must be the target's."""
    from paceline.model.store import load_tokenizer, resolve
    from paceline.model.weights import ModelError, read_json

    name = config.speculation.draft_model
    assert name is not None
    try:
        directory = resolve(name)
    except ModelError as error:
        raise ValueError(f"speculation.draft_model: {error}") from None
    ours, theirs = (read_json(each / "config.json").get("vocab_size") for each in (directory, target))
    if ours != theirs and None not in (ours, theirs):  # a model of several parts says it elsewhere
        raise ValueError(
            f"speculation.draft_model = {name!r} has {ours} tokens, the target {theirs}: a draft model must share the "
            "target's vocabulary"
        )
    if load_tokenizer(directory).get_vocab() != load_tokenizer(target).get_vocab():
        raise ValueError(
            f"speculation.draft_model = {name!r}: its tokenizer gives other ids than the target's; a draft model must "
            "share the target's vocabulary"
        )
    return directory


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
    num_values = model.num_layers * model.num_kv_heads * model.head_dim
    if config.speculation.method == "eagle3":
        num_values += model.num_kv_heads * model.head_dim
    elif config.speculation.method == "draft_model":
        from paceline.model.hf_shape import read_shape
        from paceline.model.store import resolve

        assert config.speculation.draft_model is not None
        draft = read_shape(resolve(config.speculation.draft_model))
        num_values += draft.num_layers * draft.num_kv_heads * draft.head_dim
    blocks = -(-num_tokens // KV_BLOCK) + 1
    return 2 * num_values * itemsize * blocks * KV_BLOCK
