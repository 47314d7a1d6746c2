"""Online training of a head during a run: the policy is bit-identical, acceptance improves, a resume loses nothing."""

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
from support import head_checksum
from tiny_run import LeakyOps, lines, make, policy, settings, write_head
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.build.drafter import drafting_head
from paceline.build.export import export_policy
from paceline.cli import app
from paceline.model.head_files import load_head
from paceline.model.provenance import read_provenance
from paceline.model.weights import checkpoint_checksum, load
from paceline.report.html import write_report
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.trainer import Trainer

TESTS = Path(__file__).parents[1]
EVERY = ("draft.online=every", "draft.online_learning_rate=0.02")
SHORT = ("train.num_steps=4", "train.checkpoint_every=2")
SAME = ("step", "problem", "sample", "token_ids", "reward", "advantage")
TIMES = ("stages", "tokens_per_s", "generation_tokens_per_s", "draft_s", "memory_gib")


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


def run(folder: Path, name: str, *overrides: str, resume: bool = False) -> Trainer:
    trainer = make(folder, name, *drafting(folder), *overrides, resume=resume)
    trainer.run()
    trainer.close()
    return trainer


@pytest.fixture(scope="module")
def off(folder: Path) -> Trainer:
    return run(folder, "off", "train.num_steps=20")


@pytest.fixture(scope="module")
def every(folder: Path) -> Trainer:
    return run(folder, "every", "train.num_steps=20", *EVERY)


def same_policy(one: Trainer, other: Trainer) -> bool:
    weights = policy(other)
    return all(torch.equal(tensor, weights[name]) for name, tensor in policy(one).items())


def rollouts(trainer: Trainer) -> list[list[Any]]:
    return [[record[key] for key in SAME] for record in lines(trainer.folder.path, "rollouts")]


def metrics_without_times(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in m.items() if key not in TIMES} for m in lines(run, "metrics")]


# ---- isolation ----


def test_the_policy_is_bit_identical(off: Trainer, every: Trainer) -> None:
    assert same_policy(off, every)
    assert rollouts(off) == rollouts(every)
    assert every.head_trainer is not None and off.head_trainer is None
    assert every.head_trainer.version == 20
    assert head_checksum(every.head_trainer.learner.head) != every.head_trainer.base


def test_a_gradient_that_reaches_the_policy_is_caught(folder: Path) -> None:
    """Deliberately broken: the head's loss has a gradient for the policy's embedding."""
    leaking = make(folder, "leaking", *drafting(folder), "train.num_steps=2", *EVERY)
    assert leaking.head_trainer is not None
    leaking.head_trainer.learner.head.ops = LeakyOps()
    leaking.run()
    leaking.close()
    plain = run(folder, "plain", "train.num_steps=2")
    assert not same_policy(leaking, plain)


def test_acceptance_improves(off: Trainer, every: Trainer) -> None:
    def late_acceptance_length(trainer: Trainer) -> float:
        records = lines(trainer.folder.path, "metrics")[-8:]
        return 1 + sum(m["num_accepted_tokens"] for m in records) / sum(m["num_drafts"] for m in records)

    assert late_acceptance_length(every) > late_acceptance_length(off) + 0.1


def test_records(every: Trainer) -> None:
    metrics = lines(every.folder.path, "metrics")
    assert [m["drafter_version"] for m in metrics] == list(range(20))
    assert {t["drafter_version"] for t in lines(every.folder.path, "trace")} == set(range(20))
    last = metrics[-1]["head_training"]
    assert last["loss"] < metrics[0]["head_training"]["loss"] and last["version"] == 20
    assert list(last["overlap"]) == ["1", "2", "3", "4"] and all(0 < x < 1 for x in last["overlap"].values())
    assert all(m["stages"]["head_training"] > 0 for m in metrics)
    assert all(m["acceptance_floor_alarm"] is False for m in metrics)
    page = write_report(every.folder.path).read_text()
    assert "Online draft training" in page and "draft training" in page


# ---- publishing ----


def test_an_engine_that_does_not_load_the_head_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.drafters.eagle3 import Eagle3Drafter

    update = Eagle3Drafter.update

    def keeps_old_weights(self: Eagle3Drafter, weights: Any, version: int) -> Any:
        return update(self, weights if version < 2 else own_weights(self), version)

    def own_weights(drafter: Eagle3Drafter) -> Any:
        from paceline.model.head_files import head_state

        return [(name, tensor.clone()) for name, tensor in head_state(drafter.head)]

    monkeypatch.setattr(Eagle3Drafter, "update", keeps_old_weights)
    trainer = make(folder, "old weights", *drafting(folder), *SHORT, *EVERY)
    with pytest.raises(ValueError, match="the drafter's weights of version 2: the engine has checksum"):
        trainer.run()
    trainer.close()
    assert trainer.step == 2, "the steps before are kept"


@pytest.mark.parametrize("inflight", ["drain", "keep"])
def test_with_overlapped_generation(folder: Path, inflight: str) -> None:
    ahead = (
        "train.max_staleness=1", f"train.inflight={inflight}", "train.num_steps=5",
        "algorithm.correction=none",  # with one, the engine's logprobs count, whose rounding depends on the drafts
    )  # fmt: skip
    trainer = make(folder, f"ahead {inflight}", *drafting(folder), *ahead, *EVERY)
    overlap = Overlap(trainer) if inflight == "keep" else None
    trainer.run()
    trainer.close()
    versions = [m["drafter_version"] for m in lines(trainer.folder.path, "metrics")]
    if overlap is not None:  # each batch ends with the head that arrived with the new weights
        assert_overlapped(trainer.folder.path, overlap, inflight, 5)
        assert versions == [0, 1, 2, 3, 4]
    else:
        assert versions == [0, 0, 1, 2, 3]
        assert [m["staleness_max"] for m in lines(trainer.folder.path, "metrics")] == [0, 1, 1, 1, 1], "no overlap"
        plain = run(folder, "ahead off", *ahead)
        assert same_policy(trainer, plain) and rollouts(trainer) == rollouts(plain)


def test_with_packed_weights(folder: Path) -> None:
    """The CPU kernels pack the head's weights; the checksums are still those of the learner."""
    trainer = run(folder, "packed", *EVERY, "train.num_steps=3", "model.dtype=float32")
    assert [m["drafter_version"] for m in lines(trainer.folder.path, "metrics")] == [0, 1, 2]


def test_hybrid(folder: Path) -> None:
    trainer = run(folder, "hybrid", *SHORT, *EVERY, "speculation.method=hybrid")
    assert [m["drafter_version"] for m in lines(trainer.folder.path, "metrics")] == [0, 1, 2, 3]


def test_an_audit_uses_the_head_of_its_step(folder: Path) -> None:
    trainer = make(folder, "audited", *drafting(folder), "train.num_steps=2", "speculation.audit_every=2", *EVERY)
    checksums = []
    make_drafter = trainer.auditor.make_drafter

    def recorded() -> Any:
        drafter = make_drafter()
        checksums.append(head_checksum(drafting_head(trainer.config, drafter)))  # type: ignore[arg-type]
        return drafter

    trainer.auditor.make_drafter = recorded
    trainer.run()
    trainer.close()
    assert trainer.recorder.audits[0]["identical"] and trainer.head_trainer is not None
    assert checksums and set(checksums) == {head_checksum(drafting_head(trainer.config, trainer.engine.drafter))}  # type: ignore[arg-type]
    assert trainer.head_trainer.base not in checksums


# ---- resuming ----


@pytest.fixture(scope="module")
def whole(folder: Path) -> Trainer:
    return run(folder, "whole", *SHORT, *EVERY)


def outcome(run: Path) -> dict[str, Any]:
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None
    written = json.loads((last.path / "state.json").read_text())
    return {
        "files": {name: file["sha256"] for name, file in written["files"].items()},
        "state": {key: written["state"][key] for key in ("step", "position", "head", "alarms")},
        "metrics": metrics_without_times(run),
        "rollouts": lines(run, "rollouts"),
    }


@pytest.mark.parametrize(("method", "eval_every"), [("eagle3", 2), ("hybrid", 0)])
def test_a_resumed_run_continues_bit_for_bit(folder: Path, method: str, eval_every: int) -> None:
    overrides = *SHORT, *EVERY, f"speculation.method={method}", f"train.eval_every={eval_every}"
    run(folder, f"one {method}", *overrides)
    run(folder, f"halves {method}", *overrides, "train.num_steps=2")
    run(folder, f"halves {method}", *overrides, resume=True)
    found = outcome(folder / f"halves {method}")
    assert found == outcome(folder / f"one {method}") and "head.safetensors" in found["files"]


def test_switched_off_the_head_keeps_its_weights(folder: Path, whole: Trainer) -> None:
    run(folder, "switched", *SHORT, *EVERY, "train.num_steps=2")
    trainer = run(folder, "switched", *SHORT, resume=True)
    assert [m["drafter_version"] for m in lines(folder / "switched", "metrics")] == [0, 1, 2, 2]
    assert any("draft.online = 'off', was 'every'" in note for note in trainer.callback.notes)
    assert same_policy(trainer, whole)
    trainer = run(folder, "switched", *SHORT, *EVERY, "train.num_steps=5", resume=True)
    assert trainer.head_trainer is not None and trainer.head_trainer.version == 3


def test_switched_on_later(folder: Path) -> None:
    run(folder, "later", *SHORT, "train.num_steps=2")
    trainer = run(folder, "later", *SHORT, *EVERY, resume=True)
    assert [m["drafter_version"] for m in lines(folder / "later", "metrics")] == [0, 0, 0, 1]
    assert trainer.head_trainer is not None and trainer.head_trainer.version == 2


def test_another_head_is_rejected(folder: Path) -> None:
    run(folder, "other", "train.num_steps=1", *EVERY)
    write_head(folder, "head 2", seed=1)
    before = (folder / "other" / "config.toml").read_text()
    changed = "train.num_steps=2", *EVERY, f"speculation.head={str(folder / 'head 2')!r}"
    with pytest.raises(ValueError, match=r"speculation\.head: its weights are not those"):
        make(folder, "other", *drafting(folder), *changed, resume=True)
    assert (folder / "other" / "config.toml").read_text() == before


@pytest.fixture(scope="module")
def drive(folder: Path) -> Iterator[Any]:
    """drive(name=…, overrides=…, …) -> status and output; see kill_driver.py."""
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
    """At the first file, in the middle of the head's file, and in the second checkpoint."""
    overrides = [*drafting(folder), *SHORT, *EVERY]
    end = drive(name="driven", overrides=overrides)
    assert end["status"] == 0, end["output"]
    for attempt, at in enumerate((1, 13, 34)):
        end = drive(name="killed", overrides=overrides, resume=attempt > 0, at_write=at)
        assert end["status"] == -signal.SIGKILL, end["output"]
    end = drive(name="killed", overrides=overrides, resume=True)
    assert end["status"] == 0, end["output"]
    assert outcome(folder / "killed") == outcome(folder / "driven")


# ---- export ----


def test_export(folder: Path, every: Trainer, off: Trainer, tmp_path: Path) -> None:
    assert every.head_trainer is not None
    model, head = tmp_path / "model", tmp_path / "head"
    run = every.folder.path
    result = CliRunner().invoke(app, ["export", str(run), str(model), "--head", str(head)])
    assert result.exit_code == 0 and str(head) in result.stdout.replace("\n", ""), result.output
    target = load(model, torch.float64)
    loaded = load_head(
        head, target.config, dtype=torch.float64, target_checksum=checkpoint_checksum(model)
    )  # its provenance names this policy
    assert head_checksum(loaded) == head_checksum(every.head_trainer.learner.head)
    provenance = read_provenance(head)
    assert provenance is not None and provenance.num_steps == 20 and "then online with grpo" in provenance.data
    assert provenance.acceptance["last batch"]["mean_acceptance_length"] > 1
    with pytest.raises(ValueError, match="exists and is not empty"):
        export_policy(load_config(run / "config.toml"), run, tmp_path / "more", best=False, head=head)
    assert not (tmp_path / "more").exists()
    with pytest.raises(ValueError, match="its head was not trained online"):
        run = off.folder.path
        export_policy(load_config(run / "config.toml"), run, tmp_path / "more", best=False, head=tmp_path / "none")
    assert not (tmp_path / "more").exists()
