"""Builds the drafter of an engine, by speculation.method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.build.model import build_decoder, build_paged, default_kv_tokens
from paceline.build.model_free import MODEL_FREE, build_history, build_model_free
from paceline.config import ARCHITECTURES, Config, SpeculationSection
from paceline.drafters.device import DeviceHistoryDrafter, DeviceHybridDrafter, device_head_drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.head_drafter import HeadDrafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.model import head_files
from paceline.model.config import ModelConfig, num_matrix_weights
from paceline.model.decoder import Decoder, first_layers
from paceline.model.draft_head import DraftHead
from paceline.model.dspark import DSparkHead
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_layouts import architecture_of
from paceline.model.kernels import pack_for_inference
from paceline.model.kv import BLOCK
from paceline.model.provenance import read_provenance
from paceline.model.sample import Sampler
from paceline.model.store import load_tokenizer, resolve
from paceline.model.weights import checkpoint_checksum, read_config_json
from paceline.speculation.batch import Drafter
from paceline.speculation.history_store import HistoryStore


def available_drafters(config: Config) -> tuple[str, ...]:
    """The methods that need no further settings for this model."""
    found = ["ngram", "suffix"]
    try:
        path = head_files.resolve_head(config.speculation.head, config.model.name)
        found += [architecture_of(read_config_json(path)), "hybrid"]
    except ValueError:
        if config.speculation.head is not None:
            raise
    if config.speculation.draft_model is not None:
        found.append("draft_model")
    return tuple(found)


def build_drafter(config: Config, target: Decoder, tokenizer: Any, head: DraftHead | None = None) -> Drafter | None:
    """A drafter for this target. `head`: use this head, packed like the target, instead of loading one."""
    speculation = config.speculation
    if speculation.method == "suffix" and target.ops.is_cuda and speculation.rule == "coupled":
        return _build_device_drafter(config)
    if speculation.method in MODEL_FREE:
        return build_model_free(config)
    if speculation.method == "draft_model":
        draft = _draft_decoder(config, target, tokenizer)
        coupled = speculation.rule == "coupled"
        return DraftModelDrafter(build_paged(config, draft), _build_draft_sampler(draft), coupled)
    if not speculation.uses_head:
        raise ValueError(f"speculation.method = {speculation.method!r}: there is no such drafter")
    if head is None:
        head = pack_head(build_head(config, target.config), target)
    _check_architecture(speculation.method, head)
    if target.ops.is_cuda and speculation.rule == "coupled":
        return _build_device_drafter(config, head)
    if speculation.head_dtype == "float8":
        raise ValueError(
            'speculation.head_dtype = "float8": needs a head that drafts on a GPU, with rule = "coupled"; use "auto" '
            'or "model"'
        )
    drafter = _build_head_drafter(config, target, head)
    if speculation.method != "hybrid":
        return drafter
    return HybridDrafter(build_history(config), drafter, head_cost(head, target.config), speculation.hybrid_choice)


def _build_head_drafter(config: Config, target: Decoder, head: DraftHead) -> HeadDrafter:
    num_blocks = -(-(config.engine.kv_tokens or default_kv_tokens(config, target.config)) // BLOCK)
    sampler, coupled = _build_draft_sampler(target), config.speculation.rule == "coupled"
    settings = sampler, num_blocks, coupled, config.speculation.min_confidence
    if isinstance(head, DSparkHead):
        return DSparkDrafter(head, target.embed, *settings)
    assert isinstance(head, Eagle3Head)
    return Eagle3Drafter(head, target.embed, *settings)


def _build_draft_sampler(decoder: Decoder) -> Sampler:
    """Drafts are verified, so on a GPU their bits may depend on the batch."""
    return Sampler(native=decoder.embed.panels is not None)


def _build_device_drafter(config: Config, head: DraftHead | None = None) -> Drafter:
    """A drafter on the GPU, which drafts at the end of a step for the next step: history, a head, or both."""
    from paceline.model.cuda.device_state import MAX_DRAFT
    from paceline.model.cuda.float8 import apply_head_dtype

    s = config.speculation
    lengths = s.num_speculative_tokens
    k = lengths if isinstance(lengths, int) else max(lengths.values())
    if k > MAX_DRAFT:
        raise ValueError(f"speculation.num_speculative_tokens = {k}: a GPU drafts at most {MAX_DRAFT}; lower it")
    if head is None:
        return DeviceHistoryDrafter(_history_store(s), s.suffix_recency, s.suffix_min_match)
    apply_head_dtype(head, s.head_dtype)
    drafter = device_head_drafter(head)
    if s.method != "hybrid":
        return drafter
    return DeviceHybridDrafter(_history_store(s), drafter, s.suffix_recency, s.suffix_min_match)


def _history_store(section: SpeculationSection) -> HistoryStore:
    return HistoryStore(section.suffix_max_versions, section.suffix_max_bytes)


def drafting_head(config: Config, drafter: Any) -> DraftHead | None:
    """The head of a drafter that was built from this config, with its current weights."""
    if not config.speculation.uses_head:
        return None
    head: DraftHead = drafter.head.head if config.speculation.method == "hybrid" else drafter.head
    return head


def drafting_model(config: Config, drafter: Any) -> str | None:
    """The name of the model that drafts, alone or in a hybrid; None without one."""
    if config.speculation.method == "draft_model":
        return "draft_model"
    head = drafting_head(config, drafter)
    return None if head is None else head.architecture


def relative_draft_cost(config: Config, drafter: Any, target: ModelConfig) -> float:
    """Time of one token of the drafter's model, relative to a step of the target; 0 without such a model."""
    if config.speculation.method == "draft_model":
        return _num_weights(drafter.paged.decoder.config) / _num_weights(target)
    head = drafting_head(config, drafter)
    return head_cost(head, target) if head is not None else 0.0


def build_head(config: Config, target: ModelConfig, dtype: torch.dtype | None = None) -> DraftHead:
    """The head that speculation.head names, or the one shipped for the model. It is not packed. It is on model.device,
    in model.dtype unless `dtype` is given."""
    head = head_files.load_head(
        head_files.resolve_head(config.speculation.head, config.model.name),
        target,
        dtype=dtype or getattr(torch, config.model.dtype),
        device=config.model.device,
        target_checksum=checkpoint_checksum(resolve(config.model.name)),
        any_target=config.speculation.any_target,
    )
    _check_architecture(config.speculation.method, head)
    return head


def _check_architecture(method: str, head: DraftHead) -> None:
    if method in ARCHITECTURES and method != head.architecture:
        raise ValueError(
            f'speculation.method = "{method}", but speculation.head is a head of the architecture '
            f'"{head.architecture}"; set speculation.method = "{head.architecture}", or "hybrid"'
        )


def recorded_acceptance(config: Config, temperature: float) -> float | None:
    """The share of first draft tokens that were accepted, from the head's provenance file, for this acceptance rule and
    temperature. None if there is no such record, or if the head may belong to another target
    (speculation.any_target)."""
    speculation = config.speculation
    if not speculation.uses_head or speculation.any_target:
        return None
    provenance = read_provenance(head_files.resolve_head(speculation.head, config.model.name))
    if provenance is None:
        return None
    kind = "coupled" if speculation.rule == "coupled" else "sampled"
    return provenance.first_position_rate(temperature, "greedy" if config.engine.kind == "vllm" else kind)


def pack_head(head: DraftHead, target: Decoder) -> DraftHead:
    """Prepare a head for inference: packed if the target is packed."""
    head.requires_grad_(False)
    if target.embed.panels is not None:
        pack_for_inference(head)
    return head


def head_cost(head: DraftHead, target: ModelConfig) -> float:
    """Time of one of the head's tokens, relative to a step of the target. Assumes that reading weights takes all the
    time, as on a CPU, or on a GPU with few rows."""
    c, num_draft = head.config.layer, head.config.draft_vocab_size
    if isinstance(head, DSparkHead):  # one pass for a block
        block = c.num_layers * num_matrix_weights(c) + num_draft * c.hidden_size
        num = block / head.config.block_size + num_draft * head.config.markov_rank
    else:
        num = num_matrix_weights(c, 2 * c.hidden_size) + num_draft * c.hidden_size
    bytes_ratio = 1.0 if head.lm_head.float8 is None else 1 / head.dtype.itemsize
    return bytes_ratio * num / _num_weights(target)


def _num_weights(model: ModelConfig) -> int:
    """Weights that a step reads."""
    return model.num_layers * num_matrix_weights(model) + model.vocab_size * model.hidden_size


def _draft_decoder(config: Config, target: Decoder, tokenizer: Any) -> Decoder:
    """The model that speculation.draft_model names. "layers:N" is the target's own first N layers."""
    name = config.speculation.draft_model
    assert name is not None  # the config checks it
    kind, _, count = name.partition(":")
    if kind == "layers":
        if not count.isdecimal() or not 1 <= int(count) <= target.config.num_layers:
            raise ValueError(
                f"speculation.draft_model = {name!r}: 'layers:N' takes the target's first N layers, N from 1 to "
                f"{target.config.num_layers}"
            )
        return first_layers(target, int(count))
    directory = resolve(name)
    draft = build_decoder(config.changed(engine={"invariant": False}), directory)  # drafts are verified
    check_vocabulary(name, draft.config.vocab_size, target.config.vocab_size, directory, tokenizer)
    return draft


def check_vocabulary(name: str, size: int | None, target_size: int | None, directory: Path, tokenizer: Any) -> None:
    """Raise ValueError if a draft model does not have the target's vocabulary. A size of None is not known."""
    if size != target_size and None not in (size, target_size):
        raise ValueError(
            f"speculation.draft_model = {name!r} has {size} tokens, the target {target_size}: a draft model must share "
            "the target's vocabulary"
        )
    if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"speculation.draft_model = {name!r}: its tokenizer gives other ids than the target's; a draft model must "
            "share the target's vocabulary"
        )
