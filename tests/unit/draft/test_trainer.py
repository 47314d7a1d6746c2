"""Training runs on a tiny model, interrupted and uninterrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import RecordingCallback, lines, settings

import paceline.build.draft_run as build
from paceline.build.config import load_config
from paceline.config import Config
from paceline.draft.learner import DraftLearner
from paceline.draft.trainer import DraftTrainer
from paceline.model.dspark import DSparkHead
from paceline.model.head_files import load_head
from paceline.model.provenance import read_provenance
from paceline.model.weights import checksum, hf_state, read_config

SMALL = (
    "sampling.max_tokens=10",
    "draft.layer_ids=[1, 2]",
    "draft.draft_vocab_size=64",
    "draft.num_sequences=10",
    "draft.held_out=3",
    "draft.num_epochs=2",
    "draft.tokens_per_batch=40",
    "draft.unroll=2",
    "draft.warmup_steps=2",
    "draft.eval_every=3",
    "draft.checkpoint_every=3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draft")


def small(folder: Path, *overrides: str) -> Config:
    return settings(folder, *SMALL, *overrides)


def make(
    folder: Path, name: str, *overrides: str, resume: bool = False, stopping: Callable[[], bool] = lambda: False
) -> DraftTrainer:
    run = folder / name
    if resume:
        config = load_config(run / "config.toml")
        return build.build_draft_trainer(config, RecordingCallback(), resume=run, stopping=stopping)
    return build.build_draft_trainer(small(folder, *overrides), RecordingCallback(), run=run, stopping=stopping)


def train(folder: Path, name: str, *overrides: str, resume: bool = False) -> dict[str, Any]:
    trainer = make(folder, name, *overrides, resume=resume)
    try:
        return trainer.run()
    finally:
        trainer.close()


def outcome(run: Path) -> dict[str, Any]:
    """Everything that a run writes, except times."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    written = json.loads((last / "state.json").read_text())
    keys = ("acceptance_before", "acceptance_after", "num_tokens", "examples")
    return {
        "step": written["step"],
        "files": {name: file["sha256"] for name, file in written["files"].items()},
        "state": {key: written["state"][key] for key in keys},
        "metrics": [{key: value for key, value in m.items() if key != "seconds"} for m in lines(run, "metrics")],
        "rollouts": sorted(lines(run, "rollouts"), key=lambda record: record["id"]),
        "head": (run / "head" / "model.safetensors").read_bytes(),
    }


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, dict[str, Any]]:
    """An uninterrupted run."""
    summary = train(folder, "whole")
    return folder / "whole", summary


# ---- a run ----


def test_files_of_a_run(whole: tuple[Path, dict[str, Any]]) -> None:
    run, summary = whole
    metrics, rollouts = lines(run, "metrics"), lines(run, "rollouts")
    num_steps = summary["num_planned_steps"]
    assert summary["finished"] and summary["num_steps"] == num_steps > 6
    assert [m["step"] for m in metrics] == list(range(num_steps))
    assert [m["step"] for m in metrics if "acceptance_before" in m] == [0]
    measured = [m["step"] + 1 for m in metrics if "acceptance" in m]
    assert measured == sorted({*range(3, num_steps + 1, 3), num_steps})
    assert summary["acceptance_before"] == metrics[0]["acceptance_before"]
    assert summary["acceptance_after"] == metrics[-1]["acceptance"]
    for found in (summary["acceptance_before"], summary["acceptance_after"]):
        assert found.keys() == {"coupled", "greedy", "sampled"}
        assert all(len(kind["acceptance_per_position"]) == summary["k"] == 2 for kind in found.values())
        assert all(kind["num_drafts"] > 0 for kind in found.values())
    assert [m["learning_rate"] for m in metrics][:2] == [0.0005, 0.001]
    assert json.loads((run / "summary.json").read_text()) == summary
    assert load_config(run / "config.toml") == small(run.parent)

    problems = {split: {r["problem"] for r in rollouts if r["split"] == split} for split in ("train", "held_out")}
    assert not problems["train"] & problems["held_out"]
    assert [sum(r["split"] == split for r in rollouts) for split in ("train", "held_out")] == [10, 3]
    tokens = [t for r in rollouts if r["split"] == "train" for t in r["token_ids"]]
    assert summary["num_tokens"] == 2 * len(tokens), "two epochs of the target's completions"


def test_the_head_can_be_loaded(whole: tuple[Path, dict[str, Any]], folder: Path) -> None:
    run, summary = whole
    target = read_config(folder / "model")
    head = load_head(summary["head"], target, dtype=torch.float64)
    assert head.config.layer_ids == (1, 2) and head.config.draft_vocab_size == 64
    assert set(target.eos_token_ids) <= set(head.draft_ids.tolist())
    tokens = np.array([t for r in lines(run, "rollouts") if r["split"] == "held_out" for t in r["token_ids"]])
    assert summary["coverage"] == pytest.approx(np.isin(tokens, head.draft_ids.numpy()).mean())
    provenance = read_provenance(summary["head"])
    assert provenance is not None and provenance.target_checksum is not None
    assert provenance.num_steps == summary["num_steps"] and provenance.num_tokens == summary["num_tokens"]
    measured = provenance.acceptance["held-out"]
    assert (measured["temperature"], measured["k"]) == (1.0, 2)
    assert measured["coupled"] == summary["acceptance_after"]["coupled"]["mean_acceptance_length"]
    assert provenance.first_position_rate(1.0, "coupled") is not None
    assert "temperature 1" in provenance.data and provenance.seed == 0


def test_the_target_is_not_changed(folder: Path) -> None:
    trainer = make(folder, "untouched", "draft.num_epochs=1")
    before = checksum(hf_state(trainer.decoder))
    trainer.run()
    trainer.close()
    assert checksum(hf_state(trainer.decoder)) == before
    assert all(p.grad is None and not p.requires_grad for p in trainer.decoder.parameters())


def test_every_measurement_has_the_same_noise(folder: Path) -> None:
    """With learning rate 0, acceptance is the same before and after."""
    summary = train(folder, "no learning rate", "draft.learning_rate=0.0", "draft.num_epochs=1")
    assert summary["acceptance_after"] == summary["acceptance_before"]


def test_another_seed_gives_another_outcome(folder: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    """So the comparisons of this file can fail."""
    train(folder, "seed", "draft.seed=1")
    one, other = outcome(folder / "seed"), outcome(whole[0])
    assert all(one[key] != other[key] for key in ("files", "state", "metrics", "rollouts", "head"))


# ---- interrupted ----


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_a_crash_at_any_step(
    folder: Path, whole: tuple[Path, dict[str, Any]], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after the last checkpoint are lost, and repeated bit-identically."""
    name, update = f"crash {at}", DraftLearner.update
    with monkeypatch.context() as patch:

        def crash(self: DraftLearner, *args: Any) -> Any:
            if self.version == at:
                raise RuntimeError("crash")
            return update(self, *args)

        patch.setattr(DraftLearner, "update", crash)
        with pytest.raises(RuntimeError, match="crash"):
            train(folder, name)
    assert not (folder / name / "head").exists()
    monkeypatch.setattr(build, "build_engine", lambda config: pytest.fail("generated again"))
    recorded = lines(folder / name, "metrics") if at else []
    trainer = make(folder, name, resume=True)
    assert trainer.step == at // 3 * 3
    if 0 < at < 3:  # before the first checkpoint: the records are moved aside
        assert lines(folder / name / "interrupted-1", "metrics") == recorded != []
    trainer.run()
    trainer.close()
    assert outcome(folder / name) == outcome(whole[0])


def test_missing_checkpoints_are_an_error(folder: Path) -> None:
    train(folder, "gone")
    run = folder / "gone"
    shutil.rmtree(run / "checkpoints")
    before = {path: path.read_bytes() for path in run.glob("*.json*")}
    with pytest.raises(ValueError, match=f"{run / 'checkpoints'}: no checkpoint found, but this run saved one"):
        make(folder, "gone", resume=True)
    assert {path: path.read_bytes() for path in run.glob("*.json*")} == before


def test_stopping(folder: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    """It stops after the current step, with a checkpoint."""
    trainer = make(folder, "asked")
    summary = trainer.run(stopping=lambda: trainer.step == 4)
    trainer.close()
    assert not summary["finished"] and summary["num_steps"] == 4 and summary["head"] is None
    trainer = make(folder, "asked", resume=True)
    assert trainer.step == 4
    trainer.run()
    trainer.close()
    assert outcome(folder / "asked") == outcome(whole[0])


def test_stopped_while_generating(
    folder: Path, whole: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete rollouts are kept, an incomplete line is dropped, and only the missing ones are generated."""
    calls = iter(range(1000))
    with pytest.raises(KeyboardInterrupt):
        # Two at a time, so that some are finished before others start.
        make(folder, "early", "engine.max_num_seqs=2", stopping=lambda: next(calls) > 18)
    kept = lines(folder / "early", "rollouts")
    assert 0 < len(kept) < 13
    with (folder / "early" / "rollouts.jsonl").open("a") as file:
        file.write('{"id": 12, "split": "tr')
    config = folder / "early" / "config.toml"
    config.write_text(config.read_text().replace("max_num_seqs = 2", "max_num_seqs = 16"))
    train(folder, "early", resume=True)
    assert lines(folder / "early", "rollouts")[: len(kept)] == kept
    assert outcome(folder / "early") == outcome(whole[0])


def test_resuming_a_finished_run_changes_nothing(folder: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    before = outcome(whole[0])
    again = train(folder, "whole", resume=True)
    assert again == whole[1] and outcome(whole[0]) == before


# ---- where sequences and heads come from ----


def test_recorded_rollouts_as_data(folder: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    """Without an engine, with the same tokens, and starting from an existing head."""
    data = folder / "recorded.jsonl"
    data.write_bytes((whole[0] / "rollouts.jsonl").read_bytes())
    init = [f"draft.init={str(whole[0] / 'head')!r}", f"draft.data={str(data)!r}"]
    trainer = make(folder, "recorded", *init)
    given = load_head(whole[0] / "head", trainer.decoder.config, dtype=torch.float64)
    assert all(p.equal(q) for p, q in zip(trainer.learner.head.parameters(), given.parameters(), strict=True))
    assert trainer.learner.head.draft_ids.equal(given.draft_ids)
    summary = trainer.run()
    trainer.close()
    # Prompts are held out with all of their completions: 6 problems have 1 or 2 each, the 2 held-out ones 1 or 2.
    assert summary["num_held_out"] == 3 and 9 <= summary["num_train"] <= 10
    assert summary["acceptance_before"]["coupled"]["num_drafts"] > 0
    data.write_bytes(data.read_bytes().replace(b'"token_ids": [', b'"token_ids": [5, ', 1))
    with pytest.raises(ValueError, match=r"draft.data: its sequences are not those that .*recorded started with"):
        make(folder, "recorded", resume=True)


def test_the_heads_shape(folder: Path) -> None:
    shape = ["draft.layer_ids=[2]", "draft.fc_norm=true", "draft.norm_before_residual=true", "draft.num_epochs=1"]
    summary = train(folder, "shape", *shape, "draft.draft_vocab_size=33")
    head = load_head(summary["head"], read_config(folder / "model"))
    assert head.config.layer_ids == (2,) and head.config.fc_norm and head.config.norm_before_residual
    assert head.config.draft_vocab_size == len(head.draft_ids) == 33
    init = f"draft.init={summary['head']!r}"
    config = load_config(None, [f"model.name={str(folder / 'model')!r}", init])
    assert build.build_head_init(config, folder / "model").section.layer_ids == [2]
    with pytest.raises(ValueError, match=r"draft.layer_ids = \[1, 2\]: the head draft.init = .* has \[2\]"):
        make(folder, "other shape", init, "draft.draft_vocab_size=33")
    assert not (folder / "other shape").exists(), "config errors are found before the folder is created"


def test_a_dspark_head(folder: Path) -> None:
    """It is trained, resumed bit for bit, written and loaded."""
    shape = "draft.architecture=dspark", "draft.num_layers=1", "draft.markov_rank=3"
    summary = train(folder, "dspark", *shape)
    assert summary["architecture"] == "dspark" and summary["finished"]
    head = load_head(summary["head"], read_config(folder / "model"))
    assert isinstance(head, DSparkHead) and (head.config.block_size, head.config.markov_rank) == (2, 3)
    assert head.config.layer.num_layers == 1
    trainer = make(folder, "dspark, stopped", *shape)
    trainer.run(stopping=lambda: trainer.step == 4)
    trainer.close()
    train(folder, "dspark, stopped", resume=True)
    assert outcome(folder / "dspark, stopped") == outcome(folder / "dspark")
    init = f"draft.init={summary['head']!r}"
    again = make(folder, "dspark, again", init, "draft.architecture=dspark", "draft.draft_vocab_size=64")
    assert all(p.equal(q) for p, q in zip(again.learner.head.parameters(), head.double().parameters(), strict=True))
    again.close()
    with pytest.raises(ValueError, match=r"draft.architecture = eagle3: the head draft.init = .* has dspark"):
        make(folder, "other", init, "draft.architecture=eagle3")
    with pytest.raises(ValueError, match=r"draft.unroll = 3: the head draft.init = .* has 2"):
        make(folder, "other", init, "draft.draft_vocab_size=64", "draft.unroll=3")
    config = load_config(None, [f"model.name={str(folder / 'model')!r}", init])
    assert build.build_head_init(config, folder / "model").section.unroll == 2, "blocks of the size that it has"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("draft.markov_rank=3", 'draft.markov_rank = 3: is for draft.architecture = "dspark", but it is "eagle3"'),
        ("draft.layer_ids=[1, 3]", r"draft.layer_ids = \[1, 3\]: the model has 2 layers; give ascending numbers"),
        ("draft.layer_ids=[2, 1]", r"draft.layer_ids = \[2, 1\]: the model has 2 layers"),
        ("draft.draft_vocab_size=1000", "draft.draft_vocab_size = 1000: the model has 259 tokens; lower it"),
        ("draft.data=nowhere.jsonl", "draft.data = .*no such file"),
        ("draft.init=nowhere", "draft.init = 'nowhere': no such directory, and no EAGLE-3 head ships"),
        ("task.held_out=0", "task.held_out = 0: acceptance is measured on held-out problems"),
    ],
)
def test_config_errors(folder: Path, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(folder, "mistake", setting)
    assert not (folder / "mistake").exists()


def test_sequences_that_are_too_short(folder: Path) -> None:
    """One prompt token and one completion token."""
    (folder / "short.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    short = ("sampling.max_tokens=1", f"task.name={str(folder / 'short.jsonl')!r}", "task.held_out=1")
    with pytest.raises(ValueError, match=r"draft.num_sequences: all generated sequences are too short \(10\)"):
        make(folder, "short", *short)


def test_a_prompt_that_is_too_long_is_skipped(folder: Path) -> None:
    rows = [{"prompt": "x" * 300}, *({"prompt": f"say {i}"} for i in range(6))]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = train(folder, "long", f"task.name={str(folder / 'long.jsonl')!r}", "draft.num_epochs=1")
    refused = [r for r in lines(folder / "long", "rollouts") if not r["token_ids"]]
    assert len(refused) == summary["num_skipped"] > 0
    assert all("the model's context is 256" in r["finish_reason"] for r in refused)
