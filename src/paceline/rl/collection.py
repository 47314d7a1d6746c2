"""A collection: groups of samples from their start to their scores."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass

from paceline.rl.episode import Episode
from paceline.tasks.rewards import Score
from paceline.types import Completion, Group, Request, SamplingParams


@dataclass(slots=True)
class Collected:
    groups: list[Group]
    requests: list[Request]  # all submitted ones, in order; an audit submits them again
    completions: list[Completion]  # in the order of `requests`


class Collection:
    """Groups that are being collected: see `Collector.begin`."""

    def __init__(self, when: str, episodes: list[list[Episode]], sampling: SamplingParams, seed: object) -> None:
        self.when, self.episodes, self.sampling, self.seed = when, episodes, sampling, seed
        self.num_samples = sum(map(len, episodes))
        self.requests: list[Request] = []
        self.completions: dict[int, Completion] = {}
        # By place of the group: the episodes of each call of the rewarder, and their scores.
        self.calls: list[list[tuple[list[Episode], Future[list[Score]]]]] = [[] for _ in episodes]
        self._unfinished = {id(episode): i for i, group in enumerate(episodes) for episode in group}
        self._num_unfinished = [len(group) for group in episodes]

    @property
    def num_generated(self) -> int:
        """Samples."""
        return self.num_samples - len(self._unfinished)

    @property
    def is_generated(self) -> bool:
        return not self._unfinished

    @property
    def futures(self) -> list[Future[list[Score]]]:
        return [future for calls in self.calls for _, future in calls]

    def max_tokens(self, episode: Episode) -> int:
        """Of one completion, over all turns of a trajectory."""
        return episode.problem.max_tokens or self.sampling.max_tokens

    def finish(self, episode: Episode) -> tuple[int, bool]:
        """Count an episode that has ended. The place of its group, and whether all of this group's episodes have."""
        i = self._unfinished.pop(id(episode))
        self._num_unfinished[i] -= 1
        return i, not self._num_unfinished[i]

    def scores(self, i: int) -> list[Score]:
        """Of all samples of a group that has ended."""
        found = {id(e): s for episodes, future in self.calls[i] for e, s in zip(episodes, future.result(), strict=True)}
        return [found[id(episode)] for episode in self.episodes[i]]

    def rewards(self, i: int) -> list[float] | None:
        """Of the samples of a group that could be scored; None if the group is not finished."""
        if self._num_unfinished[i] or not all(future.done() for _, future in self.calls[i]):
            return None
        return [score.reward for score in self.scores(i) if not math.isnan(score.reward)]
