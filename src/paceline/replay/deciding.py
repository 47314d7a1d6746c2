"""The rows of a step that decide tokens, as columns that are carried from step to step while they are the same."""

from __future__ import annotations

import numpy as np

from paceline.replay.tape import Tape, Texts
from paceline.speculation.batch import Load, Rows
from paceline.types import SamplingParams


class Deciding:
    def __init__(self, tape: Tape, requests: np.ndarray, sampling: list[SamplingParams]) -> None:
        self.tape, self.requests, self.all_sampling = tape, requests, sampling
        self.ids = requests + tape.first_id
        self.place = tape.place[requests]
        self.togo = (tape.end[requests] - self.place).astype(np.int32)  # tokens that it will emit
        self.left = (tape.limit_end[requests] - self.place - 1).astype(np.int32)  # that it may, before the last
        self.context = int((self.place - tape.round.start[requests]).sum())
        self.sampling = [sampling[i] for i in requests.tolist()]
        self.texts = Texts(tape, requests)
        self.noise_keys = np.zeros(len(requests), np.uint64)
        self.nothing, self.one = np.zeros(len(requests), np.int32), np.ones(len(requests), np.int32)

    def __len__(self) -> int:
        return len(self.requests)

    def view(self, version: int, load: Load, draft_budget: int) -> Rows:
        return Rows(
            self.ids, self.texts, self.noise_keys, self.sampling, version, load,
            draft_budget=draft_budget, draft_limits=self.left,
        )  # fmt: skip

    def advance(self, num: np.ndarray, num_all: int) -> None:
        """Row i emitted num[i] tokens, num_all in all."""
        self.place += num
        self.togo -= num
        self.left -= num
        self.context += num_all
        self.tape.place[self.requests] = self.place

    def without(self, gone: np.ndarray) -> Deciding:
        return Deciding(self.tape, self.requests[~gone], self.all_sampling)
