"""Reference implementation of the processed distribution, and of the token that the noise draws from it.

It shares no code with `engine.logits_processor`, `model.sample.process` and the kernels, so that it does not repeat
their mistakes. P positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.model.sample import Stream, philox_words
from paceline.types import Request, SamplingParams


def processed_logprobs(logits_PV: Tensor, sampling: SamplingParams) -> Tensor:
    """Logprobs of the processed distribution, float64 [P, V] on the logits' device; -inf for truncated tokens."""
    rows = [_process(row, sampling) for row in logits_PV.double().cpu().numpy()]
    return torch.from_numpy(np.stack(rows)).to(logits_PV.device)


def changed_logits(
    logits_V: np.ndarray, sampling: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int],
    stop_ids: Collection[int],
) -> np.ndarray:  # fmt: skip
    """Logits after the parameters that come before the temperature, token by token. Bad words are token ids."""
    output = list(output_ids)
    changed = []
    for token, given in enumerate(logits_V.tolist()):
        z = given
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            z = -math.inf
        for word in sampling.bad_words:
            if (*output, token)[-len(word) :] == word:
                z = -math.inf
        if token in stop_ids and len(output) < sampling.min_tokens:
            z = -math.inf
        z += dict(sampling.logit_bias).get(token, 0.0)
        if token in prompt_ids or token in output:
            z = z / sampling.repetition_penalty if z > 0 else z * sampling.repetition_penalty
        z -= sampling.frequency_penalty * output.count(token)
        z -= sampling.presence_penalty * (token in output)
        changed.append(z)
    return np.array(changed)


def _process(logits_V: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    if sampling.temperature == 0:
        one_hot = np.full(len(logits_V), -np.inf)
        one_hot[logits_V.argmax()] = 0
        return one_hot
    z = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(z):
        z = np.where(z >= np.sort(z)[-sampling.top_k], z, -np.inf)
    if sampling.top_p < 1:
        order = np.argsort(-z, kind="stable")
        p = np.exp(_normalise(z[order]))
        before = np.concatenate([[0.0], np.cumsum(p)[:-1]])  # probability of all likelier tokens
        z[order[before >= sampling.top_p]] = -np.inf
    if sampling.min_p > 0:
        p = np.exp(_normalise(z))
        z = np.where(p >= sampling.min_p * p.max(), z, -np.inf)
    return _normalise(z)


def _normalise(z: np.ndarray) -> np.ndarray:
    highest = z.max()
    return z - (highest + np.log(np.exp(z - highest).sum()))


def race_scores(logprobs_PV: Tensor, request: Request, positions: np.ndarray) -> Tensor:
    """log p - log E of each token, with exponential noise E from the request's noise key: [P, V]. Rule `coupled` emits
    the token with the highest score. At temperature 0 there is no noise. Each row of `logprobs_PV` may be shifted by a
    constant."""
    if request.sampling.temperature == 0:
        return logprobs_PV
    keys = np.full(len(positions), request.noise_key, np.uint64)
    words = philox_words(keys, positions, Stream.SAMPLE, logprobs_PV.shape[-1], logprobs_PV.device)
    return logprobs_PV - torch.log(-torch.log1p(-(words.double() + 0.5) / 2**32))
