"""Acceptance by depth: how many tokens of the completion come before a draft. Drafters that were trained on short
completions may be accepted less, the longer a completion gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.types import Completion, Provenance, Rollout

DEPTHS = (0, 64, 256, 1024, 4096)  # tokens before a draft: where ranges start
NUM_DEVIATIONS = 4.0  # standard deviations: one false alarm in 30,000 batches


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """By range of depths."""

    num_drafts: np.ndarray  # int64 [R]
    num_accepted: np.ndarray  # int64 [R], tokens

    @staticmethod
    def of(samples: Iterable[Rollout | Completion], drafters: Sequence[str] | None = None) -> DepthCounts:
        """Of the drafts of these drafters; None: of all."""
        num_drafts, num_accepted = (np.zeros(len(DEPTHS), np.int64) for _ in range(2))
        for sample in samples:
            begins, accepted = drafts_of(sample.provenance)
            if drafters is not None:
                is_theirs = np.isin(sample.sources, [i for i, name in enumerate(sample.drafters) if name in drafters])
                begins, accepted = begins & is_theirs, accepted & is_theirs
            at = np.flatnonzero(begins)
            if not len(at):
                continue
            of_draft = np.searchsorted(DEPTHS, at, side="right") - 1
            num_drafts += np.bincount(of_draft, minlength=len(DEPTHS))
            draft = np.cumsum(begins)[accepted] - 1
            num_accepted += np.bincount(of_draft[draft], minlength=len(DEPTHS))
        return DepthCounts(num_drafts, num_accepted)

    def lengths(self) -> dict[str, float]:
        """The mean acceptance length of each range that has drafts, by where it starts."""
        counts = zip(DEPTHS, self.num_drafts.tolist(), self.num_accepted.tolist(), strict=True)
        return {str(start): 1 + accepted / num for start, num, accepted in counts if num}

    def decay_message(self, share: float, min_drafts: int) -> str | None:
        """A message if a range accepts significantly fewer tokens per draft than the first one, by at least `share`."""
        enough = np.flatnonzero(self.num_drafts >= min_drafts)
        if not len(enough) or enough[0]:
            return None
        rates = self.num_accepted[enough] / self.num_drafts[enough]
        variances = rates * (1 + rates) / self.num_drafts[enough]  # of a geometric distribution
        for i in range(1, len(enough)):
            gap = rates[0] - rates[i]
            if rates[i] < (1 - share) * rates[0] and gap > NUM_DEVIATIONS * (variances[0] + variances[i]) ** 0.5:
                return (
                    f"after {DEPTHS[enough[i]]} tokens of a completion {rates[i]:.2f} draft tokens are accepted at a "
                    f"time, at its beginning {rates[0]:.2f}; draft.alarm_depth = {share:g} is the largest share that "
                    "may be lost. Train the head on completions as long as these (draft.max_length), or online "
                    '(draft.online = "every")'
                )
        return None


def drafts_of(provenance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each token, whether a draft begins with it, and whether it is an accepted draft token. A draft begins with an
    accepted or a corrected token that does not follow an accepted one."""
    accepted, corrected = (provenance == origin for origin in (Provenance.ACCEPTED, Provenance.CORRECTED))
    return (accepted | corrected) & ~np.concatenate([[False], accepted[:-1]]), accepted
