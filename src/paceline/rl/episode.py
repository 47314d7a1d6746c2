"""One sample on its way: a prompt, the policy's turns, what the environment says between them.

Tokens are never tokenised again: a further turn's prompt is the ids so far and those of the observation. What the
environment wrote is in the stream with mask false, so that the learner sees what the policy saw and trains on what the
policy chose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.engine.sequence import NOBODY
from paceline.tasks.rewards import Sample
from paceline.tasks.task import Env, Problem, Prompt
from paceline.types import Completion, Provenance, Request, Rollout, SamplingParams, noise_key


class Episode:
    def __init__(self, problem: Problem, group: int, sample: int, prompt: Prompt, prompt_ids: tuple[int, ...]) -> None:
        self.problem, self.group, self.sample = problem, group, sample
        self.prompt, self.prompt_ids = prompt, prompt_ids
        self.env: Env | None = None
        self.turns: list[Completion] = []
        self.observations: list[tuple[int, ...]] = []  # after each turn but the last
        self.env_reward: float | None = None
        self.failure: str | None = None
        self.text = ""

    @property
    def name(self) -> str:
        return f"{self.problem.name}, sample {self.sample}"

    @property
    def num_emitted(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def request(self, request_id: int, sampling: SamplingParams, seed: object) -> Request:
        """The next turn's. The noise is fresh for every (run, place in the data, sample, turn)."""
        ids = list(self.prompt_ids)
        for turn, observation in zip(self.turns, self.observations, strict=True):
            ids += [*turn.token_ids.tolist(), *observation]
        key = noise_key(seed, self.group, self.sample, len(self.turns))
        return Request(request_id, tuple(ids), sampling, key, self.problem.name)

    def rollout(self) -> Rollout:
        """What became of it; not scored yet."""
        if not self.turns:  # the environment failed before the policy said a word
            empty = np.empty(0, np.int32)
            return Rollout(
                self.sample, self.prompt_ids, empty, empty.astype(bool), empty.astype(np.float64), empty,
                empty.astype(np.uint8), empty.astype(np.uint8), (), "abort", 0, failure=self.failure,
            )  # fmt: skip
        drafters = tuple(dict.fromkeys(name for turn in self.turns for name in turn.drafters))
        parts: dict[str, list[np.ndarray]] = {
            name: [] for name in ("token_ids", "mask", "logprobs", "versions", "provenance", "sources")
        }

        def add(
            tokens: np.ndarray, mask: bool, logprobs: np.ndarray, versions: np.ndarray, *origin: np.ndarray
        ) -> None:
            values = (tokens, np.full(len(tokens), mask), logprobs, versions, *origin)
            for name, value in zip(parts, values, strict=True):
                parts[name].append(value)

        for turn, observation in zip(self.turns, [*self.observations, ()], strict=False):
            where = np.array([drafters.index(name) for name in turn.drafters] + [NOBODY], np.uint8)
            sources = where[np.minimum(turn.sources, len(where) - 1)]
            add(turn.token_ids, True, turn.logprobs.astype(np.float64), turn.versions, turn.provenance, sources)
            count = len(observation)
            add(
                np.array(observation, np.int32),
                False,
                np.zeros(count),
                np.full(count, turn.versions[-1], np.int32),
                np.full(count, Provenance.SAMPLED, np.uint8),
                np.full(count, NOBODY, np.uint8),
            )
        streams: dict[str, Any] = {name: np.concatenate(values) for name, values in parts.items()}
        return Rollout(
            sample=self.sample,
            prompt_ids=self.prompt_ids,
            **streams,
            drafters=drafters,
            finish_reason=self.turns[-1].finish_reason,
            num_turns=len(self.turns),
            num_drafts=sum(turn.num_drafts for turn in self.turns),
            num_draft_tokens=sum(turn.num_draft_tokens for turn in self.turns),
            num_accepted_tokens=sum(turn.num_accepted_tokens for turn in self.turns),
            text=self.text,
            failure=self.failure,
        )

    def to_score(self, step: int) -> Sample:
        return Sample(
            name=f"step {step}, {self.name}",
            prompt=self.prompt,
            completion=self.text,
            completion_ids=tuple(self.turns[-1].token_ids.tolist()),
            columns=self.problem.columns,
            env_reward=self.env_reward,
        )
