"""How a run uses and records its memory plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planned import SMALL, on_gpu, plan
from tiny_run import SETTINGS, make, settings
from typer.testing import CliRunner

from paceline.build import memory
from paceline.build.config import load_config
from paceline.build.learner import warn_of_other_bits
from paceline.build.memory import other_memory_note, resolve_memory
from paceline.build.memory_plan import GIB, MemoryPlan
from paceline.build.memory_text import plan_rows
from paceline.build.vllm import vllm_options
from paceline.cli import app
from paceline.config import Config
from paceline.config_io import ConfigError, dump_config


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu(total): from now on, runs on this machine's CPU are planned like those on a GPU with this memory."""

    def simulate(total: int) -> None:
        monkeypatch.setattr(memory, "is_planned", lambda config: True)
        monkeypatch.setattr(memory, "check_device", lambda config: None)
        monkeypatch.setattr(memory, "device_bytes", lambda config, group: total)

    return simulate


def test_auto_is_2048_without_a_plan(tmp_path: Path) -> None:
    assert Config().learner.tokens_per_microbatch == "auto"
    for given in ([], ["model.device=cuda", "cluster.kind=ray"], ["model.device=cuda", "learner.model=transformers"]):
        config, found = resolve_memory(load_config(None, given))
        assert found is None and config.learner.tokens_per_microbatch == 2048
        assert config.engine.kv_tokens is None and config.engine.sleep is None
    assert resolve_memory(load_config(None, ["learner.tokens_per_microbatch=7"]))[0].learner.tokens_per_microbatch == 7
    with pytest.raises(ConfigError, match=r"learner.tokens_per_microbatch = 'most': expected .*auto"):
        load_config(None, ["learner.tokens_per_microbatch=most"])


def test_auto_on_a_cpu_trains_like_2048(tmp_path: Path) -> None:
    spans, weights = [], []
    for name, given in (("auto", []), ("given", ["learner.tokens_per_microbatch=2048"])):
        trainer = make(tmp_path, name, "train.num_steps=1", *given)
        assert trainer.learner.section.tokens_per_microbatch == 2048
        cut = trainer.learner._microbatches
        trainer.learner._microbatches = lambda rollouts, cut=cut: spans.append(cut(rollouts)) or spans[-1]  # type: ignore
        trainer.run()
        weights.append({name: tensor.clone() for name, tensor in trainer.learner.weights()})
        trainer.close()
    assert spans and spans[: len(spans) // 2] == spans[len(spans) // 2 :]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_run_records_its_plan_and_keeps_it_on_resume(tmp_path: Path, gpu: Any) -> None:
    gpu(80 * GIB)
    trainer = make(tmp_path, "run", "train.num_steps=1", "algorithm.num_generations=400", "engine.max_num_seqs=1000")
    trainer.run()
    chosen = trainer.config.learner.tokens_per_microbatch, trainer.config.engine.kv_tokens
    assert chosen == (8192, 1000 * 256) and trainer.learner.section.tokens_per_microbatch == 8192
    assert trainer.engine.paged.pool.num_blocks * 16 == chosen[1]
    trainer.close()
    run = tmp_path / "run"
    recorded = json.loads((run / "run.json").read_text())["memory_plan"]
    assert recorded["total_bytes"] == 80 * GIB and recorded["tokens_per_microbatch"] == 8192
    config = load_config(run / "config.toml", ["train.num_steps=2"])
    assert (config.learner.tokens_per_microbatch, config.engine.kv_tokens) == chosen
    for total, is_other in ((80 * GIB, False), (40 * GIB, True)):
        gpu(total)
        trainer = make(tmp_path, "run", resume=True, config=config)
        assert (trainer.config.learner.tokens_per_microbatch, trainer.config.engine.kv_tokens) == chosen
        assert trainer.learner.section.tokens_per_microbatch == 8192
        notes = [note for note in trainer.callback.notes if "the run started on one with 80 GiB" in note]
        assert len(notes) == is_other, trainer.callback.notes
        assert not any("changed on resume: learner" in note for note in trainer.callback.notes)
        trainer.close()
    gpu(1 * GIB)
    with pytest.raises(ValueError, match="this run needs"):
        make(tmp_path, "run", resume=True, config=config)


def test_resolved_numbers_survive_the_config_file(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "read_model", lambda config: SMALL)
    gpu(140 * GIB)
    config, first = resolve_memory(on_gpu())
    assert first is not None and first.tokens_per_microbatch == 8192 and first.sleeps and config.engine.sleep is None
    (tmp_path / "config.toml").write_text(dump_config(config))
    (tmp_path / "run.json").write_text(json.dumps({"memory_plan": {"total_bytes": 140 * GIB}}))
    again = load_config(tmp_path / "config.toml")
    for total in (70, 140, 200):
        gpu(total * GIB)
        resumed, found = resolve_memory(again)
        assert resumed == config, "the same on every GPU"
        assert (other_memory_note(tmp_path, found) is None) == (total == 140)


def test_sleep_is_planned_again_on_resume(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no bit, so a smaller GPU may need it."""
    monkeypatch.setattr(memory, "read_model", lambda config: SMALL)
    gpu(140 * GIB)
    config, first = resolve_memory(on_gpu("engine.max_num_seqs=64", "learner.tokens_per_microbatch=4096"))
    assert first is not None and not first.sleeps
    (tmp_path / "config.toml").write_text(dump_config(config))
    gpu(64 * GIB)
    resumed, found = resolve_memory(load_config(tmp_path / "config.toml"))
    assert found is not None and found.sleeps and resumed == config


def test_a_run_sleeps_by_its_plan(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(80 * GIB)
    plan_memory = memory.plan_memory
    for sleeps in (False, True):
        planned = lambda *given, sleeps=sleeps: replace(plan_memory(*given), sleeps=sleeps)  # noqa: E731
        monkeypatch.setattr(memory, "plan_memory", planned)
        trainer = make(tmp_path, f"run-{sleeps}", "train.num_steps=1")
        assert trainer.sleeps is sleeps and not trainer.engine.wants_sleep
        trainer.close()
        assert load_config(tmp_path / f"run-{sleeps}" / "config.toml").engine.sleep is None
        assert make(tmp_path, f"set-{sleeps}", "engine.sleep=true").sleeps, "what is set counts"


def test_vllm_sizes_its_kv_cache_itself(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "read_model", lambda config: SMALL)
    gpu(80 * GIB)
    given = ["engine.kind=vllm", "engine.vllm.gpu_memory_utilization=0.5", "engine.vllm.max_model_len=20000"]
    config, found = resolve_memory(on_gpu(*given))
    assert found is not None and found.kv_tokens is None and config.engine.kv_tokens is None
    assert found.kv + found.engine_weights == 40 * GIB and found.sleeps
    assert not plan(SMALL, 141e9, *given, "engine.sleep=false").sleeps
    options = vllm_options(config, Path("x"), SMALL)
    assert "kv_cache_memory_bytes" not in options and options["max_model_len"] == 20000
    config, found = resolve_memory(on_gpu(*given[:2], "engine.kv_tokens=4608"))
    assert found is not None and found.kv_tokens == config.engine.kv_tokens == 4608 and found.kv < 2 * GIB
    gpu(90 * GIB)
    assert "engine.kv_tokens" in str(noted(monkeypatch, found))
    assert "engine.kv_tokens" not in str(noted(monkeypatch, replace(found, kv_tokens=None)))


def noted(monkeypatch: pytest.MonkeyPatch, found: MemoryPlan) -> str | None:
    """The note about a run that started on a GPU of 1 GiB."""
    monkeypatch.setattr(memory, "read_run_json", lambda path: {"memory_plan": {"total_bytes": GIB}})
    monkeypatch.setattr(Path, "exists", lambda path: True)
    return other_memory_note(Path("run"), found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("supported", [True, False])
def test_learner_warns_where_it_is_not_deterministic(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, dtype: str, supported: bool
) -> None:
    monkeypatch.setattr("paceline.build.learner.has_varlen", lambda *_: supported)
    for deterministic in ("true", "false"):
        warn_of_other_bits(on_gpu(f"model.dtype={dtype}", f"learner.deterministic={deterministic}"), 100)
    found = [str(warning.message) for warning in recwarn]
    assert len(found) == (dtype == "bfloat16" and not supported)
    assert all("learner.deterministic = true" in text and "head_dim = 100" in text for text in found)


def test_a_run_that_cannot_fit_ends_before_anything_is_loaded(
    tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(tmp_path)  # writes the model
    gpu(1 * GIB)
    monkeypatch.setattr("paceline.build.run.build_rollout_engine", lambda config: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r"this run needs .* GiB, but of the GPU's 1\.0 GiB"):
        make(tmp_path, "run")
    assert not (tmp_path / "run").exists()


def test_ranks_plan_with_the_smallest_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.rl.worker_group import WorkerGroup

    monkeypatch.setattr(memory, "read_model", lambda config: SMALL)
    gpu(140 * GIB)
    group = WorkerGroup(0, 2)
    monkeypatch.setattr(WorkerGroup, "all_gather_object", lambda self, own: [own, {"total_bytes": 60 * GIB}])
    _, found = resolve_memory(on_gpu(), group)
    assert found == plan(SMALL, 60 * GIB, num_ranks=2)


def dry_run(folder: Path, *overrides: str, code: int = 0) -> str:
    given = [f"model.name={str(folder / 'model')!r}", f"task.name={str(folder / 'task.jsonl')!r}"]
    result = CliRunner().invoke(app, ["train", *given, *SETTINGS, *overrides, "--dry-run"], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_parts_of_a_plan() -> None:
    names = ["weights of the learner", "weights of the engine", "master weights", "optimizer moments", "gradients",
             "KV cache, ", "activations, ", "logits, or gradients of a layer", "drafter", "reserve", "sum"]  # fmt: skip
    rows = list(plan_rows(plan(SMALL, 141e9)))
    assert all(row.startswith(name) for row, name in zip(rows, names, strict=True)), rows


def test_dry_run_prints_the_plan(tmp_path: Path, gpu: Any) -> None:
    """Without parts of 0.0 GiB."""

    def table(output: str) -> dict[str, str]:
        return dict(re.findall(r"^ *(.*\S) +(\d+\.\d) *$", output.partition("GiB")[2], re.MULTILINE))

    settings(tmp_path)
    assert table(dry_run(tmp_path)) == {"sum": "0.0"}
    gpu(80 * GIB)
    rows = table(dry_run(tmp_path))
    assert rows.keys() == {"drafter", "reserve", "sum", "GPU"} and rows["GPU"] == "80.0"
    gpu(1 * GIB)
    assert "this run needs" in dry_run(tmp_path, code=2)
