"""Policies in a whole run: no token changes, what they learned survives a stop, and the trace says what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import lines, make, write_head, write_model, write_task

from paceline.rl.loop import Loop
from paceline.speculation.cost import CostTable, Point

KEYS = ("step", "problem", "sample", "token_ids", "reward", "advantage")
CASES = [
    ("suffix", "auto"), ("suffix", "das"), ("ngram", "auto"), ("draft_model", "auto"),
    ("eagle3", "auto"), ("hybrid", "auto"), ("hybrid", "das"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a head, and a cost table by which a verified token costs next to nothing."""
    folder = tmp_path_factory.mktemp("policies")
    write_model(folder / "model")
    write_task(folder / "task.jsonl")
    write_head(folder)
    points = [Point(rows, rows * q, 32 * rows, 1e-2 + 1e-6 * rows * q) for rows in (1, 16) for q in (1, 8)]
    drafts = {name: [(1, 1, 1e-6)] for name in ("eagle3", "draft_model")}
    CostTable("cheap", points, drafts).save(folder / "costs.json")
    return folder


@pytest.fixture(autouse=True)
def machine_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take what the table says, however busy this machine is."""
    monkeypatch.setattr(CostTable, "observe", lambda *args, **options: None)


def drafting(folder: Path, method: str, policy: str) -> list[str]:
    return [
        f"speculation.method={method}", f"speculation.policy={policy}", "speculation.draft_model=layers:1",
        f"speculation.head={folder / 'head'}", f"speculation.cost_table={folder / 'costs.json'}",
        "speculation.prompt_lookup_min=1",
    ]  # fmt: skip


def run(folder: Path, name: str, *overrides: str, resume: bool = False) -> Loop:
    loop = make(folder, name, "train.groups_per_step=4", *overrides, resume=resume)
    loop.run()
    loop.close()
    return loop


def rollouts(run: Path) -> list[list[Any]]:
    return [[record[key] for key in KEYS] for record in lines(run, "rollouts")]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[Any]]:
    run(folder, "plain", "train.num_steps=4")
    return rollouts(folder / "plain")


@pytest.mark.parametrize(("method", "policy"), CASES)
def test_the_same_rollouts_and_a_trace_that_says_why(
    folder: Path, plain: list[list[Any]], method: str, policy: str
) -> None:
    name = f"{method} {policy}"
    run(folder, name, "train.num_steps=4", "engine.order=longest", *drafting(folder, method, policy))
    assert rollouts(folder / name) == plain
    traces = lines(folder / name, "trace")
    assert sum(t["num_draft_tokens"] for t in traces) > 0, "nothing was drafted: the test shows nothing"
    sources = {"hybrid": {"suffix", "eagle3"}}.get(method, {method})
    for t in traces:
        assert t["policy"] == policy and t["reason"] and t["expected_s"] > 0
        assert t["num_accepted_tokens"] <= t["num_draft_tokens"] <= t["num_proposed"] <= t["num_planned"]
        assert {source for source, _, _ in t["sources"]} <= sources
        assert sum(num for _, num, _ in t["sources"]) == t["num_draft_tokens"] == sum(t["drafted_per_position"])
        assert sum(num for _, _, num in t["sources"]) == t["num_accepted_tokens"] == sum(t["accepted_per_position"])
        if policy == "auto":
            assert t["expected_accepted"] <= t["num_draft_tokens"]
        assert 0 < t["draft_s"] + t["forward_s"] + t["sample_s"] <= t["total_s"]


@pytest.mark.parametrize(("method", "policy"), [("suffix", "auto"), ("suffix", "das"), ("hybrid", "auto")])
def test_stop_and_resume(folder: Path, plain: list[list[Any]], method: str, policy: str) -> None:
    settings, name = drafting(folder, method, policy), f"resumed {method} {policy}"
    stopped = run(folder, name, "train.num_steps=2", *settings)
    knew = stopped.engine.learned()
    checkpoint = stopped.checkpoints.latest()
    assert checkpoint is not None
    for part, state in knew.items():
        saved = checkpoint.tensors(part)
        assert saved.keys() == state.keys() and state
        assert all(np.array_equal(saved[key].numpy(), array) for key, array in state.items()), part
    loop = make(folder, name, "train.groups_per_step=4", "train.num_steps=4", *settings, resume=True)
    for part, state in loop.engine.learned().items():
        assert all(np.array_equal(knew[part][key], array) for key, array in state.items()), part
    fresh = make(folder, f"fresh {method} {policy}", "train.groups_per_step=4", *settings)
    for part, state in fresh.engine.learned().items():  # the broken twin: nothing restored
        assert any(not np.array_equal(knew[part][key], array) for key, array in state.items()), part
    fresh.close()
    loop.run()
    loop.close()
    assert rollouts(folder / name) == plain


@pytest.mark.parametrize(
    ("first", "then"),
    [("auto", "das"), ("das", "auto"), ("static", "auto"), ("auto", "static")],
)
def test_resumed_with_another_policy(folder: Path, plain: list[list[Any]], first: str, then: str) -> None:
    name = f"{first} then {then}"
    stopped = run(folder, name, "train.num_steps=2", *drafting(folder, "suffix", first))
    loop = make(
        folder, name, "train.groups_per_step=4", "train.num_steps=4", *drafting(folder, "suffix", then), resume=True
    )
    assert any(f"speculation.policy = '{then}', was '{first}'" in note for note in loop.watcher.notes)
    for part in ("drafter", "lengths"):  # they know what they knew, whoever decides
        state = loop.engine.learned()[part]
        assert all(np.array_equal(stopped.engine.learned()[part][key], array) for key, array in state.items())
    loop.run()
    loop.close()
    assert rollouts(folder / name) == plain
    assert {t["policy"] for t in lines(folder / name, "trace")} == {first, then}


@pytest.mark.parametrize("policy", ["das", "auto"])
def test_resumed_with_longer_drafts(folder: Path, plain: list[list[Any]], policy: str) -> None:
    settings, name = drafting(folder, "suffix", policy), f"longer {policy}"
    run(folder, name, "train.num_steps=2", *settings)
    run(folder, name, "train.num_steps=4", *settings, "speculation.num_speculative_tokens=7", resume=True)
    assert rollouts(folder / name) == plain


def test_a_step_that_is_given_up_teaches_nothing(folder: Path) -> None:
    """Stopped in the middle of the second step's generation: all that learns is saved as it was after the first."""
    loop = make(
        folder, "given up", "train.num_steps=2", "train.checkpoint_every=0", "engine.max_num_seqs=4",
        *drafting(folder, "suffix", "auto"),
    )  # fmt: skip
    after: list[dict[str, dict[str, np.ndarray]]] = []
    loop.watcher.step = lambda metrics: after.append(loop.engine.learned())

    def stop_in_the_middle(done: int, total: int) -> None:
        if loop.step == 1 and not loop.engine.scheduler.waiting and loop.engine.scheduler.running:
            loop.producer.stop()

    loop.producer.on_progress = stop_in_the_middle
    assert loop.run()["steps"] == 1
    loop.close()
    checkpoint = loop.checkpoints.latest()
    assert checkpoint is not None and checkpoint.step == 1
    now = loop.engine.learned()
    for part, state in after[0].items():
        saved = checkpoint.tensors(part)
        assert all(np.array_equal(saved[key].numpy(), array) for key, array in state.items()), part
        assert any(not np.array_equal(now[part][key], array) for key, array in state.items()), part


def test_audits_teach_nothing(folder: Path, plain: list[list[Any]]) -> None:
    loop = make(
        folder, "audited", "train.groups_per_step=4", "train.num_steps=4", "speculation.audit_every=2",
        *drafting(folder, "suffix", "auto"),
    )  # fmt: skip
    audit, known = loop.auditor.audit, []

    def watched(*args: Any) -> Any:
        before = loop.engine.learned()
        found = audit(*args)
        known.append((before, loop.engine.learned()))
        return found

    loop.auditor.audit = watched  # type: ignore[method-assign]
    summary = loop.run()
    loop.close()
    assert summary["identical"] and len(known) == 2 and rollouts(folder / "audited") == plain
    for before, after in known:
        for part, state in before.items():
            assert all(np.array_equal(after[part][key], array) for key, array in state.items()), part
