"""A head that follows the policy through a run: the policy is the same bits, the drafts get better, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap import Overlap, assert_overlapped
from tiny_run import Attached, lines, make, policy, settings, write_head
from typer.testing import CliRunner

from paceline.build import drafting_head, export_policy
from paceline.cli import app
from paceline.config import load_config
from paceline.model.head_files import head_checksum, load_head
from paceline.model.provenance import read_provenance
from paceline.model.weights import checkpoint_checksum, load
from paceline.report.html import write_report
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.loop import Loop

TESTS = Path(__file__).parents[1]
EVERY = ("draft.online=every", "draft.online_learning_rate=0.02")
SHORT = ("train.num_steps=4", "train.checkpoint_every=2")
SAME = ("step", "problem", "sample", "token_ids", "reward", "advantage")
TIMES = ("stages", "tokens_per_s", "draft_s", "memory_gib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    settings(folder)
    write_head(folder)
    return folder


def drafting(folder: Path) -> list[str]:
    return [
        "speculation.method=eagle3",
        f"speculation.head={str(folder / 'head')!r}",
        "speculation.num_speculative_tokens=3",
    ]


def run(folder: Path, name: str, *overrides: str, resume: bool = False) -> Loop:
    loop = make(folder, name, *drafting(folder), *overrides, resume=resume)
    loop.run()
    loop.close()
    return loop


@pytest.fixture(scope="module")
def off(folder: Path) -> Loop:
    return run(folder, "off", "train.num_steps=20")


@pytest.fixture(scope="module")
def every(folder: Path) -> Loop:
    return run(folder, "every", "train.num_steps=20", *EVERY)


def same_policy(one: Loop, other: Loop) -> bool:
    weights = policy(other)
    return all(torch.equal(tensor, weights[name]) for name, tensor in policy(one).items())


def told(loop: Loop) -> list[list[Any]]:
    return [[record[key] for key in SAME] for record in lines(loop.folder.path, "rollouts")]


def measured(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in m.items() if key not in TIMES} for m in lines(run, "metrics")]


# ---- isolation ----


def test_the_policy_is_the_same_bits(off: Loop, every: Loop) -> None:
    assert same_policy(off, every)
    assert told(off) == told(every)
    assert every.adapter is not None and off.adapter is None
    assert every.adapter.version == 20 and head_checksum(every.adapter.learner.head) != every.adapter.base


def test_one_draft_gradient_would_be_seen(folder: Path) -> None:
    """The broken twin: the head's loss has a way into the policy's embedding."""
    leaking = make(folder, "leaking", *drafting(folder), "train.num_steps=2", *EVERY)
    assert leaking.adapter is not None
    leaking.adapter.learner.head.ops = Attached()
    leaking.run()
    leaking.close()
    plain = run(folder, "plain", "train.num_steps=2")
    assert not same_policy(leaking, plain)


def test_drafts_get_better(off: Loop, every: Loop) -> None:
    def late(loop: Loop) -> float:
        records = lines(loop.folder.path, "metrics")[-8:]
        return 1 + sum(m["num_accepted_tokens"] for m in records) / sum(m["num_drafts"] for m in records)

    assert late(every) > late(off) + 0.1


def test_what_is_recorded(every: Loop) -> None:
    metrics = lines(every.folder.path, "metrics")
    assert [m["drafter_version"] for m in metrics] == list(range(20))
    assert {t["drafter_version"] for t in lines(every.folder.path, "trace")} == set(range(20))
    last = metrics[-1]["adaptation"]
    assert last["loss"] < metrics[0]["adaptation"]["loss"] and last["version"] == 20
    assert list(last["overlap"]) == ["1", "2", "3", "4"] and all(0 < x < 1 for x in last["overlap"].values())
    assert all(m["stages"]["adaptation"] > 0 for m in metrics)
    assert all(m["acceptance_floor_alarm"] is False for m in metrics)
    page = write_report(every.folder.path).read_text()
    assert "The head follows the policy" in page and "draft training" in page


# ---- publishing ----


def test_an_engine_that_did_not_take_the_head_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.drafters.eagle3 import Eagle3Drafter

    take = Eagle3Drafter.update

    def deaf(self: Eagle3Drafter, weights: Any, version: int) -> Any:
        return take(self, weights if version < 2 else self_state(self), version)

    def self_state(drafter: Eagle3Drafter) -> Any:
        from paceline.model.head_files import head_state

        return [(name, tensor.clone()) for name, tensor in head_state(drafter.head)]

    monkeypatch.setattr(Eagle3Drafter, "update", deaf)
    loop = make(folder, "deaf", *drafting(folder), *SHORT, *EVERY)
    with pytest.raises(ValueError, match="the drafter's weights of version 2: the engine holds"):
        loop.run()
    loop.close()
    assert loop.step == 2, "what was done before is kept"


@pytest.mark.parametrize("inflight", ["drain", "keep"])
def test_beside_overlapped_generation(folder: Path, inflight: str) -> None:
    ahead = "train.max_staleness=1", f"train.inflight={inflight}", "train.num_steps=5"
    loop = make(folder, f"ahead {inflight}", *drafting(folder), *ahead, *EVERY)
    overlap = Overlap(loop) if inflight == "keep" else None
    loop.run()
    loop.close()
    versions = [m["drafter_version"] for m in lines(loop.folder.path, "metrics")]
    if overlap is not None:  # each batch ends with the head that came with the weights in its middle
        assert_overlapped(loop.folder.path, overlap, 1, inflight, 5)
        assert versions == [0, 1, 2, 3, 4]
    else:
        assert versions == [0, 0, 1, 2, 3]
        assert [m["lag_max"] for m in lines(loop.folder.path, "metrics")] == [0, 1, 1, 1, 1], "nothing overlapped"
        plain = run(folder, "ahead off", *ahead)
        assert same_policy(loop, plain) and told(loop) == told(plain)


def test_in_packed_panels(folder: Path) -> None:
    """The CPU kernels' engine holds the head packed: receipts agree all the same."""
    loop = run(folder, "packed", *EVERY, "train.num_steps=3", "model.dtype=float32")
    assert [m["drafter_version"] for m in lines(loop.folder.path, "metrics")] == [0, 1, 2]


def test_hybrid(folder: Path) -> None:
    loop = run(folder, "hybrid", *SHORT, *EVERY, "speculation.method=hybrid")
    assert [m["drafter_version"] for m in lines(loop.folder.path, "metrics")] == [0, 1, 2, 3]


def test_an_audit_drafts_with_the_head_of_its_step(folder: Path) -> None:
    loop = make(folder, "audited", *drafting(folder), "train.num_steps=2", "speculation.audit_every=2", *EVERY)
    seen = []
    fresh = loop.auditor.make_drafter

    def look() -> Any:
        drafter = fresh()
        seen.append(head_checksum(drafting_head(loop.config, drafter)))  # type: ignore[arg-type]
        return drafter

    loop.auditor.make_drafter = look
    loop.run()
    loop.close()
    assert loop.audits[0]["identical"] and loop.adapter is not None
    assert seen and set(seen) == {head_checksum(drafting_head(loop.config, loop.engine.drafter))}  # type: ignore[arg-type]
    assert loop.adapter.base not in seen


# ---- going on ----


@pytest.fixture(scope="module")
def whole(folder: Path) -> Loop:
    return run(folder, "whole", *SHORT, *EVERY)


def outcome(run: Path) -> dict[str, Any]:
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None
    written = json.loads((last.path / "state.json").read_text())
    return {
        "files": {name: file["sha256"] for name, file in written["files"].items()},
        "state": {key: written["state"][key] for key in ("step", "position", "head", "alarms")},
        "metrics": measured(run),
        "rollouts": lines(run, "rollouts"),
    }


@pytest.mark.parametrize(("method", "eval_every"), [("eagle3", 2), ("hybrid", 0)])
def test_resumed_it_goes_on_bit_for_bit(folder: Path, method: str, eval_every: int) -> None:
    overrides = *SHORT, *EVERY, f"speculation.method={method}", f"train.eval_every={eval_every}"
    run(folder, f"one {method}", *overrides)
    run(folder, f"halves {method}", *overrides, "train.num_steps=2")
    run(folder, f"halves {method}", *overrides, resume=True)
    found = outcome(folder / f"halves {method}")
    assert found == outcome(folder / f"one {method}") and "head.safetensors" in found["files"]


def test_switched_off_it_keeps_what_it_learned(folder: Path, whole: Loop) -> None:
    run(folder, "switched", *SHORT, *EVERY, "train.num_steps=2")
    loop = run(folder, "switched", *SHORT, resume=True)
    assert [m["drafter_version"] for m in lines(folder / "switched", "metrics")] == [0, 1, 2, 2]
    assert any("draft.online = 'off', was 'every'" in note for note in loop.watcher.notes)
    assert same_policy(loop, whole)
    loop = run(folder, "switched", *SHORT, *EVERY, "train.num_steps=5", resume=True)
    assert loop.adapter is not None and loop.adapter.version == 3


def test_switched_on_later(folder: Path) -> None:
    run(folder, "later", *SHORT, "train.num_steps=2")
    loop = run(folder, "later", *SHORT, *EVERY, resume=True)
    assert [m["drafter_version"] for m in lines(folder / "later", "metrics")] == [0, 0, 0, 1]
    assert loop.adapter is not None and loop.adapter.version == 2


def test_another_head_is_refused(folder: Path) -> None:
    run(folder, "other", "train.num_steps=1", *EVERY)
    write_head(folder, "head 2", seed=1)
    before = (folder / "other" / "config.toml").read_text()
    changed = "train.num_steps=2", *EVERY, f"speculation.head={str(folder / 'head 2')!r}"
    with pytest.raises(ValueError, match=r"speculation\.head: its weights are not those"):
        make(folder, "other", *drafting(folder), *changed, resume=True)
    assert (folder / "other" / "config.toml").read_text() == before


@pytest.fixture(scope="module")
def drive(folder: Path) -> Iterator[Any]:
    """drive(name=…, overrides=…, …) -> how it ended; see kill_driver.py."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    driver = subprocess.Popen(
        [sys.executable, TESTS / "kill_driver.py", folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1,
    )  # fmt: skip
    assert driver.stdin is not None and driver.stdout is not None

    def call(**job: Any) -> dict[str, Any]:
        print(json.dumps(job), file=driver.stdin, flush=True)
        found: dict[str, Any] = json.loads(driver.stdout.readline())
        return found

    yield call
    driver.stdin.close()
    driver.wait(10)


def test_killed_while_it_writes_a_checkpoint(folder: Path, drive: Any) -> None:
    """At the first file of all, in the middle of the head's own, and in the second checkpoint."""
    overrides = [*drafting(folder), *SHORT, *EVERY]
    end = drive(name="driven", overrides=overrides)
    assert end["status"] == 0, end["said"]
    for attempt, at in enumerate((1, 13, 34)):
        end = drive(name="killed", overrides=overrides, resume=attempt > 0, at_write=at)
        assert end["status"] == -signal.SIGKILL, end["said"]
    end = drive(name="killed", overrides=overrides, resume=True)
    assert end["status"] == 0, end["said"]
    assert outcome(folder / "killed") == outcome(folder / "driven")


# ---- taking it along ----


def test_export(folder: Path, every: Loop, off: Loop, tmp_path: Path) -> None:
    assert every.adapter is not None
    model, head = tmp_path / "model", tmp_path / "head"
    run = every.folder.path
    said = CliRunner().invoke(app, ["export", str(run), str(model), "--head", str(head)])
    assert said.exit_code == 0 and str(head) in said.stdout.replace("\n", ""), said.output
    target = load(model, torch.float64)
    loaded = load_head(
        head, target.config, dtype=torch.float64, target_checksum=checkpoint_checksum(model)
    )  # it knows the policy it belongs to
    assert head_checksum(loaded) == head_checksum(every.adapter.learner.head)
    provenance = read_provenance(head)
    assert provenance is not None and provenance.num_steps == 20 and "then online beside grpo" in provenance.data
    assert provenance.acceptance["last batch"]["mean_acceptance_length"] > 1
    with pytest.raises(ValueError, match="already holds a model"):
        export_policy(load_config(run / "config.toml"), run, tmp_path / "more", best=False, head=head)
    assert not (tmp_path / "more").exists()
    with pytest.raises(ValueError, match="no head was adapted"):
        run = off.folder.path
        export_policy(load_config(run / "config.toml"), run, tmp_path / "more", best=False, head=tmp_path / "none")
    assert not (tmp_path / "more").exists()
