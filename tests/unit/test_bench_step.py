"""`paceline bench step`: the roofline, error messages, and runs of a tiny shape on a CPU."""

from __future__ import annotations

import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import tiny_config
from typer.testing import CliRunner

from paceline.bench import step, step_settings
from paceline.bench.random_weights import random_decoder, random_dspark, random_head
from paceline.bench.roofline import H200, Load, Rates, step_s
from paceline.bench.step import measure
from paceline.bench.step_settings import Settings, beta_probabilities, imposed_probability
from paceline.cli import app
from paceline.engine.engine import LocalEngine
from paceline.model.config import ModelConfig
from paceline.model.dspark import dspark_config
from paceline.model.eagle3 import default_layer_ids, head_config
from paceline.model.layer import Layer
from paceline.model.shapes import SHAPES

QWEN = SHAPES["qwen3-8b"]
ON_CPU = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    config = tiny_config(tie_embeddings=False)
    monkeypatch.setitem(SHAPES, "tiny", config)
    return config


def on_cpu(**changes: object) -> Settings:
    given: dict = {"batches": (1, 3), "draft_lengths": (0, 2), "prompt_tokens": 20, "max_tokens": 40}
    return Settings("tiny", device="cpu", dtype="float32", **(given | changes))


# ---- imposed acceptance ----


@pytest.mark.parametrize("k", [1, 3, 7, 15])
def test_imposed_probability(k: int) -> None:
    for length in (1.0, 1.2, 1 + k / 2, 0.9 + k, 1.0 + k):
        p = imposed_probability(length, k)
        assert 0 <= p <= 1
        assert sum(p**i for i in range(k + 1)) == pytest.approx(length, abs=1e-9)


@pytest.mark.parametrize(("length", "k"), [(0.99, 3), (4.01, 3), (1.5, 0), (float("nan"), 3), (float("inf"), 3)])
def test_an_impossible_acceptance_length_is_refused(length: float, k: int) -> None:
    with pytest.raises(ValueError, match=f"--imposed-acceptance .* acceptance length is from 1 to {1 + k}"):
        imposed_probability(length, k)


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("mean", [0.0, 0.4, 0.8745, 1.0])
def test_beta_probabilities_have_the_mean_and_the_spread(mean: float, spread: float) -> None:
    found = beta_probabilities(mean, spread)
    assert found.mean() == pytest.approx(mean, abs=2e-3) and found.min() >= 0 and found.max() <= 1
    assert found.var() == pytest.approx(spread * mean * (1 - mean), rel=0.03, abs=1e-12)


def test_only_the_bench_imposes_acceptance() -> None:
    """No other file passes `imposed` to the graph runner, and no config or build code has the word."""
    root = Path(step.__file__).parents[1]
    callers = {str(path.relative_to(root)) for path in root.rglob("*.py") if "imposed=imposed" in path.read_text()}
    assert callers == {"bench/step.py"}
    mentions = [
        path.name for path in [root / "config.py", *(root / "build").glob("*.py")] if "imposed" in path.read_text()
    ]
    assert mentions == []


def test_imposed_acceptance_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_settings, "machine_name", lambda device: "a machine")
    imposed, usual = Settings("qwen3-8b", imposed_acceptance=3.32), Settings("qwen3-8b")
    assert "acceptance imposed: 3.32" in step_settings.title(imposed) and "imposed" not in step_settings.title(usual)
    assert step_settings.describe(imposed)[
        "warning"
    ] == step_settings.IMPOSED and "warning" not in step_settings.describe(usual)


# ---- roofline ----


def matrices(config: ModelConfig, num_in: int | None = None) -> int:
    """The number of parameters in a layer's matrices, counted on a real layer."""
    with torch.device("meta"):
        return sum(p.numel() for p in Layer(config, num_in).parameters() if p.ndim == 2)


def weights(config: ModelConfig) -> int:
    return config.num_layers * matrices(config) + config.hidden_size * config.vocab_size


def test_few_tokens_are_limited_by_reading_weights() -> None:
    one_token = step_s(QWEN, Load(1, 0, 0, 2))
    assert one_token == pytest.approx(2 * weights(QWEN) / H200.bytes_per_s)
    assert one_token == pytest.approx(3.55e-3, rel=0.01)
    assert step_s(QWEN, Load(8, 3, 0, 2)) == one_token, "more tokens cost nothing while memory is the limit"


def test_many_tokens_are_limited_by_compute() -> None:
    assert step_s(QWEN, Load(1024, 3, 0, 2)) == pytest.approx(2 * weights(QWEN) * 4096 / H200.flops_per_s)
    compute_only = Rates(float("inf"), 1e12)
    per_context = 4 * QWEN.num_layers * QWEN.num_heads * QWEN.head_dim
    longer = step_s(QWEN, Load(5, 1, 300, 2), compute_only) - step_s(QWEN, Load(5, 1, 0, 2), compute_only)
    assert longer == pytest.approx(per_context * 300 * 10 / 1e12)


def test_context_is_read_once_per_row() -> None:
    kv = 147456  # bytes per token, as usually given for this shape
    added = step_s(QWEN, Load(32, 0, 1000, 2)) - step_s(QWEN, Load(32, 0, 0, 2))
    assert added == pytest.approx(32 * 1000 * kv / H200.bytes_per_s)
    assert step_s(QWEN, Load(32, 1, 1000, 2)) == step_s(QWEN, Load(32, 0, 1000, 2)), "not once per query token"


def test_times_of_a_heads_passes_are_added() -> None:
    head = head_config(QWEN, 32000)
    layer, lm_head, fuse = matrices(QWEN, 2 * QWEN.hidden_size), 32000 * QWEN.hidden_size, 3 * QWEN.hidden_size**2
    times = [step_s(QWEN, Load(1, k, 0, 2), head=head) for k in (0, 1, 2, 3)]
    assert times[0] == step_s(QWEN, Load(1, 0, 0, 2)), "k = 0 drafts nothing"
    assert times[1] - times[0] == pytest.approx(2 * (fuse + layer + lm_head) / H200.bytes_per_s)
    assert times[2] - times[1] == pytest.approx(2 * (layer + lm_head) / H200.bytes_per_s)
    assert times[3] - times[2] == pytest.approx(times[2] - times[1])
    compute_only = Rates(float("inf"), 1e12)
    drafting = step_s(QWEN, Load(4, 2, 0, 2), compute_only, head) - step_s(QWEN, Load(4, 2, 0, 2), compute_only)
    assert drafting == pytest.approx((2 * 12 * (fuse + layer) + 2 * 4 * layer + 2 * 8 * lm_head) / 1e12)


def test_times_of_a_dspark_heads_passes_are_added() -> None:
    head = dspark_config(QWEN, 32000, (2, 18, 33), num_layers=2, markov_rank=64)
    d, layers, lm_head = QWEN.hidden_size, 2 * matrices(head.layer), 32000 * QWEN.hidden_size
    context, markov = 3 * d * d + 2 * 2 * d * QWEN.num_kv_heads * QWEN.head_dim, 64 * 32000
    times = [step_s(QWEN, Load(1, k, 0, 2), head=head) for k in (0, 1, 2, 3)]
    assert times[0] == step_s(QWEN, Load(1, 0, 0, 2)), "k = 0 drafts nothing"
    assert times[1] - times[0] == pytest.approx(2 * (context + layers + lm_head + markov) / H200.bytes_per_s)
    assert times[3] - times[2] == pytest.approx(2 * markov / H200.bytes_per_s), "a longer block reads no more weights"
    compute_only = Rates(float("inf"), 1e12)
    drafting = step_s(QWEN, Load(4, 2, 0, 2), compute_only, head) - step_s(QWEN, Load(4, 2, 0, 2), compute_only)
    assert drafting == pytest.approx(2 * (12 * context + 8 * (layers + lm_head + markov)) / 1e12)
    memory_only = Rates(1e12, float("inf"))
    long, short = (step_s(QWEN, Load(4, 2, n, 2), memory_only, head) for n in (1000, 0))
    keys = 2 * (QWEN.num_layers + 2) * QWEN.num_kv_heads * QWEN.head_dim  # both read their context once
    assert long - short == pytest.approx(2 * 4 * 1000 * keys / 1e12)


# ---- measured steps ----


def test_weights_are_filled_and_draft_ids_ascend() -> None:
    config, cpu = tiny_config(qk_norm=True, family="qwen3"), torch.device("cpu")
    decoder, head = random_decoder(config, torch.float32, cpu), random_head(config, 41, torch.float32, cpu)
    dspark = random_dspark(config, 41, 3, 16, torch.float32, cpu)
    assert len(dspark.layers) == 3 and dspark.config.markov_rank == 16 and torch.equal(dspark.draft_ids, head.draft_ids)
    for name, parameter in [*decoder.named_parameters(), *head.named_parameters(), *dspark.named_parameters()]:
        assert not parameter.requires_grad
        if name == "confidence.bias":
            continue  # one number
        if name.endswith("norm"):
            assert (parameter == 1).all(), name
        else:
            assert 0.015 < parameter.std() < 0.025, name
    ids = head.draft_ids
    assert (ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < config.vocab_size


def test_only_full_steps_in_the_middle_half_count(tiny: ModelConfig) -> None:
    def trace(num_rows: int, num_query: int, context: int = 0, num_drafted: int | None = None) -> SimpleNamespace:
        drafted = num_query - num_rows if num_drafted is None else num_drafted
        return SimpleNamespace(
            num_rows=num_rows, num_query_tokens=num_query, num_draft_tokens=drafted,
            num_context_tokens=num_rows * (20 + context),
        )  # fmt: skip

    settings = on_cpu()  # 20 + 40 tokens
    # A prefill, shorter drafts, a missing row, no drafts.
    others = [trace(4, 2048, 20, 0), trace(4, 15, 20), trace(3, 12, 20), trace(4, 4, 20)]
    found = step.middle_steps([*others, *(trace(4, 16, i) for i in range(40)), *others], settings, 4, 3)
    assert [t.num_context_tokens for t in found] == [4 * (20 + i) for i in range(10, 31)]
    assert len(step.middle_steps([trace(4, 16)] * 3, settings, 4, 3)) == 2, "the second half if none is in the middle"
    assert step.middle_steps(others, settings, 4, 3) == []
    chosen = step.middle_steps([*others, *others], replace(settings, policy="auto"), 4, 3)
    assert [t.num_query_tokens for t in chosen] == [15, 4, 15, 4], "any number of draft tokens with policy auto"


def test_requests_share_nothing(tiny: ModelConfig) -> None:
    requests = step.BenchModel(on_cpu())._requests(8)
    for key in ("request_id", "prompt_ids", "noise_key", "problem"):
        assert len({getattr(request, key) for request in requests}) == 8
    assert all(len(r.prompt_ids) == 20 and r.sampling.ignore_eos and r.sampling.max_tokens == 40 for r in requests)


def test_each_step_counts_as_the_median_of_its_size() -> None:
    def traces(num_tokens: int, num_drafted_on_device: int, *seconds: float) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(num_query_tokens=num_tokens, num_drafted_on_device=num_drafted_on_device, total_s=s)
            for s in seconds
        ]

    steps = [*traces(4, 3, 1.0, 1.0, 1.1, 90.0), *traces(4, 0, 0.5), *traces(2, 3, 0.2, 0.3, 0.7)]
    assert step._sum_of_medians_s(steps) == pytest.approx(4 * 1.05 + 0.5 + 3 * 0.3)


@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
@pytest.mark.parametrize("plain_torch", [False, True])
def test_a_head_on_a_cpu(tiny: ModelConfig, plain_torch: bool, drafter: str) -> None:
    seen, ids = list[str](), default_layer_ids(tiny.num_layers)
    heads = {"eagle3": head_config(tiny, 61), "dspark": dspark_config(tiny, 61, ids, num_layers=2, markov_rank=8)}
    settings = on_cpu(draft_lengths=(2, 0), plain_torch=plain_torch, drafter=drafter, markov_rank=8)
    rows = list(measure(settings, seen.append))
    assert [(r["batch"], r["num_speculative_tokens"]) for r in rows] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert [what for what in seen if what.startswith("batch")] == [f"batch {b}, k {k}" for b in (1, 3) for k in (0, 2)]
    for row in rows:
        k, batch = row["num_speculative_tokens"], row["batch"]
        assert row["note"] is None and row["memory_gib"] is None and row["num_steps"] >= 5
        assert row["drafter"] == (drafter if k else "none")
        assert 0 < row["device_ms"] <= row["step_ms"] and row["host_ms"] >= 0
        assert 20 < row["context"] < 20 + 40 + k
        load = Load(batch, k, row["context"], 4)
        assert row["roofline_ms"] == pytest.approx(1e3 * step_s(tiny, load, head=heads[drafter] if k else None))
        assert 1 <= row["mean_acceptance_length"] <= 1 + k
        per_s = batch * row["mean_acceptance_length"] / row["step_ms"] * 1e3
        assert row["tokens_per_s"] == pytest.approx(per_s, rel=0.05)
        plain = next(r for r in rows if r["batch"] == batch and r["num_speculative_tokens"] == 0)
        assert row["step_cost"] == pytest.approx(row["step_ms"] / plain["step_ms"])
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / plain["tokens_per_s"])


def test_drafts_from_a_complete_history_are_accepted(tiny: ModelConfig) -> None:
    rows = list(measure(on_cpu(drafter="history", batches=(3,), draft_lengths=(0, 3), max_tokens=60)))
    assert rows[0]["mean_acceptance_length"] == 1
    assert rows[1]["mean_acceptance_length"] > 3.9 and rows[1]["draft_ms"] > 0 and rows[1]["num_steps"] >= 5
    # Broken: with different noise in the second run, the history does not help.
    model = step.BenchModel(on_cpu(drafter="history", max_tokens=60))
    engine, requests = model._engine(3, 3), model._requests(3)
    for keys in (iter(range(3)), iter(range(3, 6))):
        engine.drain_trace()
        engine.generate([replace(request, noise_key=next(keys)) for request in requests])
    found = engine.drain_trace()
    assert 1 + sum(t.num_accepted_tokens for t in found) / sum(t.num_drafts for t in found) < 2.5


def test_a_note_warns_of_short_runs_on_a_gpu(tiny: ModelConfig) -> None:
    def has_note(settings: Settings) -> bool:
        return any("--imposed-acceptance 2" in note for note in step_settings.notes(settings))

    on_gpu = Settings("qwen3-8b", drafter="history")
    assert has_note(on_gpu)
    assert not has_note(replace(on_gpu, imposed_acceptance=2.0))
    assert not has_note(replace(on_gpu, drafter="eagle3"))
    assert not has_note(on_cpu(drafter="history"))
    assert any("nearly all" in note for note in step_settings.notes(on_gpu))
    assert not any("nearly all" in note for note in step_settings.notes(replace(on_gpu, imposed_acceptance=2.0)))


def test_without_plain_steps_nothing_is_compared(tiny: ModelConfig) -> None:
    (row,) = measure(on_cpu(batches=(1,), draft_lengths=(2,)))
    assert row["step_ms"] and row["step_cost"] is None and row["speedup"] is None


def test_a_cell_without_full_steps_has_a_note(tiny: ModelConfig) -> None:
    rows = list(measure(on_cpu(batches=(2,), draft_lengths=(0, 5), max_tokens=4)))
    assert rows[0]["step_ms"] and "raise --max-tokens" in rows[1]["note"] and rows[1]["step_ms"] is None


def test_a_cell_out_of_memory_is_skipped(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.BenchModel.steps

    def steps(self: step.BenchModel, batch: int, k: int) -> list:
        if (batch, k) == (1, 0):
            raise torch.OutOfMemoryError("no more")
        if (batch, k) == (1, 2):  # as while a graph is captured
            try:
                raise torch.OutOfMemoryError("no more")
            finally:
                raise RuntimeError("capture failed")
        return real(self, batch, k)

    monkeypatch.setattr(step.BenchModel, "steps", steps)
    rows = list(measure(on_cpu()))
    assert [row["note"] for row in rows] == ["out of device memory", "out of device memory", None, None]
    assert rows[0]["step_ms"] is None and rows[2]["step_cost"] == 1

    def broken(self: step.BenchModel, batch: int, k: int) -> list:
        raise RuntimeError("a bug")

    monkeypatch.setattr(step.BenchModel, "steps", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        list(measure(on_cpu()))


@pytest.mark.parametrize("fails", [False, True])
def test_the_memory_of_a_cell_is_freed(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Also if it failed: the traceback must not keep references."""
    make, generate, kept = step.BenchModel._engine, LocalEngine.generate, []

    def engine(self: step.BenchModel, batch: int, k: int) -> LocalEngine:
        assert all(each() is None for each in kept)
        made = make(self, batch, k)
        kept.extend(map(weakref.ref, (made, made.paged, made.runner, made.paged.kv)))
        return made

    def generate_or_fail(self: LocalEngine, requests: list) -> list:
        if fails and len(requests) == 1:
            raise torch.OutOfMemoryError("no more")
        return generate(self, requests)

    monkeypatch.setattr(step.BenchModel, "_engine", engine)
    monkeypatch.setattr(LocalEngine, "generate", generate_or_fail)
    notes = [row["note"] for row in measure(on_cpu())]
    assert notes == (["out of device memory"] * 2 if fails else [None] * 2) + [None] * 2 and len(kept) == 16


# ---- the command ----


def test_the_command(tiny: ModelConfig, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ["bench", "step", "--model", "tiny", "--batch", "1,2", "--k", "0,2", "--prompt-tokens", "20"]
    arguments += ["--max-tokens", "30", *ON_CPU, "--json", str(out), "--plot", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "batch 2, k 2" in result.output and "TFLOP/s" in result.output and step_settings.IMPOSED not in result.output
    content = json.loads(out.read_text())
    assert [(r["batch"], r["num_speculative_tokens"]) for r in content["rows"]] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert content["settings"]["model"] == "tiny" and content["settings"]["rates"]["flops_per_s"] == 775e12
    assert not content["interrupted"] and "data:image/png" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-9"], r"--model 'gpt-9': not one of qwen3-8b, qwen3-1.7b, qwen3-0.6b, qwen2.5-1.5b, "),
        (["--drafter", "ngram"], "--drafter 'ngram': not one of eagle3, dspark, history"),
        (["--device", "tpu"], "--device 'tpu': not one of cuda, cpu"),
        (["--dtype", "int8"], "--dtype 'int8': not one of"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--batch", ""], "--batch: give at least one"),
        (["--k", "-1"], "--k '-1': give numbers"),
        (["--copy-rate", "0"], "--copy-rate 0.0: must be at least 1"),
        (["--prompt-tokens", "40900"], "together 41156, but the context of qwen3-8b is 40960"),
        (["--device", "cpu"], "--dtype bfloat16: on a CPU use float32"),
        ([*ON_CPU, "--eager"], "--eager: turns CUDA graphs off"),
        ([*ON_CPU, "--imposed-acceptance", "2"], "--imposed-acceptance: only the GPU kernels support it"),
        (["--plain-torch", "--imposed-acceptance", "2"], "--imposed-acceptance: only the GPU kernels support it"),
        (["--imposed-acceptance", "4.5"], "--imposed-acceptance 4.5: with --k 3 the acceptance length is from 1 to 4"),
        (["--dtype", "float64"], "--dtype float64: the GPU kernels do not support it; use --plain-torch"),
        (["--k", "16"], "--k 16: the GPU kernels verify at most 15"),
        (["--batch", "4096", "--k", "0,3"], "a step of 16384 tokens, but graphs take at most 8192"),
        ([], "this machine has no CUDA device; .* --device cpu --dtype float32"),
        (["--plot", "out.pdf"], "write a .png or a .html file"),
    ],
)
def test_errors(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "step", *arguments])
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split())), result.output


def test_ctrl_c_reports_the_cells_measured_so_far(
    tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = step.BenchModel.steps

    def steps(self: step.BenchModel, batch: int, k: int) -> list:
        if k:
            raise KeyboardInterrupt
        return real(self, batch, k)

    monkeypatch.setattr(step.BenchModel, "steps", steps)
    arguments = ["bench", "step", "--model", "tiny", "--batch", "1", "--prompt-tokens", "20", "--max-tokens", "30"]
    result = CliRunner().invoke(app, [*arguments, *ON_CPU, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 130
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["interrupted"] and [row["num_speculative_tokens"] for row in content["rows"]] == [0]
