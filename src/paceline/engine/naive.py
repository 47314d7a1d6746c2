"""The engine's slow, obvious twin: one request after another, the whole sequence through the model for every token,
no KV, no batch, no draft. What it emits is what every engine must emit."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.engine.sequence import Detokenize, Sequence
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.sample import Sampler, SamplingArrays
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
        key = np.array([request.noise_key], np.uint64)
        while sequence.finish_reason is None:
            length = sequence.num_tokens
            tokens = torch.as_tensor(sequence.tokens, device=decoder.device).long()
            positions = torch.arange(length, device=decoder.device)
            hidden = decoder(tokens, positions, PackedAttention([length])).hidden
            draws = sampler.draw(
                decoder.logits(hidden[-1:]), key, np.array([length]), SamplingArrays.of([request.sampling])
            )
            start, count = sequence.num_tokens, sequence.take(draws.tokens.tolist(), detokenize)
            sequence.book(start, count, draws.logprobs, draws.raw_logprobs, 0, 0, 0, None)
        completions.append(sequence.completion())
    return completions
