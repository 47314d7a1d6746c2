"""The round that plays, and how far each of its requests has come. What lies ahead on it is what the model will say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from paceline.replay.rounds import Round


class Tape:
    """Request i of the round has the id first_id + i; its next token lies at place[i]. Always:
    prompt_end <= place <= end."""

    def __init__(self) -> None:
        self.first_id = self.num_requests = 0

    def put(self, recorded: Round) -> None:
        self.round = recorded
        self.first_id += self.num_requests
        self.num_requests = len(recorded)
        self.prompt_end = recorded.start + recorded.num_prompt
        self.end = recorded.start + recorded.num_total
        self.limit_end = recorded.start + recorded.limit
        self.place = self.prompt_end.copy()
        self.num_computed = np.zeros(len(recorded), np.int64)  # of the prompt; once a request decides, all but one

    def ahead(self, place: np.ndarray, k: int) -> np.ndarray:
        """k tokens from each place on, beyond a request's end whatever comes: int32 [B, k]."""
        return self.round.tokens.take(place[:, None] + np.arange(k), mode="clip")

    def beginning(self, i: int, num_tokens: int) -> np.ndarray:
        start = self.round.start[i]
        return self.round.tokens[start : start + num_tokens]


class Texts(Sequence[np.ndarray]):
    """`Rows.tokens`, cut from the tape only where a drafter looks."""

    def __init__(self, tape: Tape, requests: np.ndarray) -> None:
        self.tape, self.requests = tape, requests

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, i: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, i: slice) -> list[np.ndarray]: ...
    def __getitem__(self, i: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        request, tape = self.requests[i], self.tape
        return tape.round.tokens[tape.round.start[request] : tape.place[request]]
