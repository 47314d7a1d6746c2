"""How many bytes each part of a training run takes on its GPU, from the settings and the models' shapes.

Shapes: D hidden, H query heads, G key/value heads, E head dimension, I intermediate, V vocabulary, N draft vocabulary,
L layers. "Per token" is per packed token of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.build.model import itemsize, kernel_obstacle
from paceline.config import Config, DraftSection
from paceline.model.config import ModelConfig, num_matrix_weights
from paceline.model.draft_head import HeadConfig
from paceline.model.dspark import DSparkConfig
from paceline.model.eagle3 import Eagle3Config
from paceline.rl.check_settings import may_audit
from paceline.rl.logprobs import CHUNK, CUDA_CHUNK_BYTES, CUDA_KEEP_BYTES, KEEP_BYTES
from paceline.rl.packing import KEYS_PER_TOKEN

CONTEXT_BYTES = 1 << 30  # CUDA context, loaded kernels, workspace of libraries
GRAPH_POSITIONS = 2048  # positions with logits in one captured step, if a batch of plain rows does not need more
HISTORY_BYTES = 1 << 28  # history of the drafters `suffix` and `hybrid` on the device
VLLM_UTILIZATION = 0.92  # vLLM's default of gpu_memory_utilization: its share of the GPU's memory


# ---- weights ----


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
    heads, keys = model.num_heads * e, model.num_kv_heads * e
    attention = {"q_proj": d + heads, "k_proj": d + keys, "v_proj": d + keys, "o_proj": heads + d}
    sizes = attention | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), d + i)
    return model.num_layers * config.learner.lora_rank * sum(sizes[name] for name in config.learner.lora_targets)


def engine_weight_bytes(config: Config, model: ModelConfig, num_ranks: int) -> int:
    """Of the engine alone. With LoRA, a local engine computes beside the base weights of the learner in its process and
    has adapters of its own. A learner of several ranks shards its base weights. vLLM gets merged weights."""
    size, weights = itemsize(config), num_weights(model)
    if not has_own_adapters(config):
        return size * weights
    is_packed = config.model.device == "cpu" and config.model.dtype == "float32" and config.engine.native
    return size * (num_lora_weights(config, model) + weights * (num_ranks > 1 or is_packed))


def has_own_adapters(config: Config) -> bool:
    """Whether weight updates of the engine have only adapters."""
    return config.learner.lora_rank > 0 and config.engine.kind == "local"


def published_bytes(config: Config, model: ModelConfig) -> int:
    """Of one version of the policy, as the engine gets it."""
    return itemsize(config) * (num_lora_weights(config, model) if has_own_adapters(config) else num_weights(model))


def gathered_weights(model: ModelConfig) -> int:
    """What FSDP gathers at a time: the weights outside of layers, one layer, and the next one."""
    return num_outer_weights(model) + 2 * num_layer_weights(model)


def moment_bytes(config: Config, model: ModelConfig, trained: int) -> int:
    """In float32 or better: two for each parameter (AdamW), but one for those in a layer's matrices with Muon."""
    num_single = 0
    if config.learner.optimizer == "muon":
        num_single = trained if config.learner.lora_rank else model.num_layers * num_matrix_weights(model)
    return (2 * trained - num_single) * max(4, itemsize(config))


def checkpoint_bytes(config: Config, model: ModelConfig, head: HeadConfig | None) -> int:
    """On disk, of all ranks: trained parameters and moments in float32 or better, the versions of the policy that
    pending batches begin with, and the state of a head that is trained online. Without rollouts and history."""
    trained = num_lora_weights(config, model) if config.learner.lora_rank else num_weights(model)
    versions = config.train.max_staleness * published_bytes(config, model)
    online = num_head_weights(head) if head is not None and config.draft.online != "off" else 0
    return trained * max(4, itemsize(config)) + moment_bytes(config, model, trained) + versions + 12 * online


# ---- a microbatch ----


def is_fused(config: Config, model: ModelConfig) -> bool:
    """Whether the learner has the fused operations of 16 bits; else it computes in plain torch."""
    return itemsize(config) == 2 and kernel_obstacle(model) is None


def layer_activations(config: Config, model: ModelConfig) -> int:
    """Per token and layer: what the forward pass keeps for the backward pass."""
    size, d, i = itemsize(config), model.hidden_size, model.intermediate_size
    wide = max(4, size)
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    kept = 2 * wide * d  # residual stream before and after attention, float32: 2 [D]
    kept += 2 * size * d  # outputs of the two norms: 2 [D]
    kept += size * (heads + 2 * keys)  # output of qkv: [(H + 2G) E]
    kept += size * heads + 4 * model.num_heads  # output of attention [H E], and its log-sum-exp [H]
    kept += 2 * size * i  # output of gate_up: [2I]
    if not is_fused(config, model):
        kept += size * i  # silu(gate) * up: [I]
        trains_norms = config.learner.lora_rank == 0  # then they keep what is multiplied with their weights, float32
        kept += trains_norms * 2 * wide * d  # residual stream: 2 [D]
        if model.qk_norm:  # q [H E], k [G E]; also before the norm, if that is a copy in float32
            kept += (trains_norms + (size < wide)) * wide * (heads + keys)
        kept += size * (heads + keys)  # rotated: q [H E], k [G E]
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


def layer_gradients(config: Config, model: ModelConfig, tokens: int, max_tokens: int) -> int:
    """In the backward pass of a layer: gradients of about its activations, and of its parameters before they are added
    to the sums. In one attention kernel also k and v with copies of shared prompts, and their gradients, first for each
    query head: 2 [H E] + 4 [G E] for each row of the keys."""
    num_keys = max(tokens, KEYS_PER_TOKEN * max_tokens)
    copies = 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * num_keys if itemsize(config) == 2 else 0
    return tokens * layer_activations(config, model) + (num_layer_weights(model) + copies) * itemsize(config)


def logits_bytes(config: Config, model: ModelConfig, tokens: int) -> int:
    """A chunk of logits in float32 [chunk, V]; the probabilities that are kept for the backward pass [tokens, V]; and,
    if the LM head is trained, its gradient: in float32 [V, D], and rounded."""
    size, vocab_size = max(4, itemsize(config)), model.vocab_size
    if is_fused(config, model):
        chunk = min(CUDA_CHUNK_BYTES, tokens * vocab_size * size)
        kept = itemsize(config) * vocab_size * tokens
        kept = kept if kept <= CUDA_KEEP_BYTES else 0  # computed again, chunk by chunk
    else:  # logits, probabilities and gradients of a chunk
        chunk, kept = 3 * min(CHUNK, tokens) * vocab_size * size, min(KEEP_BYTES, tokens * vocab_size * size)
    head_gradient = 0 if config.learner.lora_rank else vocab_size * model.hidden_size * (size + itemsize(config))
    return chunk + kept + head_gradient


# ---- engine ----


def kv_bytes_per_token(config: Config, model: ModelConfig, heads: Sequence[HeadConfig]) -> int:
    """Keys and values of the target: 2 L [G E]. For the largest of these heads: those of its layers, and the hidden
    states of target layers, usually 3 [D]."""
    sizes = [_keys_and_values(head.layer) + head.aux_hidden_size for head in heads]
    return itemsize(config) * (_keys_and_values(model) + max(sizes, default=0))


def _keys_and_values(model: ModelConfig) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim


def graph_bytes(config: Config, model: ModelConfig) -> int:
    """The memory that captured graphs share: logits in float32 of all positions of a step [positions, V]. vLLM's are
    part of its share."""
    positions = min(8 * config.engine.max_num_seqs, max(GRAPH_POSITIONS, config.engine.max_num_seqs))
    has_graphs = config.engine.graphs and config.engine.kind == "local"
    return positions * model.vocab_size * 4 if has_graphs else 0


def vllm_bytes(config: Config, total: int) -> int:
    """All that vLLM takes, if it chooses the size of its KV cache."""
    return int(total * config.engine.vllm.get("gpu_memory_utilization", VLLM_UTILIZATION))


# ---- drafter ----


def num_head_weights(head: HeadConfig) -> int:
    """Layers, fc [D, aux], two norms [D], LM head [N, D]. Some heads have an embedding [V, D].

    EAGLE-3: the layer's input is 2 D; some heads have norms before fc [aux]. DSpark: the Markov term's matrices of rank
    R, [V, R] and [N, R], and the confidence output [1, D + R] with a bias."""
    layer, d, num_draft = head.layer, head.layer.hidden_size, head.draft_vocab_size
    num = layer.num_layers * num_layer_weights(layer) + head.aux_hidden_size * d
    num += 2 * d + num_draft * d + head.own_embedding * layer.vocab_size * d
    if isinstance(head, DSparkConfig):
        rank = head.markov_rank
        return num + rank * (layer.vocab_size + num_draft) + head.has_confidence * (d + rank + 1)
    assert isinstance(head, Eagle3Config)
    wide = d * (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim  # the second half of the input
    return num + wide + head.aux_hidden_size * head.fc_norm


def drafter_bytes(config: Config, draft: ModelConfig | None, heads: Sequence[HeadConfig], kv_tokens: int) -> int:
    """The largest of: a draft model; a head in the engine, in the model's dtype and in float8, with its
    training state in float32 (weights, gradients, two moments) and a history."""
    speculation, size = config.speculation, itemsize(config)
    has_history = heads or speculation.method in ("suffix", "hybrid")
    per_weight = size + 1 + 4 * max(4, size)
    head = max((num_head_weights(head) for head in heads), default=0) * per_weight + HISTORY_BYTES * bool(has_history)
    if draft is None or speculation.method != "draft_model":
        return head
    num = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * kv_tokens
    if not (speculation.draft_model or "").startswith("layers:"):  # else it has the target's weights
        num += num_weights(draft)
    return max(head, num * size * (2 if may_audit(config) else 1))  # an audit builds another one


def head_training_bytes(config: Config, section: DraftSection, head: HeadConfig) -> int:
    """Online training of a head, in float32, when the activations of the policy's update are freed: the target's logits
    three times [tokens, V]; the activations of all steps in each layer, and distributions over the draft vocabulary six
    times [tokens, N]. DSpark's context counts as one more step."""
    tokens = max(section.tokens_per_batch, section.online_tokens)
    num_steps = section.unroll + isinstance(head, DSparkConfig)
    per_layer = layer_activations(config.changed(model={"dtype": "float32"}), head.layer)
    layers = num_steps * head.layer.num_layers * per_layer
    return tokens * max(4 * 3 * head.layer.vocab_size, 4 * 6 * head.draft_vocab_size + layers)
