"""All settings, by section, with their defaults. `build.config.load_config` reads files and overrides.

A section is validated when it is made, and never changes. Checks that concern several sections are in the
`check_settings` module of the package that they are about; `load_config` calls them. Nothing here imports torch, so
commands that only read settings start fast.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from paceline.types import SamplingParams


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="after")
    def _validate(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise ValueError for settings that do not go together. The message names key, value and what to do."""


def _int_keys(value: Any) -> Any:
    """TOML keys are strings: {"1": 4} means {1: 4}."""
    if isinstance(value, dict):
        return {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
    return value


DraftLength = Annotated[int, Field(ge=0, le=256)]
DraftLengths = Annotated[
    dict[Annotated[int, Field(ge=1)], DraftLength], Field(min_length=1), BeforeValidator(_int_keys)
]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
NumThreads = Annotated[int, Field(ge=1, le=4096)]
HeadDtype = Literal["auto", "model", "float8"]


class ModelSection(Section):
    name: str = "smollm2-135m"  # a name that `paceline pull` knows, a Hugging Face directory, or a hub id
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    yarn_factor: Annotated[float, Field(ge=1)] | None = None  # extend the context by this factor (YaRN)


class EngineSection(Section):
    # Engine that generates the rollouts of a training run: "local" (Paceline's own), or "vllm" (installed separately).
    kind: Literal["local", "vllm"] = "local"
    max_num_seqs: Positive = 32  # rows in a step
    max_num_batched_tokens: Positive = 512  # query tokens in a step; longer prompts are chunked
    kv_tokens: Positive | None = None  # size of the KV cache in tokens; None: enough for max_num_seqs
    prefix_sharing: bool = True  # prefix caching: a prompt that several requests share is computed once
    # Which waiting requests start first: "arrival", or "longest": the group with the longest expected completions.
    order: Literal["arrival", "longest"] = "arrival"
    native: bool = True  # compiled kernels: C on a CPU, Triton on a GPU; false: plain torch
    # Free the KV cache's memory while the learner trains. None: on a GPU, if the cache takes an eighth of its memory.
    sleep: bool | None = None
    graphs: bool = True  # on a GPU: decode steps as CUDA graphs; false: launch every kernel
    threads: NumThreads | None = None  # None: torch's default
    tensor_parallel_size: Positive = 1  # vllm: devices that share one model
    vllm: dict[str, Any] = {}  # vllm: more engine arguments, those of VLLM_OPTIONS in cluster/check_settings.py


HEAD_METHODS = ("eagle3", "hybrid")  # methods that draft with an EAGLE-3 head


class SpeculationSection(Section):
    method: Literal["none", "ngram", "suffix", "draft_model", "eagle3", "hybrid"] = "none"
    # Decides how many tokens to draft: "static" (always num_speculative_tokens), "das" (draft budgets for long
    # sequences), or "auto" (at every step the draft lengths that save most time; 0 if drafting would cost time).
    policy: Literal["static", "das", "auto"] = "static"
    # One draft length (with das and auto: the maximum), or {batch size upper bound: draft length}. Batches above the
    # last bound do not draft.
    num_speculative_tokens: DraftLength | DraftLengths = 4
    cost_table: str | None = None  # das, auto: a JSON file or a shipped table's name; None: measured once and cached
    rule: Literal["coupled", "rejection", "block"] = "coupled"  # acceptance rule
    draft_model: str | None = None  # like model.name, with the same vocabulary; or "layers:N": the target's first N
    head: str | None = None  # EAGLE-3: a directory; None: the head that is shipped for model.name
    # EAGLE-3 on a GPU: dtype of the head's large matrix products, model.dtype ("model") or "float8", which is faster.
    # Most drafts are the same, all emitted tokens are. "auto": float8 for large heads, if the GPU supports it.
    head_dtype: HeadDtype = "auto"
    any_target: bool = False  # allow a head that was trained for other weights than model.name's
    # hybrid: choose between suffix and EAGLE-3 for each row "before" EAGLE-3 drafts, or "after" both have drafted.
    hybrid_choice: Literal["before", "after"] = "before"
    prompt_lookup_min: Positive = 2  # ngram: shortest and longest match
    prompt_lookup_max: Positive = 5
    # A draft ends before the first token that is less likely than this to be reached and accepted.
    min_confidence: Annotated[float, Field(ge=0, le=1)] = 0.0
    audit_every: Count = 0  # train: generate every n-th step's rollouts again without drafts, and time both; 0: never
    suffix_min_match: Positive = 1  # do not draft from shorter matches
    suffix_max_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 30  # size of the history; the oldest is removed first
    suffix_max_versions: Annotated[int, Field(ge=1, le=64)] = 4  # policy versions kept per problem
    suffix_recency: Annotated[float, Field(gt=0, le=1)] = 0.8  # weight of a version, relative to the next newer one

    def check(self) -> None:
        if self.method == "draft_model" and self.draft_model is None:
            raise ValueError(
                'speculation.draft_model is not set, but speculation.method = "draft_model"; give a model name, '
                "directory or hub id, or layers:8 for the model's own first eight layers"
            )
        if self.policy != "static" and not isinstance(self.num_speculative_tokens, int):
            raise ValueError(
                f'speculation.num_speculative_tokens: policy = "{self.policy}" chooses the draft length for every '
                "batch size itself; give one number, the maximum draft length"
            )
        if self.policy != "static" and self.min_confidence:
            raise ValueError(
                f'speculation.min_confidence = {self.min_confidence}: policy = "{self.policy}" chooses draft lengths '
                "itself; set it to 0"
            )
        if self.policy == "auto" and self.rule != "coupled":
            raise ValueError(
                f'speculation.policy = "auto" selects by the draft tokens, which biases rule = "{self.rule}"; use rule '
                '= "coupled", or policy = "das" or "static"'
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculation.prompt_lookup_min = {self.prompt_lookup_min}: must be at most "
                f"speculation.prompt_lookup_max = {self.prompt_lookup_max}"
            )

    @property
    def uses_head(self) -> bool:
        return self.method in HEAD_METHODS


class SamplingSection(Section):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int = 0  # for generate, bench and verify; training uses train.seed

    def check(self) -> None:
        self.params()  # SamplingParams checks the ranges

    def params(self) -> SamplingParams:
        values = self.model_dump(exclude={"seed"})
        values |= {"stop": tuple(self.stop), "stop_token_ids": tuple(self.stop_token_ids)}
        return SamplingParams(**values)


class TaskSection(Section):
    kind: Literal["reasoning_gym", "jsonl", "dataset", "env"] = "reasoning_gym"
    # A reasoning-gym dataset, a jsonl file, a Hugging Face dataset (id or directory), or `module:EnvClass`.
    name: str = "chain_sum"
    params: dict[str, Any] = {}  # parameters of the reasoning-gym dataset or the environment
    split: str = "train"
    prompt_column: str | None = None  # None: `prompt`, else `question`
    answer_column: str = "answer"
    system: str | None = None  # system message before every prompt
    template: str = "{prompt}"  # applied to prompts that are strings
    chat: bool = True  # apply the model's chat template; false: use the prompt as it is
    size: Positive | None = None  # training problems; None: all (reasoning-gym: 1024)
    held_out: Count = 64  # validation problems, never trained on
    seed: Count = 0


class RewardSection(Section):
    # exact, format, math, code, gym (reasoning-gym's scorer), model, env (the environment's reward), or
    # `module:function` with TRL's signature.
    functions: Annotated[list[str], Field(min_length=1)] = ["gym"]
    weights: list[float] | None = None  # one per function; None: 1 each
    answer_pattern: str | None = None  # regex; its last match (group 1 if any) is the answer; None: the whole text
    format_pattern: str = r"(?s)<think>.*</think>\s*<answer>.*</answer>\s*"  # `format`: must match the whole text
    model: str | None = None  # `model`: a sequence classifier's directory or hub id
    timeout_s: Seconds = 10.0  # per sample; a sample that takes longer fails, the run goes on
    workers: Positive = 2  # processes for math, code and custom functions
    code_memory_mb: Positive = 512  # memory limit of all processes of a program
    code_cpu_s: Positive = 5  # CPU time limit of a program
    # How `code` isolates programs. "namespaces": separate file system, network and process table; an error on machines
    # that do not allow it. "process": only limits and system call filters (docs/training.md).
    sandbox: Literal["namespaces", "process"] = "namespaces"
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.5  # stop the run if a larger share of a step's samples fails

    def check(self) -> None:
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} entries, reward.functions {len(self.functions)}; give one each"
            )
        if not all(math.isfinite(weight) for weight in self.weights or []):
            raise ValueError(f"reward.weights = {self.weights}: every weight must be a finite number")
        if "model" in self.functions and self.model is None:
            raise ValueError('reward.model is not set, but reward.functions has "model"; name a sequence classifier')
        for key in ("answer_pattern", "format_pattern"):
            pattern = getattr(self, key)
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"reward.{key} = {pattern!r}: not a regular expression ({error})") from None


class AlgorithmSection(Section):
    """None means: as in the algorithm's paper."""

    name: Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo"] = "grpo"
    num_generations: Annotated[int, Field(ge=2)] = 8  # rollouts per problem
    epsilon: Annotated[float, Field(ge=0)] | None = None
    epsilon_high: Annotated[float, Field(ge=0)] | None = None
    beta: Annotated[float, Field(ge=0)] = 0.0  # coefficient of the KL to the reference model, the initial policy
    kl: Literal["k1", "k2", "k3"] | None = None
    kl_in: Literal["loss", "reward"] | None = None
    scale_rewards: Literal["group", "batch", "none"] | None = None
    loss_type: Literal["grpo", "dapo", "dr_grpo"] | None = None  # how token losses are averaged
    dynamic_sampling: bool | None = None  # replace groups whose rewards are all equal
    max_sampling_rounds: Positive = 3  # dynamic sampling: rounds before a smaller batch is used
    mask_truncated_completions: bool | None = None  # overlong filtering: truncated completions are not trained on
    overlong_buffer: Count = 0  # soft overlong penalty: on the last n tokens before sampling.max_tokens; 0: none
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    correction: Literal["none", "token_tis", "sequence_tis", "icepop"] = "none"  # of engine-learner logprob mismatch
    correction_cap: Annotated[float, Field(gt=0)] = 2.0  # TIS: ratios are clipped here; IcePop: upper bound
    correction_floor: Annotated[float, Field(ge=0)] = 0.5  # IcePop: tokens with a lower ratio are masked

    def check(self) -> None:
        in_reward = self.name in ("rloo", "reinforce_pp")  # by default they use k1, in the reward
        kl = self.kl or ("k1" if in_reward else None)
        if kl == "k1" and (self.kl_in or ("reward" if in_reward else "loss")) == "loss":
            # The gradient of k1 = log π - log π_ref is ∇log π. Its expectation under π is zero.
            raise ValueError(
                'algorithm.kl = "k1" with algorithm.kl_in = "loss": the expected gradient of k1 is zero, so the KL '
                'would have no effect, whatever algorithm.beta is; use kl = "k2" (its expected gradient is that of the '
                'KL) or "k3" in the loss, or kl_in = "reward"'
            )


class OptimizerSection(Section):
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon for matrices, AdamW for other parameters
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    muon_learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Count = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class LearnerSection(OptimizerSection):
    # Implementation of the trained model: Paceline's, or "transformers" for architectures that Paceline does not have.
    model: Literal["paceline", "transformers"] = "paceline"
    tokens_per_microbatch: Positive = 2048  # prompt and completion tokens in one forward pass (gradient accumulation)
    num_minibatches: Positive = 1  # optimizer steps per batch
    num_iterations: Positive = 1  # passes over a batch
    activation_checkpointing: bool = False
    lora_rank: Count = 0  # 0: train all weights
    lora_alpha: Annotated[float, Field(gt=0)] = 16.0
    lora_targets: list[Literal["qkv", "o", "gate_up", "down"]] = ["qkv", "o", "gate_up", "down"]
    threads: NumThreads | None = None  # None: all, or half of them if generation overlaps with training

    def check(self) -> None:
        if self.model == "transformers" and (self.lora_rank or self.optimizer == "muon"):
            key = f"learner.lora_rank = {self.lora_rank}" if self.lora_rank else 'learner.optimizer = "muon"'
            raise ValueError(
                f'{key}: needs the parameter names of Paceline\'s own decoder; with learner.model = "transformers" '
                "train all weights with adamw"
            )


class DraftSection(OptimizerSection):
    """Training of an EAGLE-3 head, by `paceline train-draft` and online in `paceline train`."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    warmup_steps: Count = 20
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    loss: Literal["kl", "acceptance"] = "kl"  # soft cross-entropy with the target, or -log of the overlap of p and q
    unroll: Annotated[int, Field(ge=1, le=16)] = 4  # training-time test: steps that use the head's own hidden states
    unroll_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # loss weight of each step, relative to the step before
    tokens_per_batch: Positive = 4096  # of one optimizer step
    # train-draft: source of the sequences. "rollouts": generated from the task's prompts; else a jsonl file of `text`,
    # `prompt` and `completion`, `messages`, or recorded rollouts (`prompt_ids`, `token_ids`).
    data: str = "rollouts"
    num_sequences: Positive = 512  # sequences to generate, or to read at most
    max_length: Annotated[int, Field(ge=8)] = 512  # longer sequences are truncated
    num_epochs: Positive = 4
    held_out: Positive = 32  # sequences that measure acceptance; their prompts are not trained on
    eval_every: Count = 50  # optimizer steps between two measurements; 0: only before and after
    checkpoint_every: Count = 200
    draft_vocab_size: Positive = 16384  # size of the head's vocabulary: the most frequent tokens of the sequences
    layer_ids: list[Positive] | None = None  # target layers that give the auxiliary hidden states; None: low, mid, high
    norm_before_residual: bool = False
    fc_norm: bool = False
    init: str | None = None  # initial head: a directory, or a model with a shipped head; None: random weights
    seed: Count = 0
    # train: train the head on the hidden states of the policy update. "off"; "every": every n-th step; "drop": when
    # the mean acceptance length is below (1 - online_drop) times the best so far.
    online: Literal["off", "every", "drop"] = "off"
    online_every: Positive = 1
    online_drop: Annotated[float, Field(gt=0, lt=1)] = 0.05
    online_learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    online_tokens: Annotated[int, Field(ge=8)] = 4096  # tokens of a step's rollouts to train on, at most
    # Alarms: the share of acceptance lost at one weight sync; the mean acceptance length; and the share of the head's
    # recorded acceptance (first position, worst kind of data, this temperature). The shipped head's kinds of data
    # differ by a fifth. Auxiliary hidden states that are one token late leave six tenths of the worst.
    alarm_drop: Annotated[float, Field(gt=0, lt=1)] = 0.2
    alarm_floor: Annotated[float, Field(ge=1)] = 1.05
    alarm_record: Annotated[float, Field(ge=0, lt=1)] = 0.7


class TrainSection(Section):
    num_steps: Positive = 100
    groups_per_step: Positive = 8  # problems in a batch
    max_staleness: Count = 0  # 0: synchronous; n: train on rollouts of up to n policy versions ago
    inflight: Literal["drain", "keep", "recompute"] = "drain"  # what happens to running sequences at a weight sync
    seed: Count = 0
    eval_every: Count = 0  # evaluate on held-out problems every n steps, and before and after; 0: never
    eval_samples: Positive = 1  # per problem
    eval_temperature: Annotated[float, Field(ge=0)] = 1.0
    checkpoint_every: Count = 10  # 0: only at the end and when interrupted
    keep_checkpoints: Positive = 2  # the last n; the best one is always kept
    env_timeout_s: Seconds = 30.0  # for one step of an environment
    mismatch_alarm: Annotated[float, Field(gt=0)] = 0.02  # mean |engine - learner| logprob that raises an alarm
    tensorboard: bool = True
    wandb: bool = False


class ClusterSection(Section):
    """Placement of processes. "none": everything in one process; "ray": Ray actors, restarted when they die."""

    kind: Literal["none", "ray"] = "none"
    address: str | None = None  # of a running Ray ("auto", HOST:PORT); None: start one on this machine, loopback only
    num_engines: Positive = 1  # engines, each with the whole model
    num_learners: Positive = 1  # ranks of the learner
    num_reward_workers: Positive = 1  # each with reward.workers processes
    # "disaggregated": engines and learner have separate GPUs; "colocated": each rank of the learner shares a GPU with
    # an engine, which sleeps while the rank trains.
    layout: Literal["disaggregated", "colocated"] = "disaggregated"
    cpus_per_engine: Positive = 1  # also the number of threads, unless engine.threads is set
    cpus_per_learner: Positive = 1
    gpus_per_engine: Annotated[float, Field(ge=0)] | None = None  # None: as many as the engine needs
    gpus_per_learner: Annotated[float, Field(ge=0)] | None = None
    max_restarts: Count = 10  # of each process, before the run fails
    sync_timeout_s: Seconds = 60.0  # for one bucket of weights to reach all engines
    bucket_mb: Positive = 64  # weights are sent in buckets of this size
    object_store_mb: Annotated[int, Field(ge=80)] = 200  # of a Ray that is started on this machine


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

    def changed(self, **sections: dict[str, Any]) -> Self:
        """A copy with other values of some keys, by section. They are not checked."""
        copies = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=copies)
