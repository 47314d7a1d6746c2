"""A sampler that draws with the kernels of CUDA graphs, for rows that run without one: in both cases a token and its
logprobs have the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.model.cuda.sample import draw
from paceline.model.cuda.truncate import truncate
from paceline.model.sample import Draws, Sampler, Stream
from paceline.model.sampling_arrays import SamplingArrays


@dataclass(slots=True)
class _Params:
    """Of each position."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class CudaSampler(Sampler):
    def draw(
        self,
        logits_PV: Tensor,
        keys: np.ndarray,
        positions: np.ndarray,
        params: SamplingArrays,
        stream: int = Stream.SAMPLE,
        margins: bool = False,
    ) -> Draws:
        assert not margins, "only heads need margins, and they draw in the graph"
        device = logits_PV.device
        on_device = partial(torch.as_tensor, device=device)
        of_positions = _Params(
            on_device(params.temperature), on_device(params.top_k.astype(np.int32)), on_device(params.top_p),
            on_device(params.min_p),
        )  # fmt: skip
        truncation = None
        if ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)).any():
            truncation = truncate(
                logits_PV, torch.arange(len(keys), dtype=torch.int32, device=device), of_positions
            )  # fmt: skip
        draws = draw(
            logits_PV, on_device(keys.view(np.int64)), on_device(positions), of_positions.temperature, stream,
            truncation=truncation, fp_fusion=False,
        )  # fmt: skip
        return Draws(*(each.cpu().numpy() for each in (draws.tokens, draws.logprobs, draws.raw_logprobs)))
