"""A resumed run with other settings: refused where it would be another run, said where it is not; never poisoned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_run import Quiet, make, policy, settings, write_model

from paceline.build import build_loop, export_policy
from paceline.config import load_config
from paceline.drafters.ahead import HistoryAhead
from paceline.speculation.library import Library


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    loop = make(tmp_path, "run", "train.num_steps=2", "train.checkpoint_every=1")
    loop.run()
    loop.close()
    return tmp_path


@pytest.mark.parametrize(
    "change",
    ["task.seed=7", "task.held_out=3", "train.seed=1", "train.max_staleness=1", "learner.optimizer=muon",
     "learner.lora_rank=2", "model.dtype=float32"],
)  # fmt: skip
def test_what_would_be_another_run_is_refused_and_harms_nothing(folder: Path, change: str) -> None:
    files = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=change.partition("=")[0].replace(".", r"\.")):
        make(folder, "run", "train.num_steps=3", change, resume=True)
    for path, content in files.items():
        assert path.name == ".lock" or path.read_bytes() == content, path
    loop = make(folder, "run", "train.num_steps=3", "train.checkpoint_every=1", resume=True)
    assert loop.run()["steps"] == 3
    loop.close()


def test_other_changes_are_said(folder: Path) -> None:
    loop = make(folder, "run", "train.num_steps=3", "train.checkpoint_every=1", "algorithm.name=gspo", resume=True)
    assert any("algorithm.name = 'gspo', was 'grpo'" in note for note in loop.watcher.notes)
    loop.run()
    loop.close()
    assert load_config(folder / "run" / "config.toml").algorithm.name == "gspo"


def test_a_model_that_changed_under_its_name_is_refused(folder: Path) -> None:
    from paceline.model.weights import load, save

    decoder = load(folder / "model", torch.float64)
    with torch.no_grad():
        decoder.norm.add_(1)
    save(decoder, folder / "model")
    with pytest.raises(ValueError, match="not those that this run began with"):
        make(folder, "run", "train.num_steps=3", "train.checkpoint_every=1", resume=True)


def test_from_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Relative paths in the settings are those of the folder where the run began."""
    monkeypatch.chdir(folder)
    config = settings(folder, "train.num_steps=1")
    relative = config.model_copy(
        update={
            "model": config.model.model_copy(update={"name": "model"}),
            "task": config.task.model_copy(update={"name": "task.jsonl"}),
        }
    )
    loop = build_loop(relative, Quiet(), run=folder / "relative")
    loop.run()
    loop.close()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    again = load_config(folder / "relative" / "config.toml", ["train.num_steps=2"])
    loop = build_loop(again, Quiet(), resume=folder / "relative")
    assert loop.run()["steps"] == 2
    loop.close()


def test_what_fails_after_the_update_does_not_lose_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C during validation, say."""
    loop = make(tmp_path, "run", "train.num_steps=6", "train.eval_every=3", "train.checkpoint_every=0")
    evaluate, calls = loop._evaluate, []

    def interrupted() -> dict:
        calls.append(loop.step)
        if loop.step == 3:
            raise KeyboardInterrupt
        return evaluate()

    monkeypatch.setattr(loop, "_evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    weights = policy(loop)
    loop.close()
    assert calls == [0, 3]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    resumed = make(tmp_path, "run", "train.num_steps=6", "train.eval_every=3", "train.checkpoint_every=0", resume=True)
    assert resumed.step == 3
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy(resumed).items())
    resumed.close()


def test_nothing_to_learn_from_moves_nothing(tmp_path: Path) -> None:
    """All completions cut off, and filtered: not even weight decay may move the policy."""
    masked = "algorithm.mask_truncated_completions=true", "sampling.ignore_eos=true", "learner.weight_decay=0.1"
    loop = make(tmp_path, "run", *masked, "train.num_steps=2")
    before = policy(loop)
    loop.run()
    assert all(torch.equal(before[name], tensor) for name, tensor in policy(loop).items())
    assert any("nothing to learn from" in note for note in loop.watcher.notes)
    loop.close()


def test_a_validation_that_can_not_be_scored_is_no_zero(tmp_path: Path) -> None:
    failing = 'reward.functions=["reward_functions:nan_on_held_out"]', "train.eval_every=1", "train.num_steps=1"
    loop = make(tmp_path, "run", *failing, f"task.template={tmp_path / 'held_out.json'!s} {{prompt}}")
    (tmp_path / "held_out.json").write_text(json.dumps([problem.prompt for problem in loop.task.held_out]))
    summary = loop.run()
    loop.close()
    assert summary["reward_before"] is None and summary["reward_after"] is None and summary["best"] is None
    assert any("validation:" in note and "nan" in note.lower() for note in loop.watcher.notes)


def test_export_never_overwrites_a_model(folder: Path) -> None:
    config = load_config(folder / "run" / "config.toml")
    with pytest.raises(ValueError, match="already holds a model"):
        export_policy(config, folder / "run", folder / "model", best=False)
    export_policy(config, folder / "run", folder / "new", best=False)
    assert (folder / "new" / "config.json").exists()


def test_messages_without_a_chat_template_are_refused_at_once(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    task = tmp_path / "task.jsonl"
    lines = ['{"prompt": "a", "answer": "1"}'] * 1 + [
        json.dumps({"prompt": [{"role": "user", "content": f"b{i}"}], "answer": "1"}) for i in range(5)
    ]
    task.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"list of messages, but task\.chat = false"):
        make(tmp_path, "run")
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_given_up_is_no_history(tmp_path: Path) -> None:
    """Stopped in the middle of the second step's generation: the checkpoint is that of a run of one step."""
    suffix = "speculation.method=suffix", "train.checkpoint_every=0"
    one = make(tmp_path, "one", *suffix, "train.num_steps=1")
    one.run()
    one.close()
    two = make(tmp_path, "two", *suffix, "train.num_steps=2")

    def stop_in_the_middle(done: int, total: int) -> None:
        if two.step == 1 and any(len(s.tokens) > s.num_prompt + 3 for s in two.engine.scheduler.running):
            two.producer.stop()

    two.producer.on_progress = stop_in_the_middle
    assert two.run()["steps"] == 1
    two.close()
    found, expected = two.checkpoints.latest(), one.checkpoints.latest()
    assert found is not None and expected is not None and found.step == expected.step == 1
    drafter = expected.tensors("drafter")
    assert drafter and all(torch.equal(drafter[name], tensor) for name, tensor in found.tensors("drafter").items())


def test_a_drafter_of_another_kind_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a run goes on on a GPU, where history is read in another way."""
    suffix = "speculation.method=suffix", "train.checkpoint_every=1"
    one = make(tmp_path, "run", *suffix, "train.num_steps=1")
    one.run()
    one.close()
    monkeypatch.setattr("paceline.build.drafter.build_history", lambda config: HistoryAhead(Library()))
    two = make(tmp_path, "run", *suffix, "train.num_steps=2", resume=True)
    assert two.step == 1 and any("of another kind" in note for note in two.watcher.notes)
    assert two.run()["steps"] == 2 and two.engine.drafter.num_bytes > 0
    two.close()


def test_a_finished_run_keeps_its_settings(folder: Path) -> None:
    before = (folder / "run" / "config.toml").read_text()
    more = "train.num_steps=2", "train.checkpoint_every=1", "algorithm.num_generations=8"
    loop = make(folder, "run", *more, resume=True)
    assert loop.run()["steps"] == 2
    assert any("is finished" in note for note in loop.watcher.notes)
    loop.close()
    assert (folder / "run" / "config.toml").read_text() == before
