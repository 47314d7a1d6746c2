"""The memory plan of a training run on one GPU: how many bytes each part of it takes, and from these the size of the KV
cache and of the microbatches.

Invariants:
  - A plan depends only on the settings, the model's shape and the GPU's total memory: never on what is free or loaded.
    So runs on GPUs of one kind cut the same microbatches and compute the same bits.
  - Room for an EAGLE-3 head and its training is always reserved, so switching speculation or draft.online on changes
    no microbatch. Exception: a draft model, if memory is short.
  - More memory never gives a smaller microbatch or KV cache.

Shapes: D hidden, H query heads, G key/value heads, E head dimension, I intermediate, V vocabulary, L layers; W bytes of
a weight. "Per token" is per packed token of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.config import Config
from paceline.model.config import ModelConfig
from paceline.model.eagle3 import head_config
from paceline.model.kv import BLOCK
from paceline.rl.logprobs import CUDA_CHUNK_BYTES, CUDA_KEEP_BYTES

GIB = 1 << 30
# Microbatches that "auto" chooses from. Larger ones are hardly faster: each costs one pass over all gradients, and a
# product of 8192 rows keeps a GPU busy.
TOKEN_CHOICES = (8192, 4096, 2048)
SHARES = 16  # steps in which the KV cache shrinks
PROMPT_TOKENS = 1024  # allowed for a prompt, on average
LONGEST_PROMPT = 4096  # the KV cache holds at least one sequence with such a prompt
ENV_TOKENS = 4096  # allowed for a sequence with the turns of an environment
USABLE = 15 / 16  # share of a GPU's memory that a plan may use; the rest is lost between allocations
CONTEXT_BYTES = GIB  # CUDA context, loaded kernels, workspace of libraries
GRAPH_POSITIONS = 2048  # positions with logits in one captured step, if a batch of plain rows does not need more
HEAD_VOCABULARY = 32768  # draft vocabulary of a head; published heads have up to 32000
HISTORY_BYTES = 1 << 28  # history of the drafters `suffix` and `hybrid` on the device


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """In bytes, except `kv_tokens`, `tokens_per_microbatch` and `sleeps`. `total_bytes` is None without a limit, on a
    CPU."""

    total_bytes: int | None
    kv_tokens: int
    tokens_per_microbatch: int
    sleeps: bool  # whether the KV cache is freed while the learner trains, so that both use the same memory
    learner_weights: int
    engine_weights: int  # a copy of its own; with LoRA, the merged weights
    published_weights: int  # copies that wait for the engine, if generation and training overlap
    reference: int  # the weights of the reference policy
    masters: int  # float32 copies of the trained parameters
    moments: int  # AdamW's two, or Muon's momentum
    gradients: int  # sums over microbatches
    drafter: int
    kv: int  # with the drafter's keys, values and hidden states
    activations: int  # of a microbatch, kept for the backward pass
    logits: int  # or the gradients of one layer: the two never exist at the same time
    reserve: int  # CUDA context and captured graphs

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache and a microbatch."""
        weights = self.learner_weights + self.engine_weights + self.published_weights + self.reference
        return weights + self.masters + self.moments + self.gradients + self.drafter + self.reserve

    @property
    def microbatch_bytes(self) -> int:
        return self.activations + self.logits

    @property
    def sum_bytes(self) -> int:
        both = max if self.sleeps else int.__add__
        return self.fixed_bytes + both(self.kv, self.microbatch_bytes)

    @property
    def fits(self) -> bool:
        return self.total_bytes is None or self.sum_bytes <= usable_bytes(self.total_bytes)


def plan_memory(
    config: Config, model: ModelConfig, total_bytes: int, num_ranks: int = 1, draft: ModelConfig | None = None
) -> MemoryPlan:
    """The plan of a run on a GPU with this memory. Numbers that are set in the config are kept; others are chosen. With
    several ranks it is that of rank 0, which has the engine. `draft`: the draft model of speculation.draft_model, if it
    is used.

    The KV cache gets what `engine.max_num_seqs` sequences need, and the microbatch the largest of TOKEN_CHOICES that
    fits beside it. If even the smallest does not fit, the KV cache shrinks, down to one sequence: the engine then
    preempts. If that does not fit either: ValueError."""
    total = total_bytes // GIB * GIB  # drivers report slightly different totals for the same GPU
    sizes, tokens = kv_choices(config, model), token_choices(config)
    choices = [(sizes[0], num) for num in tokens] + [(num, tokens[-1]) for num in sizes[1:]]
    tried = [(choice, True) for choice in choices]
    if not config.speculation.uses_head:  # its room is given up rather than more than half of the KV cache
        half = len(tokens) + SHARES // 2
        tried = tried[:half] + [(choice, False) for choice in choices[half - 1 :] or choices[-1:]]
    for (kv_tokens, num), has_head in tried:
        plan = part_sizes(config, model, kv_tokens, num, total, num_ranks, draft, has_head)
        if plan.fits:
            return plan
    raise ValueError(refusal(config, plan))


def part_sizes(
    config: Config,
    model: ModelConfig,
    kv_tokens: int,
    tokens: int,
    total: int | None,
    num_ranks: int = 1,
    draft: ModelConfig | None = None,
    has_head: bool = True,
) -> MemoryPlan:
    """The plan with this KV cache and this microbatch, whether it fits or not. `has_head`: with room for an EAGLE-3
    head."""
    size, weights = itemsize(config), num_weights(model)
    trained = num_lora_weights(config, model) if config.learner.lora_rank else weights
    frozen = weights if config.learner.lora_rank else 0
    gathered = gathered_weights(model) * size if num_ranks > 1 else 0
    # A single sequence may be longer than a microbatch.
    packed = max(tokens, min(model.max_positions, PROMPT_TOKENS + config.sampling.max_tokens))
    logits = max(logits_bytes(config, model, packed), layer_gradients(config, model, packed))
    activations = activation_bytes(config, model, packed)
    kv = kv_tokens * kv_bytes_per_token(config, model, has_head)
    drafter = draft_model_bytes(config, draft, kv_tokens) if draft is not None else 0
    if has_head:
        drafter = max(drafter, drafter_bytes(config, model))
        activations = max(activations, head_training_bytes(config, model) - logits)
    plan = MemoryPlan(
        total_bytes=total,
        kv_tokens=kv_tokens,
        tokens_per_microbatch=tokens,
        sleeps=False,
        learner_weights=(trained + frozen) * size // num_ranks + gathered,
        engine_weights=weights * size,
        # One version for each that a batch in the queue may begin with, and the newest.
        published_weights=(config.train.max_staleness + 1) * weights * size if config.train.max_staleness else 0,
        # With LoRA it is the learner's own model without adapters.
        reference=(weights * size // num_ranks + gathered) if config.algorithm.beta > 0 and not frozen else 0,
        masters=trained * 4 // num_ranks if size < 4 else 0,  # else the weights themselves
        moments=moment_bytes(config, model, trained) // num_ranks,
        gradients=trained * max(4, size) // num_ranks,
        drafter=drafter,
        kv=kv,
        activations=activations,
        logits=logits,
        reserve=CONTEXT_BYTES + graph_bytes(config, model) if total is not None else 0,
    )
    if total is None or config.train.max_staleness:  # generation and training overlap
        return plan
    should_sleep = 8 * kv > total or not plan.fits
    return replace(plan, sleeps=should_sleep if config.engine.sleep is None else config.engine.sleep)


# ---- sizes of the choices ----


def usable_bytes(total: int) -> int:
    return int(total * USABLE)


def token_choices(config: Config) -> Sequence[int]:
    """Microbatches to choose from, the largest first; no more than the tokens of one optimizer step need."""
    given = config.learner.tokens_per_microbatch
    if given != "auto":
        return (given,)
    rows = config.train.groups_per_step * config.algorithm.num_generations
    step = rows * config.sampling.max_tokens + config.train.groups_per_step * PROMPT_TOKENS
    enough = min((tokens for tokens in TOKEN_CHOICES if tokens >= step), default=TOKEN_CHOICES[0])
    return [tokens for tokens in TOKEN_CHOICES if tokens <= enough]


def needed_kv_tokens(config: Config, model: ModelConfig) -> int:
    """For engine.max_num_seqs sequences of full length. With prefix sharing, the rollouts of a problem share its
    prompt."""
    num, longest = config.engine.max_num_seqs, config.sampling.max_tokens
    num_prompts = -(-num // config.algorithm.num_generations) if config.engine.prefix_sharing else num
    if config.task.kind == "env":
        needed = num * min(model.max_positions, max(ENV_TOKENS, PROMPT_TOKENS + longest))
    else:
        needed = min(num * longest + num_prompts * PROMPT_TOKENS, num * model.max_positions)
    return -(-max(needed, least_kv_tokens(config, model)) // BLOCK) * BLOCK


def kv_choices(config: Config, model: ModelConfig) -> Sequence[int]:
    """Sizes of the KV cache to choose from, the largest first: what is set, or what is needed and shares of it."""
    if config.engine.kv_tokens is not None:
        return [config.engine.kv_tokens]
    full, least = needed_kv_tokens(config, model), least_kv_tokens(config, model)
    shares = (full * share // SHARES // BLOCK * BLOCK for share in range(SHARES - 1, 0, -1))
    return [full, *(num for num in shares if num > least), least]


def least_kv_tokens(config: Config, model: ModelConfig) -> int:
    """For one sequence. The engine refuses a request that the KV cache can't hold."""
    longest = min(model.max_positions, LONGEST_PROMPT + config.sampling.max_tokens)
    return -(-longest // BLOCK) * BLOCK


# ---- weights ----


def itemsize(config: Config) -> int:
    return {"float64": 8, "float32": 4}.get(config.model.dtype, 2)


def num_matrix_weights(model: ModelConfig) -> int:
    """Of one layer's matrices: qkv [(H + 2G) E, D], o [D, H E], gate_up [2I, D], down [D, I]."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return model.hidden_size * (heads + 3 * model.intermediate_size)


def num_layer_weights(model: ModelConfig) -> int:
    """Of one layer: matrices, biases and norms."""
    d, e = model.hidden_size, model.head_dim
    biases = (model.num_heads + 2 * model.num_kv_heads) * e * model.qkv_bias
    biases += d * model.o_bias + (2 * model.intermediate_size + d) * model.mlp_bias
    return num_matrix_weights(model) + biases + 2 * d + 2 * e * model.qk_norm


def num_outer_weights(model: ModelConfig) -> int:
    """Outside of layers: embedding [V, D], LM head [V, D] unless tied, final norm."""
    return model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2) + model.hidden_size


def num_weights(model: ModelConfig) -> int:
    return model.num_layers * num_layer_weights(model) + num_outer_weights(model)


def num_lora_weights(config: Config, model: ModelConfig) -> int:
    """The adapters: A [rank, inputs] and B [outputs, rank] of each target."""
    d, i, e = model.hidden_size, model.intermediate_size, model.head_dim
    heads, qkv = model.num_heads * e, (model.num_heads + 2 * model.num_kv_heads) * e
    shapes = {"qkv": d + qkv, "o": heads + d, "gate_up": d + 2 * i, "down": i + d}
    return model.num_layers * config.learner.lora_rank * sum(shapes[name] for name in config.learner.lora_targets)


def gathered_weights(model: ModelConfig) -> int:
    """What FSDP gathers at a time: the weights outside of layers, one layer, and the next one."""
    return num_outer_weights(model) + 2 * num_layer_weights(model)


def moment_bytes(config: Config, model: ModelConfig, trained: int) -> int:
    """In float32 or better: two for each parameter (AdamW), but one for those in a layer's matrices with Muon."""
    num_single = 0
    if config.learner.optimizer == "muon":
        num_single = trained if config.learner.lora_rank else model.num_layers * num_matrix_weights(model)
    return (2 * trained - num_single) * max(4, itemsize(config))


# ---- a microbatch ----


def layer_activations(config: Config, model: ModelConfig) -> int:
    """Per token and layer: what the forward pass keeps for the backward pass."""
    size, d, i = itemsize(config), model.hidden_size, model.intermediate_size
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    kept = 2 * max(4, size) * d  # residual stream before and after attention, float32: 2 [D]
    kept += 2 * size * d  # outputs of the two norms: 2 [D]
    kept += size * (heads + 2 * keys)  # output of qkv: [(H + 2G) E]
    kept += size * heads + 4 * model.num_heads  # output of attention [H E], and its log-sum-exp [H]
    kept += 2 * size * i  # output of gate_up: [2I]
    if size >= 4:  # plain torch, without fused operations
        kept += size * i  # silu(gate) * up: [I]
        kept += 2 * size * d  # normalized residual stream, before the norm's weight: 2 [D]
        kept += size * (heads + keys) * (2 if model.qk_norm else 1)  # normalized, and rotated: q [H E], k [G E]
        # Padded for attention: q [H E], and k and v [2G E] with half as many tokens of the prompt before them.
        kept += size * (heads + 3 * keys)
    return kept + config.learner.lora_rank * size * len(config.learner.lora_targets)  # x A^T: [rank]


def activation_bytes(config: Config, model: ModelConfig, tokens: int) -> int:
    """Of a microbatch. With checkpointing: the inputs of each layer (residual stream in float32, and the term to add),
    and one layer's activations, which are computed again."""
    layer = layer_activations(config, model)
    if not config.learner.activation_checkpointing:
        return tokens * model.num_layers * layer
    inputs = (max(4, itemsize(config)) + itemsize(config)) * model.hidden_size
    return tokens * (model.num_layers * inputs + layer)


def layer_gradients(config: Config, model: ModelConfig, tokens: int) -> int:
    """In the backward pass: gradients of about one layer's activations, and of its parameters before they are added to
    the sums."""
    return tokens * layer_activations(config, model) + num_layer_weights(model) * itemsize(config)


def logits_bytes(config: Config, model: ModelConfig, tokens: int) -> int:
    """A chunk of logits in float32 [chunk, V]; the probabilities that are kept for the backward pass [tokens, V]; and,
    if the LM head is trained, its gradient: in float32 [V, D], and rounded."""
    size = max(4, itemsize(config))
    chunk = min(CUDA_CHUNK_BYTES, tokens * model.vocab_size * size)
    kept = itemsize(config) * model.vocab_size * tokens
    kept = kept if kept <= CUDA_KEEP_BYTES else 0  # computed again, chunk by chunk
    head_gradient = 0 if config.learner.lora_rank else model.vocab_size * model.hidden_size * (size + itemsize(config))
    return chunk + kept + head_gradient


# ---- engine ----


def kv_bytes_per_token(config: Config, model: ModelConfig, has_head: bool) -> int:
    """Keys and values of the target: 2 L [G E]. For an EAGLE-3 head: 2 [G E], and the hidden states of three target
    layers 3 [D]."""
    keys = model.num_kv_heads * model.head_dim
    head = 2 * keys + 3 * model.hidden_size if has_head else 0
    return itemsize(config) * (2 * model.num_layers * keys + head)


def graph_bytes(config: Config, model: ModelConfig) -> int:
    """The memory that captured graphs share: logits in float32 of all positions of a step [positions, V]."""
    positions = min(8 * config.engine.max_num_seqs, max(GRAPH_POSITIONS, config.engine.max_num_seqs))
    return positions * model.vocab_size * 4 if config.engine.graphs else 0


# ---- drafter ----


def num_head_weights(model: ModelConfig) -> int:
    """An EAGLE-3 head: one layer with an input of 2 D, fc [D, 3 D], two norms [D], LM head [N, D]."""
    d = model.hidden_size
    layer = head_config(model, HEAD_VOCABULARY).layer
    wide = d * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim  # the second half of the input
    return num_layer_weights(layer) + wide + 3 * d * d + 2 * d + min(HEAD_VOCABULARY, model.vocab_size) * d


def drafter_bytes(config: Config, model: ModelConfig) -> int:
    """An EAGLE-3 head in the engine, in the model's dtype and in float8, and its training state in float32: weights,
    gradients, two moments. And the history of `hybrid`."""
    return num_head_weights(model) * (itemsize(config) + 1 + 4 * max(4, itemsize(config))) + HISTORY_BYTES


def head_training_bytes(config: Config, model: ModelConfig) -> int:
    """Online training of a head, in float32, when the activations of the policy's update are freed: the target's logits
    three times [tokens, V]; the unrolled layer's activations, and distributions over the draft vocabulary six times
    [tokens, N]."""
    tokens = max(config.draft.tokens_per_batch, config.draft.online_tokens)
    wide = config.changed(model={"dtype": "float32"})
    layers = config.draft.unroll * layer_activations(wide, model)
    return 4 * tokens * max(3 * model.vocab_size, 6 * min(HEAD_VOCABULARY, model.vocab_size) + layers // 4)


def draft_model_bytes(config: Config, draft: ModelConfig, kv_tokens: int) -> int:
    """The weights and the KV cache of a draft model. "layers:N" shares the target's weights."""
    shares = (config.speculation.draft_model or "").startswith("layers:")
    kv = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * kv_tokens
    return itemsize(config) * (kv + (0 if shares else num_weights(draft)))


# ---- text ----


def plan_rows(plan: MemoryPlan) -> dict[str, int]:
    """The parts that are shown to users, in bytes. They add up to the sum, unless the engine sleeps."""
    weights = {
        "weights of the learner": plan.learner_weights,
        "weights of the engine": plan.engine_weights,
        "published weights": plan.published_weights,
        "weights of the reference": plan.reference,
        "master weights": plan.masters,
    }
    kv = f"KV cache, {plan.kv_tokens} tokens" + (", freed in training" if plan.sleeps else "")
    return {name: size for name, size in weights.items() if size} | {
        "moments": plan.moments,
        "gradients": plan.gradients,
        kv: plan.kv,
        f"activations, {plan.tokens_per_microbatch} tokens": plan.activations,
        "logits": plan.logits,
        "drafter": plan.drafter,
        "reserve": plan.reserve,
        "sum": plan.sum_bytes,
    }


def refusal(config: Config, plan: MemoryPlan) -> str:
    """The message for a plan that does not fit: the largest parts, and what makes each of them smaller."""
    assert plan.total_bytes is not None
    learner = config.learner
    parts = {name: size for name, size in plan_rows(plan).items() if name != "sum"}
    largest = sorted(parts, key=lambda name: -parts[name])[:4]
    state = plan.masters + plan.moments + plan.gradients
    remedies = {
        "lower engine.kv_tokens": plan.kv if config.engine.kv_tokens is not None else 0,
        "lower engine.max_num_seqs": plan.kv + plan.reserve - CONTEXT_BYTES,
        "lower learner.tokens_per_microbatch": plan.microbatch_bytes if learner.tokens_per_microbatch != "auto" else 0,
        "set learner.activation_checkpointing = true": 0 if learner.activation_checkpointing else plan.activations,
        "set algorithm.beta = 0": plan.reference,
        "set train.max_staleness = 0": plan.published_weights,
        "train adapters (learner.lora_rank = 16)": 0 if learner.lora_rank else state,
        "use a smaller model": plan.learner_weights + plan.engine_weights,
    }
    chosen = [text for text, size in remedies.items() if size > plan.sum_bytes // 50]
    return (
        f"model.device = {config.model.device!r}: this run needs {gib(plan.sum_bytes)}, but of the GPU's "
        f"{gib(plan.total_bytes)} a run may use {gib(usable_bytes(plan.total_bytes))}. It needs "
        f"{', '.join(f'{gib(parts[name])} for {name}' for name in largest)}. To need less: {', '.join(chosen)}"
    )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
