"""Acceptance, watched from batch to batch: a drafter that fell behind costs speed, and it is seen.

Two alarms, for every kind of drafter: acceptance fell at a weight sync, or next to nothing that is drafted stands. A
third for EAGLE-3 heads: they accept far less than their provenance file records, which a sync cannot show where it was
so from the first step. Alarms are said when they begin, not again while they last. A batch of few drafts says nothing
either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config import Config
from paceline.types import Completion, Provenance, Rollout

MIN_DRAFTS = 50  # of a batch, for its acceptance to mean something
DROP, FLOOR, RECORD = "acceptance_drop_alarm", "acceptance_floor_alarm", "acceptance_record_alarm"
CHANCE = 4.0  # standard deviations below the record: once in 30,000 batches that are as good as it
HEAD = "eagle3"  # the name under which a head drafts, alone or in a hybrid


@dataclass(frozen=True, slots=True)
class FirstPositions:
    """How the first tokens of a head's drafts fared. Their acceptance rate depends neither on the draft length nor on
    how a policy chooses it, so that it can be compared with a record."""

    num: int
    num_accepted: int

    @staticmethod
    def of(samples: Iterable[Rollout | Completion]) -> FirstPositions:
        num = num_accepted = 0
        for sample in samples:
            if HEAD not in sample.drafters:
                continue
            # A draft begins with an accepted or a corrected token that follows no accepted one.
            accepted, corrected = (
                sample.provenance == origin for origin in (Provenance.ACCEPTED, Provenance.CORRECTED)
            )
            begins = (sample.sources == sample.drafters.index(HEAD)) & ~np.concatenate([[False], accepted[:-1]])
            num += int(((accepted | corrected) & begins).sum())
            num_accepted += int((accepted & begins).sum())
        return FirstPositions(num, num_accepted)

    def below(self, recorded: float, share: float, temperature: float) -> str | None:
        """What is to be said where less than this share of the recorded rate was accepted, and chance does not explain
        it."""
        rate = self.num_accepted / max(1, self.num)
        deviation = (recorded * (1 - recorded) / max(1, self.num)) ** 0.5
        if rate >= share * recorded or rate >= recorded - CHANCE * deviation:
            return None
        return (
            f"the head's first drafted token is accepted in {rate:.0%} of {self.num} drafts; its provenance.json "
            f"records {recorded:.0%} on its worst data at temperature {temperature:g}, and draft.alarm_record = "
            f"{share:g} of that is the least. Either it reads other hidden states than it was trained on (another "
            "model, other layers, a changed engine: run `paceline verify`), or the policy or the task is far from its "
            'training data: let it follow the policy (draft.online = "every"), or train one for this task (paceline '
            "train-draft)"
        )


class Alarms:
    def __init__(self, config: Config, recorded: float | None = None) -> None:
        """`recorded`: what the head's provenance file says of the first position, at this run's temperature."""
        self.recorded, self.temperature = recorded, config.sampling.temperature
        self.section, self.method = config.draft, config.speculation.method
        self.online = config.draft.online != "off"
        self.length: float | None = None  # the mean acceptance length of the last batch that had enough drafts
        self.version: int | None = None  # and the policy it was drafted for
        self.low = self.below = False

    def check(self, length: float | None, version: int | None) -> tuple[dict[str, bool], list[str]]:
        """The flags of a batch, and what is to be said. `length` is its mean acceptance length, None where it had too
        few drafts; `version` the policy's that generated it."""
        flags = {DROP: False, FLOOR: False}
        said: list[str] = []
        if length is None:
            return flags, said
        if self.length is not None and version != self.version:
            flags[DROP] = length < (1 - self.section.alarm_drop) * self.length
        if flags[DROP]:
            said.append(
                f"ALARM: acceptance fell at the weight sync to version {version}: mean length {self.length:.2f} -> "
                f"{length:.2f}, more than draft.alarm_drop = {self.section.alarm_drop:g}; {self._remedy('fell')}"
            )
        flags[FLOOR] = length < self.section.alarm_floor
        if flags[FLOOR] and not self.low:
            said.append(
                f"ALARM: drafts are wasted: mean acceptance length {length:.3f} < draft.alarm_floor = "
                f"{self.section.alarm_floor:g}; {self._remedy('low')}"
            )
        self.length, self.version, self.low = length, version, flags[FLOOR]
        return flags, said

    def check_record(self, first: FirstPositions) -> tuple[dict[str, bool], list[str]]:
        """The same for the first tokens of a head's drafts."""
        if first.num < MIN_DRAFTS or self.recorded is None:
            return {RECORD: False}, []
        said = first.below(self.recorded, self.section.alarm_record, self.temperature)
        begins, self.below = not self.below, said is not None
        return {RECORD: self.below}, [f"ALARM: {said}"] if said is not None and begins else []

    def _remedy(self, what: str) -> str:
        if self.method in ("eagle3", "hybrid"):
            if not self.online:
                return 'let the head follow the policy (draft.online = "every")'
            if what == "fell":
                return (
                    "its head does not follow the policy: where adaptation.loss falls, raise "
                    "draft.online_learning_rate or draft.online_tokens; where it rises, lower the rate"
                )
            return "train a head for this model and task (paceline train-draft), and name it in speculation.head"
        if what == "fell":
            return "if it stays so, draft less far (speculation.num_speculative_tokens)"
        return "raise speculation.min_confidence, take another speculation.method, or none"

    def state(self) -> dict[str, Any]:
        """What JSON can say."""
        return {"length": self.length, "version": self.version, "low": self.low, "below": self.below}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.length, self.version, self.low = state["length"], state["version"], state["low"]
        self.below = state["below"]
