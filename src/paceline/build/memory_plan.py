"""The memory plan of a training run on one GPU: how many bytes each part of it takes, and from these the size of the KV
cache and of the microbatches.

Invariants:
  - A plan depends only on the settings, the models' shapes and the GPU's total memory: never on what is free or loaded.
    So runs on GPUs of one kind cut the same microbatches and compute the same bits.
  - Room for an EAGLE-3 head of the default size and its training is reserved, so switching speculation or draft.online
    on changes no microbatch. Exceptions: a draft model; a head or training batches that are larger than the reserve.
  - More memory never gives a smaller microbatch or KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from paceline.build import memory_parts as parts
from paceline.build.model import ample_kv_tokens, itemsize
from paceline.config import Config, DraftSection
from paceline.model.config import ModelConfig
from paceline.model.draft_head import HeadConfig
from paceline.model.eagle3 import head_config
from paceline.model.kv import BLOCK
from paceline.model.paged import is_large

GIB = 1 << 30
# Microbatches that "auto" chooses from. Larger ones are hardly faster: each costs one pass over all gradients, and a
# product of 8192 rows keeps a GPU busy.
TOKEN_CHOICES = (8192, 4096, 2048)
SHARES = 16  # steps in which the KV cache shrinks
PROMPT_TOKENS = 1024  # allowed for a prompt, on average
LONGEST_PROMPT = 4096  # the KV cache and a microbatch hold at least one sequence with such a prompt
ENV_TOKENS = 4096  # allowed for a sequence with the turns of an environment
USABLE = 15 / 16  # share of a GPU's memory that a plan may use; the rest is lost between allocations
HEAD_VOCABULARY = 32768  # draft vocabulary of the head that room is reserved for; published heads have up to 32000


@dataclass(frozen=True, slots=True)
class RunShape:
    """What a plan depends on besides the settings."""

    model: ModelConfig
    total_bytes: int | None  # of the GPU; None: no limit, on a CPU
    num_ranks: int = 1  # with several, the plan is that of rank 0, which has the engine
    draft: ModelConfig | None = None  # the model of speculation.draft_model, if it is used
    head: HeadConfig | None = None  # the draft head, if one is used


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """In bytes, except numbers of tokens and `sleeps`. `total_bytes` is None without a limit, on a CPU."""

    total_bytes: int | None
    kv_tokens: int | None  # None: vLLM chooses
    tokens_per_microbatch: int
    packed_tokens: int  # of the largest microbatch: a single sequence may be longer than tokens_per_microbatch
    sleeps: bool  # whether the KV cache is freed while the learner trains, so that both use the same memory
    learner_weights: int
    engine_weights: int  # a copy of its own; with LoRA only the adapters, if it shares the learner's base weights
    published_weights: int  # copies that wait for the engine, if generation and training overlap
    reference: int  # the weights of the reference policy
    masters: int  # float32 copies of the trained parameters
    moments: int  # AdamW's two, or Muon's momentum
    gradients: int  # sums over microbatches
    drafter: int
    kv: int  # with the drafter's keys, values and hidden states; of vLLM, all but the weights
    activations: int  # of a microbatch, kept for the backward pass
    backward: int  # logits, or the gradients of one layer: the two never exist at the same time
    reserve: int  # CUDA context and captured graphs

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache and a microbatch."""
        weights = self.learner_weights + self.engine_weights + self.published_weights + self.reference
        return weights + self.masters + self.moments + self.gradients + self.drafter + self.reserve

    @property
    def microbatch_bytes(self) -> int:
        return self.activations + self.backward

    @property
    def sum_bytes(self) -> int:
        both = max if self.sleeps else int.__add__
        return self.fixed_bytes + both(self.kv, self.microbatch_bytes)

    @property
    def fits(self) -> bool:
        return self.total_bytes is None or self.sum_bytes <= usable_bytes(self.total_bytes)


def plan_memory(config: Config, shape: RunShape) -> MemoryPlan:
    """The first plan that fits; if none does, the smallest. Numbers that are set in the config are kept.

    These are tried in turn: an ample KV cache, as long as it is not large and the engine need not sleep for it, and
    smaller ones, down to what engine.max_num_seqs sequences need; smaller microbatches; smaller KV caches, down to one
    sequence, so that the engine preempts. Room for a head that is not used is given up rather than more than half of
    the needed KV cache."""
    assert shape.total_bytes is not None
    total = shape.total_bytes // GIB * GIB  # drivers report slightly different totals for the same GPU
    shape = replace(shape, total_bytes=total)
    tokens, (needed, *smaller) = token_choices(config, shape.model), kv_choices(config, shape.model)
    for kv_tokens in ample_kv_choices(config, shape.model):
        plan = plan_parts(config, shape, kv_tokens, tokens[0])
        needs_sleep = plan.sleeps and config.engine.sleep is None
        if plan.fits and not is_large(plan.kv, total) and not needs_sleep:
            return plan
    choices = [(needed, num) for num in tokens] + [(kv_tokens, tokens[-1]) for kv_tokens in smaller]
    with_room = [choice for choice in choices if needed is None or 2 * (choice[0] or 0) >= needed]
    plans = [plan_parts(config, shape, *choice) for choice in with_room]
    for plan in plans:
        if plan.fits:
            return plan
    # The first that would fit with room, if the last did: so that more memory never gives less.
    fit_together = [
        plan.tokens_per_microbatch == tokens[-1] and plan.sum_bytes <= plans[-1].sum_bytes for plan in plans
    ]
    for choice in choices[fit_together.index(True) :]:
        plan = plan_parts(config, shape, *choice, has_room=False)
        if plan.fits:
            return plan
    return plan


def plan_parts(
    config: Config, shape: RunShape, kv_tokens: int | None, tokens: int, has_room: bool = True
) -> MemoryPlan:
    """The plan with this KV cache and this microbatch, whether it fits or not. `has_room`: for an EAGLE-3 head and its
    training, used or not."""
    model, total, num_ranks, draft = shape.model, shape.total_bytes, shape.num_ranks, shape.draft
    size, weights = itemsize(config), parts.num_weights(model)
    trained = parts.num_lora_weights(config, model) if config.learner.lora_rank else weights
    frozen = weights if config.learner.lora_rank else 0
    gathered = parts.gathered_weights(model) * size if num_ranks > 1 else 0
    packed = max(tokens, longest_sequence(config, model))
    heads = list(heads_of(config, shape, has_room))
    backward = parts.logits_bytes(config, model, packed)
    backward = max(backward, parts.layer_gradients(config, model, packed, tokens))
    activations = parts.activation_bytes(config, model, packed)
    for head, training in heads:
        if training is not None:
            activations = max(activations, parts.head_training_bytes(config, training, head) - backward)
    head_shapes, overlaps = [head for head, _ in heads], config.train.max_staleness > 0
    if kv_tokens is not None:
        kv = kv_tokens * parts.kv_bytes_per_token(config, model, head_shapes)
    else:
        draft, kv = None, max(0, parts.vllm_bytes(config, total or 0) - weights * size)  # a draft model is part of it
    plan = MemoryPlan(
        total_bytes=total,
        kv_tokens=kv_tokens,
        tokens_per_microbatch=tokens,
        packed_tokens=packed,
        sleeps=False,
        # Shards of trained parameters are their own masters.
        learner_weights=(trained * (num_ranks == 1 or size >= 4) + frozen) * size // num_ranks + gathered,
        engine_weights=parts.engine_weight_bytes(config, model, num_ranks),
        # One version for each that a batch in the queue may begin with, and the newest.
        published_weights=(config.train.max_staleness + 1) * parts.published_bytes(config, model) if overlaps else 0,
        # With LoRA it is the learner's own model without adapters.
        reference=(weights * size // num_ranks + gathered) if config.algorithm.beta > 0 and not frozen else 0,
        masters=trained * 4 // num_ranks if size < 4 else 0,  # else the weights themselves
        moments=parts.moment_bytes(config, model, trained) // num_ranks,
        gradients=trained * max(4, size) // num_ranks,
        drafter=parts.drafter_bytes(config, draft, head_shapes, kv_tokens or 0),
        kv=kv,
        activations=activations,
        backward=backward,
        reserve=parts.CONTEXT_BYTES + parts.graph_bytes(config, model) if total is not None else 0,
    )
    if total is None or overlaps:
        return plan
    sleeps = config.engine.sleep
    if sleeps is None:
        sleeps = config.engine.kind == "vllm" or is_large(kv, total) or not plan.fits  # vLLM sleeps whenever it can
    return replace(plan, sleeps=sleeps)


def heads_of(config: Config, shape: RunShape, has_room: bool) -> Iterator[tuple[HeadConfig, DraftSection | None]]:
    """The heads to count, with the settings of their training."""
    default = head_config(shape.model, min(HEAD_VOCABULARY, shape.model.vocab_size))
    if has_room:
        yield default, DraftSection()
    if config.speculation.uses_head:
        yield shape.head or default, config.draft if config.draft.online != "off" else None


# ---- sizes of the choices ----


def usable_bytes(total: int) -> int:
    return int(total * USABLE)


def longest_sequence(config: Config, model: ModelConfig) -> int:
    return min(model.max_positions, LONGEST_PROMPT + config.sampling.max_tokens)


def token_choices(config: Config, model: ModelConfig) -> list[int]:
    """Microbatches to choose from, the largest first; no more than the tokens of one optimizer step need. All must hold
    the longest sequence: of those below it, only the largest is of use."""
    given = config.learner.tokens_per_microbatch
    if given != "auto":
        return [given]
    rows = config.train.groups_per_step * config.algorithm.num_generations
    step = rows * config.sampling.max_tokens + config.train.groups_per_step * PROMPT_TOKENS
    enough = min((tokens for tokens in TOKEN_CHOICES if tokens >= step), default=TOKEN_CHOICES[0])
    useful = [tokens for tokens in TOKEN_CHOICES if tokens <= enough]
    longest = longest_sequence(config, model)
    return useful[:1] + [tokens for larger, tokens in pairwise(useful) if larger > longest]


def kv_choices(config: Config, model: ModelConfig) -> list[int | None]:
    """Sizes of the KV cache to choose from, the largest first: what is set, or what is needed and shares of it. None:
    vLLM chooses."""
    if config.engine.kv_tokens is not None:
        return [config.engine.kv_tokens]
    if config.engine.kind == "vllm":
        return [None]
    least = least_kv_tokens(config, model)
    return [*shares(needed_kv_tokens(config, model), least), least]


def ample_kv_choices(config: Config, model: ModelConfig) -> list[int]:
    """Sizes above what is needed: prompts may be longer, and evaluations have more of them."""
    if config.engine.kv_tokens is not None or config.engine.kind == "vllm":
        return []
    return shares(round_up(ample_kv_tokens(config, model)), needed_kv_tokens(config, model))


def shares(full: int, least: int) -> list[int]:
    """Those of `full` above `least`, the largest first."""
    sizes = (full * share // SHARES // BLOCK * BLOCK for share in range(SHARES, 0, -1))
    return [num for num in sizes if num > least]


def needed_kv_tokens(config: Config, model: ModelConfig) -> int:
    """For engine.max_num_seqs sequences of full length. With prefix sharing, the rollouts of a problem share its
    prompt."""
    num, longest = config.engine.max_num_seqs, config.sampling.max_tokens
    num_prompts = -(-num // config.algorithm.num_generations) if config.engine.prefix_sharing else num
    if any(task.section.has_agents for task in config.tasks):
        needed = num * min(model.max_positions, max(ENV_TOKENS, PROMPT_TOKENS + longest))
    else:
        needed = min(num * longest + num_prompts * PROMPT_TOKENS, num * model.max_positions)
    return max(round_up(needed), least_kv_tokens(config, model))


def least_kv_tokens(config: Config, model: ModelConfig) -> int:
    """For one sequence. The engine refuses a request that the KV cache can't hold."""
    return round_up(longest_sequence(config, model))


def round_up(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK
