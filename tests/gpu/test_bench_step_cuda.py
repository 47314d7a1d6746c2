"""`paceline bench step` on a GPU: a tiny shape with CUDA graphs, with kernels and no graphs, and in plain torch."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from support import tiny_config
from typer.testing import CliRunner

from paceline.bench import step, step_settings
from paceline.bench.step import measure
from paceline.bench.step_settings import Settings
from paceline.cli import app
from paceline.engine.engine import LocalEngine
from paceline.model.shapes import SHAPES

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(
        vocab_size=2048, hidden_size=128, intermediate_size=192, head_dim=32, max_positions=1024, tie_embeddings=False
    )
    monkeypatch.setitem(SHAPES, "tiny", config)


def rows_of(**changes: object) -> list[dict]:
    given: dict = {"batches": (1, 5), "draft_lengths": (0, 3), "prompt_tokens": 40, "max_tokens": 120}
    rows = list(measure(Settings("tiny", draft_vocab_size=1000, **(given | changes))))
    assert [row["note"] for row in rows] == [None] * len(rows)
    for row in rows:
        assert row["num_steps"] >= 5 and row["device_ms"] > 0 and row["step_ms"] > 0 and row["host_ms"] >= 0
        assert row["memory_gib"] > 0 and row["roofline_ms"] > 0
    return rows


def test_the_limits_are_the_kernels() -> None:
    from paceline.model.cuda.device_state import MAX_DRAFT
    from paceline.model.cuda.graphs import SIZES

    assert (MAX_DRAFT, SIZES[-1]) == (step_settings.MAX_DRAFT, step_settings.MAX_TOKENS)


@pytest.mark.parametrize("mode", [{}, {"eager": True}, {"plain_torch": True}], ids=["graphs", "eager", "plain torch"])
@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_a_head(drafter: str, mode: dict) -> None:
    rows = rows_of(drafter=drafter, **mode)
    assert [row["mean_acceptance_length"] for row in rows if row["drafter"] == "none"] == [1, 1]
    assert all(1 <= row["mean_acceptance_length"] <= 4 for row in rows)


@pytest.mark.parametrize("mode", [{}, {"eager": True}, {"plain_torch": True}], ids=["graphs", "eager", "plain torch"])
def test_drafts_from_a_complete_history_are_accepted(mode: dict) -> None:
    """With kernels the device drafts; otherwise the host does, and `draft_ms` is its time."""
    rows = rows_of(drafter="history", **mode)
    for row in rows:
        if row["num_speculative_tokens"]:
            assert row["mean_acceptance_length"] > 3.9 and (row["draft_ms"] > 0) == ("plain_torch" in mode)


@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("drafter", ["eagle3", "dspark", "history"])
def test_acceptance_is_what_was_imposed(drafter: str, eager: bool, spread: float) -> None:
    given = {"imposed_acceptance": 2.5, "imposed_spread": spread}
    rows = rows_of(drafter=drafter, **given, batches=(32,), max_tokens=200, eager=eager)
    assert rows[0]["mean_acceptance_length"] == 1 and rows[0]["imposed_acceptance"] is None
    # About 32 x 50 draws of a number from 1 to 4: a standard error of 0.03.
    assert rows[1]["mean_acceptance_length"] == pytest.approx(2.5, abs=0.12)


@pytest.mark.parametrize("eager", [False, True])
def test_the_memory_of_a_cell_is_freed(monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    """Before the next cell begins: both the KV cache and the graphs."""
    make, kept = step.BenchModel._engine, []

    def engine(self: step.BenchModel, batch: int, k: int) -> LocalEngine:
        assert all(each() is None for each in kept)
        made = make(self, batch, k)
        kept.extend(map(weakref.ref, (made, made.runner, made.paged.kv)))
        return made

    monkeypatch.setattr(step.BenchModel, "_engine", engine)
    rows_of(eager=eager)
    assert len(kept) == 12


def test_a_cell_without_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.BenchModel._engine

    def engine(self: step.BenchModel, batch: int, k: int) -> LocalEngine:
        if batch == 2:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return real(self, batch, k)

    monkeypatch.setattr(step.BenchModel, "_engine", engine)
    rows = list(measure(Settings("tiny", batches=(2, 3), draft_lengths=(0,), prompt_tokens=40, max_tokens=60)))
    assert [row["note"] for row in rows] == ["out of device memory", None]


def test_the_command_marks_imposed_acceptance(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["bench", "step", "--model", "tiny", "--batch", "4", "--k", "0,3", "--imposed-acceptance", "2"]
    result = CliRunner().invoke(
        app, [*arguments, "--prompt-tokens", "40", "--max-tokens", "90", "--json", str(out), "--plot", f"{out}.html"]
    )
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert step_settings.IMPOSED in shown and "acceptance imposed: 2" in shown
    assert json.loads(out.read_text())["settings"]["warning"] == step_settings.IMPOSED
