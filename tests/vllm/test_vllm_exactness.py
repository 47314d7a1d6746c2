"""Samples of vLLM with drafts against samples without, by the script that does it with many more of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from paceline.verify.chance import SIGNIFICANCE, holm

pytestmark = pytest.mark.vllm
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm" / "exactness.py"
METHODS = ("ngram", "eagle3", "suffix")
SAMPLES = 5000


def script() -> Any:
    spec = importlib.util.spec_from_file_location("exactness", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drafts_do_not_change_the_distribution(capsys: Any) -> None:
    exactness = script()
    processes = [["plain", "null", "eagle3", "suffix", "twin"], ["ngram"]]
    found = exactness.draw_all(processes, seed=0, num_samples=SAMPLES, jobs=2)
    text, tests = exactness.table(found)
    with capsys.disabled():
        print(f"\n{text}")
    for method in METHODS:
        assert found[method]["mean_acceptance_length"] > 1.1  # else nothing was tried
    twin = tests.pop("twin")
    assert min(holm([test.p_value for test in tests.values()])) > SIGNIFICANCE > twin.p_value
