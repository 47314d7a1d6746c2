"""An engine without a model: it emits scripted text, for one request a step, the last submitted first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from paceline.tasks.rewards import Sample, Score
from paceline.types import Completion, Provenance, Receipt, Request


class ScriptedEngine:
    """`script(request)`: the text that it emits. Weights are their version."""

    def __init__(self, script: Callable[[Request], str] = lambda request: "ab") -> None:
        self.script, self.version, self.max_model_len = script, 0, 200
        self.waiting: list[Request] = []
        self.submitted: list[Request] = []
        self.aborted: list[int] = []
        self.updates: list[tuple[int, str, int]] = []  # version, inflight, and how many requests waited then

    def submit(self, request: Request) -> None:
        if len(request.prompt_ids) > 200:
            raise ValueError("the context is full")
        self.waiting.append(request)
        self.submitted.append(request)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)
        self.waiting = [request for request in self.waiting if request.request_id != request_id]

    def step(self) -> list[Completion]:
        if not self.waiting:
            return []
        request = self.waiting.pop()
        ids = np.array(list(self.script(request).encode())[: request.sampling.max_tokens], np.int32)
        num = len(ids)
        versions = np.full(num, self.version, np.int32)
        where, no_source = np.full(num, Provenance.SAMPLED, np.uint8), np.full(num, 255, np.uint8)
        logprobs = -np.arange(1.0, num + 1)
        return [Completion(request, ids, logprobs, logprobs, versions, where, no_source, (), "stop")]

    def update_weights(self, weights: Iterable[Any], version: int, inflight: str) -> Receipt:
        self.version = version
        self.updates.append((version, inflight, len(self.waiting)))
        return Receipt(version, str(version), 0, 0, 0.0)

    def drain_trace(self) -> list[Any]:
        return []

    def reset_prefix_cache(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}


class Bytes:
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        return bytes(list(ids)).decode(errors="replace")


class ScriptedRewarder:
    """A rewarder: `reward_of(sample)` is its reward or its score, or a text with the reason why there is none."""

    num_parallel = 1
    by_sample = False
    sandbox = None

    def __init__(self, reward_of: Callable[[Sample], float | str | Score] = lambda sample: 1.0) -> None:
        self.reward_of = reward_of

    def score(self, samples: Iterable[Sample]) -> list[Score]:
        scores = []
        for sample in samples:
            found = self.reward_of(sample)
            if isinstance(found, Score):
                scores.append(found)
                continue
            failed = isinstance(found, str)
            scores.append(
                Score(float("nan"), {}, f"{sample.name}: {found}") if failed else Score(found, {"judge": found})
            )
        return scores
