"""Acceptance, watched from batch to batch: a drafter that fell behind costs speed, and it is seen.

Two alarms, for every kind of drafter: acceptance fell at a weight sync, or next to nothing that is drafted stands.
They are said when they begin, not again while they last. A batch of few drafts says nothing either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import Config

MIN_DRAFTS = 50  # of a batch, for its acceptance to mean something
DROP, FLOOR = "acceptance_drop_alarm", "acceptance_floor_alarm"


class Alarms:
    def __init__(self, config: Config) -> None:
        self.section, self.method = config.draft, config.speculation.method
        self.online = config.draft.online != "off"
        self.length: float | None = None  # the mean acceptance length of the last batch that had enough drafts
        self.version: int | None = None  # and the policy it was drafted for
        self.low = False

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
        return {"length": self.length, "version": self.version, "low": self.low}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.length, self.version, self.low = state["length"], state["version"], state["low"]
