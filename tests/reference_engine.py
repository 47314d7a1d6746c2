"""The reference implementation of an engine: one request after another, the whole sequence through the model for every
token, without KV cache, batch or draft. Every engine must emit what it emits."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.engine.accept import VerificationResult
from paceline.engine.sequence import Detokenize, Sequence
from paceline.engine.sequence_table import SequenceTable
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.sample import Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.types import Completion, Request, with_noise_key


@torch.inference_mode()
def generate(
    decoder: Decoder, requests: Seq[Request], detokenize: Detokenize | None = None, sampler: Sampler | None = None
) -> list[Completion]:
    sampler = sampler or Sampler()
    completions = []
    for number, request in enumerate(requests):
        request = with_noise_key(request, 0, number)
        sequence = Sequence(request, 0, decoder.config.max_positions, decoder.config.eos_token_ids)
        table, slots, none = SequenceTable(1), np.zeros(1, np.int64), np.zeros(1, np.int32)
        table.add(sequence)
        key = np.array([request.noise_key], np.uint64)
        while sequence.finish_reason is None:
            length = sequence.num_tokens
            tokens = torch.as_tensor(sequence.tokens, device=decoder.device).long()
            positions = torch.arange(length, device=decoder.device)
            hidden = decoder(tokens, positions, PackedAttention([length])).hidden
            draws = sampler.draw(
                decoder.logits(hidden[-1:]), key, np.array([length]), SamplingArrays.of([request.sampling])
            )
            result = VerificationResult(
                draws.tokens[:, None], none, draws.logprobs[:, None], draws.raw_logprobs[:, None]
            )
            table.commit(slots, result, none, none.astype(np.uint8), 0, detokenize)
        completions.append(sequence.completion())
    return completions
