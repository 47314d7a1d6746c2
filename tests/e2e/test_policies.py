"""Speculation policies in a run: tokens do not change, their state survives a resume, the trace has their decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import lines, make, write_head, write_model, write_task

from paceline.rl.trainer import Trainer
from paceline.speculation.cost import CostTable, Point

KEYS = ("step", "problem", "sample", "token_ids", "reward", "advantage")
CASES = [
    ("suffix", "auto"), ("suffix", "das"), ("ngram", "auto"), ("draft_model", "auto"),
    ("eagle3", "auto"), ("hybrid", "auto"), ("hybrid", "das"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a head, and a cost table in which verifying a token is almost free."""
    folder = tmp_path_factory.mktemp("policies")
    write_model(folder / "model")
    write_task(folder / "task.jsonl")
    write_head(folder)
    points = [Point(rows, rows * q, 32 * rows, 1e-2 + 1e-6 * rows * q) for rows in (1, 16) for q in (1, 8)]
    drafts = {name: [(1, 1, 1e-6)] for name in ("eagle3", "draft_model")}
    CostTable("cheap", points, drafts).save(folder / "costs.json")
    return folder


@pytest.fixture(autouse=True)
def fixed_cost_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are those of the table, independent of the machine."""
    for name in ("observe", "observe_drafting"):
        monkeypatch.setattr(CostTable, name, lambda *args: None)


def drafting(folder: Path, method: str, policy: str) -> list[str]:
    return [
        f"speculation.method={method}", f"speculation.policy={policy}", "speculation.draft_model=layers:1",
        f"speculation.head={folder / 'head'}", f"speculation.cost_table={folder / 'costs.json'}",
        "speculation.prompt_lookup_min=1",
    ]  # fmt: skip


def run(folder: Path, name: str, *overrides: str, resume: bool = False) -> Trainer:
    trainer = make(folder, name, "train.groups_per_step=4", *overrides, resume=resume)
    trainer.run()
    trainer.close()
    return trainer


def rollouts(run: Path) -> list[list[Any]]:
    return [[record[key] for key in KEYS] for record in lines(run, "rollouts")]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[Any]]:
    run(folder, "plain", "train.num_steps=4")
    return rollouts(folder / "plain")


@pytest.mark.parametrize(("method", "policy"), CASES)
def test_the_same_rollouts_and_a_complete_trace(folder: Path, plain: list[list[Any]], method: str, policy: str) -> None:
    name = f"{method} {policy}"
    run(folder, name, "train.num_steps=4", "engine.order=longest", *drafting(folder, method, policy))
    assert rollouts(folder / name) == plain
    traces = lines(folder / name, "trace")
    assert sum(t["num_draft_tokens"] for t in traces) > 0, "the test needs drafts"
    sources = {"hybrid": {"suffix", "eagle3"}}.get(method, {method})
    for t in traces:
        assert t["policy"] == policy and t["reason"] and t["expected_s"] > 0
        assert t["num_accepted_tokens"] <= t["num_draft_tokens"] <= t["num_proposed"] <= t["num_planned"]
        assert {source for source, _, _ in t["per_drafter"]} <= sources
        assert sum(num for _, num, _ in t["per_drafter"]) == t["num_draft_tokens"] == sum(t["drafted_per_position"])
        assert sum(num for _, _, num in t["per_drafter"]) == t["num_accepted_tokens"] == sum(t["accepted_per_position"])
        if policy == "auto":
            assert t["expected_accepted"] <= t["num_draft_tokens"]
        assert 0 < t["draft_s"] + t["forward_s"] + t["sample_s"] <= t["total_s"]


@pytest.mark.parametrize(("method", "policy"), [("suffix", "auto"), ("suffix", "das"), ("hybrid", "auto")])
def test_stop_and_resume(folder: Path, plain: list[list[Any]], method: str, policy: str) -> None:
    settings, name = drafting(folder, method, policy), f"resumed {method} {policy}"
    stopped = run(folder, name, "train.num_steps=2", *settings)
    expected = stopped.engine.state_dict()
    checkpoint = stopped.checkpoints.latest()
    assert checkpoint is not None
    assert {part for part, state in expected.items() if state} == {"drafter", "acceptance", "lengths"}
    for part, state in expected.items():
        saved = checkpoint.tensors(part)
        assert saved.keys() == state.keys()
        assert all(np.array_equal(saved[key].numpy(), array) for key, array in state.items()), part
    trainer = make(folder, name, "train.groups_per_step=4", "train.num_steps=4", *settings, resume=True)
    for part, state in trainer.engine.state_dict().items():
        assert all(np.array_equal(expected[part][key], array) for key, array in state.items()), part
    fresh = make(folder, f"fresh {method} {policy}", "train.groups_per_step=4", *settings)
    for part, state in fresh.engine.state_dict().items():  # deliberately broken: nothing is restored
        assert not state or any(not np.array_equal(expected[part][key], array) for key, array in state.items()), part
    fresh.close()
    trainer.run()
    trainer.close()
    assert rollouts(folder / name) == plain


@pytest.mark.parametrize(
    ("first", "then"),
    [("auto", "das"), ("das", "auto"), ("static", "auto"), ("auto", "static")],
)
def test_resumed_with_another_policy(folder: Path, plain: list[list[Any]], first: str, then: str) -> None:
    name = f"{first} then {then}"
    stopped = run(folder, name, "train.num_steps=2", *drafting(folder, "suffix", first))
    trainer = make(
        folder, name, "train.groups_per_step=4", "train.num_steps=4", *drafting(folder, "suffix", then), resume=True
    )
    assert any(f"speculation.policy = '{then}', was '{first}'" in note for note in trainer.callback.notes)
    for part in ("drafter", "lengths"):  # their state does not depend on the policy
        state = trainer.engine.state_dict()[part]
        assert all(np.array_equal(stopped.engine.state_dict()[part][key], array) for key, array in state.items())
    trainer.run()
    trainer.close()
    assert rollouts(folder / name) == plain
    assert {t["policy"] for t in lines(folder / name, "trace")} == {first, then}


@pytest.mark.parametrize("policy", ["das", "auto"])
def test_resumed_with_longer_drafts(folder: Path, plain: list[list[Any]], policy: str) -> None:
    settings, name = drafting(folder, "suffix", policy), f"longer {policy}"
    run(folder, name, "train.num_steps=2", *settings)
    run(folder, name, "train.num_steps=4", *settings, "speculation.num_speculative_tokens=7", resume=True)
    assert rollouts(folder / name) == plain


def test_a_discarded_step_does_not_change_the_state(folder: Path) -> None:
    """Stopped during the generation of the second step: the checkpoint has the state after the first."""
    trainer = make(
        folder, "discarded", "train.num_steps=2", "train.checkpoint_every=0", "engine.max_num_seqs=4",
        *drafting(folder, "suffix", "auto"),
    )  # fmt: skip
    after: list[dict[str, dict[str, np.ndarray]]] = []
    trainer.callback.step = lambda metrics: after.append(trainer.engine.state_dict())

    def stop_in_the_middle(done: int, total: int) -> None:
        if trainer.step == 1 and not trainer.engine.scheduler.waiting and trainer.engine.scheduler.running:
            trainer.producer.stop()

    trainer.producer.on_progress = stop_in_the_middle
    assert trainer.run()["num_steps"] == 1
    trainer.close()
    checkpoint = trainer.checkpoints.latest()
    assert checkpoint is not None and checkpoint.step == 1
    now = trainer.engine.state_dict()
    for part, state in after[0].items():
        saved = checkpoint.tensors(part)
        assert all(np.array_equal(saved[key].numpy(), array) for key, array in state.items()), part
        assert not state or any(not np.array_equal(now[part][key], array) for key, array in state.items()), part


def test_audits_do_not_change_the_state(folder: Path, plain: list[list[Any]]) -> None:
    trainer = make(
        folder, "audited", "train.groups_per_step=4", "train.num_steps=4", "speculation.audit_every=2",
        *drafting(folder, "suffix", "auto"),
    )  # fmt: skip
    audit, states = trainer.auditor.audit, []

    def recorded(*args: Any) -> Any:
        before = trainer.engine.state_dict()
        found = audit(*args)
        states.append((before, trainer.engine.state_dict()))
        return found

    trainer.auditor.audit = recorded  # type: ignore[method-assign]
    summary = trainer.run()
    trainer.close()
    assert summary["identical"] and len(states) == 2 and rollouts(folder / "audited") == plain
    for before, after in states:
        for part, state in before.items():
            assert all(np.array_equal(after[part][key], array) for key, array in state.items()), part
