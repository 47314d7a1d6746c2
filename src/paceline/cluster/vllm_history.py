"""Our history drafter where vLLM lets others propose: `custom_class`.

vLLM hands over rows without saying whose they are; the worker's own lists do (`meet`). A request carries its problem
and the policy's version in its sampling parameters, and every token is seen when it is sampled, so that siblings
profit at once and nothing is sent to a worker while it decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.cluster.vllm_names import PROBLEM, SETTINGS, VERSION
from paceline.drafters.suffix import SuffixDrafter
from paceline.speculation.batch import Commits, Rows
from paceline.types import Request


@dataclass(slots=True)
class _Live:
    request_id: int
    num_seen: int  # of its tokens, prompt included
    limit: int  # tokens in all, at most


class HistoryProposer:
    def __init__(self, vllm_config: Any) -> None:
        self.drafter = SuffixDrafter(**vllm_config.additional_config[SETTINGS])
        self._draft_length: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = vllm_config.model_config.max_model_len
        self._runner: Any = None
        self._live: dict[str, _Live] = {}
        self._num_begun = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def meet(self, runner: Any) -> None:
        self._runner = runner

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Only between requests."""
        self._end_all()
        self.drafter.restore(state)

    def propose(
        self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Row i has token_ids[i, :num_tokens[i]], the newly sampled ones at its end; none where a prompt isn't through
        yet."""
        drafts: list[list[int]] = [[] for _ in sampled]
        if self._runner is None:  # vLLM tries itself out before anybody asks for anything
            return drafts
        self._end_gone()
        rows = [row for row, tokens in enumerate(sampled) if tokens]
        if not rows:
            return drafts
        names = self._runner.input_batch.req_ids
        live = [self._live.get(names[row]) or self._begin(names[row]) for row in rows]
        request_ids = np.array([each.request_id for each in live], np.int64)
        new = [token_ids[row, each.num_seen : num_tokens[row]] for row, each in zip(rows, live, strict=True)]
        num_new = np.array([len(tokens) for tokens in new], np.int32)
        said = np.zeros((len(rows), max(1, int(num_new.max()))), np.int32)
        for i, tokens in enumerate(new):
            said[i, : len(tokens)] = tokens
            live[i].num_seen += len(tokens)
        none = np.zeros(len(rows), np.int32)
        self.drafter.observe(Commits(request_ids, said, num_new, none, none))
        left = np.array([each.limit - each.num_seen for each in live], np.int32)
        caps = np.clip(left - 1, 0, self._draft_length).astype(np.int32)
        if caps.any():
            found = self.drafter.propose(Rows(request_ids, (), np.zeros(len(rows), np.uint64), ()), caps)
            for i, row in enumerate(rows):
                drafts[row] = found.tokens[i, : found.num[i]].tolist()
        return drafts

    def _begin(self, name: str) -> _Live:
        state = self._runner.requests[name]
        prompt, told = tuple(state.prompt_token_ids), state.sampling_params.extra_args or {}
        self._num_begun += 1
        request = Request(self._num_begun, prompt, problem=told.get(PROBLEM))
        self.drafter.begin(request, told.get(VERSION, 0))
        limit = min(len(prompt) + state.sampling_params.max_tokens, self._max_length)
        live = self._live[name] = _Live(self._num_begun, len(prompt), limit)
        return live

    def _end_gone(self) -> None:
        for name in [name for name in self._live if name not in self._runner.requests]:
            self.drafter.end(self._live.pop(name).request_id)

    def _end_all(self) -> None:
        while self._live:
            self.drafter.end(self._live.popitem()[1].request_id)
