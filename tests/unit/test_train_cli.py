"""`paceline train`, `report`, `eval` and `export`, and their output."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from tiny_run import SETTINGS, lines, make, settings
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.cli import app
from paceline.cli.app import split_arguments, split_settings
from paceline.cli.progress import TerminalProgress, format_duration
from paceline.cli.train import summary_figures
from paceline.rl.checkpoint import Checkpoints


@pytest.fixture
def command() -> Any:
    """command("train", …) -> result, with separate stdout and stderr. Uncaught exceptions are raised."""

    def call(*arguments: object, code: int = 0) -> Any:
        result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    settings(folder)
    return folder


@pytest.fixture(scope="module")
def overrides(folder: Path) -> list[str]:
    """The tiny task as settings."""
    return [f"model.name={str(folder / 'model')!r}", f"task.name={str(folder / 'task.jsonl')!r}", *SETTINGS]


@pytest.fixture(scope="module")
def trained(folder: Path, overrides: list[str]) -> Path:
    """A finished run with evaluation, audits and drafts."""
    run = folder / "trained"
    extra = ["speculation.method=suffix", "speculation.audit_every=2", "train.eval_every=1", "train.tensorboard=true"]
    result = CliRunner().invoke(app, ["train", "--run", str(run), *overrides, *extra], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    (folder / "output").write_text(result.output)
    return run


# ---- train ----


def test_arguments() -> None:
    assert split_arguments(None) == (None, [])
    assert split_arguments(["a=1", "x.toml", "b.c=d=e"]) == (Path("x.toml"), ["a=1", "b.c=d=e"])
    with pytest.raises(ValueError, match=r"two config files, x.toml and y.toml"):
        split_arguments(["x.toml", "a=1", "y.toml"])
    assert split_arguments(["a.b=1"], ["a.b=2"], Path("x.toml")) == (Path("x.toml"), ["a.b=1", "a.b=2"])
    with pytest.raises(ValueError, match=r"two config files, y.toml and x.toml"):
        split_arguments(["x.toml"], None, Path("y.toml"))


def test_settings_among_prompts() -> None:
    """Only what starts with a key of a section is a setting, also a key that the section does not have."""
    prompts = ["model.x = 3?", "x=1", "Is f(train.seed=3) right?", "engine=on", "a.b=c", "runs/model.a=1/x.jsonl"]
    settings = ["sampling.top_k=3", "train.sed=1", "engine.vllm.max_model_len=9"]
    assert split_settings([*prompts[:3], *settings, *prompts[3:]], ["train.seed=2"]) == (
        prompts,
        [*settings, "train.seed=2"],
    )


# Every command that reads a config, with the other arguments that it needs.
READS_CONFIG = {
    ("train",): (), ("eval",): ("model", "chain_sum"), ("train-draft",): (), ("sweep",): (), ("verify",): (),
    ("doctor",): (), ("generate",): ("a prompt",), ("serve",): (), ("replay",): ("x.jsonl",), ("advise",): ("x.jsonl",),
    ("bench", "rollout"): (), ("bench", "learner"): (), ("simulate",): ("nvidia-8b-zero",), ("config",): (),
}  # fmt: skip


def test_all_commands_that_read_a_config() -> None:
    root = typer.main.get_command(app)
    found = {(name,): command for name, command in root.commands.items()}
    found |= {("bench", name): command for name, command in root.commands["bench"].commands.items()}
    assert {name for name, command in found.items() if "overrides" in {p.name for p in command.params}} == set(
        READS_CONFIG
    )


@pytest.mark.parametrize("name", READS_CONFIG, ids=" ".join)
@pytest.mark.parametrize("given", [["sampling.temprature=1"], ["--set", "sampling.temprature=1"]])
def test_every_command_takes_settings_as_arguments_and_by_set(
    command: Any, name: tuple[str, ...], given: list[str]
) -> None:
    error = command(*name, *READS_CONFIG[name], *given, code=2).stderr
    assert "unknown key sampling" in error


@pytest.mark.parametrize("name", ["train", "train-draft", "sweep", "verify", "doctor", "config"])
def test_commands_take_the_config_file_as_argument_or_by_config(command: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[sampling]\ntemprature = 1\n")
    for given in ([tmp_path / "c.toml"], ["--config", tmp_path / "c.toml"]):
        assert "unknown key sampling.temprature" in command(name, *given, code=2).stderr
    error = command(name, tmp_path / "c.toml", "--config", "other.toml", code=2).stderr
    assert "two config files, other.toml and " in error


def test_a_prompt_may_have_an_equals_sign(command: Any) -> None:
    assert "no-such-model" in command("generate", "a.b=c", "--model", "no-such-model", code=2).stderr
    assert "no prompt" in command("generate", "sampling.seed=1", code=2).stderr
    assert "no rollouts" in command("replay", "engine.prefix_sharing=true", code=2).stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["one.toml", "two.toml"], "two config files, one.toml and two.toml"),
        (["nowhere.toml"], "config file nowhere.toml does not exist"),
        (["train.num_step=3"], "unknown key train.num_step: did you mean train.num_steps?"),
        (["train.num_steps=many"], "train.num_steps = 'many': expected an integer"),
        (["--resume", "nowhere"], "--resume nowhere: not a run"),
        (["--resume", "nowhere", "x.toml"], "--resume takes the run's own config.toml"),
        (["task.name=no_such_task"], "no_such_task"),
        (["train.eval_every=1", "task.held_out=0"], "train.eval_every needs held-out problems"),
        (["speculation.audit_every=2", "train.max_staleness=1"], "speculation.audit_every = 2"),
        (['reward.functions=["unknown"]'], "unknown"),
        (["sampling.temperature=0.0"], "sampling.temperature"),
    ],
)
def test_errors_are_one_message(
    command: Any, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("train", *([] if "--resume" in given else overrides), *given, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == [], "an error must not create a run"


def test_config_file_is_checked(command: Any, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[algorithm]\nnum_generation = 4\n")
    result = command("train", tmp_path / "c.toml", "train.num_steps=1", code=2)
    assert "unknown key algorithm.num_generation: did you mean algorithm.num_generations?" in result.stderr


def test_dry_run(command: Any, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("train", *overrides, "--dry-run")
    assert "6 to train on, 2 held out" in result.stdout
    assert "2 problems x 4 samples of up to 12 tokens" in result.stdout
    assert re.search(r"say [a-h]", result.stdout), "the first prompt as the model sees it"
    assert "nothing was trained" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_dry_run_loads_the_reward_functions_without_answers(command: Any, overrides: list[str], tmp_path: Path) -> None:
    table = tmp_path / "no_answers.jsonl"
    table.write_text("".join(f'{{"prompt": "say {letter}"}}\n' for letter in "abcd"))
    given = [*overrides, f"task.name={str(table)!r}", "--dry-run"]
    assert "2 to train on, 2 held out" in command("train", *given).stdout
    result = command("train", *given, 'reward.functions=["reward_functions:no_such"]', code=2)
    assert "reward.functions has 'reward_functions:no_such'" in result.stderr


def test_run_folder_is_under_runs(
    command: Any, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("train", *overrides, "train.num_steps=1")
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"task-\d{8}-\d{6}", run.name)
    assert f"runs/{run.name}/report.html" in result.stdout
    assert "already holds a run" in command("train", "--run", run, *overrides, code=2).stderr


def test_output_and_files_of_a_run(trained: Path, folder: Path) -> None:
    output = (folder / "output").read_text()
    assert [f"step {n}/4" in output for n in (1, 2, 3, 4, 5)] == [True] * 4 + [False]
    for figure in ("held-out reward before", "held-out reward after", "mean acceptance length", "audited speed-up"):
        assert figure in output
    assert "no config file: defaults (" in output and "task.jsonl, 4 steps)" in " ".join(output.split())
    assert re.search(r"time of the RL steps +\d+\.\d s, without evaluation and audits", output)
    assert re.search(r"time in generation +\d+\.\d s +\d+\.\d% of the RL steps", output)
    assert str(trained / "report.html") in output.replace("\n", "")
    assert f"paceline watch {trained}" in " ".join(output.split())
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["finished"] and summary["num_steps"] == 4 and summary["identical"] is True
    for key in ("reward_before", "reward_after", "generation_speedup", "mean_acceptance_length"):
        assert isinstance(summary[key], float)
    assert set(summary["tail_speedup"]) == {"1", "2", "4"}
    assert {"generation", "training", "reward", "draft", "exposed_generation"} <= set(summary["stages"])
    names = {path.name for path in trained.iterdir()}
    assert names >= {"config.toml", "run.json", "metrics.jsonl", "rollouts.jsonl", "trace.jsonl", "checkpoints"}
    assert list((trained / "tensorboard").iterdir())
    metrics = lines(trained, "metrics")
    assert all("eval" in m for m in metrics) and sum("audit" in m for m in metrics) == 2


@pytest.mark.parametrize(("num_steps", "label"), [(1, None), (2, "after"), (3, "at step 2")])
def test_reward_after_is_of_the_last_step(tmp_path: Path, num_steps: int, label: str | None) -> None:
    """A run that is stopped is not evaluated again: its newest evaluation may be of an earlier step."""
    trainer = make(tmp_path, "run", "train.eval_every=2")
    record = trainer.callback.step

    def step(metrics: Any) -> None:
        record(metrics)
        if len(trainer.callback.metrics) == num_steps:
            trainer.producer.stop()

    trainer.callback.step = step
    summary = trainer.run()
    trainer.close()
    assert summary["num_steps"] == num_steps and not summary["finished"]
    before = trainer.callback.metrics[0]["eval_before"]["reward"]
    newest = trainer.callback.metrics[1]["eval"]["reward"] if num_steps > 1 else before
    assert summary["reward_before"] == before
    assert summary["reward_after"] == (newest if num_steps == 2 else None)
    assert summary["last_eval"] == {"step": num_steps // 2 * 2, "reward": newest}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["last_eval"] == summary["last_eval"]
    shown = {k: v for k, v in summary_figures(summary, False).items() if k.startswith("held-out reward")}
    assert shown == {"held-out reward before": before} | ({f"held-out reward {label}": newest} if label else {})


def test_resume_of_a_finished_run(trained: Path, command: Any) -> None:
    before = json.loads((trained / "summary.json").read_text())
    command("train", "--resume", trained)
    assert json.loads((trained / "summary.json").read_text()) == before
    assert len(lines(trained, "metrics")) == 4


@pytest.mark.parametrize(("broken_from", "saved"), [(0, None), (1, "step 1 is"), (2, "steps 1 to 2 are")])
def test_an_error_in_a_step_says_what_is_saved(
    command: Any,
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken_from: int,
    saved: str | None,
) -> None:
    """The reward function then returns too few values. After it is corrected, the run continues."""
    run, steps = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    monkeypatch.syspath_prepend(tmp_path)
    module = f"flaky_reward_{broken_from}"
    (tmp_path / f"{module}.py").write_text(f"""
from pathlib import Path

def reward(completions, **columns):
    steps, broken = Path({str(steps)!r}), not Path({str(tmp_path / "corrected")!r}).exists()
    num_steps = len(steps.read_text().splitlines()) if steps.exists() else 0
    values = [float(i) for i in range(len(completions))]
    return values[1:] if broken and num_steps >= {broken_from} else values
""")
    given = [*overrides, f'reward.functions=["{module}:reward"]']
    result = command("train", "--run", run, *given, code=2)
    assert "error: " in result.stderr
    advice = f"{saved} saved; fix this, then: paceline train --resume {run}"
    assert (advice in result.stderr) == (saved is not None) and ("saved" in result.stderr) == (saved is not None)
    (tmp_path / "corrected").touch()
    command("train", "--resume", run)
    assert len(lines(run, "metrics")) == 4


# ---- report ----


def test_report(trained: Path, command: Any, tmp_path: Path) -> None:
    (trained / "report.html").unlink(missing_ok=True)
    assert command("report", trained).stdout.strip() == str(trained / "report.html")
    page = (trained / "report.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    shown = [(r["s"], r["g"], r["i"]) for r in data["rollouts"]]
    assert shown == [(r["step"], r["group"], r["sample"]) for r in lines(trained, "rollouts")]
    assert "<svg" in page
    command("report", trained, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()
    assert "nowhere" in command("report", tmp_path / "nowhere", code=2).stderr


def test_report_of_several_runs(trained: Path, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "other")
    assert command("report", trained, "other").stdout.strip() == "comparison.html"
    assert "All settings are the same." in (tmp_path / "comparison.html").read_text()
    assert "nowhere" in command("report", trained, "nowhere", code=2).stderr
    assert "is given twice" in command("report", trained, trained, code=2).stderr


# ---- eval ----


def test_eval(folder: Path, overrides: list[str], command: Any, tmp_path: Path) -> None:
    """With a config, a jsonl file (the same task here) and a reasoning-gym dataset."""
    model, results = folder / "model", {}
    task_overrides = [override for override in overrides if not override.startswith(("model.name", "task.name"))]
    (tmp_path / "c.toml").write_text(f"[task]\nname = {str(folder / 'task.jsonl')!r}\n")
    for name, task in {"config": tmp_path / "c.toml", "jsonl": folder / "task.jsonl"}.items():
        out = tmp_path / f"{name}.json"
        shown = command("eval", model, task, *task_overrides, "-n", 4, "--json", out).stdout
        results[name] = json.loads(out.read_text())
        assert "pass@4" in shown and f"{results[name]['num_problems']}" in shown
    assert results["config"].pop("task") != results["jsonl"].pop("task")
    assert results["config"] == results["jsonl"]
    assert results["jsonl"]["num_problems"] == 2 and results["jsonl"]["n"] == 4 and 0 < results["jsonl"]["reward"] < 1

    gym = ["model.dtype=float64", "task.held_out=3", "sampling.max_tokens=4", "task.chat=false"]
    out = tmp_path / "gym.json"
    command("eval", model, "chain_sum", *gym, "--json", out)
    assert json.loads(out.read_text())["num_problems"] == 3
    assert "no_such" in command("eval", model, "no_such", code=2).stderr
    for wrong in ("x.json", "./chain_sum", "data/x.gz"):
        error = command("eval", model, wrong, code=2).stderr
        assert f"{wrong}: " in error and ".toml" in error and ".jsonl.gz" in error and "reasoning-gym dataset" in error
    env = ["paceline.tasks.calculator:Calculator", "task.kind=env", 'reward.functions=["env"]', "task.held_out=0"]
    assert "task.held_out = 0" in command("eval", model, *env, code=2).stderr  # a name with a dot that is not a file
    assert "task.held_out = 0" in command("eval", model, folder / "task.jsonl", "task.held_out=0", code=2).stderr


# ---- export ----


@pytest.mark.parametrize("flavour", ["full", "lora"])
def test_export(folder: Path, overrides: list[str], command: Any, tmp_path: Path, flavour: str) -> None:
    """transformers loads it and computes the same logits as the learner."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from paceline.build.learner import build_learner
    from paceline.model.attention import PackedAttention

    run = tmp_path / "run"
    extra = ["learner.lora_rank=4"] if flavour == "lora" else []
    command("train", "--run", run, *overrides, *extra, "train.eval_every=1", "train.keep_checkpoints=1")
    best = json.loads((run / "summary.json").read_text())["best"]["step"]
    command("train", "--resume", run, "train.num_steps=5", "train.eval_every=0")  # the last checkpoint is not the best
    command("export", run, tmp_path / "last")
    command("export", run, tmp_path / "best", "--best")
    checkpoints = Checkpoints(run / "checkpoints", 1)
    config = load_config(run / "config.toml")
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder / "model").encode("say b"))
    logits = {}
    for name, checkpoint in (("last", checkpoints.latest()), ("best", checkpoints.best())):
        assert checkpoint is not None and checkpoint.step == {"last": 5, "best": best}[name]
        learner = build_learner(config, folder / "model")
        learner.load(checkpoint.path / "learner")
        with torch.no_grad():
            hidden = learner.decoder(tokens, torch.arange(5), PackedAttention([5])).hidden
            ours = learner.decoder.logits(hidden)
            model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)
            logits[name] = model(tokens[None]).logits[0]
        torch.testing.assert_close(logits[name], ours, rtol=1e-3, atol=1e-5)  # transformers' RoPE is float32
        exported = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(exported[key], tensor) for key, tensor in learner.weights() if key in exported)
        assert AutoTokenizer.from_pretrained(tmp_path / name).encode("say b") == tokens.tolist()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    with torch.no_grad():
        assert not torch.allclose(model(tokens[None]).logits[0], logits["last"], atol=1e-3), (
            "the export has the initial weights"
        )


def test_export_without_a_checkpoint(command: Any, overrides: list[str], tmp_path: Path) -> None:
    assert "not a run" in command("export", tmp_path, tmp_path / "out", code=2).stderr
    command("train", "--run", tmp_path / "run", *overrides, "train.num_steps=1")
    assert "no validated checkpoint" in command("export", tmp_path / "run", tmp_path / "out", "--best", code=2).stderr


# ---- progress ----


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_progress_on_a_terminal(trained: Path, max_staleness: int) -> None:
    config = load_config(None, [f"train.max_staleness={max_staleness}", "train.num_steps=4"])
    screen = io.StringIO()
    console = Console(force_terminal=True, file=screen, width=120, color_system=None)
    with TerminalProgress(console, config) as callback:
        callback.progress("generation", 3, 8)
        callback._live.refresh()
        for metrics in lines(trained, "metrics")[:3]:
            callback.step(metrics | {"num_failures": 2, "staleness_max": 1})
            callback._live.refresh()
        callback.note("ALARM: [bold]not markup[/bold]")
    seen = screen.getvalue()
    for text in ("generation", "3/8", "step 3/4", "2 not scored", "staleness 1", "held out", "speed-up", " left"):
        assert text in seen
    assert "ALARM: [bold]not markup[/bold]" in seen
    stages = {"exposed_generation"} if max_staleness else {"generation"}
    assert all(re.search(rf"━ *.*{name} \d+%", seen) for name in stages)


def test_the_rate_of_generation_and_of_the_step(trained: Path) -> None:
    """A step whose groups are the surplus of earlier steps generates nothing."""
    log = io.StringIO()
    first, *_ = lines(trained, "metrics")
    assert first["generation_tokens_per_s"] > first["tokens_per_s"] > 0
    callback = TerminalProgress(Console(file=log, width=200), load_config(None, []))
    callback.step(first | {"tokens_per_s": 110.2, "generation_tokens_per_s": 579.8})
    callback.step(first | {"tokens_per_s": 110.2, "generation_tokens_per_s": None})
    both, whole = log.getvalue().splitlines()
    assert "  580 tokens/s in generation, 110 in the whole step  " in both
    assert "  110 tokens/s in the whole step  " in whole


def test_progress_without_a_terminal(trained: Path) -> None:
    """Only lines: no escape codes, no bars."""
    log = io.StringIO()
    with TerminalProgress(Console(file=log, width=80), load_config(None, ["train.num_steps=4"])) as callback:
        callback.progress("generation", 3, 8)
        for metrics in lines(trained, "metrics"):
            callback.step(metrics)
        callback.note("a note")
    assert [line.split("  ")[0] for line in log.getvalue().splitlines()] == [f"step {n}/4" for n in (1, 2, 3, 4)] + [
        "a note"
    ]
    assert "\x1b" not in log.getvalue() and "━" not in log.getvalue()


def test_format_duration() -> None:
    assert [format_duration(s) for s in (0, 61, 3661.9)] == ["0:00", "1:01", "1:01:01"]
