"""The composition root: configuration in, objects out. The only place that branches on a `kind`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from paceline.config import Config
from paceline.native import NativeUnavailable

if TYPE_CHECKING:
    from paceline.engine.engine import LocalEngine
    from paceline.model.config import ModelConfig
    from paceline.model.decoder import Decoder
    from paceline.model.paged import PagedDecoder
    from paceline.model.sample import Sampler
    from paceline.speculation.batch import Drafter


def build_engine(config: Config) -> LocalEngine:
    """A local engine with its model, tokenizer, drafter and policy."""
    import torch

    from paceline.engine.engine import LocalEngine
    from paceline.model.store import load_tokenizer, resolve
    from paceline.speculation.policy import StaticPolicy

    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    directory = resolve(config.model.name)
    tokenizer = load_tokenizer(directory)
    decoder = build_decoder(config, directory)
    sampler = build_sampler(decoder)
    return LocalEngine(
        build_paged(config, decoder),
        sampler=sampler,
        drafter=build_drafter(config, decoder, tokenizer),
        policy=StaticPolicy(config.speculation.num_speculative_tokens),
        rule=config.speculation.rule,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        prefix_sharing=config.engine.prefix_sharing,
        tokenizer=tokenizer,
    )


def build_decoder(config: Config, directory: Any) -> Decoder:
    """The model for inference: packed for the CPU kernels where they can run, plain torch elsewhere."""
    import torch

    from paceline.model.weights import load

    dtype, device = getattr(torch, config.model.dtype), config.model.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device = {device!r}: this machine has no CUDA device; use 'cpu'")
    if device == "cpu" and dtype.itemsize < 4:
        raise ValueError(f"model.dtype = {config.model.dtype!r}: on a CPU use 'float32' (or 'float64')")
    decoder = load(directory, dtype, device).requires_grad_(False)
    if config.engine.native and device == "cpu" and dtype == torch.float32:
        from paceline.model.kernels import pack_decoder

        try:
            pack_decoder(decoder)
        except NativeUnavailable as error:
            warnings.warn(f"engine.native: {error}\nGoing on in plain torch, several times slower.", stacklevel=2)
    return decoder


def build_sampler(decoder: Decoder) -> Sampler:
    from paceline.model.sample import Sampler

    return Sampler(native=decoder.embed.panels is not None)


def build_paged(config: Config, decoder: Decoder) -> PagedDecoder:
    from paceline.model.kv import BLOCK
    from paceline.model.paged import PagedDecoder

    num_tokens = config.engine.kv_tokens or default_kv_tokens(config, decoder.config)
    try:
        return PagedDecoder(decoder, -(-num_tokens // BLOCK))
    except (MemoryError, RuntimeError) as error:  # torch's own out-of-memory is a RuntimeError
        raise ValueError(
            f"engine.kv_tokens = {num_tokens}: no memory for that many tokens' KV; lower it ({str(error)[:80]})"
        ) from None


def default_kv_tokens(config: Config, model: ModelConfig) -> int:
    """Room for every row at the model's whole context or 4096 tokens each, but no more than 2 GiB; one whole context
    in any case."""
    each = min(model.max_positions, 4096)
    itemsize = {"float64": 8, "float32": 4}.get(config.model.dtype, 2)
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    return max(model.max_positions, min(config.engine.max_num_seqs * each, 2 * 2**30 // bytes_per_token))


def build_drafter(config: Config, target: Decoder, tokenizer: Any) -> Drafter | None:
    speculation = config.speculation
    if speculation.method == "none":
        return None
    if speculation.method == "ngram":
        from paceline.drafters.ngram import NgramDrafter

        return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    if speculation.method == "suffix":
        from paceline.drafters.suffix import SuffixDrafter

        return SuffixDrafter(min_match=speculation.suffix_min_match, max_bytes=speculation.suffix_max_bytes)
    from paceline.drafters.draft_model import DraftModelDrafter

    draft = _draft_decoder(config, target, tokenizer)
    return DraftModelDrafter(build_paged(config, draft), build_sampler(draft), coupled=speculation.rule == "coupled")


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
