"""The alarms for a drop of acceptance, and for drafts that are hardly ever accepted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import lines, make

from paceline.build.config import load_config
from paceline.rl.alarms import DROP, FLOOR, MIN_DRAFTS, AdvantageAlarm, Alarms, RewardFailureAlarm
from paceline.rl.metrics import acceptance_length


def make_alarms(*overrides: str) -> Alarms:
    return Alarms(load_config(None, ["draft.alarm_drop=0.2", "draft.alarm_floor=1.05", *overrides]))


def test_a_drop_at_a_weight_sync() -> None:
    alarms = make_alarms("speculation.method=eagle3")
    assert alarms.check(2.0, 0) == ({DROP: False, FLOOR: False}, [])
    assert alarms.check(1.61, 1) == ({DROP: False, FLOOR: False}, [])
    assert alarms.check(None, 2) == ({DROP: False, FLOOR: False}, []), "too few drafts"
    flags, messages = alarms.check(1.2, 2)
    assert flags == {DROP: True, FLOOR: False}
    assert len(messages) == 1 and "1.61 -> 1.20" in messages[0] and 'draft.online = "every"' in messages[0]
    assert alarms.check(1.2, 3) == ({DROP: False, FLOOR: False}, [])
    assert alarms.check(2.0, 4)[1] == []


def test_a_drop_without_a_weight_sync_is_no_alarm() -> None:
    alarms = make_alarms()
    alarms.check(2.0, 3)
    assert alarms.check(1.2, 3) == ({DROP: False, FLOOR: False}, [])


def test_the_floor_alarm_is_reported_once() -> None:
    alarms = make_alarms("speculation.method=ngram", "speculation.policy=static")
    messages = [alarms.check(length, i)[1] for i, length in enumerate([1.04, 1.03, None, 1.02, 1.06, 1.01])]
    assert [len(texts) for texts in messages] == [1, 0, 0, 0, 0, 1]
    assert "draft.alarm_floor = 1.05" in messages[0][0] and "speculation.min_confidence" in messages[0][0]
    again = make_alarms("speculation.method=ngram")
    again.load_state_dict(alarms.state_dict())
    assert again.check(1.01, 9) == ({DROP: False, FLOOR: True}, [])


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["speculation.method=hybrid"], 'draft.online = "every"'),
        (["speculation.method=hybrid", "draft.online=every"], "train-draft"),
        (["speculation.method=suffix", "speculation.policy=static"], "speculation.min_confidence"),
        (["speculation.method=suffix"], "speculation.method"),
        (["speculation.method=suffix", "speculation.rule=rejection"], "speculation.method"),
    ],
)
def test_the_remedy_fits_the_settings(overrides: list[str], setting: str) -> None:
    message = make_alarms(*overrides).check(1.0, 0)[1][0]
    assert setting in message
    assert ("min_confidence" in message) == (setting == "speculation.min_confidence")


def test_batches_with_few_drafts_are_ignored() -> None:
    def batch(num_drafts: int) -> Any:
        trace = SimpleNamespace(
            num_drafts=num_drafts, num_draft_tokens=num_drafts, num_accepted_tokens=num_drafts, drafted_per_position=(),
            accepted_per_position=(), num_emitted=0, draft_s=0, forward_s=0, sample_s=0, total_s=0, version=4,
        )  # fmt: skip
        return SimpleNamespace(traces=[trace])

    assert acceptance_length(batch(MIN_DRAFTS)) == (2.0, 4)
    assert acceptance_length(batch(MIN_DRAFTS - 1)) == (None, 4)
    empty: Any = SimpleNamespace(traces=[])
    assert acceptance_length(empty) == (None, None)


# ---- steps without advantages ----


def groups(*rewards: list[float]) -> Any:
    return [SimpleNamespace(rewards=group) for group in rewards]


def test_zero_advantages_are_reported_at_first_and_then_rarely() -> None:
    alarm = AdvantageAlarm(load_config(None, ["algorithm.num_generations=4"]))
    checks = [alarm.check(step, groups([0.0, 0.0], [0.0])) for step in range(120)]
    assert all(flag for flag, _ in checks)
    messages = [found for _, found in checks]
    assert [step for step, found in enumerate(messages) if found] == [0, 9, 99]
    assert "step 1: all advantages are zero, so rewards do not change the policy: all rewards are 0." in messages[0][0]
    assert "returns a constant" in messages[0][0] and "algorithm.num_generations = 4" in messages[0][0]
    assert "in 10 steps so far" in messages[9][0]


def test_zero_advantages_by_equal_rewards_in_each_group() -> None:
    """A single step is no alarm: some problems are solved always, others never."""
    alarm = AdvantageAlarm(load_config(None))
    first, *others = [alarm.check(step, groups([1.0, 1.0], [0.0, 0.0]))[1] for step in range(10)]
    assert first[0].startswith("step 1: the samples of each problem have equal rewards") and "normal" in first[0]
    assert not any(others[:-1])
    assert others[-1][0].startswith("ALARM: step 10") and "the samples of each problem have equal" in others[-1][0]


def test_failures_raise_no_alarm_about_advantages(tmp_path: Path) -> None:
    """They have their own messages."""
    assert AdvantageAlarm(load_config(None)).check(3, groups([], [])) == (False, [])
    trainer = make(tmp_path, "run")
    batch: Any = SimpleNamespace(step=3, all_groups=groups([], []))
    assert trainer._check_advantages(batch, has_any=False) == {"zero_advantages_alarm": False}
    batch.all_groups = groups([1.0, 1.0], [])
    assert trainer._check_advantages(batch, has_any=False) == {"zero_advantages_alarm": True}
    trainer.close()


def test_the_alarm_for_failed_rewards_is_reported_when_it_starts() -> None:
    def step(num_failed: int) -> Any:
        failures = ["p0: hung: scored 0"] * num_failed + [None] * (4 - num_failed)
        other = SimpleNamespace(task="other", rollouts=[SimpleNamespace(failure="p1: hung: scored 0", branch=0)] * 8)
        return [
            SimpleNamespace(task="sums", rollouts=[SimpleNamespace(failure=each, branch=0) for each in failures]),
            other,
        ]

    alarm = RewardFailureAlarm(0.5, "task.sums.reward", "sums")
    flags, messages = zip(*(alarm.check(i, step(num)) for i, num in enumerate((0, 2, 3, 4, 2, 3))), strict=True)
    assert flags == (False, False, True, True, False, True)
    assert [bool(message) for message in messages] == [False, False, True, False, False, True]
    assert "ALARM: step 3: rewards failed for 3 of 4 samples" in messages[2][0] and "p0: hung" in messages[2][0]
    assert "task.sums.reward.max_failures = 0.5" in messages[2][0]


@pytest.mark.parametrize("dynamic_sampling", ["false", "true"])
def test_a_run_with_a_constant_reward_function(tmp_path: Path, dynamic_sampling: str) -> None:
    constant = 'reward.functions=["reward_functions:constant"]'
    few = ["train.num_steps=2", "sampling.max_tokens=2", "algorithm.max_sampling_rounds=1"]
    trainer = make(tmp_path, "run", constant, *few, f"algorithm.dynamic_sampling={dynamic_sampling}")
    trainer.run()
    trainer.close()
    alarms = [note for note in trainer.callback.notes if note.startswith("ALARM")]
    assert len(alarms) == 1 and "step 1: all advantages are zero" in alarms[0] and "all rewards are 0.1" in alarms[0]
    assert [m["zero_advantages_alarm"] for m in lines(tmp_path / "run", "metrics")] == [True, True]


def test_a_run_with_different_rewards_has_no_alarm(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=1", "train.tensorboard=true")
    trainer.run()
    trainer.close()
    assert not any("advantages" in note for note in trainer.callback.notes)
    assert [m["zero_advantages_alarm"] for m in lines(tmp_path / "run", "metrics")] == [False]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1], "steps count from 1"
