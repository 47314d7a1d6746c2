"""The emitting rows of a step as arrays, which are kept from step to step while the rows stay the same."""

from __future__ import annotations

import numpy as np

from paceline.replay.round_state import RoundState, TokenViews
from paceline.speculation.batch import Load, Rows


class EmittingRows:
    def __init__(self, round_state: RoundState, requests: np.ndarray) -> None:
        self.round_state, self.requests = round_state, requests
        self.ids = requests + round_state.first_id
        self.positions = round_state.positions[requests]
        self.num_left = (round_state.end[requests] - self.positions).astype(np.int32)  # tokens that it will emit
        # Tokens that it may still emit before its length limit, without the last one.
        self.draft_limits = (round_state.limit_end[requests] - self.positions - 1).astype(np.int32)
        self.context = int((self.positions - round_state.round.start[requests]).sum())
        self.sampling = [round_state.sampling[i] for i in requests.tolist()]
        self.tokens = TokenViews(round_state, requests)
        self.noise_keys = np.zeros(len(requests), np.uint64)
        self.zeros, self.ones = np.zeros(len(requests), np.int32), np.ones(len(requests), np.int32)

    def __len__(self) -> int:
        return len(self.requests)

    def view(self, version: int, load: Load, draft_budget: int) -> Rows:
        return Rows(
            self.ids, self.tokens, self.noise_keys, self.sampling, version, load,
            draft_budget=draft_budget, draft_limits=self.draft_limits,
        )  # fmt: skip

    def advance(self, num: np.ndarray, num_total: int) -> None:
        """Row i emitted num[i] tokens, num_total in all."""
        self.positions += num
        self.num_left -= num
        self.draft_limits -= num
        self.context += num_total
        self.round_state.positions[self.requests] = self.positions

    def without(self, finished: np.ndarray) -> EmittingRows:
        return EmittingRows(self.round_state, self.requests[~finished])
