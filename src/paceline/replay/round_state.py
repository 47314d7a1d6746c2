"""The round that is replayed, and the position of each request in its recorded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from paceline.replay.rounds import Round
from paceline.types import SamplingParams


class RoundState:
    """Request i of the round has the id first_id + i. Its next token is round.tokens[positions[i]]. Invariant:
    prompt_end <= positions <= end."""

    def __init__(self) -> None:
        self.first_id = self.num_requests = 0

    def set_round(self, recorded: Round) -> None:
        self.round = recorded
        self.first_id += self.num_requests
        self.num_requests = len(recorded)
        self.prompt_end = recorded.start + recorded.num_prompt
        self.end = recorded.start + recorded.num_total
        self.limit_end = recorded.start + recorded.limit
        self.positions = self.prompt_end.copy()
        self.num_computed = np.zeros(len(recorded), np.int64)  # tokens in the KV cache
        params: dict[int, SamplingParams] = {}
        max_tokens = (recorded.limit - recorded.num_prompt).tolist()
        self.sampling = [params.setdefault(num, SamplingParams(max_tokens=num)) for num in max_tokens]

    def next_tokens(self, positions: np.ndarray, k: int) -> np.ndarray:
        """The k recorded tokens from each position on; arbitrary tokens beyond a request's end: int32 [B, k]."""
        return self.round.tokens.take(positions[:, None] + np.arange(k), mode="clip")

    def prefix(self, i: int, num_tokens: int) -> np.ndarray:
        start = self.round.start[i]
        return self.round.tokens[start : start + num_tokens]


class TokenViews(Sequence[np.ndarray]):
    """`Rows.tokens`: the tokens of each request up to its position, sliced on access."""

    def __init__(self, round_state: RoundState, requests: np.ndarray) -> None:
        self.round_state, self.requests = round_state, requests

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, i: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, i: slice) -> list[np.ndarray]: ...
    def __getitem__(self, i: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        request, recorded = self.requests[i], self.round_state.round
        return recorded.tokens[recorded.start[request] : self.round_state.positions[request]]
