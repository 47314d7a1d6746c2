"""All settings, by section, with their defaults. `build.config.load_config` reads files and overrides.

`docs/generate_reference.py` writes the reference of all settings from here: the meaning of a key is the comment above
its field, or behind it. "Not set" means None.

A section is validated when it is made, and never changes. Checks that concern several sections are in the
`check_settings` module of the package that they are about; `load_config` calls them. Nothing here imports torch, so
commands that only read settings start fast.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

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
    """Engine and learner use this policy model."""

    name: str = "smollm2-135m"  # a name that `paceline pull` knows or imported, a Hugging Face directory, or a hub id
    # Dtype of the weights; on a GPU "bfloat16" by default, with a float32 copy in the optimizer. `float16`: not for
    # training.
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"  # "cpu", "cuda", or one GPU: "cuda:1"
    yarn_factor: Annotated[float, Field(ge=1)] | None = None  # extend the context by this factor (YaRN)
    # File of a chat template (Jinja) in place of the model's own, for example one with tools, or that keeps thinking.
    chat_template: str | None = None


class EngineSection(Section):
    # Engine for the rollouts of a training run: Paceline's own, or vLLM (installed separately).
    kind: Literal["local", "vllm"] = "local"
    max_num_seqs: Positive = 32  # maximum sequences in a step; on a GPU 256 by default
    # Maximum query tokens in a step; longer prompts are chunked. On a GPU 16384 by default.
    max_num_batched_tokens: Positive = 512
    # Maximum prompt tokens in a step while other sequences decode, so that these wait less for their next token. Not
    # set: 256 with `serve` and AsyncLLM on a GPU; else only max_num_batched_tokens limits them, for throughput.
    max_num_prefill_tokens: Positive | None = None
    # Size of the KV cache in tokens. Not set: `train` on one GPU plans it; else 4096 per sequence, within 2 GiB or a
    # third of the GPU's memory.
    kv_tokens: Positive | None = None
    prefix_sharing: bool = True  # compute a shared prompt once (prefix caching)
    # Order of waiting requests. "longest" starts problems with the longest expected completions first.
    order: Literal["arrival", "longest"] = "arrival"
    native: bool = True  # compiled kernels: C on a CPU, Triton on a GPU; false: plain torch
    # Free the KV cache while the learner trains. Not set: if it takes an eighth of a GPU's memory, or the run does not
    # fit otherwise.
    sleep: bool | None = None
    graphs: bool = True  # run decode steps as CUDA graphs
    # Batch-invariant kernels: a token's bits do not depend on the batch, so speculation changes no token. For Hopper
    # GPUs (H100, H200) in bfloat16. Not set: where they are supported. A CPU's kernels are batch-invariant anyway.
    invariant: bool | None = None
    threads: NumThreads | None = None  # CPU threads of the engine; not set: torch's default
    tensor_parallel_size: Positive = 1  # `vllm`: devices that share one model
    vllm: dict[str, Any] = {}  # `vllm`: more engine arguments; the error for a wrong one lists all


# Defaults on a GPU, where they differ: more sequences and tokens cost little there.
GPU_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"dtype": "bfloat16"},
    "engine": {"max_num_seqs": 256, "max_num_batched_tokens": 16384},
    "speculation": {"num_speculative_tokens": 7},
}
ARCHITECTURES = ("eagle3", "dspark")  # of draft heads
HEAD_METHODS = (*ARCHITECTURES, "hybrid")  # methods that draft with a head


class SpeculationSection(Section):
    # Drafter. "ngram" drafts from the sequence itself, "suffix" from the history of its problem, "draft_model" with a
    # smaller model, "eagle3" and "dspark" with a head of that kind, "hybrid" from the history or with a head. By
    # default "hybrid" if head is set, "draft_model" if draft_model is set, and "none" with vLLM or `generate`.
    method: Literal["none", "ngram", "suffix", "draft_model", "eagle3", "dspark", "hybrid"] = "suffix"
    # How many tokens to draft: "static" always num_speculative_tokens, "das" more for long sequences, "auto" at every
    # step the number that saves most time, or none. "static" by default where "auto" can't be used: with vLLM, another
    # rule than "coupled", a table of draft lengths, or min_confidence; and with `generate`.
    policy: Literal["static", "das", "auto"] = "auto"
    # Draft length; for `das` and `auto`, its maximum. On a GPU 7 by default. For `static` also a table {maximum batch
    # size: draft length}; larger batches do not draft.
    num_speculative_tokens: DraftLength | DraftLengths = 4
    cost_table: str | None = None  # `das`, `auto`: a JSON file, or the name of a shipped table; not set: measure it
    # Acceptance rule (docs/concepts/exactness.md); with vLLM "rejection" by default.
    rule: Literal["coupled", "rejection", "block"] = "coupled"
    # `draft_model`: a model with the same vocabulary, or "layers:N", the first N layers of the target.
    draft_model: str | None = None
    head: str | None = None  # directory of the head; not set: the shipped head for model.name
    # Heads on a GPU: dtype of the head's large matrix products. "model": model.dtype. "float8": faster, with the same
    # emitted tokens. "auto": float8 for large heads, if the GPU supports it.
    head_dtype: HeadDtype = "auto"
    any_target: bool = False  # allow a head trained for other weights
    # `hybrid`: choose a sequence's drafter "before" the head drafts, or "after" both have drafted.
    hybrid_choice: Literal["before", "after"] = "before"
    prompt_lookup_min: Positive = 2  # `ngram`: minimum match length in tokens
    prompt_lookup_max: Positive = 5  # `ngram`: maximum match length in tokens
    # `static`: end a draft before a token whose survival probability is below this.
    min_confidence: Annotated[float, Field(ge=0, le=1)] = 0.0
    # `train`: generate every n-th RL step again, with drafts and without, to compare tokens and time. 0: never. Not
    # set: where audits are possible, they take at most 3% of the run's time.
    audit_every: Count | None = None
    suffix_min_match: Positive = 1  # `suffix`: minimum match length in tokens
    suffix_max_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 30  # `suffix`: maximum size of the history
    suffix_max_versions: Annotated[int, Field(ge=1, le=64)] = 4  # `suffix`: policy versions to keep per problem
    suffix_recency: Annotated[float, Field(gt=0, le=1)] = 0.8  # `suffix`: weight of a version relative to the next one

    def check(self) -> None:
        if self.method == "draft_model" and self.draft_model is None:
            raise ValueError(
                'speculation.draft_model is not set, but speculation.method = "draft_model"; give a model name, '
                "directory or hub id, or layers:8 for the model's own first eight layers"
            )
        if self.policy in ("das", "auto") and not isinstance(self.num_speculative_tokens, int):
            raise ValueError(
                f'speculation.num_speculative_tokens: policy = "{self.policy}" chooses the draft length for every '
                'batch size itself; give one number, the maximum draft length, or set policy = "static"'
            )
        if self.policy in ("das", "auto") and self.min_confidence:
            raise ValueError(
                f'speculation.min_confidence = {self.min_confidence}: policy = "{self.policy}" chooses draft lengths '
                'itself; set it to 0, or policy = "static"'
            )
        if self.policy == "auto" and self.rule != "coupled":
            raise ValueError(
                f'speculation.policy = "auto" selects by the draft tokens, which biases rule = "{self.rule}"; use '
                'policy = "static" or "das", or rule = "coupled"'
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculation.prompt_lookup_min = {self.prompt_lookup_min}: must be at most "
                f"speculation.prompt_lookup_max = {self.prompt_lookup_max}"
            )

    @property
    def uses_head(self) -> bool:
        return self.method in HEAD_METHODS

    @property
    def uses_drafter_settings(self) -> bool:
        return self.head is not None or self.draft_model is not None


class SamplingSection(Section):
    temperature: float = 1.0  # sampling temperature; 0: greedy
    top_k: int = 0  # sample from the k most probable tokens; 0: off
    top_p: float = 1.0  # nucleus sampling, above 0, up to 1; 1: off
    min_p: float = 0.0  # minimum probability relative to the most probable token, below 1; 0: off
    max_tokens: int = 128  # maximum tokens per completion, over all turns
    stop: list[str] = []  # strings that end a completion
    stop_token_ids: list[int] = []  # tokens that end a completion, besides the model's EOS
    ignore_eos: bool = False  # continue after EOS
    seed: int = 0  # seed for generate, bench and verify; training uses train.seed

    def check(self) -> None:
        self.params()  # SamplingParams checks the ranges

    def params(self) -> SamplingParams:
        values = self.model_dump(exclude={"seed"})
        values |= {"stop": tuple(self.stop), "stop_token_ids": tuple(self.stop_token_ids)}
        return SamplingParams(**values)


class TaskSection(Section):
    # Source of the problems.
    kind: Literal["reasoning_gym", "jsonl", "dataset", "env", "agent", "verifiers"] = "reasoning_gym"
    # A reasoning-gym dataset, a jsonl file (also `agent`), a Hugging Face dataset (id or directory), `module:EnvClass`,
    # or a taskset of `verifiers`.
    name: str = "chain_sum"
    # Arguments of the reasoning-gym dataset, `load_dataset` or the environment; `verifiers`: its table `[env]`.
    params: dict[str, Any] = {}
    split: str = "train"  # `dataset`: the split to use
    prompt_column: str | None = None  # `jsonl`, `dataset`: column of the prompt; not set: `prompt`, else `question`
    answer_column: str = "answer"  # `jsonl`, `dataset`: column of the answer
    system: str | None = None  # system message before every prompt
    template: str = "{prompt}"  # text around string prompts; must contain {prompt}
    chat: bool = True  # apply the model's chat template
    agent: str | None = None  # `agent`: function that drives a sample, `module:function` (docs/how-to/agents.md)
    command: list[str] | None = None  # `agent`: or the program that does, such as ["python", "agent.py"]
    env: dict[str, str] = {}  # `agent`: more environment variables of the command; the trainer's are not passed on
    # `agent`, `verifiers`: samples that run at the same time; others wait, which does not count as their time.
    max_parallel: Positive = 64
    chat_template_kwargs: dict[str, Any] = {}  # further variables of the chat template, such as enable_thinking = false
    # `env`: "process" runs each environment in a process of its own, which is killed if it hangs. "thread": in this
    # process, whose threads can't be killed.
    isolation: Literal["thread", "process"] = "thread"
    timeout_s: Seconds = 600.0  # `env`, `agent`, `verifiers`: time limit of a sample, over all turns
    max_calls: Positive = 256  # `env`, `agent`, `verifiers`: turns of a sample, or calls of the policy
    size: Positive | None = None  # training problems; not set: all (`reasoning_gym`, `env`, infinite `verifiers`: 1024)
    held_out: Count = 64  # problems for evaluation, never trained on
    seed: Count = 0  # seed of generated problems and of the held-out split

    def check(self) -> None:
        if self.kind == "agent" and (self.agent is None) == (self.command is None):
            raise ValueError(
                f'task.agent = {self.agent!r}, task.command = {self.command!r}: task.kind = "agent" needs one of the '
                'two; set task.agent = "module:function" or task.command = ["python", "agent.py"]'
            )
        for key in ("agent", "command", "env"):
            if getattr(self, key) and (self.kind != "agent" or (key == "env" and self.command is None)):
                needed = "task.command" if self.kind == "agent" else 'task.kind = "agent"'
                raise ValueError(f"task.{key} = {getattr(self, key)!r}: needs {needed}; remove the setting")

    @property
    def has_agents(self) -> bool:
        """Whether a sample may call the policy more than once."""
        return self.kind not in ("reasoning_gym", "jsonl", "dataset")


class RewardSection(Section):
    # Any of exact, format, math, code, gym (reasoning-gym's scorer), model, env (the environment's reward), and your
    # own `module:function` with TRL's signature.
    functions: Annotated[list[str], Field(min_length=1)] = ["gym"]
    weights: list[float] | None = None  # one weight per function; not set: 1 each
    # Added to the reward of samples that end for these reasons: "length"; with several turns "context" (no room in the
    # model's context) and "budget" (no tokens or calls left); "timeout" and "crash" of an environment or agent. Samples
    # with a timeout or crash are not trained on, unless there is a penalty for it, which then is their reward.
    penalties: dict[Literal["length", "context", "budget", "timeout", "crash"], float] = {}
    # Regular expression for the answer: the last match, or its first group. Not set: the whole completion.
    answer_pattern: str | None = None
    # `format`: regular expression that must match the whole completion.
    format_pattern: str = r"(?s)<think>.*</think>\s*<answer>.*</answer>\s*"
    model: str | None = None  # `model`: directory or hub id of a sequence classifier
    timeout_s: Seconds = 10.0  # time limit per sample; slower samples fail
    # What a sample gets if its answer makes a reward function exceed timeout_s, crash or run out of memory. "zero": 0
    # from that function; "exclude": no reward, and it is not trained on; "stop": the run ends. Other failures, such as
    # an exception of your function, exclude the sample.
    on_failure: Literal["zero", "exclude", "stop"] = "zero"
    # Your own functions: "group" calls them with all samples of a problem, which they may compare; "sample" with each
    # sample alone, so that a slow sample does not delay the others.
    call_per: Literal["group", "sample"] = "group"
    workers: Positive = 2  # processes that compute rewards, except `model` and `env`
    code_memory_mb: Positive = 512  # `code`: memory limit of all processes of a program
    code_cpu_s: Positive = 5  # `code`: CPU time limit of a program
    # How `code` isolates programs (docs/how-to/code-rewards.md). "process" is weaker, for machines without namespaces.
    sandbox: Literal["namespaces", "process"] = "namespaces"
    # Stop the run if a larger share of a step's samples is excluded, or if all samples fail; alarm if a larger share is
    # excluded or gets 0 by on_failure. 1: never.
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.5

    def check(self) -> None:
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} entries, reward.functions {len(self.functions)}; give one each"
            )
        for reason, penalty in self.penalties.items():
            if not math.isfinite(penalty):
                raise ValueError(f"reward.penalties.{reason} = {penalty}: must be a finite number")
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

    def weight_of(self, function: str) -> float:
        """0 if it is not one of the functions."""
        if function not in self.functions:
            return 0.0
        return self.weights[self.functions.index(function)] if self.weights is not None else 1.0


class MixedTaskSection(TaskSection):
    """With several tasks, write `[[task]]` for each, and its reward below it as `[task.reward]`. A task has the keys of
    `[task]` and those here. On the command line, name it by its label: `task.sums.weight=2`; `task=sums` uses only this
    task."""

    # Name of the task in metrics, in rollouts and on the command line: letters, digits, `_` and `-`.
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    weight: float = 1.0  # share of the groups, relative to the other tasks
    max_tokens: Positive | None = None  # maximum tokens per completion; not set: sampling.max_tokens
    reward: RewardSection = RewardSection()  # the task's own `[reward]`

    def check(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(
                f"weight = {self.weight:g}: must be a finite number above 0; a task that is not to "
                "be trained on must be removed from the config"
            )
        if self.label in type(self).model_fields:
            raise ValueError(f'label = "{self.label}": this is the name of a key of a task; choose another label')


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Everything that may differ between the tasks of a run."""

    section: TaskSection
    reward: RewardSection
    max_tokens: int  # of a completion
    label: str | None = None  # None: the run's only task, without a label
    weight: float = 1.0

    @property
    def key(self) -> str:
        """The dotted key of its section."""
        return "task" if self.label is None else f"task.{self.label}"

    @property
    def reward_key(self) -> str:
        return "reward" if self.label is None else f"task.{self.label}.reward"

    @property
    def max_tokens_key(self) -> str:
        return "sampling.max_tokens" if self.label is None else f"task.{self.label}.max_tokens"


class AlgorithmSection(Section):
    """Keys that are not set have the value of the algorithm's paper."""

    # RL algorithm; the other keys override its parts.
    name: Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo"] = "grpo"
    num_generations: Annotated[int, Field(ge=2)] = 8  # rollouts per problem
    epsilon: Annotated[float, Field(ge=0)] | None = None  # clip probability ratios below 1 - epsilon
    # Clip probability ratios above 1 + epsilon_high. `cispo`: above epsilon_high.
    epsilon_high: Annotated[float, Field(ge=0)] | None = None
    beta: Annotated[float, Field(ge=0)] = 0.0  # coefficient of the KL to the initial policy
    kl: Literal["k1", "k2", "k3"] | None = None  # estimator of the KL
    kl_in: Literal["loss", "reward"] | None = None  # where to add the KL
    # Rewards of single turns (`env`): "sum" adds them to the sample's reward, which all its tokens get. "to_go": a turn
    # gets this reward without the rewards of the turns before it, compared with turns of the same index in the group.
    turn_rewards: Literal["sum", "to_go"] = "sum"
    # Divide advantages by the standard deviation of rewards in the group or batch.
    scale_rewards: Literal["group", "batch", "none"] | None = None
    # How to average token losses: "grpo" per sample, "dapo" over all tokens, "dr_grpo" by sampling.max_tokens.
    loss_type: Literal["grpo", "dapo", "dr_grpo"] | None = None
    dynamic_sampling: bool | None = None  # replace groups whose rewards are all equal
    max_sampling_rounds: Positive = 3  # dynamic sampling: maximum rounds; then train on a smaller batch
    mask_truncated_completions: bool | None = None  # overlong filtering: do not train on truncated completions
    # Soft overlong penalty: it grows over the last n tokens before sampling.max_tokens. 0: none.
    overlong_buffer: Count = 0
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0  # maximum of the soft overlong penalty
    # Importance weights that correct the difference between the logprobs of the engine, which sampled the tokens, and
    # those of the learner before the update. With train.max_staleness > 0 the default is "token_tis".
    correction: Literal["none", "token_tis", "sequence_tis", "icepop", "decoupled_ppo"] = "none"
    # Maximum weight; `icepop` masks tokens above it, `decoupled_ppo` has no maximum.
    correction_cap: Annotated[float, Field(gt=0)] = 2.0
    correction_floor: Annotated[float, Field(ge=0)] = 0.5  # `icepop`: mask tokens with a lower weight

    @property
    def samples_dynamically(self) -> bool:
        return self.name == "dapo" if self.dynamic_sampling is None else self.dynamic_sampling

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
    optimizer: Literal["adamw", "muon"] = "adamw"  # "muon": Muon for matrices, AdamW for other parameters
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6  # learning rate of AdamW
    muon_learning_rate: Annotated[float, Field(ge=0)] = 1e-3  # learning rate of Muon
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.999]  # betas of AdamW
    eps: Annotated[float, Field(gt=0)] = 1e-8  # epsilon of AdamW
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # weight decay of matrices
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0  # clip the gradient to this norm
    warmup_steps: Count = 0  # steps in which the learning rate rises linearly
    # Learning rate after the warm-up. "linear" and "cosine" fall to 0 at the last step.
    schedule: Literal["constant", "linear", "cosine"] = "constant"


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LearnerSection(OptimizerSection):
    # Implementation of the trained model. "transformers" is for architectures that Paceline lacks.
    model: Literal["paceline", "transformers"] = "paceline"
    # Prompt and completion tokens in one forward pass (gradient accumulation). "auto": planned on one GPU, else 2048.
    # The completions of a problem share its prompt; with model = "transformers" each has its own, and padding counts.
    tokens_per_microbatch: Positive | Literal["auto"] = "auto"
    num_minibatches: Positive = 1  # optimizer steps per batch
    num_iterations: Positive = 1  # passes over a batch
    # An optimizer step whose loss or gradient is not finite is skipped. The run stops after an RL step that ends with
    # this many skipped in a row.
    max_skipped: Positive = 3
    activation_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    # On a GPU in bfloat16 with flash attention: the same rollouts and weights give the same bits. `false` is faster for
    # long sequences.
    deterministic: bool = True
    lora_rank: Count = 0  # rank of LoRA adapters; 0: train all weights
    # LoRA: an adapter's term is multiplied with lora_alpha / lora_rank.
    lora_alpha: Annotated[float, Field(gt=0)] = 16.0
    # LoRA: modules with adapters, as PEFT's `target_modules`.
    lora_targets: Annotated[list[LoraTarget], Field(min_length=1)] = [*get_args(LoraTarget)]
    # LoRA: start with this adapter, a directory of PEFT. Rank, alpha and targets are then those of the adapter.
    lora_init: str | None = None
    threads: NumThreads | None = None  # CPU threads; not set: all, or half of them if generation overlaps

    def check(self) -> None:
        if self.model == "transformers" and (self.lora_rank or self.lora_init or self.optimizer == "muon"):
            key = f"learner.lora_rank = {self.lora_rank}" if self.lora_rank else 'learner.optimizer = "muon"'
            key = f"learner.lora_init = {self.lora_init!r}" if self.lora_init else key
            raise ValueError(
                f'{key}: needs the parameter names of Paceline\'s own decoder; with learner.model = "transformers" '
                "train all weights with adamw"
            )


class DraftSection(OptimizerSection):
    """Training of a draft head, by `paceline train-draft` and online in `paceline train`."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    warmup_steps: Count = 20
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    # "kl": soft cross-entropy with the target. "acceptance": -log Σ min(p, q). "tv": total variation, and a little
    # cross-entropy. "coupled": how often drafts agree with the target under rule = "coupled".
    loss: Literal["kl", "acceptance", "tv", "coupled"] = "kl"
    # Draft tokens to train for; with "eagle3" steps of the training-time test, which use its own hidden states.
    unroll: Annotated[int, Field(ge=1, le=16)] = 4
    unroll_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # loss weight of a step, relative to the step before
    tokens_per_batch: Positive = 4096  # tokens of one optimizer step
    # `train-draft`: source of the sequences. "rollouts": generate them from the task's prompts. Or a jsonl file of
    # `text`, `prompt` and `completion`, `messages`, or recorded rollouts (`prompt_ids`, `token_ids`).
    data: str = "rollouts"
    num_sequences: Positive = 512  # sequences to generate, or maximum to read
    max_length: Annotated[int, Field(ge=8)] = 512  # truncate longer sequences
    num_epochs: Positive = 4  # passes over the sequences
    held_out: Positive = 32  # sequences that measure acceptance; their prompts are not trained on
    eval_every: Count = 50  # measure acceptance every n optimizer steps; always before and after training
    checkpoint_every: Count = 200  # checkpoint every n optimizer steps; 0: only at the end and when interrupted
    draft_vocab_size: Positive = 16384  # size of the head's vocabulary: the most frequent tokens of the sequences
    # "eagle3": one layer that drafts token after token. "dspark": a few layers that draft all tokens in one pass, and a
    # Markov term that makes a token depend on the one before.
    architecture: Literal["eagle3", "dspark"] = "eagle3"
    num_layers: Positive = 2  # `dspark`: layers of the head
    markov_rank: Positive = 32  # `dspark`: rank of the Markov term
    # The head reads the outputs of these target layers. Not set: a low, a middle and a high one.
    layer_ids: list[Positive] | None = None
    norm_before_residual: bool = False  # `eagle3`: the residual stream starts with the normalized state
    fc_norm: bool = False  # `eagle3`: normalize each layer's hidden state before fusing
    init: str | None = None  # initial head: a directory, or a model with a shipped head; not set: random weights
    seed: Count = 0  # seed of weights and data order
    # `train`: train the head on the hidden states of the policy update, "every" `online_every` steps, or after a "drop"
    # of the mean acceptance length from its best by the share `online_drop`.
    online: Literal["off", "every", "drop"] = "off"
    online_every: Positive = 1  # "every": train the head every n steps
    online_drop: Annotated[float, Field(gt=0, lt=1)] = 0.05  # "drop": train the head after a loss of this share
    online_learning_rate: Annotated[float, Field(ge=0)] = 1e-4  # learning rate of online training
    online_tokens: Annotated[int, Field(ge=8)] = 4096  # maximum tokens to train on in a step
    alarm_drop: Annotated[float, Field(gt=0, lt=1)] = 0.2  # alarm if acceptance falls by this share at a weight sync
    alarm_floor: Annotated[float, Field(ge=1)] = 1.05  # alarm if the mean acceptance length is below this
    # Alarm if deep in a completion this share fewer draft tokens are accepted than at its beginning.
    alarm_depth: Annotated[float, Field(gt=0, le=1)] = 0.3
    # Alarm if first draft tokens are accepted less often than this share of the lowest rate in provenance.json.
    alarm_record: Annotated[float, Field(ge=0, lt=1)] = 0.7


class TrainSection(Section):
    num_steps: Positive = 100  # number of RL steps
    groups_per_step: Positive = 8  # problems in a batch
    max_staleness: Count = 0  # 0: synchronous; n: train on rollouts of up to n policy versions ago
    # With max_staleness > 0: "drain" generates one batch after another and updates weights in between, so runs repeat.
    # With "keep" and "recompute" groups start all the time, and running sequences get new weights at once: they
    # continue on the old KV cache, or it is computed again.
    inflight: Literal["drain", "keep", "recompute"] = "drain"
    # With max_staleness = 0: generate so many times the groups that are needed, and stop as soon as the first ones are
    # enough. For dynamic sampling.
    oversample: Annotated[float, Field(ge=1, le=16)] = 1.0
    seed: Count = 0  # seed of sampling and of the order of problems
    eval_every: Count = 0  # evaluate held-out problems every n steps, and before and after training; 0: never
    eval_samples: Positive = 1  # samples per problem in an evaluation
    eval_temperature: Annotated[float, Field(ge=0)] = 1.0  # temperature in an evaluation
    checkpoint_every: Count = 10  # checkpoint every n steps; 0: only at the end and when interrupted
    keep_checkpoints: Positive = 2  # keep the last n checkpoints, and the best one
    # Write the policy to exports/ in the run's folder, as a Hugging Face directory, every n steps and at the end.
    # 0: never; `paceline export` does it later.
    export_every: Count = 0
    keep_exports: Positive | None = None  # keep the last n exports; not set: all
    env_timeout_s: Seconds = 30.0  # time limit for one step of an environment
    mismatch_alarm: Annotated[float, Field(gt=0)] = 0.02  # alarm if engine and learner logprobs differ more, on average
    tensorboard: bool = True  # write metrics for TensorBoard
    wandb: bool = False  # write metrics to Weights & Biases
    wandb_project: Annotated[str, Field(min_length=1)] = "paceline"  # project of the run in Weights & Biases
    wandb_name: str | None = None  # name of the run in Weights & Biases; not set: that of the run's folder
    # Rollouts to write to rollouts.jsonl: "all", "none", or a number n: those of the first n problems of every step.
    # `replay`, `advise` and `simulate` need all.
    log_rollouts: Positive | Literal["all", "none"] = "all"


class ClusterSection(Section):
    # "none": run in one process. "ray": in Ray actors, which restart when they die.
    kind: Literal["none", "ray"] = "none"
    # Address of a running Ray ("auto", HOST:PORT). Not set: start one, on the loopback address only.
    address: str | None = None
    num_engines: Positive = 1  # engines, each with the whole model
    num_learners: Positive = 1  # ranks of the learner
    num_reward_workers: Positive = 1  # reward workers, each with reward.workers processes
    # "disaggregated": engines and learner have separate GPUs. "colocated": each learner rank shares a GPU with an
    # engine, which sleeps while the rank trains.
    layout: Literal["disaggregated", "colocated"] = "disaggregated"
    cpus_per_engine: Positive = 1  # CPUs of an engine, and its threads unless engine.threads is set
    cpus_per_learner: Positive = 1  # CPUs of a rank, and its threads unless learner.threads is set
    gpus_per_engine: Annotated[float, Field(ge=0)] | None = None  # GPUs of an engine; not set: as many as it needs
    gpus_per_learner: Annotated[float, Field(ge=0)] | None = None  # GPUs of a rank; not set: as many as it needs
    max_restarts: Count = 10  # restarts of each process before the run fails
    sync_timeout_s: Seconds = 60.0  # time limit for sending one bucket of weights to all engines
    bucket_mb: Positive = 64  # size of a bucket of weights
    object_store_mb: Annotated[int, Field(ge=80)] = 200  # object store of a Ray started on this machine


def _form(value: Any) -> str:
    return "list" if isinstance(value, list) else "table"


OneOrMoreTasks = Annotated[
    Annotated[TaskSection, Tag("table")] | Annotated[list[MixedTaskSection], Tag("list")], Discriminator(_form)
]


class Config(Section):
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    speculation: SpeculationSection = SpeculationSection()
    sampling: SamplingSection = SamplingSection()
    task: OneOrMoreTasks = TaskSection()  # read `tasks`, which has the same for one task and for several
    reward: RewardSection | None = RewardSection()  # None with several tasks: each has its own
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    draft: DraftSection = DraftSection()
    train: TrainSection = TrainSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="before")
    @classmethod
    def _without_common_reward(cls, settings: Any) -> Any:
        has_several = isinstance(settings, dict) and isinstance(settings.get("task"), list)
        return {"reward": None, **settings} if has_several else settings

    @property
    def tasks(self) -> list[TaskSettings]:
        """The tasks of a run, in their order."""
        if isinstance(self.task, TaskSection):
            assert self.reward is not None, "only `[[task]]` replaces it"
            return [TaskSettings(self.task, self.reward, self.sampling.max_tokens)]
        return [
            TaskSettings(task, task.reward, task.max_tokens or self.sampling.max_tokens, task.label, task.weight)
            for task in self.task
        ]

    @property
    def task_weights(self) -> dict[str, float]:
        """By label; empty for one task without a label."""
        return {task.label: task.weight for task in self.tasks if task.label is not None}

    @property
    def task_names(self) -> str:
        return ", ".join(task.label or task.section.name for task in self.tasks)

    def only_task(self, what: str) -> TaskSettings:
        """The task of a config with one. ValueError if there are several: `what` uses one."""
        if len(self.tasks) > 1:
            raise ValueError(
                f"{what} uses one task, but the config has several: {self.task_names}; choose one: "
                f"task={self.tasks[0].label}"
            )
        return self.tasks[0]

    def changed(self, **sections: dict[str, Any]) -> Self:
        """A copy with other values of some keys, by section. They are not checked."""
        copies = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=copies)
