"""Paceline's history drafter as a proposer of vLLM (`custom_class`).

vLLM passes rows without request ids; the proposer reads them from the model runner. A request carries its
problem and the policy version in its sampling parameters. The proposer sees every token when it is sampled, so that
other requests of the problem use it at once and the engine sends nothing to a worker while it decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.cluster.vllm_names import HISTORY_SETTINGS, PROBLEM, VERSION
from paceline.drafters.suffix import SuffixDrafter
from paceline.speculation.batch import Commits, Rows
from paceline.types import Request


@dataclass(slots=True)
class _RunningRequest:
    request_id: int
    num_observed: int  # tokens that the drafter has seen, with the prompt
    limit: int  # maximum number of tokens, with the prompt


class HistoryProposer:
    def __init__(self, vllm_config: Any) -> None:
        self.drafter = SuffixDrafter(**vllm_config.additional_config[HISTORY_SETTINGS])
        self._draft_length: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = vllm_config.model_config.max_model_len
        self.runner: Any = None  # vLLM's model runner, once the engine has started
        self._running: dict[str, _RunningRequest] = {}  # by vLLM's request id
        self._num_started = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this; a history drafter has no model."""

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Only between requests."""
        self._end(list(self._running))
        self.drafter.load_state_dict(state)

    def propose(
        self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Row i has token_ids[i, :num_tokens[i]], with the newly sampled tokens at its end. Nothing is sampled for a
        row that is still in its prefill."""
        drafts: list[list[int]] = [[] for _ in sampled]
        if self.runner is None:  # vLLM's dummy runs at startup
            return drafts
        self._end([vllm_id for vllm_id in self._running if vllm_id not in self.runner.requests])
        rows = [row for row, tokens in enumerate(sampled) if tokens]
        if not rows:
            return drafts
        vllm_ids = self.runner.input_batch.req_ids
        running = [self._running.get(vllm_ids[row]) or self._begin(vllm_ids[row]) for row in rows]
        request_ids = np.array([each.request_id for each in running], np.int64)
        new = [token_ids[row, each.num_observed : num_tokens[row]] for row, each in zip(rows, running, strict=True)]
        num_new = np.array([len(tokens) for tokens in new], np.int32)
        emitted = np.zeros((len(rows), max(1, int(num_new.max()))), np.int32)
        for i, tokens in enumerate(new):
            emitted[i, : len(tokens)] = tokens
            running[i].num_observed += len(tokens)
        zeros = np.zeros(len(rows), np.int32)
        self.drafter.observe(Commits(request_ids, emitted, num_new, zeros, zeros))
        num_left = np.array([each.limit - each.num_observed for each in running], np.int32)
        caps = np.clip(num_left - 1, 0, self._draft_length).astype(np.int32)
        if caps.any():
            found = self.drafter.propose(Rows(request_ids, (), np.zeros(len(rows), np.uint64), ()), caps)
            for i, row in enumerate(rows):
                drafts[row] = found.tokens[i, : found.num[i]].tolist()
        return drafts

    def _begin(self, vllm_id: str) -> _RunningRequest:
        state = self.runner.requests[vllm_id]
        prompt, extra_args = tuple(state.prompt_token_ids), state.sampling_params.extra_args or {}
        self._num_started += 1
        request = Request(self._num_started, prompt, problem=extra_args.get(PROBLEM))
        self.drafter.begin(request, extra_args.get(VERSION, 0))
        limit = min(len(prompt) + state.sampling_params.max_tokens, self._max_length)
        running = self._running[vllm_id] = _RunningRequest(self._num_started, len(prompt), limit)
        return running

    def _end(self, vllm_ids: Sequence[str]) -> None:
        for vllm_id in vllm_ids:
            self.drafter.end(self._running.pop(vllm_id).request_id)
