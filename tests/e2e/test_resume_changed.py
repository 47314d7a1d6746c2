"""Resuming with other settings: rejected for settings that define the run, otherwise reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_run import RecordingCallback, make, policy, settings, write_model

from paceline.build.config import load_config
from paceline.build.export import export_policy
from paceline.build.run import build_trainer
from paceline.drafters.device import DeviceHistoryDrafter
from paceline.speculation.history_store import HistoryStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    trainer = make(tmp_path, "run", "train.num_steps=2", "train.checkpoint_every=1")
    trainer.run()
    trainer.close()
    return tmp_path


@pytest.mark.parametrize(
    "change",
    ["task.seed=7", "task.held_out=3", "train.seed=1", "train.max_staleness=1", "learner.optimizer=muon",
     "learner.lora_rank=2", "model.dtype=float32"],
)  # fmt: skip
def test_settings_that_define_the_run_are_rejected_and_nothing_is_changed(folder: Path, change: str) -> None:
    files = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=change.partition("=")[0].replace(".", r"\.")):
        make(folder, "run", "train.num_steps=3", change, resume=True)
    for path, content in files.items():
        assert path.name == ".lock" or path.read_bytes() == content, path
    trainer = make(folder, "run", "train.num_steps=3", "train.checkpoint_every=1", resume=True)
    assert trainer.run()["num_steps"] == 3
    trainer.close()


def test_other_changes_are_reported(folder: Path) -> None:
    trainer = make(folder, "run", "train.num_steps=3", "train.checkpoint_every=1", "algorithm.name=gspo", resume=True)
    assert any("algorithm.name = 'gspo', was 'grpo'" in note for note in trainer.callback.notes)
    trainer.run()
    trainer.close()
    assert load_config(folder / "run" / "config.toml").algorithm.name == "gspo"


def test_a_changed_model_is_rejected(folder: Path) -> None:
    from paceline.model.weights import load, save

    decoder = load(folder / "model", torch.float64)
    with torch.no_grad():
        decoder.norm.add_(1)
    save(decoder, folder / "model")
    with pytest.raises(ValueError, match="not those that this run started with"):
        make(folder, "run", "train.num_steps=3", "train.checkpoint_every=1", resume=True)


def test_from_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Relative paths in the settings refer to the folder where the run was started."""
    monkeypatch.chdir(folder)
    config = settings(folder, "train.num_steps=1")
    relative = config.model_copy(
        update={
            "model": config.model.model_copy(update={"name": "model"}),
            "task": config.task.model_copy(update={"name": "task.jsonl"}),
        }
    )
    trainer = build_trainer(relative, RecordingCallback(), run=folder / "relative")
    trainer.run()
    trainer.close()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    again = load_config(folder / "relative" / "config.toml", ["train.num_steps=2"])
    trainer = build_trainer(again, RecordingCallback(), resume=folder / "relative")
    assert trainer.run()["num_steps"] == 2
    trainer.close()


def test_an_error_after_the_update_does_not_lose_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a second Ctrl-C during evaluation."""
    trainer = make(tmp_path, "run", "train.num_steps=6", "train.eval_every=3", "train.checkpoint_every=0")
    evaluate, calls = trainer.evaluator._evaluate, []

    def interrupted(step: int, may_stop: bool = False) -> dict:
        calls.append(step)
        if step == 3:
            raise KeyboardInterrupt
        return evaluate(step, may_stop)

    monkeypatch.setattr(trainer.evaluator, "_evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    weights = policy(trainer)
    trainer.close()
    assert calls == [0, 3]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    resumed = make(tmp_path, "run", "train.num_steps=6", "train.eval_every=3", "train.checkpoint_every=0", resume=True)
    assert resumed.step == 3
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy(resumed).items())
    resumed.close()


def test_a_step_with_nothing_to_train_on_does_not_change_the_policy(tmp_path: Path) -> None:
    """All completions are truncated and masked: not even weight decay may change the policy."""
    masked = "algorithm.mask_truncated_completions=true", "sampling.ignore_eos=true", "learner.weight_decay=0.1"
    trainer = make(tmp_path, "run", *masked, "train.num_steps=2")
    before = policy(trainer)
    trainer.run()
    assert all(torch.equal(before[name], tensor) for name, tensor in policy(trainer).items())
    assert any("nothing to train on" in note for note in trainer.callback.notes)
    trainer.close()


def test_an_evaluation_without_scores_has_no_reward(tmp_path: Path) -> None:
    failing = 'reward.functions=["reward_functions:nan_on_held_out"]', "train.eval_every=1", "train.num_steps=1"
    trainer = make(tmp_path, "run", *failing, f"task.template={tmp_path / 'held_out.json'!s} {{prompt}}")
    (tmp_path / "held_out.json").write_text(json.dumps([problem.prompt for problem in trainer.task.held_out]))
    summary = trainer.run()
    trainer.close()
    assert summary["reward_before"] is None and summary["reward_after"] is None and summary["best"] is None
    assert any("validation:" in note and "nan" in note.lower() for note in trainer.callback.notes)


def test_export_never_overwrites_a_model(folder: Path) -> None:
    config = load_config(folder / "run" / "config.toml")
    with pytest.raises(ValueError, match="exists and is not empty"):
        export_policy(config, folder / "run", folder / "model", best=False)
    export_policy(config, folder / "run", folder / "new", best=False)
    assert (folder / "new" / "config.json").exists()


def test_messages_without_a_chat_template_are_rejected_at_once(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    task = tmp_path / "task.jsonl"
    lines = ['{"prompt": "a", "answer": "1"}'] * 1 + [
        json.dumps({"prompt": [{"role": "user", "content": f"b{i}"}], "answer": "1"}) for i in range(5)
    ]
    task.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"list of messages, but task\.chat = false"):
        make(tmp_path, "run")
    assert not (tmp_path / "run").exists()


def test_a_discarded_step_is_not_in_the_history(tmp_path: Path) -> None:
    """Stopped during the generation of the second step: the checkpoint equals that of a run of one step."""
    suffix = "speculation.method=suffix", "train.checkpoint_every=0"
    one = make(tmp_path, "one", *suffix, "train.num_steps=1")
    one.run()
    one.close()
    two = make(tmp_path, "two", *suffix, "train.num_steps=2")

    def stop_in_the_middle(done: int, total: int) -> None:
        if two.step == 1 and any(len(s.tokens) > s.num_prompt + 3 for s in two.engine.scheduler.running):
            two.producer.stop()

    two.producer.on_progress = stop_in_the_middle
    assert two.run()["num_steps"] == 1
    two.close()
    found, expected = two.checkpoints.latest(), one.checkpoints.latest()
    assert found is not None and expected is not None and found.step == expected.step == 1
    drafter = expected.tensors("drafter")
    assert drafter and all(torch.equal(drafter[name], tensor) for name, tensor in found.tensors("drafter").items())


def test_another_drafter_implementation_starts_without_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if a run continues on a GPU, which has another history drafter."""
    suffix = "speculation.method=suffix", "train.checkpoint_every=1"
    one = make(tmp_path, "run", *suffix, "train.num_steps=1")
    one.run()
    one.close()
    monkeypatch.setattr("paceline.build.model_free.build_history", lambda config: DeviceHistoryDrafter(HistoryStore()))
    two = make(tmp_path, "run", *suffix, "train.num_steps=2", resume=True)
    assert two.step == 1 and any("has another implementation" in note for note in two.callback.notes)
    assert two.run()["num_steps"] == 2 and two.engine.drafter.num_bytes > 0
    two.close()


def test_a_finished_run_keeps_its_settings(folder: Path) -> None:
    before = (folder / "run" / "config.toml").read_text()
    more = "train.num_steps=2", "train.checkpoint_every=1", "algorithm.num_generations=8"
    trainer = make(folder, "run", *more, resume=True)
    assert trainer.run()["num_steps"] == 2
    assert any("is finished" in note for note in trainer.callback.notes)
    trainer.close()
    assert (folder / "run" / "config.toml").read_text() == before
