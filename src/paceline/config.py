"""One tree of settings: defaults, then a TOML file, then `a.b=c` overrides; each later one wins.

A key that does not exist is an error that names the nearest one that does; so is a value of the wrong type. Once
made, a Config never changes. No torch here: commands that only look at settings start at once.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from paceline.files import read_text
from paceline.types import SamplingParams


class ConfigError(ValueError):
    """A setting that can't be used: names the key, the value and the way out."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _int_keys(value: Any) -> Any:
    """TOML writes every key as a string: {"1": 4} means {1: 4}."""
    if isinstance(value, dict):
        return {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
    return value


DraftLength = Annotated[int, Field(ge=0, le=256)]
DraftLengths = Annotated[
    dict[Annotated[int, Field(ge=1)], DraftLength], Field(min_length=1), BeforeValidator(_int_keys)
]


class ModelSection(Section):
    name: str = "smollm2-135m"  # a name `paceline pull` knows, a Hugging Face directory, or a hub id
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    yarn_factor: Annotated[float, Field(ge=1)] | None = None  # stretch the context this many times (YaRN)


class EngineSection(Section):
    # Who generates a training run's rollouts: "local" (our own engine), or "vllm" (which must be installed beside).
    kind: Literal["local", "vllm"] = "local"
    max_num_seqs: Annotated[int, Field(ge=1)] = 32  # rows in a step
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 512  # query tokens in a step; longer prompts are chunked
    kv_tokens: Annotated[int, Field(ge=1)] | None = None  # KV memory in tokens; None: enough for max_num_seqs
    prefix_sharing: bool = True  # a prompt that several requests share is computed once
    # Who begins first: "arrival", or "longest": the group that may be expected to take longest.
    order: Literal["arrival", "longest"] = "arrival"
    native: bool = True  # compiled kernels, C on a CPU and Triton on a GPU; false: plain torch
    # Give the KV's memory back while the learner trains; None: on a GPU, where it takes an eighth of all there is.
    sleep: bool | None = None
    graphs: bool = True  # on a GPU: whole decode steps as CUDA graphs; false: kernel by kernel
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None  # None: torch's own choice
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1  # vllm: devices that one model is cut over
    vllm: dict[str, Any] = {}  # vllm: further engine arguments of its own, those of VLLM_OPTIONS


# What may be set of vLLM's own: where it computes and how fast, never what.
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


HeadDtype = Literal["auto", "model", "float8"]


class SpeculationSection(Section):
    method: Literal["none", "ngram", "suffix", "draft_model", "eagle3", "hybrid"] = "none"
    # Who decides how much is drafted: "static" (num_speculative_tokens, always), "das" (budgets for long sequences), or
    # "auto" (what pays, step by step; none where nothing does).
    policy: Literal["static", "das", "auto"] = "static"
    # One draft length (under das and auto: the longest), or {batch size upper bound: draft length}; batches above the
    # last bound do not speculate.
    num_speculative_tokens: DraftLength | DraftLengths = 4
    cost_table: str | None = None  # das, auto: a JSON file or a shipped table's name; None: measured once, and kept
    rule: Literal["coupled", "rejection", "block"] = "coupled"
    draft_model: str | None = None  # as model.name, with the same vocabulary; or "layers:N": the target's first N
    head: str | None = None  # EAGLE-3: a directory; None: the one that is shipped for model.name
    # EAGLE-3 on a GPU: its large products in model.dtype ("model") or in "float8", which is faster; what is sampled is
    # the same, and so are most guesses. "auto": float8 for large heads, where the GPU has it.
    head_dtype: HeadDtype = "auto"
    any_target: bool = False  # draft with a head that was made for other weights than model.name's
    # hybrid: which of suffix and EAGLE-3 drafts for a row is decided "before" EAGLE-3 drafts, or "after" seeing both.
    hybrid_choice: Literal["before", "after"] = "before"
    prompt_lookup_min: Annotated[int, Field(ge=1)] = 2
    prompt_lookup_max: Annotated[int, Field(ge=1)] = 5
    min_confidence: Annotated[float, Field(ge=0, le=1)] = 0.0  # a draft ends where it is less likely to get so far
    audit_every: Annotated[int, Field(ge=0)] = (
        0  # train: every n-th step's rollouts once more, plainly, timed; 0: never
    )
    suffix_min_match: Annotated[int, Field(ge=1)] = 1  # shorter matches are not drafted from
    suffix_max_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 30  # history beyond this is forgotten, oldest first
    suffix_max_versions: Annotated[int, Field(ge=1, le=64)] = 4  # policy versions remembered of each problem
    suffix_recency: Annotated[float, Field(gt=0, le=1)] = 0.8  # what a version counts, compared to the next one

    @model_validator(mode="after")
    def _consistent(self) -> SpeculationSection:
        if self.method == "draft_model" and self.draft_model is None:
            raise ValueError(
                'speculation.draft_model is not set, but speculation.method = "draft_model"; '
                "give a model name, directory or hub id, or layers:8 for the model's own first eight layers"
            )
        if self.policy != "static" and not isinstance(self.num_speculative_tokens, int):
            raise ValueError(
                f'speculation.num_speculative_tokens: policy = "{self.policy}" chooses by itself how much to draft at '
                "which batch size; give one number, the longest draft"
            )
        if self.policy != "static" and self.min_confidence:
            raise ValueError(
                f'speculation.min_confidence = {self.min_confidence}: policy = "{self.policy}" weighs confidence by '
                "itself; leave it at 0"
            )
        if self.policy == "auto" and self.rule != "coupled":
            raise ValueError(
                f'speculation.policy = "auto" reads what was drafted, which biases rule = "{self.rule}"; use rule = '
                '"coupled", or policy = "das" or "static"'
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculation.prompt_lookup_min = {self.prompt_lookup_min}: must be at most "
                f"speculation.prompt_lookup_max = {self.prompt_lookup_max}"
            )
        return self


ADAPTABLE = ("eagle3", "hybrid")  # methods whose drafter has a head that can follow the policy


class SamplingSection(Section):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int = 0  # of generate, bench and verify; training goes by train.seed

    @model_validator(mode="after")
    def _valid(self) -> SamplingSection:
        self.params()  # SamplingParams knows the ranges
        return self

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class TaskSection(Section):
    kind: Literal["reasoning_gym", "jsonl", "dataset", "env"] = "reasoning_gym"
    # A reasoning-gym dataset, a jsonl file, a Hugging Face dataset (id or directory), or `module:EnvClass`.
    name: str = "chain_sum"
    params: dict[str, Any] = {}  # the reasoning-gym dataset's or environment's own parameters
    split: str = "train"
    prompt_column: str | None = None  # None: `prompt`, else `question`
    answer_column: str = "answer"
    system: str | None = None  # a system message before every prompt
    template: str = "{prompt}"  # wraps prompts that are strings
    chat: bool = True  # through the model's chat template; false: the bare text
    size: Positive | None = None  # training problems; None: all there are (reasoning-gym: 1024)
    held_out: Count = 64  # problems for validation, never trained on
    seed: Count = 0


class RewardSection(Section):
    # exact, format, math, code, gym (reasoning-gym's own scorer), model, env (what the environment gave), or
    # `module:function` in TRL's signature.
    functions: Annotated[list[str], Field(min_length=1)] = ["gym"]
    weights: list[float] | None = None  # one per function; None: 1 each
    answer_pattern: str | None = None  # regex whose last match (group 1 if any) is the answer; None: the whole text
    format_pattern: str = r"(?s)<think>.*</think>\s*<answer>.*</answer>\s*"  # `format`: the whole text must match
    model: str | None = None  # `model`: a sequence classifier's directory or hub id
    timeout_s: Seconds = 10.0  # per sample; what takes longer costs that sample, not the run
    workers: Positive = 2  # processes for math, code and functions of your own
    code_memory_mb: Positive = 512  # of all processes of a program together
    code_cpu_s: Positive = 5
    # How `code` isolates programs. "namespaces": a file system, network and process table of their own; a machine that
    # does not allow it is refused. "process": limits and system call filters alone (docs/training.md).
    sandbox: Literal["namespaces", "process"] = "namespaces"
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.5  # a larger share of failed samples in a step ends the run

    @model_validator(mode="after")
    def _consistent(self) -> RewardSection:
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} entries, reward.functions {len(self.functions)}; give one each"
            )
        if not all(math.isfinite(weight) for weight in self.weights or []):
            raise ValueError(f"reward.weights = {self.weights}: every weight must be a finite number")
        if "model" in self.functions and self.model is None:
            raise ValueError('reward.model is not set, but reward.functions has "model"; name a sequence classifier')
        for key in ("answer_pattern", "format_pattern"):
            try:
                re.compile(getattr(self, key) or "")
            except re.error as error:
                raise ValueError(f"reward.{key} = {getattr(self, key)!r}: not a regular expression ({error})") from None
        return self


KL_IN_REWARD = ("rloo", "reinforce_pp")  # algorithms with kl = "k1" and kl_in = "reward" by default; others: loss


class AlgorithmSection(Section):
    """None means: what the algorithm's paper says."""

    name: Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo"] = "grpo"
    num_generations: Annotated[int, Field(ge=2)] = 8  # samples per problem
    epsilon: Annotated[float, Field(ge=0)] | None = None
    epsilon_high: Annotated[float, Field(ge=0)] | None = None
    beta: Annotated[float, Field(ge=0)] = 0.0  # weight of the KL to the reference, the policy as it was at the start
    kl: Literal["k1", "k2", "k3"] | None = None
    kl_in: Literal["loss", "reward"] | None = None
    scale_rewards: Literal["group", "batch", "none"] | None = None
    loss_type: Literal["grpo", "dapo", "dr_grpo"] | None = None  # how token losses are averaged
    dynamic_sampling: bool | None = None  # groups whose rewards are all alike are replaced by further ones
    max_sampling_rounds: Positive = 3  # and how often before a smaller batch will do
    mask_truncated_completions: bool | None = None  # overlong filtering: they train nothing
    overlong_buffer: Count = 0  # soft overlong penalty over this many last tokens before sampling.max_tokens; 0: none
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    correction: Literal["none", "token_tis", "sequence_tis", "icepop"] = "none"  # for the engine's own logprobs
    correction_cap: Annotated[float, Field(gt=0)] = 2.0  # TIS: ratios are cut here; IcePop: upper bound
    correction_floor: Annotated[float, Field(ge=0)] = 0.5  # IcePop: tokens with a lower ratio are masked

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmSection:
        in_reward = self.name in KL_IN_REWARD
        kl = self.kl or ("k1" if in_reward else None)
        kl_in = self.kl_in or ("reward" if in_reward else "loss")
        if kl == "k1" and kl_in == "loss":
            # The gradient of k1 = log π - log π_ref is ∇log π, whose expectation under π is zero.
            raise ValueError(
                'algorithm.kl = "k1" with algorithm.kl_in = "loss": the expected gradient of k1 is zero, so the KL '
                'would hold nothing back, whatever algorithm.beta is; use kl = "k2" (its expected gradient is that of '
                'the KL) or "k3" in the loss, or kl_in = "reward"'
            )
        return self


class OptimizerSection(Section):
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: matrices by Muon, the rest by AdamW
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    muon_learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Count = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class LearnerSection(OptimizerSection):
    # Whose code computes the policy in training: ours, or "transformers", for architectures that we do not have.
    model: Literal["paceline", "transformers"] = "paceline"
    tokens_per_microbatch: Positive = 2048  # gradient accumulation: prompts and completions in one forward
    num_minibatches: Positive = 1  # optimiser steps that a batch is divided into
    num_iterations: Positive = 1  # passes over a batch
    activation_checkpointing: bool = False
    lora_rank: Count = 0  # 0: all weights are trained
    lora_alpha: Annotated[float, Field(gt=0)] = 16.0
    lora_targets: list[Literal["qkv", "o", "gate_up", "down"]] = ["qkv", "o", "gate_up", "down"]
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None  # None: all, or half of them where generation overlaps

    @model_validator(mode="after")
    def _consistent(self) -> LearnerSection:
        if self.model == "transformers" and (self.lora_rank or self.optimizer == "muon"):
            key = f"learner.lora_rank = {self.lora_rank}" if self.lora_rank else 'learner.optimizer = "muon"'
            raise ValueError(
                f'{key}: it knows the matrices of our own model by name; with learner.model = "transformers" train all '
                "weights with adamw"
            )
        return self


class DraftSection(OptimizerSection):
    """How an EAGLE-3 head is trained, by `paceline train-draft` and online in `paceline train`."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    warmup_steps: Count = 20
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    loss: Literal["kl", "acceptance"] = "kl"  # soft cross-entropy with the target, or -log of the overlap of the two
    unroll: Annotated[int, Field(ge=1, le=16)] = 4  # training-time test: how far the head goes on from its own states
    unroll_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # each further step counts this much of the one before
    tokens_per_batch: Positive = 4096  # one optimiser step
    # train-draft: where sequences come from. "rollouts": the engine generates them from the task's prompts; else a
    # jsonl file of `text`, `prompt` and `completion`, `messages`, or recorded rollouts (`prompt_ids`, `token_ids`).
    data: str = "rollouts"
    num_sequences: Positive = 512  # how many are generated, or read at most
    max_length: Annotated[int, Field(ge=8)] = 512  # longer sequences are cut
    num_epochs: Positive = 4
    held_out: Positive = 32  # sequences of prompts that are not trained on, for the acceptance
    eval_every: Count = 50  # optimiser steps between two measurements of it; 0: only before and after
    checkpoint_every: Count = 200
    draft_vocab_size: Positive = 16384  # the head's own, chosen by how often the sequences use a token
    layer_ids: list[Positive] | None = None  # the target's layers whose states it reads; None: low, middle, high
    norm_before_residual: bool = False
    fc_norm: bool = False
    init: str | None = None  # a head to begin with: its directory, or the name of a model with a shipped one; None: new
    seed: Count = 0
    # train: the head learns from the hidden states of the policy's own update. "off", "every" (n-th step), or
    # "drop": when the mean acceptance length falls below (1 - drop) times the best seen.
    online: Literal["off", "every", "drop"] = "off"
    online_every: Positive = 1
    online_drop: Annotated[float, Field(gt=0, lt=1)] = 0.05
    online_learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    online_tokens: Annotated[int, Field(ge=8)] = 4096  # of a step's rollouts, at most so many are learned from
    alarm_drop: Annotated[float, Field(gt=0, lt=1)] = 0.2  # acceptance lost at one weight sync that raises an alarm
    alarm_floor: Annotated[float, Field(ge=1)] = 1.05  # and the mean acceptance length that does
    # And the share of the head's recorded acceptance (first position, its worst data, this temperature). The shipped
    # head's kinds of data differ by a fifth; features that are one token late leave six tenths of the worst.
    alarm_record: Annotated[float, Field(ge=0, lt=1)] = 0.7


class TrainSection(Section):
    num_steps: Positive = 100
    groups_per_step: Positive = 8  # problems in a batch
    max_staleness: Count = 0  # 0: synchronous; n: training may use rollouts of up to n versions ago
    inflight: Literal["drain", "keep", "recompute"] = "drain"  # running sequences when new weights come
    seed: Count = 0
    eval_every: Count = 0  # validate on the held-out problems every n steps, and before and after; 0: never
    eval_samples: Positive = 1  # per problem
    eval_temperature: Annotated[float, Field(ge=0)] = 1.0
    checkpoint_every: Count = 10  # 0: only at the end and when interrupted
    keep_checkpoints: Positive = 2  # the last n; the best is kept besides
    env_timeout_s: Seconds = 30.0  # for one step of an environment
    mismatch_alarm: Annotated[float, Field(gt=0)] = 0.02  # mean |engine - learner| logprob that raises an alarm
    tensorboard: bool = True
    wandb: bool = False


class ClusterSection(Section):
    """Where a run's processes are. "none": all in one process; "ray": Ray's actors, placed and restarted by it."""

    kind: Literal["none", "ray"] = "none"
    address: str | None = None  # of a Ray that runs ("auto", HOST:PORT); None: one is started here, on loopback alone
    num_engines: Positive = 1  # that generate, each with the whole model
    num_learners: Positive = 1  # ranks that share the learner
    num_reward_workers: Positive = 1  # each with reward.workers processes of its own
    # "disaggregated": engines and learner have GPUs of their own; "colocated": each of the learner's ranks shares its
    # with an engine, which sleeps while it trains.
    layout: Literal["disaggregated", "colocated"] = "disaggregated"
    cpus_per_engine: Positive = 1  # and threads, unless engine.threads says otherwise
    cpus_per_learner: Positive = 1
    gpus_per_engine: Annotated[float, Field(ge=0)] | None = None  # None: as many as the engine needs
    gpus_per_learner: Annotated[float, Field(ge=0)] | None = None
    max_restarts: Count = 10  # of every process, before the run is given up
    sync_timeout_s: Seconds = 60.0  # for a bucket of weights to reach all engines
    bucket_mb: Positive = 64  # weights travel in pieces of this size
    object_store_mb: Annotated[int, Field(ge=80)] = 200  # of a Ray that is started here


class Config(Section):
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    speculation: SpeculationSection = SpeculationSection()
    sampling: SamplingSection = SamplingSection()
    task: TaskSection = TaskSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    draft: DraftSection = DraftSection()
    train: TrainSection = TrainSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _vllm_can(self) -> Config:
        wrong = _not_in_vllm(self) if self.engine.kind == "vllm" else _only_in_vllm(self)
        if wrong is not None:
            raise ValueError(wrong)
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        audits, rule = self.speculation.audit_every > 0, self.speculation.rule
        if audits and rule != "coupled":
            raise ValueError(
                f"speculation.audit_every = {self.speculation.audit_every}: an audit generates the same tokens twice, "
                f'which speculation.rule = "{rule}" does not; use rule = "coupled" or audit_every = 0'
            )
        if audits and self.train.max_staleness:
            raise ValueError(
                f"speculation.audit_every = {self.speculation.audit_every}: training would run beside the audit and "
                "disturb its times; set train.max_staleness = 0 or audit_every = 0"
            )
        if audits and self.task.kind == "env":
            raise ValueError(
                f'speculation.audit_every = {self.speculation.audit_every}: with task.kind = "env" a further turn\'s '
                "prompt holds what the turn before is asked to generate again; set audit_every = 0"
            )
        if self.cluster.kind == "ray" and (reason := _not_on_ray(self)) is not None:
            raise ValueError(reason)
        if self.draft.online != "off" and self.speculation.method not in ADAPTABLE:
            raise ValueError(
                f'draft.online = "{self.draft.online}": only an EAGLE-3 head learns, but speculation.method = '
                f'"{self.speculation.method}"; use "eagle3" or "hybrid", or draft.online = "off"'
            )
        if self.learner.model == "transformers" and self.draft.online != "off":
            raise ValueError(
                f'draft.online = "{self.draft.online}": a head learns from the states of our own model; with '
                'learner.model = "transformers" set draft.online = "off"'
            )
        if self.learner.model == "transformers" and self.model.yarn_factor is not None:
            raise ValueError(
                f'model.yarn_factor = {self.model.yarn_factor}: with learner.model = "transformers" the model\'s own '
                "config.json says how far its context is stretched; set rope_parameters there"
            )
        if self.algorithm.correction != "none" and self.sampling.params().truncates:
            raise ValueError(
                f'algorithm.correction = "{self.algorithm.correction}": compares the engine\'s logprobs with the '
                "learner's, which do not know sampling.top_k, top_p and min_p; turn these off, or the correction"
            )
        return self


def _only_in_vllm(config: Config) -> str | None:
    engine = config.engine
    if engine.tensor_parallel_size > 1:
        return (
            f"engine.tensor_parallel_size = {engine.tensor_parallel_size}: our own engine computes on one device; use "
            'engine.kind = "vllm", or 1'
        )
    if engine.vllm:
        return f'engine.vllm = {engine.vllm}: belongs to engine.kind = "vllm", but that is "{engine.kind}"'
    return None


def _not_in_vllm(config: Config) -> str | None:
    """The first setting that vLLM has no counterpart for, with the reason and the way out."""
    engine, speculation, drafts = config.engine, config.speculation, config.speculation.method != "none"
    vllm = 'engine.kind = "vllm"'
    for key in engine.vllm:
        if key == "speculative_config" or "accept" in key or "rejection" in key:
            return (
                f"engine.vllm.{key}: how drafts are made and accepted is set in [speculation], where every setting "
                "keeps the policy's distribution; vLLM's synthetic or typical acceptance does not"
            )
        if key not in VLLM_OPTIONS:
            return f"engine.vllm.{key}: not one of those that may be given to vLLM: {', '.join(VLLM_OPTIONS)}"
    if speculation.audit_every:
        return (
            f"speculation.audit_every = {speculation.audit_every}: an audit generates the same tokens again without "
            f'drafts, which takes rule = "coupled", and {vllm} has none; set audit_every = 0'
        )
    if drafts and speculation.method == "hybrid":
        return f'speculation.method = "hybrid": {vllm} has one drafter at a time; use "suffix" or "eagle3"'
    if drafts and speculation.rule != "rejection":
        return (
            f'speculation.rule = "{speculation.rule}": {vllm} accepts drafts by rejection sampling (the distribution '
            'is the same, the tokens of a seed are not); set rule = "rejection"'
        )
    if speculation.policy != "static":
        return (
            f'speculation.policy = "{speculation.policy}": {vllm} schedules by itself and does not ask how much to '
            'draft for whom; use policy = "static"'
        )
    if drafts and (not isinstance(speculation.num_speculative_tokens, int) or not speculation.num_speculative_tokens):
        return (
            f"speculation.num_speculative_tokens = {speculation.num_speculative_tokens}: {vllm} takes one draft length "
            'above 0; to draft nothing set speculation.method = "none"'
        )
    if speculation.min_confidence:
        return (
            f"speculation.min_confidence = {speculation.min_confidence}: {vllm} verifies drafts whole; leave it at 0, "
            "or lower num_speculative_tokens"
        )
    if speculation.head_dtype == "float8":
        return f'speculation.head_dtype = "float8": {vllm} computes a head as the model; use "auto" or "model"'
    if speculation.method == "draft_model" and (speculation.draft_model or "").startswith("layers:"):
        return (
            f'speculation.draft_model = "{speculation.draft_model}": {vllm} loads a draft model from a directory; give '
            "one"
        )
    if drafts and config.sampling.min_p:
        return f"sampling.min_p = {config.sampling.min_p}: {vllm} does not know min_p with drafts; set it to 0"
    if config.model.dtype == "float64":
        return f'model.dtype = "float64": {vllm} does not compute in it; use "float32" or less'
    if config.model.yarn_factor is not None:
        return (
            f"model.yarn_factor = {config.model.yarn_factor}: {vllm} reads the context from the model's config.json; "
            "write rope_parameters there"
        )
    if engine.order != "arrival":
        return f'engine.order = "{engine.order}": {vllm} begins requests as they arrive; use "arrival"'
    if config.train.inflight == "keep":
        return (
            f'train.inflight = "keep": {vllm} can\'t forget prompts that old weights computed while requests run; use '
            '"drain" or "recompute"'
        )
    return None


def _not_on_ray(config: Config) -> str | None:
    """The first setting that can't be had with Ray, with the reason and the way out."""
    cluster, device, ray = config.cluster, config.model.device, 'cluster.kind = "ray"'
    gpus = {key: getattr(cluster, key) for key in ("gpus_per_engine", "gpus_per_learner")}
    if config.speculation.audit_every:
        return (
            f"speculation.audit_every = {config.speculation.audit_every}: an audit times the same rollouts twice on "
            f"an engine in the learner's process, and {ray} has none there; set audit_every = 0"
        )
    if ":" in device:
        return f'model.device = "{device}": with {ray} every process sees only the GPUs that Ray gives it; use "cuda"'
    for key, number in gpus.items():
        if number is not None and (number > 0) != (device == "cuda"):
            return f'cluster.{key} = {number:g}: does not go with model.device = "{device}"; leave it out'
    if cluster.layout == "colocated" and any(number is not None and number > 1 for number in gpus.values()):
        return (
            f'cluster.layout = "colocated" shares one GPU, but cluster.gpus_per_engine = {gpus["gpus_per_engine"]}, '
            f'gpus_per_learner = {gpus["gpus_per_learner"]}; use "disaggregated", or at most one each'
        )
    return None


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The settings of a TOML file (or the defaults), with `a.b=c` overrides applied in order."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(read_text(Path(path)))
        except FileNotFoundError:
            raise ConfigError(f"config file {path} does not exist") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
        except RecursionError:
            raise ConfigError(f"config file {path} is not valid TOML: nested too deep") from None
        except ValueError as error:
            raise ConfigError(f"config file {error}") from None
    for override in overrides:
        apply_override(tree, override)
    return make_config(tree)


def make_config(tree: Mapping[str, Any]) -> Config:
    """The config of a tree of sections, keys and values, checked."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(tree, error))) from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    for depth, part in enumerate(parts[:-1], 1):
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parts[:depth])} is a value, not a section")
    tree[parts[-1]] = _parse(key.strip(), text.strip())


def _parse(key: str, text: str) -> Any:
    """A TOML value, or a bare word as a string: `model.name=smollm2-135m` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        if text and text[0] not in "[{\"'" and "\n" not in text:
            return text
        raise ConfigError(f"{key} = {text}: not a TOML value; write strings as {key}='\"text\"'") from None


def _explain(tree: Mapping[str, Any], error: ValidationError) -> list[str]:
    """One line per mistake. A union reports one error per member: those are gathered under their key."""
    lines: list[str] = []
    seen: set[str] = set()
    for detail in error.errors():
        path = _key_path(detail["loc"])
        key = ".".join(path)
        if key in seen:
            continue
        seen.add(key)
        if detail["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}: {_nearest(path)}")
        elif detail["type"] == "value_error":  # the sections' own checks name key, value and remedy themselves
            lines.append(str(detail["ctx"]["error"]))
        else:
            lines.append(f"{key} = {_look_up(tree, path)!r}: expected {_expected(path)}")
    return lines


def _key_path(location: tuple[int | str, ...]) -> list[str]:
    """The part of pydantic's location that a user would write: sections and key, without union members."""
    path: list[str] = []
    section: type[BaseModel] | None = Config
    for step in map(str, location):
        path.append(step)
        field = section.model_fields.get(step) if section else None
        section = _as_section(field.annotation) if field else None
        if section is None:
            break
    return path


def _nearest(path: list[str]) -> str:
    *parents, leaf = path
    keys = list(_section_at(parents).model_fields)
    here = {key: ".".join([*parents, key]) for key in keys}
    everywhere = {key.rpartition(".")[2]: key for key in all_keys()}
    # The right word in the wrong section, then a near word in this section, then a near word anywhere.
    for candidates, cutoff in ((everywhere, 1.0), (here, 0.5), (everywhere, 0.8)):
        if close := difflib.get_close_matches(leaf, candidates, n=1, cutoff=cutoff):
            return f"did you mean {candidates[close[0]]}?"
    return f"the keys of {'.'.join(parents) or 'a config'} are {', '.join(keys)}"


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key there is."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        inner = _as_section(field.annotation)
        keys += all_keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return keys


def _as_section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _section_at(path: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in path:
        section = _as_section(section.model_fields[part].annotation) or section
    return section


def _look_up(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _expected(path: list[str]) -> str:
    *parents, leaf = path
    field = _section_at(parents).model_fields[leaf]
    return _describe(field.annotation, field.metadata)


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation in a user's words: `int | None` is "an integer >= 1"."""
    if _as_section(annotation):
        return f"a section with the keys {', '.join(annotation.model_fields)}"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        fields = [m.metadata if hasattr(m, "metadata") else [m] for m in args[1:]]
        return _describe(args[0], [m for group in fields for m in group])
    if origin is Literal:
        return "one of " + ", ".join(f'"{arg}"' for arg in args)
    if origin in (Union, UnionType):
        return " or ".join(_describe(arg) for arg in args if arg is not type(None))
    if origin is dict:
        return f"a table from {_describe(args[0])} to {_describe(args[1])}"
    if origin is list:
        return f"a list of {_describe(args[0]).removeprefix('a ').removeprefix('an ')}s"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    text = words.get(annotation, str(annotation))
    rules = [
        f"{sign} {bound}"
        for rule in metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("le", "<="), ("pattern", "matching"))
        if (bound := getattr(rule, name, None)) is not None
    ]
    return f"{text} {' and '.join(rules)}" if rules else text


def dump_config(config: Config) -> str:
    """Every setting as TOML that `load_config` reads back equal. What is None is left out: that is its default."""
    sections = []
    for name, section in config.model_dump().items():
        lines = [f"{key} = {_toml(value)}" for key, value in section.items() if value is not None]
        sections.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's escapes are JSON's, but for surrogate pairs (so: no escapes beyond ASCII) and DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, date | time):  # datetime too
        return value.isoformat()
    assert isinstance(value, int | float), f"no TOML for {value!r}"
    return repr(value)
