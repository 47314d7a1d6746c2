"""The alarms of a step, by their key in metrics.jsonl. A message tells the user what to do.

- acceptance_drop_alarm: acceptance drops at a weight sync. Each drop is reported.
- acceptance_floor_alarm: hardly any draft token is accepted. Reported when it starts, and not again while it lasts.
- acceptance_record_alarm: a head accepts far less than its provenance file records; this also finds heads that
  fit badly from the first step on. Reported when it starts, too.
- reward_failure_alarm: rewards failed for a larger share of samples than reward.max_failures. Reported when it starts.
- zero_advantages_alarm: all advantages are zero, so rewards do not change the policy. Reported the first, the tenth,
  the hundredth … time; the first time only as a note, if problems differ in their rewards.

The first three ignore batches with few drafts. The trainer has one more, mismatch_alarm. Skipped optimizer steps are
counted, not flagged: num_skipped_optimizer_steps. Each RL step with some is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config import ARCHITECTURES, HEAD_METHODS, Config
from paceline.rl.depth import DepthCounts, drafts_of
from paceline.types import Completion, Group, Rollout, first_branches

if TYPE_CHECKING:  # the learner imports torch
    from paceline.rl.learner import UpdateReport

MIN_DRAFTS = 50  # in a batch, to measure its acceptance
DROP, FLOOR, RECORD = "acceptance_drop_alarm", "acceptance_floor_alarm", "acceptance_record_alarm"
DEPTH = "acceptance_depth_alarm"
NUM_DEVIATIONS = 4.0  # standard deviations below the record: one false alarm in 30,000 batches
SKIPPED_REMEDY = "Lower learner.learning_rate, or look for rewards and logprobs out of range"


@dataclass(frozen=True, slots=True)
class FirstPositions:
    """Acceptance of the first tokens of a head's drafts. It does not depend on the draft length or the speculation
    policy, so it is comparable with a recorded rate."""

    num: int
    num_accepted: int

    @staticmethod
    def of(samples: Iterable[Rollout | Completion]) -> FirstPositions:
        num = num_accepted = 0
        for sample in samples:
            sources = [i for i, name in enumerate(sample.drafters) if name in ARCHITECTURES]
            if not sources:
                continue
            begins, accepted = drafts_of(sample.provenance)
            begins &= np.isin(sample.sources, sources)
            num += int(begins.sum())
            num_accepted += int((accepted & begins).sum())
        return FirstPositions(num, num_accepted)

    def shortfall_message(self, recorded: float, share: float, temperature: float) -> str | None:
        """A message if the rate is significantly below this share of the recorded one; else None. The default share is
        0.7: the shipped head's kinds of data differ by a fifth; auxiliary hidden states that are one token late leave
        six tenths of the worst."""
        rate = self.num_accepted / max(1, self.num)
        deviation = (recorded * (1 - recorded) / max(1, self.num)) ** 0.5
        if rate >= share * recorded or rate >= recorded - NUM_DEVIATIONS * deviation:
            return None
        return (
            f"the head's first draft token is accepted in {rate:.0%} of {self.num} drafts; its provenance.json records "
            f"{recorded:.0%} on its worst data at temperature {temperature:g}, and draft.alarm_record = {share:g} of "
            "that is the minimum. Either the head reads other hidden states than it was trained on (another model, "
            "other layers, a changed engine: run `paceline verify`), or the policy or the task is far from its "
            'training data: train it online (draft.online = "every"), or train a head for this task (paceline '
            "train-draft)"
        )


class Alarms:
    def __init__(self, config: Config, recorded: float | None = None) -> None:
        """`recorded`: the first-position rate in the head's provenance file, at this run's temperature."""
        self.recorded, self.temperature = recorded, config.sampling.temperature
        self.section, self.method = config.draft, config.speculation.method
        # With others, speculation.min_confidence is an error.
        self.has_min_confidence = config.speculation.policy == "static" and config.speculation.rule == "coupled"
        self.online = config.draft.online != "off"
        self.length: float | None = None  # mean acceptance length of the last batch with enough drafts
        self.version: int | None = None  # policy version of that batch
        self.below_floor = self.below_record = self.decays = False  # the floor, record and depth alarms are active

    def check(self, length: float | None, version: int | None) -> tuple[dict[str, bool], list[str]]:
        """The flags of a batch, and messages. `length` is its mean acceptance length, None for too few drafts;
        `version` the policy version that generated it."""
        flags = {DROP: False, FLOOR: False}
        messages: list[str] = []
        if length is None:
            return flags, messages
        if self.length is not None and version != self.version:
            flags[DROP] = length < (1 - self.section.alarm_drop) * self.length
        if flags[DROP]:
            messages.append(
                f"ALARM: acceptance dropped at the weight sync to version {version}: mean length {self.length:.2f} -> "
                f"{length:.2f}, more than draft.alarm_drop = {self.section.alarm_drop:g}; {self._remedy(DROP)}"
            )
        flags[FLOOR] = length < self.section.alarm_floor
        if flags[FLOOR] and not self.below_floor:
            messages.append(
                f"ALARM: hardly any draft token is accepted: mean acceptance length {length:.3f} < draft.alarm_floor = "
                f"{self.section.alarm_floor:g}; {self._remedy(FLOOR)}"
            )
        self.length, self.version, self.below_floor = length, version, flags[FLOOR]
        return flags, messages

    def check_record(self, first: FirstPositions) -> tuple[dict[str, bool], list[str]]:
        """The flag of the record alarm, and messages."""
        if first.num < MIN_DRAFTS or self.recorded is None:
            return {RECORD: False}, []
        message = first.shortfall_message(self.recorded, self.section.alarm_record, self.temperature)
        starts, self.below_record = not self.below_record, message is not None
        return {RECORD: self.below_record}, [f"ALARM: {message}"] if message is not None and starts else []

    def check_depth(self, counts: DepthCounts) -> tuple[dict[str, bool], list[str]]:
        """The flag of the depth alarm, and messages. `counts`: of a head, which was trained on completions of some
        length."""
        message = counts.decay_message(self.section.alarm_depth, MIN_DRAFTS)
        starts, self.decays = not self.decays, message is not None
        return {DEPTH: self.decays}, [f"ALARM: {message}"] if message is not None and starts else []

    def _remedy(self, alarm: str) -> str:
        if self.method in HEAD_METHODS:
            if not self.online:
                return 'train the head online (draft.online = "every")'
            if alarm == DROP:
                return (
                    "the head does not keep up with the policy: if head_training.loss falls, raise "
                    "draft.online_learning_rate or draft.online_tokens; if it rises, lower the learning rate"
                )
            return "train a head for this model and task (paceline train-draft), and set speculation.head to it"
        if alarm == DROP:
            return "if this persists, draft fewer tokens (speculation.num_speculative_tokens)"
        remedy = 'choose another speculation.method, or "none"'
        return f"raise speculation.min_confidence, or {remedy}" if self.has_min_confidence else remedy

    def state_dict(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": self.length,
            "version": self.version,
            "below_floor": self.below_floor,
            "below_record": self.below_record,
            "decays": self.decays,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.length, self.version = state_dict["mean_acceptance_length"], state_dict["version"]
        self.below_floor, self.below_record = state_dict["below_floor"], state_dict["below_record"]
        self.decays = state_dict["decays"]


class AdvantageAlarm:
    """For steps in which every advantage is zero. It is reported the first, the tenth, the hundredth … time."""

    def __init__(self, config: Config) -> None:
        self.num_generations = config.algorithm.num_generations
        self.has_rollouts = config.train.log_rollouts != "none"
        self.num_steps = 0  # with only zero advantages, since the run was started or resumed

    def check(self, step: int, groups: Sequence[Group]) -> tuple[bool, list[str]]:
        """The flag of a step without advantages, and messages; `groups` are all that were generated for it. False if no
        sample could be scored."""
        rewards = [group.rewards for group in groups]
        if not any(rewards):  # failures, which are reported by themselves
            return False, []
        self.num_steps += 1
        if str(self.num_steps).strip("0") != "1":  # powers of ten
            return True, []
        values = {reward for group in rewards for reward in group}
        if len(values) > 1 and self.num_steps == 1:
            return True, [
                f"step {step + 1}: the samples of each problem have equal rewards, so rewards do not change the policy "
                "in this step. Single steps like this are normal. If there are many, choose other problems or raise "
                f"algorithm.num_generations ({self.num_generations})"
            ]
        found = (
            f"all rewards are {values.pop():g}"
            if len(values) == 1
            else "the samples of each problem have equal rewards"
        )
        so_far = f" in {self.num_steps} steps so far" if self.num_steps > 1 else ""
        where = "read rollouts.jsonl" if self.has_rollouts else "set train.log_rollouts, and read rollouts.jsonl"
        message = (
            f"ALARM: step {step + 1}: all advantages are zero{so_far}, so rewards do not change the policy: {found}. "
            f"Likely reasons: the reward function returns a constant or never finds the answer ({where}); "
            "the problems are too hard or too easy for the model; or too few samples per problem "
            f"(algorithm.num_generations = {self.num_generations})"
        )
        return True, [message]


def skipped_message(step: int, report: UpdateReport, in_a_row: int, max_skipped: int) -> str:
    """For an RL step with skipped optimizer steps. `in_a_row`: skipped ones at the end of the step."""
    num_skipped, num_applied = len(report.skipped), report.num_optimizer_steps
    result = f"the other {num_applied} changed the weights" if num_applied else "the weights did not change"
    return (
        f"ALARM: step {step + 1}: {num_skipped} of {num_skipped + num_applied} optimizer steps skipped, because "
        f"{' and '.join(dict.fromkeys(report.skipped))}; {result}. In a row: {in_a_row} of learner.max_skipped = "
        f"{max_skipped}, which stops the run. {SKIPPED_REMEDY}"
    )


def check_skipped(step: int, in_a_row: int, max_skipped: int) -> None:
    """Raises ValueError after too many skipped optimizer steps in a row."""
    if in_a_row >= max_skipped:
        raise ValueError(
            f"step {step + 1}: the last {in_a_row} optimizer steps were skipped, because the loss or the gradient was "
            f"not finite (learner.max_skipped = {max_skipped}). The weights are those of the last applied one. "
            f"{SKIPPED_REMEDY}, then continue with --resume"
        )


class RewardFailureAlarm:
    """Of one task, for steps in which rewards failed for a larger share of samples than `max_failures`. The producer
    stops the run if so many could not be scored; here those count too that `on_failure` gave 0."""

    def __init__(self, max_failures: float, key: str = "reward", task: str | None = None) -> None:
        """`key`: of the reward's settings. `task`: its label."""
        self.max_failures, self.key, self.task = max_failures, key, task
        self.is_active = False

    def check(self, step: int, groups: Sequence[Group]) -> tuple[bool, list[str]]:
        """The flag of a step, and messages; `groups` are all that were generated for it."""
        rollouts = first_branches(rollout for group in groups if group.task == self.task for rollout in group.rollouts)
        failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
        starts, self.is_active = not self.is_active, len(failures) > self.max_failures * len(rollouts)
        if not (self.is_active and starts):
            return self.is_active, []
        return True, [
            f"ALARM: step {step + 1}: rewards failed for {len(failures)} of {len(rollouts)} samples, more than "
            f"{self.key}.max_failures = {self.max_failures:g} of them, and {self.key}.on_failure gave them 0. If the "
            f"answers are not to blame, correct the reward function or raise {self.key}.timeout_s. The first: "
            f"{failures[0]}"
        ]
