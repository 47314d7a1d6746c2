"""Shared by tests: tiny models, a naive reference implementation of generation, and a check of KV blocks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from string import ascii_letters, digits
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

from paceline.engine.accept import VerificationResult
from paceline.engine.engine import LocalEngine
from paceline.engine.sequence import Sequence
from paceline.engine.sequence_table import SequenceTable
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.draft_head import DraftHead, Head
from paceline.model.dspark import DSparkHead, dspark_config, init_dspark
from paceline.model.eagle3 import Eagle3Head, head_config, init_head
from paceline.model.head_files import head_state
from paceline.model.kernels import pack_for_inference
from paceline.model.kv import BLOCK
from paceline.model.sample import Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.model.weights import checksum, init
from paceline.types import Request
from paceline.verify.table import Table


def tiny_config(**changes: object) -> ModelConfig:
    shape: dict[str, object] = {
        "family": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_positions": 256,
        "tie_embeddings": True,
        "eos_token_ids": (60,),
    }
    return ModelConfig(**(shape | changes))  # type: ignore[arg-type]


def head_checksum(head: DraftHead) -> str:
    return checksum(head_state(head))


def tiny_decoder(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: object) -> Decoder:
    """A decoder with random weights, scaled up so that distributions are neither flat nor certain."""
    decoder = init(tiny_config(**changes), seed, dtype)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(12)
    return decoder.requires_grad_(False)


class LetterTokenizer:
    """Decodes token i to the i-th letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def letter_tokenizer(vocab_size: int) -> Any:
    """A tokenizer of transformers with one letter or digit per token; the last token ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = (ascii_letters + digits)[: vocab_size - 1]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def naive_generate(
    table: Table, requests: list[Request], eos: tuple[int, ...], max_positions: int = 512
) -> list[list[int]]:
    """Reference implementation of an engine whose target is a table: plain decoding, one token per sequence and step.
    Each draw depends only on the request's noise key and the position."""
    sampler, decode = Sampler(), LetterTokenizer().decode
    sequences = [Sequence(request, 0, max_positions, eos) for request in requests]
    seq_table = SequenceTable(len(sequences))
    seq_table.add(*sequences)
    while live := [sequence for sequence in sequences if sequence.finish_reason is None]:
        logits = torch.from_numpy(np.stack([table.logits_after(sequence.tokens) for sequence in live]))
        keys = np.array([sequence.request.noise_key for sequence in live], np.uint64)
        positions = np.array([sequence.num_tokens for sequence in live])
        params = SamplingArrays.of([sequence.request.sampling for sequence in live])
        draws = sampler.draw(logits, keys, positions, params)
        none = np.zeros(len(live), np.int32)
        result = VerificationResult(draws.tokens[:, None], none, draws.logprobs[:, None], draws.raw_logprobs[:, None])
        slots = np.array([sequence.slot for sequence in live])
        seq_table.commit(slots, result, none, none.astype(np.uint8), 0, decode)
    return [sequence.emitted.tolist() for sequence in sequences]


def check_blocks(engine: LocalEngine) -> None:
    """Check that reference counts of KV blocks are right, that blocks being written are not shared, and that every
    other block is free."""
    pool = engine.paged.pool
    holders: Counter[int] = Counter()
    writable: Counter[int] = Counter()
    for sequence in engine.scheduler.running:
        holders.update(sequence.table.blocks)
        writable.update(sequence.table.blocks[sequence.num_computed // BLOCK :])
        assert len(sequence.table.blocks) * BLOCK >= sequence.num_computed
    for sequence in engine.scheduler.waiting:
        assert not sequence.table.blocks
    assert [holders[b] for b in range(pool.num_blocks)] == pool.ref_counts
    assert all(holders[block] == 1 for block in writable), "a block that is being written is shared"
    assert sum(1 for n in pool.ref_counts if n == 0) == pool.num_free, "a block is neither used nor free"


def tiny_head(decoder: Decoder, draft_vocab_size: int = 41, seed: int = 3, **changes: object) -> Eagle3Head:
    """A random EAGLE-3 head for a tiny decoder. A reduced vocabulary leaves out every third token."""
    config = replace(head_config(decoder.config, draft_vocab_size, (1, 2, 3)), **changes)  # type: ignore[arg-type]
    ids = tiny_draft_ids(decoder, draft_vocab_size)
    return as_tiny(decoder, init_head(config, ids, seed=seed, dtype=decoder.dtype, device=decoder.device))


def tiny_dspark(decoder: Decoder, draft_vocab_size: int = 41, seed: int = 3, **changes: object) -> DSparkHead:
    config = dspark_config(decoder.config, draft_vocab_size, (1, 2, 3), markov_rank=4)
    config = replace(config, **changes)  # type: ignore[arg-type]
    ids = tiny_draft_ids(decoder, draft_vocab_size)
    return as_tiny(decoder, init_dspark(config, ids, seed=seed, dtype=decoder.dtype, device=decoder.device))


def tiny_draft_ids(decoder: Decoder, draft_vocab_size: int) -> torch.Tensor:
    every = range(decoder.config.vocab_size)
    return torch.tensor(list(every) if draft_vocab_size == len(every) else [i for i in every if i % 3 != 1])


def as_tiny(decoder: Decoder, head: Head) -> Head:
    """With large weights, for inference beside this decoder."""
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2 and len(parameter) > 3:
                parameter.mul_(12)
    head.requires_grad_(False)
    if decoder.embed.panels is not None:
        pack_for_inference(head)
    return head


@contextmanager
def kernel_modules(**paths: str) -> Iterator[SimpleNamespace]:
    """Import modules that define Triton kernels, by their paths in the package. Without Triton, a mock replaces it."""
    names = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda")
    missing = () if find_spec("triton") else names
    sys.modules.update({name: MagicMock() for name in missing})
    before = set(sys.modules)
    yield SimpleNamespace(**{name: import_module(f"paceline.{path}") for name, path in paths.items()})
    # Remove only modules that were imported with the mock: others would be imported twice, with two copies of classes.
    with_kernels = ("paceline.model.cuda", "paceline.engine.graph_runner")
    new = [name for name in set(sys.modules) - before if name.startswith(with_kernels)]
    for name in [*(new if missing else ()), *missing]:
        sys.modules.pop(name)
