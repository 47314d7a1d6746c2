"""Finds settings that vLLM, the local engine or Ray do not support. Imports neither vLLM nor Ray."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import Config

# vLLM options that may be set: they change speed and placement, never the distribution of tokens.
VLLM_OPTIONS = (
    "attention_backend",
    "block_size",
    "compilation_config",
    "cpu_offload_gb",
    "disable_custom_all_reduce",
    "distributed_executor_backend",
    "gpu_memory_utilization",
    "max_model_len",
    "pipeline_parallel_size",
)
VLLM = 'engine.kind = "vllm"'
RAY = 'cluster.kind = "ray"'


def engine_problems(config: Config) -> Iterator[str]:
    """Settings that the engine of `engine.kind` does not have."""
    engine = config.engine
    if engine.kind == "vllm":
        yield from _vllm_option_problems(config)
        yield from _vllm_speculation_problems(config)
        yield from _vllm_problems(config)
        return
    if engine.tensor_parallel_size > 1:
        yield (
            f"engine.tensor_parallel_size = {engine.tensor_parallel_size}: the local engine computes on one device; "
            f"use {VLLM}, or 1"
        )
    if engine.vllm:
        yield f'engine.vllm = {engine.vllm}: needs {VLLM}, but engine.kind = "{engine.kind}"'


def _vllm_option_problems(config: Config) -> Iterator[str]:
    for key in config.engine.vllm:
        if key == "speculative_config" or "accept" in key or "rejection" in key:
            yield (
                f"engine.vllm.{key}: use [speculation] to set how drafts are proposed and accepted; every setting "
                "there keeps the policy's distribution, vLLM's synthetic or typical acceptance does not"
            )
        if key not in VLLM_OPTIONS:
            yield f"engine.vllm.{key}: not an allowed vLLM option; allowed are {', '.join(VLLM_OPTIONS)}"


def _vllm_speculation_problems(config: Config) -> Iterator[str]:
    speculation, drafts = config.speculation, config.speculation.method != "none"
    if speculation.audit_every:
        yield (
            f"speculation.audit_every = {speculation.audit_every}: an audit generates the same tokens again without "
            f'drafts, which takes rule = "coupled", and {VLLM} has none; set audit_every = 0'
        )
    if speculation.method == "hybrid":
        yield f'speculation.method = "hybrid": {VLLM} has one drafter at a time; use "suffix" or "eagle3"'
    if speculation.method == "dspark":
        yield f'speculation.method = "dspark": not tested with {VLLM}; use "suffix" or "eagle3"'
    if drafts and speculation.rule != "rejection":
        yield (
            f'speculation.rule = "{speculation.rule}": {VLLM} accepts drafts by rejection sampling (the distribution '
            'is the same, the tokens of a seed are not); set rule = "rejection"'
        )
    if speculation.policy != "static":
        yield (
            f'speculation.policy = "{speculation.policy}": {VLLM} schedules by itself and does not call a speculation '
            'policy; use policy = "static"'
        )
    if drafts and (not isinstance(speculation.num_speculative_tokens, int) or not speculation.num_speculative_tokens):
        yield (
            f"speculation.num_speculative_tokens = {speculation.num_speculative_tokens}: {VLLM} takes one draft length "
            'above 0; to draft nothing set speculation.method = "none"'
        )
    if speculation.min_confidence:
        yield (
            f"speculation.min_confidence = {speculation.min_confidence}: {VLLM} always verifies the whole draft; set "
            "it to 0, or lower num_speculative_tokens"
        )
    if speculation.head_dtype == "float8":
        yield f'speculation.head_dtype = "float8": {VLLM} computes a head in model.dtype; use "auto" or "model"'
    draft_model = speculation.draft_model or ""
    if speculation.method == "draft_model" and draft_model.startswith("layers:"):
        yield f'speculation.draft_model = "{draft_model}": {VLLM} loads a draft model from a directory; give one'
    if drafts and config.sampling.min_p:
        yield f"sampling.min_p = {config.sampling.min_p}: {VLLM} does not support min_p with drafts; set it to 0"


def _vllm_problems(config: Config) -> Iterator[str]:
    if config.model.dtype == "float64":
        yield f'model.dtype = "float64": {VLLM} does not support it; use "float32" or less'
    if config.model.yarn_factor is not None:
        yield (
            f"model.yarn_factor = {config.model.yarn_factor}: {VLLM} reads the context length from the model's "
            "config.json; set rope_parameters there"
        )
    if config.engine.order != "arrival":
        yield f'engine.order = "{config.engine.order}": {VLLM} starts requests in order of arrival; use "arrival"'
    if config.train.inflight == "keep":
        yield (
            f'train.inflight = "keep": {VLLM} can\'t clear its prefix cache of old weights while requests run; use '
            '"drain" or "recompute"'
        )


def cluster_problems(config: Config) -> Iterator[str]:
    """Settings that `cluster.kind` does not support."""
    cluster, device = config.cluster, config.model.device
    if cluster.kind != "ray":
        return
    if config.speculation.audit_every:
        yield (
            f"speculation.audit_every = {config.speculation.audit_every}: an audit times the same rollouts twice on "
            f"an engine in the learner's process, and {RAY} has none there; set audit_every = 0"
        )
    if ":" in device:
        yield f'model.device = "{device}": with {RAY} every process sees only the GPUs that Ray gives it; use "cuda"'
    gpus = {key: getattr(cluster, key) for key in ("gpus_per_engine", "gpus_per_learner")}
    for key, number in gpus.items():
        if number is not None and (number > 0) != (device == "cuda"):
            yield f'cluster.{key} = {number:g}: does not go with model.device = "{device}"; leave it out'
    if cluster.layout == "colocated" and any(number is not None and number > 1 for number in gpus.values()):
        yield (
            f'cluster.layout = "colocated" shares one GPU, but cluster.gpus_per_engine = {gpus["gpus_per_engine"]}, '
            f'gpus_per_learner = {gpus["gpus_per_learner"]}; use "disaggregated", or at most one each'
        )
