"""Who drafts for an engine, by speculation.method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.build.engine import build_decoder, build_paged, build_sampler, default_kv_tokens
from paceline.config import ADAPTABLE, Config

if TYPE_CHECKING:
    import torch

    from paceline.drafters.suffix import SuffixDrafter
    from paceline.model.config import ModelConfig
    from paceline.model.decoder import Decoder
    from paceline.model.eagle3 import Eagle3Head
    from paceline.speculation.batch import Drafter

MODEL_FREE = ("none", "suffix", "ngram")  # methods without a model of their own


def available_drafters(config: Config) -> tuple[str, ...]:
    """What can draft for this model without further ado."""
    from paceline.model.head_files import resolve_head

    found = ["ngram", "suffix"]
    try:
        resolve_head(config.speculation.head, config.model.name)
        found += ["eagle3", "hybrid"]
    except ValueError:
        if config.speculation.head is not None:  # asked for, so it matters
            raise
    if config.speculation.draft_model is not None:
        found.append("draft_model")
    return tuple(found)


def build_drafter(config: Config, target: Decoder, tokenizer: Any, head: Eagle3Head | None = None) -> Drafter | None:
    """A drafter for this target. `head`: an EAGLE-3 head that is already there, packed as the target is, instead of
    the one on disk."""
    speculation = config.speculation
    if speculation.method == "suffix" and target.ops.is_cuda and speculation.rule == "coupled":
        return _history_ahead(config)
    if speculation.method in MODEL_FREE:
        return build_model_free(config)
    if speculation.method == "draft_model":
        from paceline.drafters.draft_model import DraftModelDrafter

        draft = _draft_decoder(config, target, tokenizer)
        coupled = speculation.rule == "coupled"
        return DraftModelDrafter(build_paged(config, draft), build_sampler(draft), coupled)
    if speculation.method not in ("eagle3", "hybrid"):
        raise ValueError(f"speculation.method = {speculation.method!r}: there is no such drafter")
    from paceline.drafters.eagle3 import Eagle3Drafter
    from paceline.model.kv import BLOCK

    if head is None:
        head = pack_head(build_head(config, target.config), target)
    if target.ops.is_cuda and speculation.rule == "coupled":
        return _ahead(config, target, head)
    if speculation.head_dtype == "float8":
        raise ValueError(
            'speculation.head_dtype = "float8": only where a head drafts on a GPU, by rule = "coupled"; use "auto" or '
            '"model"'
        )
    num_blocks = -(-(config.engine.kv_tokens or default_kv_tokens(config, target.config)) // BLOCK)
    eagle3 = Eagle3Drafter(
        head,
        target.embed,
        build_sampler(target),
        num_blocks,
        coupled=speculation.rule == "coupled",
        min_confidence=speculation.min_confidence,
    )
    if speculation.method == "eagle3":
        return eagle3
    from paceline.drafters.hybrid import HybridDrafter

    return HybridDrafter(build_history(config), eagle3, head_cost(head, target.config), speculation.hybrid_choice)


def _ahead(config: Config, target: Decoder, head: Eagle3Head) -> Drafter:
    """Where whole steps are computed on the device, a head drafts there too."""
    from paceline.drafters.ahead import Eagle3Ahead
    from paceline.drafters.hybrid import HybridAhead
    from paceline.model.cuda.float8 import settle_dtype

    _check_length(config)
    settle_dtype(head, config.speculation.head_dtype)
    eagle3 = Eagle3Ahead(head)
    if config.speculation.method == "eagle3":
        return eagle3
    cost = head_cost(head, target.config)
    return HybridAhead(build_history(config), eagle3, cost, config.speculation.hybrid_choice)


def _history_ahead(config: Config) -> Drafter:
    """There history is read on the device as well."""
    from paceline.drafters.ahead import HistoryAhead
    from paceline.speculation.library import Library

    _check_length(config)
    s = config.speculation
    return HistoryAhead(Library(s.suffix_max_versions, s.suffix_max_bytes), s.suffix_recency, s.suffix_min_match)


def _check_length(config: Config) -> None:
    from paceline.model.cuda.slots import MAX_DRAFT

    lengths = config.speculation.num_speculative_tokens
    longest = lengths if isinstance(lengths, int) else max(lengths.values())
    if longest > MAX_DRAFT:
        raise ValueError(f"speculation.num_speculative_tokens = {longest}: a GPU drafts at most {MAX_DRAFT}; lower it")


def build_model_free(config: Config) -> Drafter | None:
    """For one of MODEL_FREE."""
    speculation = config.speculation
    if speculation.method == "none":
        return None
    if speculation.method == "suffix":
        return build_history(config)
    from paceline.drafters.ngram import NgramDrafter

    assert speculation.method == "ngram"
    return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)


def build_history(config: Config) -> SuffixDrafter:
    from paceline.drafters.suffix import SuffixDrafter

    s = config.speculation
    return SuffixDrafter(s.suffix_min_match, s.suffix_max_bytes, s.suffix_max_versions, s.suffix_recency)


def drafting_head(config: Config, drafter: Any) -> Eagle3Head | None:
    """The EAGLE-3 head that this config's drafter drafts with, as it is now."""
    if config.speculation.method not in ADAPTABLE:
        return None
    head: Eagle3Head = drafter.head if config.speculation.method == "eagle3" else drafter.head.head
    return head


def drafting_cost(config: Config, drafter: Any, target: ModelConfig) -> float:
    """What a token takes that the drafter's own model drafts, in steps of the target; 0 where it has none."""
    if config.speculation.method == "draft_model":
        return _weights(drafter.paged.decoder.config) / _weights(target)
    head = drafting_head(config, drafter)
    return head_cost(head, target) if head is not None else 0.0


def build_head(config: Config, target: ModelConfig, dtype: torch.dtype | None = None) -> Eagle3Head:
    """The EAGLE-3 head that speculation.head names, or the one shipped for the model; plain, where the model is, and as
    precise unless `dtype` is given."""
    import torch

    from paceline.model.head_files import load_head, resolve_head
    from paceline.model.store import resolve
    from paceline.model.weights import checkpoint_checksum

    directory = resolve_head(config.speculation.head, config.model.name)
    return load_head(
        directory,
        target,
        dtype=dtype or getattr(torch, config.model.dtype),
        device=config.model.device,
        target_checksum=checkpoint_checksum(resolve(config.model.name)),
        any_target=config.speculation.any_target,
    )


def recorded_acceptance(config: Config, temperature: float) -> float | None:
    """How often the first token of the head's drafts was accepted, as its provenance file records it for this way of
    drafting and this temperature; None where nothing comparable is on record. A head that is used for another target
    than its own (speculation.any_target) has no comparable record."""
    from paceline.model.head_files import resolve_head
    from paceline.model.provenance import read_provenance

    speculation = config.speculation
    if speculation.method not in ADAPTABLE or speculation.any_target:
        return None
    provenance = read_provenance(resolve_head(speculation.head, config.model.name))
    if provenance is None:
        return None
    kind = "coupled" if speculation.rule == "coupled" else "sampled"
    return provenance.first_position_rate(temperature, "greedy" if config.engine.kind == "vllm" else kind)


def pack_head(head: Eagle3Head, target: Decoder) -> Eagle3Head:
    """For inference beside this target: packed if the target is."""
    head.requires_grad_(False)
    if target.embed.panels is not None:
        from paceline.model.kernels import pack_for_inference

        pack_for_inference(head)
    return head


def head_cost(head: Eagle3Head, target: ModelConfig) -> float:
    """What a drafted token costs, in steps of the target, where both are bound by reading their weights: as on a CPU,
    or on a GPU with few rows."""
    c = head.config.layer
    own = c.hidden_size * c.head_dim * (3 * c.num_heads + 4 * c.num_kv_heads) + 3 * c.hidden_size * c.intermediate_size
    share = 1.0 if head.lm_head.rounded is None else 1 / head.dtype.itemsize  # of the bytes
    return share * (own + head.config.draft_vocab_size * c.hidden_size) / _weights(target)


def _weights(model: ModelConfig) -> int:
    """Numbers that a step reads."""
    heads = 2 * (model.num_heads + model.num_kv_heads)
    per_layer = model.hidden_size * model.head_dim * heads + 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * per_layer + model.vocab_size * model.hidden_size


def _draft_decoder(config: Config, target: Decoder, tokenizer: Any) -> Decoder:
    """The model that speculation.draft_model names; "layers:N" is the target's own first N layers."""
    from paceline.model.decoder import first_layers
    from paceline.model.store import load_tokenizer, resolve

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
    draft = build_decoder(config, directory)
    if draft.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"speculation.draft_model = {name!r} has {draft.config.vocab_size} tokens, the target "
            f"{target.config.vocab_size}: a draft model must share the target's vocabulary"
        )
    if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"speculation.draft_model = {name!r}: its tokenizer gives other ids than the target's; a draft model must "
            "share the target's vocabulary"
        )
    return draft
