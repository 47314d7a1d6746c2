"""The trajectories of a sample: its calls, joined where one extends another.

A call extends a trajectory if its prompt begins with all of the trajectory's ids. Then the trajectory grows by the ids
between them, with mask false, and by what the call sampled. A call that extends none begins a trajectory of its own: a
branch, whose whole prompt is not trained on. So every sampled token is in one trajectory, once.

Invariant: the trajectories and their order depend on the calls alone, not on when they were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paceline.engine.sequence import NO_SOURCE
from paceline.rl.calls import Call, Ids, extends
from paceline.rl.records import PER_TOKEN
from paceline.types import Completion, Provenance


class Trajectory:
    def __init__(self, prompt_ids: Ids) -> None:
        self.prompt_ids = self.ids = prompt_ids
        self.turns: list[Completion] = []
        self.gaps: list[Ids] = []  # the ids before each turn, after the turn before it

    def add(self, call: Call) -> None:
        assert call.completion is not None
        self.gaps.append(call.request.prompt_ids[len(self.ids) :])
        self.turns.append(call.completion)
        self.ids = call.ids

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for turn in self.turns for name in turn.drafters))

    def per_token(self) -> dict[str, np.ndarray]:
        """The fields of a Rollout that have an entry per token."""
        drafters = self.drafters
        parts: list[tuple[np.ndarray, ...]] = [tuple(np.empty(0, dtype) for dtype in PER_TOKEN.values())]
        version = 0
        for gap, turn in zip(self.gaps, self.turns, strict=True):
            values = (gap, False, 0.0, version, Provenance.SAMPLED, NO_SOURCE)
            per_token = zip(values, PER_TOKEN.values(), strict=True)
            parts.append(tuple(np.full(len(gap), value, dtype) for value, dtype in per_token))
            new_index = np.array([drafters.index(name) for name in turn.drafters] + [NO_SOURCE], np.uint8)
            sources = new_index[np.minimum(turn.sources, len(new_index) - 1)]
            mask, logprobs = np.ones(len(turn.token_ids), bool), turn.logprobs.astype(np.float64)
            parts.append((turn.token_ids, mask, logprobs, turn.versions, turn.provenance, sources))
            version = int(turn.versions[-1])
        return dict(zip(PER_TOKEN, map(np.concatenate, zip(*parts, strict=True)), strict=True))

    def fields(self, turn_rewards: Mapping[int, float]) -> dict[str, Any]:
        """The fields of a Rollout, without those of its sample. `turn_rewards`: by request id."""
        rewards = [turn_rewards.get(turn.request.request_id, 0.0) for turn in self.turns]
        return {
            "prompt_ids": self.prompt_ids,
            **self.per_token(),
            "drafters": self.drafters,
            "num_turns": len(self.turns),
            "turn_lengths": tuple(len(turn.token_ids) for turn in self.turns),
            "turn_rewards": tuple(rewards) if turn_rewards else (),
            "num_drafts": sum(turn.num_drafts for turn in self.turns),
            "num_draft_tokens": sum(turn.num_draft_tokens for turn in self.turns),
            "num_accepted_tokens": sum(turn.num_accepted_tokens for turn in self.turns),
        }


def in_order(calls: Iterable[Call]) -> list[Call]:
    """In an order that does not depend on when they were made; a call comes after those that it extends."""
    return sorted(calls, key=lambda call: (len(call.request.prompt_ids), call.request.prompt_ids, call.occurrence))


def trajectories(calls: Iterable[Call]) -> list[Trajectory]:
    """Of the calls that have an answer with tokens."""
    found: list[Trajectory] = []
    for call in in_order(call for call in calls if call.num_sampled):
        prompt_ids = call.request.prompt_ids
        extended = [trajectory for trajectory in found if extends(prompt_ids, trajectory.ids)]
        if extended:
            longest = max(extended, key=lambda trajectory: len(trajectory.ids))  # the first of equally long ones
        else:
            longest = Trajectory(prompt_ids)
            found.append(longest)
        longest.add(call)
    return found
