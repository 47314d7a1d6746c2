"""`paceline sweep`: fair measurements, detection of different tokens, and recommendations."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from paceline.bench import sweep
from paceline.bench.sweep import Case, Run, Settings, Sweep, best_settings
from paceline.build.config import load_config
from paceline.build.drafter import available_drafters
from paceline.cli import app
from paceline.engine import accept
from paceline.model import head_files
from paceline.model.eagle3 import head_config, init_head
from paceline.model.provenance import Provenance
from paceline.model.weights import ModelError, read_config

PROMPTS = ("aa bb aa bb aa", "one two one two", "x y x y x y", "to be or not to be")


@pytest.fixture
def model(checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture
def command(model, prompts) -> Any:
    """command("--k", "2", …) -> result of a small sweep with these further options. Exceptions are raised."""

    def call(*arguments: object, code: int = 0) -> Any:
        small = ["--prompts", prompts, "--drafters", "suffix", "--k", "2", "--batch", "2", "--temperature", "1"]
        small += ["--samples", "2", "--max-tokens", "8", "--repeats", "1", f"model.name={str(model)!r}"]
        result = CliRunner().invoke(app, ["sweep", *map(str, [*small, *arguments])], env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return call


def small_sweep(model: Path, *overrides: str, **settings: Any) -> Sweep:
    config = load_config(None, [f"model.name={str(model)!r}", *overrides])
    small = {"drafters": ("suffix",), "draft_lengths": (2,), "batches": (2,), "temperatures": (1.0,), "repeats": 2}
    small |= {"num_samples": 2, "max_tokens": 8, **settings}
    return sweep.open_sweep(Settings(config=config, **small), PROMPTS)


def test_every_cell_is_measured(command, tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ["--drafters", "none,ngram,suffix,draft_model", "speculation.draft_model='layers:2'", "--k", "1,2"]
    arguments += ["--batch", "1,2", "--temperature", "0,1", "--repeats", "2", "--json", out, "--plot", page]
    result = command(*arguments)
    report = json.loads(out.read_text())
    assert report.keys() == {"interrupted", "settings", "rows", "best"}
    assert report["interrupted"] is False
    assert report["settings"]["draft_lengths"] == [1, 2]
    found = {(r["temperature"], r["batch"], r["name"], r["num_speculative_tokens"]): r for r in report["rows"]}
    names = {0: ("ngram", "suffix cold", "draft_model"), 1: ("ngram", "suffix cold", "suffix warm", "draft_model")}
    expected = {(t, b, name, k) for t in (0, 1) for b in (1, 2) for name in names[t] for k in (1, 2)}
    assert found.keys() == expected | {(t, b, "none", 0) for t in (0, 1) for b in (1, 2)}
    assert len(found) == len(report["rows"])
    for (_, _, name, k), row in found.items():
        assert row["num_rounds"] == 2
        assert row["identical"] is True
        assert row["tokens_per_s"] > 0 and row["speedup"] > 0 and row["step_ms"] > 0 and row["step_cost"] > 0
        assert 1 <= row["mean_acceptance_length"] <= k + 1
        assert 1 <= row["tokens_per_step"] <= k + 1
        assert 0 <= row["draft_share"] < 1
        if name == "none":
            assert row["speedup"] == row["step_cost"] == row["tokens_per_step"] == 1
    assert found[1, 1, "draft_model", 2]["num_drafts"] > 0
    assert {(b["temperature"], b["batch"]) for b in report["best"]} == {(t, b) for t in (0, 1) for b in (1, 2)}
    assert "accept" in result.stdout and "suffix warm" in result.stdout and "best" in result.stdout
    assert "DIFFERENT" not in result.output
    assert "about 0:0" in result.stderr, "no estimate"
    assert "data:image/png;base64," in page.read_text() and "suffix warm" in page.read_text()


def accept_everything(inputs: accept.VerificationInput, sampler: Any) -> accept.VerificationResult:
    """A deliberately broken `coupled` rule that accepts every draft token."""
    starts = inputs.starts
    sizes = np.diff(starts)
    positions = np.arange(starts[-1]) + np.repeat(inputs.lengths - starts[:-1], sizes)
    draws = sampler.draw(inputs.logits_PV, np.repeat(inputs.noise_keys, sizes), positions, inputs.params)
    result = accept.VerificationResult.empty(len(sizes), int(sizes.max()))
    for i, (draft, (a, b)) in enumerate(zip(inputs.drafts, pairwise(starts), strict=True)):
        result.put(i, np.append(draft, draws.tokens[b - 1]), draws.logprobs[a:b], draws.raw_logprobs[a:b])
    return result


def test_different_tokens_are_detected(command, monkeypatch, tmp_path):
    monkeypatch.setitem(accept.RULES, "coupled", accept_everything)
    out = tmp_path / "out.json"
    arguments = ["--drafters", "draft_model", "speculation.draft_model='layers:1'", "--json", out]
    result = command(*arguments, code=1)
    report = json.loads(out.read_text())
    assert [(r["drafter"], r["identical"]) for r in report["rows"]] == [("none", True), ("draft_model", False)]
    assert report["rows"][1]["mean_acceptance_length"] > 2
    assert [b["drafter"] for b in report["best"]] == ["none"], "a cell with different tokens was recommended"
    assert "DIFFERENT TOKENS: draft_model k=2, batch 2, T=1" in result.stderr


def test_tokens_are_not_compared_with_other_rules(command, tmp_path):
    out = tmp_path / "out.json"
    result = command("speculation.rule=rejection", "--json", out)
    assert {r["identical"] for r in json.loads(out.read_text())["rows"]} == {None}
    assert "tokens are not" in result.stdout


def test_runs_are_fair(model, monkeypatch):
    """All cases get the same requests. Every repeat has new samples, computes prompts again, uses new drafters (with a
    history for warm cases), and reverses the order of cases."""
    seen: list[tuple[Case, list[int], Any, int]] = []
    run = Sweep._run

    def recorded(self, case, requests, drafter):
        num_history = drafter.num_tokens if drafter is not None else 0
        done = run(self, case, requests, drafter)
        first = done.steps[0]
        assert first.num_query_tokens - first.num_draft_tokens == len(requests[0].prompt_ids), "the prompt was cached"
        assert max(step.num_rows for step in done.steps) == case.batch
        seen.append((case, [r.noise_key for r in requests], drafter, num_history))
        return done

    monkeypatch.setattr(Sweep, "_run", recorded)
    measured = small_sweep(model, batches=(1,), num_prompts=1)
    measured.run()
    order = measured.cases()
    assert [case.name for case in order] == ["none", "suffix cold", "suffix warm"]
    rounds = seen[-2 * len(order) :]
    assert [case for case, *_ in rounds] == [*order, *reversed(order)]
    keys = [{tuple(keys) for _, keys, *_ in part} for part in (rounds[:3], rounds[3:])]
    assert len(keys[0]) == len(keys[1]) == 1 and not set(*keys[0]) & set(*keys[1])
    used = [drafter for *_, drafter, _ in seen if drafter is not None]
    assert len(set(map(id, used))) == len(used), "a drafter was used twice"
    for case, _, _, num_history in rounds:
        assert (num_history > 0) == (case.history == "warm"), f"{case} had {num_history} tokens of history"


def test_a_warm_history_has_other_samples(model):
    measured = small_sweep(model)
    own = {r.noise_key for repeat in range(2) for r in measured._requests(1.0, repeat)}
    other = {r.noise_key for r in measured._requests(1.0, "history")}
    assert len(own) == 16 and len(other) == 8 and not own & other


def test_greedy_uses_more_prompts_instead_of_samples(model):
    measured = small_sweep(model, temperatures=(0.0, 1.0), num_prompts=2)
    greedy, sampled = measured._requests(0.0, 0), measured._requests(1.0, 0)
    assert len({r.prompt_ids for r in greedy}) == len(greedy) == len(sampled) == 4
    assert len({r.prompt_ids for r in sampled}) == 2
    assert not any(case.history == "warm" for case in measured.cases() if case.temperature == 0)


class ScriptedSweep(Sweep):
    """Runs take the given seconds. Every step emits one token per row, and one accepted draft token with k > 0."""

    seconds: dict[str, list[float]]

    def _run(self, case, requests, drafter):
        seconds = self.seconds[case.name].pop(0)
        step = SimpleNamespace(
            num_rows=case.batch,
            num_query_tokens=case.batch * (1 + case.k),
            num_emitted=case.batch * (2 if case.k else 1),
            num_drafts=case.batch if case.k else 0,
            num_draft_tokens=case.batch * case.k,
            num_accepted_tokens=case.batch if case.k else 0,
            accepted_per_position=(),
            drafted_per_position=(),
            draft_s=seconds / 100 if case.k else 0.0,
            forward_s=0.0,
            sample_s=0.0,
            total_s=seconds / 10,
        )
        completions = [SimpleNamespace(token_ids=np.arange(10), num_drafts=0) for _ in requests]
        return Run(seconds, completions, [step])  # type: ignore[arg-type, list-item]


def scripted(**seconds: list[float]) -> ScriptedSweep:
    settings = Settings(("ngram",), (2,), (2,), (1.0,), num_prompts=1, num_samples=2, repeats=len(seconds["none"]) - 1)
    measured = ScriptedSweep(settings, None, lambda method: None, [(1, 2)])  # type: ignore[arg-type]
    measured.seconds = seconds
    return measured


def test_metrics_are_ratios_within_a_round():
    """The machine is half as fast in the second round, and one run of the third is an outlier."""
    measured = scripted(none=[4.0, 4.0, 8.0, 4.0], ngram=[1.0, 2.0, 4.0, 40.0])  # the first ones are the warm-up
    measured.run()
    plain, row = measured.rows()
    assert row["speedup"] == pytest.approx(2)
    assert row["tokens_per_s"] == pytest.approx(20 / 4)
    assert row["step_cost"] == pytest.approx(0.5)
    assert row["tokens_per_step"] == pytest.approx(2)
    assert row["draft_share"] == pytest.approx(0.1)
    assert row["mean_acceptance_length"] == pytest.approx(2)
    assert plain["speedup"] == 1
    assert measured.unsteady() == {Case(1.0, 2): (2.5, 5.0)}
    steady = scripted(none=[4.0, 4.1, 4.2], ngram=[2.0, 2.0, 2.0])
    steady.run()
    assert steady.unsteady() == {}


def row(name: str, k: int, speedup: float | None, identical: bool | None = True, batch: int = 1) -> dict[str, Any]:
    drafter, _, history = name.partition(" ")
    setting = {"drafter": drafter, "history": history or None, "name": name, "num_speculative_tokens": k}
    return {"temperature": 1.0, "batch": batch, **setting, "speedup": speedup, "identical": identical}


@pytest.mark.parametrize(
    ("rows", "best", "note"),
    [
        ([row("ngram", 3, 1.2), row("suffix warm", 5, 1.3), row("ngram", 5, 1.1)], ("suffix warm", 5, 1.3), ""),
        ([row("ngram", 3, 1.019), row("ngram", 5, 0.7)], ("none", 0, 1.0), "more than 2%; nearest: ngram k=3, 1.02x"),
        ([row("ngram", 3, 0.9), row("ngram", 5, 3.0, False)], ("none", 0, 1.0), "nearest: ngram k=3, 0.90x"),
        ([row("ngram", 3, 3.0, False)], ("none", 0, 1.0), "no drafter has valid results"),
        ([row("ngram", 3, 1.5, None), row("ngram", 5, None, None)], ("ngram", 3, 1.5), ""),
    ],
)
def test_the_best_setting_is_faster_or_none(rows, best, note):
    other = [row("none", 0, 1.0, batch=4), row("ngram", 7, 9.0, batch=4)]
    found, elsewhere = best_settings([row("none", 0, 1.0), *rows, *other])
    assert (found["name"], found["num_speculative_tokens"], found["speedup"]) == best
    assert found["drafter"] == best[0].split()[0]
    assert (elsewhere["batch"], elsewhere["num_speculative_tokens"]) == (4, 7)
    assert note in found["note"] and bool(note) == bool(found["note"])


def test_ctrl_c_reports_the_cells_measured_so_far(command, monkeypatch, tmp_path):
    run, left = Sweep._run, [6]  # warm-up, plain, history; then plain, cold, interrupt

    def interrupted(self, *args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return run(self, *args)

    monkeypatch.setattr(Sweep, "_run", interrupted)
    out = tmp_path / "out.json"
    result = command("--json", out, code=130)
    report = json.loads(out.read_text())
    assert report["interrupted"] is True
    assert [(r["name"], r["num_rounds"]) for r in report["rows"]] == [
        ("none", 1),
        ("suffix cold", 1),
        ("suffix warm", 0),
    ]
    assert report["rows"][2]["speedup"] is None
    assert "so far" in result.stderr and "suffix cold" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "magic"], "--drafters 'magic': not one of none, ngram"),
        (["--drafters", ","], "--drafters: give at least one"),
        (["--drafters", "draft_model"], "speculation.draft_model=NAME"),
        (["--k", "1,x"], "--k '1,x': give numbers separated by commas"),
        (["--k", "0"], "--k 0: must be from 1 to 256"),
        (["--k", "300"], "--k 300: must be from 1 to 256"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--batch", ""], "--batch: give at least one"),
        (["--batch", "16"], "--batch 16: 4 prompts with 2 samples each are 8 sequences; give more prompts"),
        (["--batch", "6", "--temperature", "0"], "--batch 6: at temperature 0 all samples of a prompt are identical"),
        (["--temperature", "warm"], "--temperature 'warm': give numbers separated by commas, such as 0,0.6,1"),
        (["--temperature", "-1"], "--temperature -1.0: must be 0 (greedy)"),
        (["--temperature", "nan"], "--temperature nan: must be 0 (greedy)"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--samples", "0"], "--samples 0: must be at least 1"),
        (["--plot", "out.pdf"], "write a .png or a .html file"),
        (["speculation.rule=block", "speculation.min_confidence=0.5"], "biased by a policy"),
        (["speculation.methud=ngram"], "speculation.method"),
    ],
)
def test_errors(command, arguments, message):
    assert message in " ".join(command(*arguments, code=2).stderr.split())


@pytest.mark.parametrize("architecture", ["eagle3", "dspark"])
def test_available_drafters(monkeypatch, tmp_path, architecture):
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"speculators_model_type": architecture}))

    def resolve(name: str | None, model_name: str) -> Path:
        if name == "there" or (name is None and model_name == "shipped"):
            return head
        raise ModelError(f"speculation.head = {name!r}: no head")

    monkeypatch.setattr(head_files, "resolve_head", resolve)

    def found(*overrides: str) -> tuple[str, ...]:
        return available_drafters(load_config(None, overrides))

    assert found("model.name=other") == ("ngram", "suffix")
    assert found("model.name=shipped") == ("ngram", "suffix", architecture, "hybrid")
    assert found("model.name=other", "speculation.head=there") == ("ngram", "suffix", architecture, "hybrid")
    assert found("model.name=other", "speculation.draft_model='layers:1'") == ("ngram", "suffix", "draft_model")
    with pytest.raises(ValueError, match="no head"):
        found("model.name=shipped", "speculation.head=elsewhere")


def test_prompts_of_the_task(tmp_path):
    """Held-out prompts first, because no head was trained on them."""
    path = tmp_path / "task.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"ask {i}", "answer": str(i)}) + "\n" for i in range(6)))
    config = load_config(None, ["task.kind=jsonl", f"task.name={str(path)!r}", "task.held_out=2"])
    from paceline.build.task import build_task

    prompts = sweep.task_prompts(config, 3)
    assert prompts[:2] == [problem.prompt for problem in build_task(config).held_out]
    assert len(prompts) == len(set(prompts)) == 3


def test_sweep_with_a_head(command, model, tmp_path):
    """EAGLE-3 and hybrid, with a random head."""
    target = read_config(model)
    head = init_head(head_config(target, 64, (1, 2, 3)), torch.arange(64))
    head_files.save_head(head, tmp_path / "head", Provenance(str(model), None, "none", 0, 0, 0))
    out = tmp_path / "out.json"
    command("--drafters", "eagle3,hybrid", f"speculation.head={str(tmp_path / 'head')!r}", "--json", out)
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["none", "eagle3", "hybrid cold", "hybrid warm"]
    assert all(row["identical"] for row in rows)
    assert all(row["num_drafts"] > 0 for row in rows[1:])
