"""An episode: the prompt, the policy's turns, and the environment's observations between them.

Emitted tokens are never tokenized again: the prompt of the next turn is the ids so far plus the ids of the observation.
Observations are part of the rollout with mask false: the learner reads them and does not train on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.chat.messages import Prompt
from paceline.engine.sequence import NO_SOURCE
from paceline.rl.records import PER_TOKEN
from paceline.tasks.rewards import Sample
from paceline.tasks.task import Env, Problem
from paceline.types import Completion, Provenance, Request, Rollout, SamplingParams, noise_key


class Episode:
    def __init__(self, problem: Problem, group: int, sample: int, prompt: Prompt, prompt_ids: tuple[int, ...]) -> None:
        self.problem, self.group, self.sample = problem, group, sample
        self.prompt, self.prompt_ids = prompt, prompt_ids
        self.env: Env | None = None
        self.turns: list[Completion] = []
        self.observations: list[tuple[int, ...]] = []  # after each turn except the last
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
        """The request of the next turn. The noise key is unique to (seed, group, sample, turn)."""
        ids = list(self.prompt_ids)
        for turn, observation in zip(self.turns, self.observations, strict=True):
            ids += [*turn.token_ids.tolist(), *observation]
        key = noise_key(seed, self.group, self.sample, len(self.turns))
        return Request(request_id, tuple(ids), sampling, key, self.problem.name)

    def rollout(self) -> Rollout:
        """The rollout, without rewards. It has no tokens if the environment failed before the first turn."""
        drafters = tuple(dict.fromkeys(name for turn in self.turns for name in turn.drafters))
        parts: list[tuple[np.ndarray, ...]] = [tuple(np.empty(0, dtype) for dtype in PER_TOKEN.values())]
        for turn, observation in zip(self.turns, [*self.observations, ()], strict=False):
            new_index = np.array([drafters.index(name) for name in turn.drafters] + [NO_SOURCE], np.uint8)
            sources = new_index[np.minimum(turn.sources, len(new_index) - 1)]
            mask, logprobs = np.ones(len(turn.token_ids), bool), turn.logprobs.astype(np.float64)
            parts.append((turn.token_ids, mask, logprobs, turn.versions, turn.provenance, sources))
            values = (observation, False, 0.0, turn.versions[-1], Provenance.SAMPLED, NO_SOURCE)
            per_token = zip(values, PER_TOKEN.values(), strict=True)
            parts.append(tuple(np.full(len(observation), value, dtype) for value, dtype in per_token))
        streams: dict[str, Any] = dict(zip(PER_TOKEN, map(np.concatenate, zip(*parts, strict=True)), strict=True))
        return Rollout(
            sample=self.sample,
            prompt_ids=self.prompt_ids,
            **streams,
            drafters=drafters,
            finish_reason=self.turns[-1].finish_reason if self.turns else "abort",
            num_turns=len(self.turns),
            num_drafts=sum(turn.num_drafts for turn in self.turns),
            num_draft_tokens=sum(turn.num_draft_tokens for turn in self.turns),
            num_accepted_tokens=sum(turn.num_accepted_tokens for turn in self.turns),
            text=self.text,
            failure=self.failure,
        )

    def to_score(self, when: str) -> Sample:
        return Sample(
            name=f"{when}, {self.name}",
            prompt=self.prompt,
            completion=self.text,
            completion_ids=tuple(self.turns[-1].token_ids.tolist()),
            columns=self.problem.columns,
            env_reward=self.env_reward,
            task=self.problem.task,
        )
