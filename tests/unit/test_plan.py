"""`paceline train --dry-run`: the plan, and one message with key and remedy for everything that would stop the run."""

from __future__ import annotations

import collections
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tiny_run import lines, make, settings, write_head
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.build.memory import read_model
from paceline.build.memory_parts import checkpoint_bytes
from paceline.cli import app
from paceline.cli.train import CORRECT
from paceline.cluster import ray_probe, vllm_probe
from paceline.config_io import dump_config
from paceline.doctor import plan, run
from paceline.files import RUN_FORMAT
from paceline.speculation.cost_files import shipped_tables

VLLM = ("engine.kind=vllm", "model.dtype=float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    settings(folder)
    return folder


@pytest.fixture
def dry_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """dry_run(overrides…) -> output. It must create nothing."""
    monkeypatch.chdir(tmp_path)

    def call(*overrides: str, code: int = 0) -> str:
        (folder / "c.toml").write_text(dump_config(settings(folder)))
        result = CliRunner().invoke(
            app, ["train", str(folder / "c.toml"), *overrides, "--dry-run"], env={"COLUMNS": "500"}
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        assert not (tmp_path / "runs").exists()
        return result.output

    return call


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_probe, "vllm_facts", lambda: {"version": "0.32", "weight_transfer": True})


def errors(output: str) -> list[str]:
    """The errors, without the plan: none is printed."""
    assert not re.search(r"^ (plan|memory)\b", output, re.MULTILINE), output
    *found, last = output.partition("error: ")[2].splitlines()
    assert last == CORRECT
    return found


def test_the_plan(dry_run: Any) -> None:
    output = dry_run("speculation.method=suffix", "speculation.policy=auto", "speculation.audit_every=4")
    table = output.partition("memory")[0]
    rows = {line[:12].strip(): line[12:].strip() for line in table.splitlines()}
    assert rows["algorithm"] == "grpo, 4 samples per problem"
    assert rows["drafter"] == "suffix, num_speculative_tokens = 4, rule = coupled"
    assert rows["policy"].startswith("auto: up to 4 tokens, only if ")
    assert rows["staleness"].startswith("0: ")
    assert rows["engine"] == "local, up to 16 sequences in a step" and rows["cluster"].startswith("none: ")
    assert rows["audits"] == "every 4 steps; on average 1.5 times the generation time"
    assert rows["prompts"] == "up to 5 tokens"
    assert rows["checkpoints"] == "every 10 steps; the last 2 are kept" and "checkpoints of" in rows["disk"]
    assert rows["time"] == "unknown until the first step"
    assert "nothing was trained" in output and re.search(r"^ memory +GiB *$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("overrides", "audits"),
    [
        ([], "at most 3% of the run's time; none in a short run"),
        (
            ["speculation.audit_every=4"],
            "every 4 steps; on average 1.5 times the generation time",
        ),
        (["speculation.audit_every=0"], "none"),
        (["speculation.method=none"], "none"),
        (["train.max_staleness=1"], "none"),
        (["engine.kind=vllm", "speculation.method=suffix"], "none"),
    ],
)
def test_audits_in_the_plan(overrides: list[str], audits: str) -> None:
    assert plan.described_audits(load_config(None, overrides)) == audits


def test_a_head_and_a_cluster_are_described() -> None:
    head = load_config(None, ["speculation.method=eagle3", "draft.online=every", "speculation.head=x"])
    assert plan.described_drafter(head).startswith("eagle3, head x, num_") and "online: every" in (
        plan.described_drafter(head)
    )
    shipped = plan.described_drafter(load_config(None, ["speculation.method=eagle3", "model.name=smollm2-135m"]))
    assert shipped.startswith("eagle3, head shipped for the model, num_")
    none = plan.described_drafter(load_config(None, ["speculation.method=eagle3", "model.name=Qwen/Qwen3-0.6B"]))
    assert none.startswith("eagle3, head missing: none ships for the model, num_")
    cluster = load_config(None, ["cluster.kind=ray", "cluster.num_engines=3"])
    assert plan.described_cluster(cluster).startswith("Ray on this machine, disaggregated: 3 engines, 1 learner ranks")
    assert "5 CPUs" in plan.described_cluster(cluster)


def test_time_is_only_estimated_from_a_cost_table() -> None:
    assert plan.estimated_time(load_config(None, []), 10) == "unknown until the first step"
    table = next(iter(shipped_tables()))
    text = plan.estimated_time(load_config(None, [f"speculation.cost_table={table}"]), 10)
    assert text.startswith("generation up to ") and table in text and "training: unknown" in text


# ---- mistakes ----


def test_vllm_is_missing_or_too_old(dry_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ValueError("ModuleNotFoundError: No module named 'vllm'")

    monkeypatch.setattr(vllm_probe, "vllm_facts", fail)
    (error,) = errors(dry_run(*VLLM, code=2))
    assert "No module named 'vllm'" in error and "make setup-vllm" in error and 'engine.kind = "vllm"' in error
    monkeypatch.setattr(vllm_probe, "vllm_facts", lambda: {"version": "0.9.2", "weight_transfer": False})
    (error,) = errors(dry_run(*VLLM, code=2))
    assert "vLLM 0.9.2 is older than 0.11" in error and "install a newer vLLM" in error


def test_ray_is_missing_or_too_old(dry_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_weight_transfer", lambda host, required: run.ok("gloo", host))

    def fail() -> Any:
        raise ValueError("ModuleNotFoundError: No module named 'ray'")

    monkeypatch.setattr(ray_probe, "ray_version", fail)
    (error,) = errors(dry_run("cluster.kind=ray", code=2))
    assert "No module named 'ray'" in error and 'cluster.kind = "ray"' in error and "pip install" in error
    monkeypatch.setattr(ray_probe, "ray_version", lambda: "2.9.3")
    (error,) = errors(dry_run("cluster.kind=ray", code=2))
    assert "Ray 2.9.3 is older than 2.52" in error


def test_the_oldest_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm>={run.MIN_VLLM}"] and extras["ray"] == [f"ray>={run.MIN_RAY}"]
    assert not run.is_older("2.52.1", "2.52") and not run.is_older("3", "2.52") and run.is_older("0.9", "0.11")


def test_prompts_and_completions_are_longer_than_the_context(dry_run: Any, folder: Path, with_vllm: None) -> None:
    context = read_model(settings(folder)).max_positions
    assert dry_run(f"sampling.max_tokens={context - 5}")
    (error,) = errors(dry_run(f"sampling.max_tokens={context - 4}", code=2))
    assert error == (
        f"sampling.max_tokens = {context - 4}: the longest prompt has 5 tokens, together {context + 1}, but the "
        f"model's context is {context}; lower sampling.max_tokens to {context - 5}, or set model.yarn_factor, or use "
        "another model"
    )
    (error,) = errors(dry_run("engine.kv_tokens=16", code=2))
    assert "but engine.kv_tokens is 16; lower sampling.max_tokens to 11, or raise it" in error
    (error,) = errors(dry_run(*VLLM, "engine.vllm.max_model_len=12", code=2))
    assert "but engine.vllm.max_model_len is 12" in error
    (error,) = errors(dry_run("engine.kv_tokens=4", code=2))
    assert "shorten the prompts" in error


def test_a_reward_function_returns_a_wrong_number_of_values(dry_run: Any) -> None:
    (error,) = errors(dry_run('reward.functions=["reward_functions:one_for_all"]', code=2))
    assert error.startswith("reward.functions: reward_functions:one_for_all returned 1 value for 4 completions; return")
    assert "def one_for_all(prompts, completions, **columns) -> list[float | None]" in error


def test_a_reward_function_raises(dry_run: Any) -> None:
    (error,) = errors(dry_run('reward.functions=["reward_functions:raises"]', code=2))
    line = 1 + (Path(__file__).parents[1] / "reward_functions.py").read_text().splitlines().index(
        '    return [column["missing"] for column in columns]'
    )
    assert error.startswith("reward.functions = ['reward_functions:raises']: a reward failed for 4 of 4 samples")
    assert "raised TypeError" in error and f"tests/reward_functions.py, line {line})" in error
    assert "(answer)" in error, "the columns of the problem"


def test_reward_functions_get_a_whole_group(dry_run: Any) -> None:
    output = dry_run('reward.functions=["reward_functions:relative"]')
    assert "0 for '0'" in output or "0 for '" in output
    assert "0.25 for 'I do not know.'" in output, "one of four completions is shorter"


def test_a_reward_function_gives_the_reference_answer_no_more_than_other_text(dry_run: Any, tmp_path: Path) -> None:
    output = dry_run('reward.functions=["reward_functions:always_zero"]')
    (warning,) = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert re.match(r"warning: the reference answer '\d' gets the same reward \(0\) as other text\. If all", warning)
    assert "check reward.functions = ['reward_functions:always_zero'] (the column `answer` is a string)" in warning
    assert "answer_pattern" not in warning
    output = dry_run('reward.functions=["exact"]', "reward.answer_pattern=<answer>(.*)</answer>")
    assert "whether reward.answer_pattern = '<answer>(.*)</answer>' matches an answer" in output
    assert "warning: " not in dry_run('reward.functions=["exact"]')
    without = tmp_path / "no_answers.jsonl"
    without.write_text("".join(f'{{"prompt": "say {letter}"}}\n' for letter in "abcd"))
    assert "warning: " not in dry_run('reward.functions=["reward_functions:always_zero"]', f"task.name={without}")


def test_a_step_repeats_problems(dry_run: Any) -> None:
    assert "warning: train.groups_per_step = 7: a step has 7 problems, but there are only 6 to train on" in dry_run(
        "train.groups_per_step=7"
    )
    assert "train.groups_per_step" not in dry_run("train.groups_per_step=6")


def test_there_is_not_enough_disk(dry_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    (error,) = errors(dry_run(code=2))
    assert error.startswith("train.keep_checkpoints = 2: 1 checkpoints of ") and "0.00 GB free; keep fewer" in error
    assert "--run" in error


@pytest.mark.parametrize(
    ("method", "num"), [("train.checkpoint_every=1", 3), ("train.eval_every=1", 2), ("train.checkpoint_every=0", 1)]
)
def test_number_of_checkpoints_on_disk(folder: Path, tmp_path: Path, method: str, num: int) -> None:
    assert plan.check_disk(settings(folder, method), tmp_path)["disk"].startswith(f"{num} checkpoints of")


@pytest.mark.parametrize(("keep", "num"), [([], 4), (["train.keep_exports=1"], 2), (["train.keep_exports=7"], 4)])
def test_exports_on_disk(folder: Path, tmp_path: Path, keep: list[str], num: int, monkeypatch: Any) -> None:
    config = settings(folder, "train.export_every=3", "train.num_steps=10", *keep)
    usage = collections.namedtuple("usage", "total used free")
    size = (folder / "model" / "model.safetensors").stat().st_size
    checkpoint = checkpoint_bytes(config, read_model(config), None)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage(0, 0, checkpoint + num * size))
    assert f" and {num} exports of 0.00 GB need" in plan.check_disk(config, tmp_path)["disk"]
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage(0, 0, checkpoint + (num - 1) * size))
    with pytest.raises(ValueError, match=r"train.keep_exports .*0.00 GB free; keep fewer"):
        plan.check_disk(config, tmp_path)


@pytest.mark.parametrize("overrides", [[], ["learner.lora_rank=16"], ["learner.optimizer=muon", "model.dtype=float32"]])
def test_the_size_of_a_checkpoint_is_right(tmp_path: Path, overrides: list[str]) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=1", "sampling.max_tokens=2", *overrides)
    trainer.run()
    trainer.close()
    assert len(lines(tmp_path / "run", "metrics")) == 1
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    (learner,) = (saved / "learner").glob("*.safetensors")
    config = settings(tmp_path, *overrides)
    assert checkpoint_bytes(config, read_model(config), None) == pytest.approx(learner.stat().st_size, rel=0.15)


def test_a_column_of_the_dataset_is_missing(dry_run: Any) -> None:
    (error,) = errors(dry_run("task.prompt_column=instruction", code=2))
    assert "needs `instruction`" in error and "its columns are `prompt`, `answer`" in error
    assert "set task.prompt_column" in error
    (error,) = errors(dry_run("task.answer_column=solution", code=2))
    assert "no `solution`" in error and "set task.answer_column" in error


def test_all_problems_are_reported_at_once(dry_run: Any, with_vllm: None, tmp_path: Path) -> None:
    found = errors(
        dry_run(
            "sampling.max_tokens=100000",
            'reward.functions=["reward_functions:scalar"]',
            "task.held_out=0",
            "train.eval_every=1",
            code=2,
        )
    )
    assert len(found) == 3
    for text in ("train.eval_every needs held-out problems", "sampling.max_tokens = 100000", "returned 1.0"):
        assert any(text in error for error in found), text
    found = errors(dry_run("model.name=./nowhere", 'reward.functions=["exact"]', "task.name=no.jsonl", code=2))
    assert len(found) == 2 and "./nowhere" in found[0] and "no.jsonl" in found[1]


def test_a_head_for_other_layers(dry_run: Any, folder: Path) -> None:
    assert "head" in dry_run(*write_head(folder))
    nowhere = ("speculation.method=eagle3", "speculation.head=./nowhere")
    (error,) = errors(dry_run(*nowhere, code=2))
    assert "nowhere" in error
    found = errors(dry_run(*nowhere, 'reward.functions=["reward_functions:one_for_all"]', code=2))
    assert len(found) == 2 and "one_for_all" in found[1], "it hides no other problem"


def test_an_error_without_a_remedy(dry_run: Any) -> None:
    (error,) = errors(dry_run("model.name=gpt-2", code=2))
    assert error.endswith("not a hub id (org/name)")


def test_a_missing_model_hides_no_missing_head(dry_run: Any) -> None:
    found = errors(dry_run("model.name=./nowhere", "speculation.method=eagle3", code=2))
    assert len(found) == 2 and "./nowhere" in found[0] and "no EAGLE-3 head ships with Paceline for" in found[1]


def test_a_model_directory_without_config(dry_run: Any, tmp_path: Path) -> None:
    """`paceline eval` and the dry run give the same error."""
    (tmp_path / "empty").mkdir()
    message = "empty: config.json is missing; expected a directory with config.json and model.safetensors"
    (error,) = errors(dry_run("model.name=./empty", code=2))
    assert error == message
    result = CliRunner().invoke(app, ["eval", "./empty", "chain_sum"], env={"COLUMNS": "500"})
    assert message in result.output


# ---- what the run would refuse ----


@pytest.fixture
def dry_resume(folder: Path, tmp_path: Path) -> Any:
    """dry_resume(overrides…) -> output, of a run of 4 steps with a checkpoint after `done`."""

    def call(*overrides: str, done: int | None = 2, code: int = 0) -> str:
        run_folder = tmp_path / "run"
        run_folder.mkdir(exist_ok=True)
        (run_folder / "config.toml").write_text(dump_config(settings(folder)))
        (run_folder / "run.json").write_text(json.dumps({"format": RUN_FORMAT, "command": "train"}))
        if done is not None:
            (run_folder / "checkpoint.json").write_text(json.dumps({"step": done}))
            steps = [{"step": step, "stages": {"total": 30.0 + step}} for step in range(done)]
            (run_folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
        given = ["train", "--resume", str(run_folder), *overrides, "--dry-run"]
        result = CliRunner().invoke(app, given, env={"COLUMNS": "500"})
        assert result.exit_code == code, result.output
        return result.output

    return call


def test_a_setting_that_cannot_change_on_resume(dry_resume: Any) -> None:
    assert "task.held_out = 1: this run started with 2" in dry_resume("task.held_out=1", done=None, code=2)


def test_the_plan_of_a_resume(dry_resume: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = dry_resume("train.checkpoint_every=7")
    assert "changed on resume: train.checkpoint_every = 7, was 10" in output and "2 of 4 steps are done" in output
    assert "about 0:01:01 for the 2 steps that are left" in output and "last steps took 30.5 s" in output
    output = dry_resume(done=4)
    assert "is finished: 4 of 4 steps are done; to continue, raise train.num_steps" in output
    assert "changed on resume" not in output and "none: all steps are done" in output
    monkeypatch.chdir(folder)
    assert "changed on resume" not in dry_resume("task.name=task.jsonl"), "the run has the absolute path"


def test_the_plan_of_a_resume_without_checkpoint(dry_resume: Any, folder: Path) -> None:
    output = dry_resume(done=None)
    assert "was interrupted before its first checkpoint: it starts again" in output
    assert "unknown until the first step" in output


def test_a_folder_that_already_holds_a_run(dry_run: Any, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.toml").write_text("")
    (error,) = errors(dry_run("--run", str(tmp_path / "used"), code=2))
    assert "already holds a run" in error


def test_a_missing_cost_table_hides_no_other_problem(dry_run: Any) -> None:
    found = errors(dry_run("speculation.cost_table=none", 'reward.functions=["reward_functions:one_for_all"]', code=2))
    assert any("speculation.cost_table" in error for error in found)
    assert any("reward_functions:one_for_all" in error for error in found)
