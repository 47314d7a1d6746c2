"""A run with two tasks, 70 to 30: shares, metrics and held-out results, recomputed from the rollouts; resuming; and the
commands that read its config."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import reward_functions
import tiny_run
from tiny_run import RecordingCallback, lines, outcome, write_model
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.build.run import build_trainer
from paceline.cli import app
from paceline.rl.order import Shares
from paceline.rl.trainer import Trainer
from paceline.types import Group

# Both tasks read the same file, so their problems have the same names and prompts; only the template differs.
CONFIG = """
[sampling]
max_tokens = 12

[[task]]
label = "letters"
weight = 0.7
kind = "jsonl"
name = "TASK"
chat = false
held_out = 2
[task.reward]
functions = ["reward_functions:many_a"]

[[task]]
label = "short"
weight = 0.3
max_tokens = 5
kind = "jsonl"
name = "TASK"
template = "{prompt}!"
chat = false
held_out = 3
[task.reward]
functions = ["reward_functions:length", "reward_functions:many_a"]
weights = [0.25, 1.0]
"""
OF_ONE_TASK = ("sampling.", "task.", "reward.", "train.groups_per_step")
SETTINGS = [each for each in tiny_run.SETTINGS if not each.startswith(OF_ONE_TASK)]
SETTINGS += ["train.groups_per_step=4", "train.num_steps=5", "speculation.method=suffix"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_model(folder / "model")
    tiny_run.write_task(folder / "task.jsonl", 10)
    (folder / "two.toml").write_text(CONFIG.replace("TASK", str(folder / "task.jsonl")))
    return folder


def arguments(folder: Path, *overrides: str) -> list[str]:
    return [str(folder / "two.toml"), f"model.name={str(folder / 'model')!r}", *SETTINGS, *overrides]


def trainer_of(folder: Path, name: str, *overrides: str, resume: bool = False) -> Trainer:
    path, *given = arguments(folder, *overrides)
    config = load_config(path, given)
    run = folder / name
    return build_trainer(config, RecordingCallback(), run=None if resume else run, resume=run if resume else None)


def train(folder: Path, name: str, *overrides: str, resume: bool = False) -> Path:
    with closing(trainer_of(folder, name, *overrides, resume=resume)) as trainer:
        trainer.run()
    return folder / name


def expected_reward(task: str, text: str, token_ids: list[int]) -> float:
    (share,) = reward_functions.many_a(None, [text], None)
    return share if task == "letters" else 0.25 * len(token_ids) + share


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> tuple[Path, list[list[Group]]]:
    """A run, and the groups of each of its evaluations."""
    evaluations: list[list[Group]] = []
    with closing(trainer_of(folder, "run", "train.eval_every=2", "train.eval_samples=4")) as trainer:
        collect = trainer.collector.collect

        def recording(when: str, *args: Any, **options: Any) -> Any:
            collected = collect(when, *args, **options)
            if when.startswith("evaluation"):
                evaluations.append(collected.groups)
            return collected

        trainer.collector.collect = recording  # type: ignore[method-assign]
        trainer.run()
    return folder / "run", evaluations


def test_shares_and_metrics(evaluated: tuple[Path, Any]) -> None:
    run, _ = evaluated
    rollouts, metrics = lines(run, "rollouts"), lines(run, "metrics")
    assert all(r["problem"].startswith(f"{r['task']}/") for r in rollouts)
    task_of = {r["group"]: r["task"] for r in rollouts}
    for num in range(1, 21):  # after any number of groups, the shares are exact up to one group
        counts = Counter(task_of[group] for group in range(num))
        assert abs(counts["letters"] - 0.7 * num) < 1 and abs(counts["short"] - 0.3 * num) < 1
    assert Counter(task_of.values()) == {"letters": 14, "short": 6}
    for r in rollouts:
        assert r["reward"] == pytest.approx(expected_reward(r["task"], r["completion"], r["token_ids"]))
        assert len(r["token_ids"]) <= (12 if r["task"] == "letters" else 5)
    assert {len(r["token_ids"]) for r in rollouts if r["task"] == "letters"} >= {12}
    for m in metrics:
        for label in ("letters", "short"):
            own = [r for r in rollouts if r["step"] == m["step"] and r["task"] == label]
            found, rewards, lengths = m["tasks"][label], [r["reward"] for r in own], [len(r["token_ids"]) for r in own]
            assert found["num_samples"] == len(own) == 4 * found["num_groups"] > 0
            assert found["share"] == len(own) / 16 and found["num_tokens"] == sum(lengths)
            assert found["reward_mean"] == pytest.approx(fmean(rewards))
            assert found["reward_std"] == pytest.approx(pstdev(rewards))
            assert found["solved_ratio"] == fmean(reward >= 1 for reward in rewards)
            assert found["truncated_ratio"] == fmean(r["finish_reason"] == "length" for r in own)
            assert (found["length_mean"], found["length_max"]) == (pytest.approx(fmean(lengths)), max(lengths))
            assert len(found["rewards"]) == (1 if label == "letters" else 2)
        assert m["num_samples"] == sum(found["num_samples"] for found in m["tasks"].values())
    # 8 problems of `letters` and 7 of `short` are left for training: 14 and 6 groups.
    assert [m["tasks"]["letters"]["epoch"] for m in metrics] == [0, 0, 1, 1, 1]
    assert {m["epoch"] for m in metrics} == {0}
    solved = {m["tasks"]["short"]["solved_ratio"] for m in metrics} | {
        m["tasks"]["letters"]["solved_ratio"] for m in metrics
    }
    assert len(solved) > 1


def test_each_task_has_its_own_order_and_history(evaluated: tuple[Path, Any]) -> None:
    run, evaluations = evaluated
    rollouts = lines(run, "rollouts")
    problems: dict[str, list[str]] = {"letters": [], "short": []}
    for r in sorted(rollouts, key=lambda r: r["group"]):
        if r["sample"] == 0:
            problems[r["task"]].append(r["problem"].partition("/")[2])
    assert set(problems["letters"]) & set(problems["short"]), "without the label, both tasks have these names"
    assert len(set(problems["letters"][:8])) == 8 and len(set(problems["short"])) == 6, "each epoch has a problem once"
    held_out = {group.problem for group in evaluations[0]}
    assert len(held_out) == 5 and held_out.isdisjoint(r["problem"] for r in rollouts)
    assert sum(m["num_accepted_tokens"] for m in lines(run, "metrics")) > 0, "drafts come from the history of a problem"


def test_held_out_problems(evaluated: tuple[Path, list[list[Group]]]) -> None:
    """Recomputed from the texts of the evaluated samples. The best step has the highest weighted mean."""
    run, evaluations = evaluated
    metrics = lines(run, "metrics")
    results = [metrics[0]["eval_before"], *(m["eval"] for m in metrics if "eval" in m)]
    assert len(results) == len(evaluations) == 4
    for result, groups in zip(results, evaluations, strict=True):
        assert list(result["tasks"]) == ["letters", "short"]
        means, solved = {}, {}
        for label, num_problems in (("letters", 2), ("short", 3)):
            own = [group for group in groups if group.task == label]
            rewards = [
                [expected_reward(label, rollout.text, rollout.token_ids.tolist()) for rollout in group.rollouts]
                for group in own
            ]
            assert [len(each) for each in rewards] == [4] * num_problems
            means[label] = fmean(reward for each in rewards for reward in each)
            solved[label] = fmean(any(reward >= 1 for reward in each) for each in rewards)
            found = result["tasks"][label]
            assert found["reward"] == pytest.approx(means[label]) and found["num_problems"] == num_problems
            assert found["pass_at_k"] == pytest.approx(solved[label]) and found["k"] == 4
        assert means["letters"] != pytest.approx(means["short"])
        assert result["reward"] == pytest.approx(0.7 * means["letters"] + 0.3 * means["short"])
        assert result["pass_at_k"] == pytest.approx(0.7 * solved["letters"] + 0.3 * solved["short"])
        assert result["num_problems"] == 5
    summary = json.loads((run / "summary.json").read_text())
    steps = {m["step"] + 1: m["eval"]["reward"] for m in metrics if "eval" in m}
    assert summary["best"]["reward"] == max(steps.values()) == steps[summary["best"]["step"]]
    assert summary["tasks"]["short"] == {
        "reward_before": results[0]["tasks"]["short"]["reward"],
        "reward_after": results[-1]["tasks"]["short"]["reward"],
    }


@pytest.mark.parametrize("flavour", ["synchronous", "staleness 1, resampled"])
def test_a_resumed_run_continues_bit_for_bit(folder: Path, flavour: str) -> None:
    more = ["train.checkpoint_every=1"]
    if flavour == "synchronous":  # otherwise it depends on timing which history an evaluation drafts from
        more.append("train.eval_every=2")
    else:
        alike = 'task.letters.reward.functions=["reward_functions:sometimes_alike"]'
        more += ["train.max_staleness=1", "algorithm.name=dapo", alike]
    whole = train(folder, f"{flavour}, whole", *more)
    resumed = train(folder, f"{flavour}, resumed", *more, "train.num_steps=2")
    assert len(lines(resumed, "metrics")) == 2
    train(folder, f"{flavour}, resumed", *more, resume=True)
    first, second = outcome(whole), outcome(resumed)
    assert first["rollouts"] == second["rollouts"] and len(first["rollouts"]) >= 80
    assert first == second
    if "resampled" in flavour:
        assert sum(m["tasks"]["letters"]["num_groups_filtered"] for m in lines(whole, "metrics")) > 0


def test_continuous_rollouts_have_the_same_order(folder: Path, evaluated: Any) -> None:
    """Which step takes a group depends on timing; its task and its problem do not, also after resuming."""
    more = ["train.max_staleness=2", "train.inflight=keep", "train.checkpoint_every=1"]
    run = train(folder, "continuous", *more, "train.num_steps=2")
    train(folder, "continuous", *more, resume=True)
    rollouts = lines(run, "rollouts")
    shares, labels = Shares([0.7, 0.3]), ("letters", "short")
    assert len({r["group"] for r in rollouts}) == 20 and len(rollouts) == 80
    assert all(r["task"] == labels[shares[r["group"]][0]] for r in rollouts)
    in_order = {r["group"]: r["problem"] for r in lines(folder / "run", "rollouts")}
    both = [r for r in rollouts if r["group"] in in_order]
    assert both and all(r["problem"] == in_order[r["group"]] for r in both)


def test_what_may_change_on_resume(folder: Path, evaluated: Any) -> None:
    notes: list[str] = []
    with closing(trainer_of(folder, "run", "task.short.reward.timeout_s=9.0", "train.eval_every=2", resume=True)) as t:
        notes = t.callback.notes  # type: ignore[attr-defined]
    assert any("changed on resume: task.short.reward.timeout_s = 9.0, was 10.0" in note for note in notes)
    for override, message in (
        ("task.short.weight=1.0", r"task\.short\.weight = 1\.0: this run started with 0\.3"),
        ("task=short", "task = short: this run started with letters, short, and tasks can't change"),
        ("task.short.label=other", "task = letters, other: this run started with letters, short"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(folder, "run", override, resume=True)


def test_the_failures_of_a_task_are_counted_by_themselves(folder: Path) -> None:
    """All samples of the smaller task fail: less than half of a step's samples."""
    failing = 'task.short.reward.functions=["reward_functions:scalar"]'
    with pytest.raises(ValueError, match="reward_functions:scalar"):
        train(folder, "wrong", failing, "task.short.reward.weights=[1.0]")
    none = ["task.short.reward.functions=['env']", "task.short.reward.weights=[1.0]"]
    with pytest.raises(ValueError, match=r"4 of 4 samples .*more than task\.short\.reward\.max_failures = 0\.5"):
        train(folder, "failing", *none)
    more = ["task.short.reward.max_failures=1.0", "train.num_steps=2", "train.eval_every=2"]
    tolerant = train(folder, "tolerant", *none, *more)
    result = lines(tolerant, "metrics")[-1]["eval"]
    assert result["reward"] is None, "without one of the tasks, the mean could not be compared"
    assert result["tasks"]["short"]["reward"] is None and result["tasks"]["letters"]["reward"] > 0
    assert result["num_failures"] == result["tasks"]["short"]["num_failures"] == 3 and result["num_zero_scored"] == 0
    for m in lines(tolerant, "metrics"):
        assert m["tasks"]["short"]["num_failures"] == m["num_failures"] > m["tasks"]["letters"]["num_failures"] == 0


# ---- commands ----


def run_command(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_eval_reports_each_task(folder: Path, tmp_path: Path) -> None:
    path, _, *settings = arguments(folder)
    shown = run_command("eval", folder / "model", path, *settings, "--json", tmp_path / "e.json")
    found = json.loads((tmp_path / "e.json").read_text())
    weighted = 0.7 * found["tasks"]["letters"]["reward"] + 0.3 * found["tasks"]["short"]["reward"]
    assert found["reward"] == pytest.approx(weighted) and "mean reward, short" in shown
    run_command("eval", folder / "model", path, "task=letters", *settings, "--json", tmp_path / "one.json")
    one = json.loads((tmp_path / "one.json").read_text())
    assert list(one["tasks"]) == ["letters"] and one["reward"] == found["tasks"]["letters"]["reward"]


def test_dry_run_has_a_row_for_each_task(folder: Path) -> None:
    shown = " ".join(run_command("train", "--dry-run", *arguments(folder)).split())
    assert "problems, letters 8 to train on, 2 held out, 0.7 of the groups" in shown
    assert "problems, short 7 to train on, 3 held out, 0.3 of the groups" in shown
    assert "rewards, letters" in shown and "rewards, short" in shown
    wrong = run_command(
        "train", "--dry-run", *arguments(folder), "task.short.held_out=20", "task.letters.reward.functions=['none']",
        code=2,
    )  # fmt: skip
    assert "task.short: task.held_out = 20" in wrong
    missing = run_command("train", "--dry-run", *arguments(folder), "task.letters.reward.functions=['x']", code=2)
    assert "task.letters: reward.functions has 'x'" in missing


def test_commands_that_use_one_task(folder: Path) -> None:
    path, model, *_ = arguments(folder)
    for more in ([], ["--config", path]):
        refused = run_command("sweep", *(more or [path]), model, "--batch", 1, code=2)
        assert "paceline sweep uses one task, but the config has several: letters, short; choose one: task=" in refused


def test_a_head_is_trained_on_all_tasks(folder: Path, tmp_path: Path) -> None:
    draft = ["draft.num_sequences=20", "draft.held_out=5", "draft.num_epochs=1", "draft.layer_ids=[1,2]"]
    draft += ["draft.draft_vocab_size=64", "draft.tokens_per_batch=256", "model.dtype=float32"]
    run_command("train-draft", *arguments(folder, *draft), "--run", tmp_path / "head")
    records = lines(tmp_path / "head", "rollouts")
    counts = Counter((r["split"], r["problem"].partition("/")[0]) for r in records)
    assert counts["train", "letters"] == 14 and counts["train", "short"] == 6
    assert counts["held_out", "letters"] + counts["held_out", "short"] == 5
    assert max(len(r["token_ids"]) for r in records if r["problem"].startswith("short/")) == 5


def test_report_and_folder(folder: Path, evaluated: tuple[Path, Any]) -> None:
    run, _ = evaluated
    run_command("report", run)
    page = (run / "report.html").read_text()
    assert '<section id="tasks"' in page and '<a href="#tasks">' in page
    for title in ("Reward by task", "Held-out reward by task", "Completion length by task", "Share of groups"):
        assert title in page
    assert "Held-out problems by task" in page
    run_command("report", run, train(folder, "other", "task.letters.weight=2.0"), "--out", run / "both.html")
    compared = (run / "both.html").read_text().replace("<wbr>", "")
    assert "task.letters.weight" in compared and "task.short.weight" not in compared
    assert json.loads((run / "run.json").read_text())["task"] == "letters, short"


def test_a_run_with_one_task_has_no_tasks(tmp_path: Path) -> None:
    with closing(tiny_run.make(tmp_path, "run", "train.num_steps=2", "train.eval_every=2")) as trainer:
        trainer.run()
    for m in lines(tmp_path / "run", "metrics"):
        assert "tasks" not in m and "tasks" not in m.get("eval", {})
    assert all("task" not in r for r in lines(tmp_path / "run", "rollouts"))
    assert "tasks" not in json.loads((tmp_path / "run" / "summary.json").read_text())
