"""Baselines do not draft, though speculation is the default."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from paceline.bench.rollout import Settings
from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.types import Request, SamplingParams, noise_key

REPOSITORY = Path(__file__).parents[2]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)  # greedy tiny models repeat themselves


def num_drafts(*settings: str) -> int:
    with closing(build_engine(load_config(None, settings))) as engine:
        engine.generate([Request(i, (5, 6, 7) * 4, SAMPLING, noise_key(0, i), "problem") for i in range(2)])
        return sum(trace.num_drafts for trace in engine.drain_trace())


def test_only_the_method_none_drafts_nothing(checkpoint) -> None:
    model = f"model.name={str(checkpoint('llama'))!r}"
    assert num_drafts(model, "speculation.policy=static") > 0  # the default method
    assert num_drafts(model, "speculation.method=none") == 0


def test_bench_plain() -> None:
    settings = Settings(
        models=("m",), engines=("paceline",), modes=("plain",), draft_lengths=(4,), batches=(1,), max_tokens=8,
        temperature=1.0, repeats=1, threads=1, num_generations=1, seed=0, config=load_config(None),
    )  # fmt: skip
    assert settings.with_mode("plain", 0).speculation.method == "none"
    assert settings.with_mode("suffix", 4).speculation.method == "suffix"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "benchmarks").rglob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_says_which_method_it_uses(path: Path) -> None:
    """A script that makes a config also names the method, or its TOML file does."""
    text = path.read_text() + "".join(file.read_text() for file in path.parent.glob("*.toml"))
    assert "load_config(" not in text or re.search(r"speculation\.method|\"method\"|with_method|^method =", text, re.M)
