"""Samples of vLLM with drafts against samples without, by the script that does it with many more of them."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import load_script

from paceline.verify.chance import SIGNIFICANCE, holm

pytestmark = pytest.mark.vllm
METHODS = ("ngram", "eagle3", "suffix")
SAMPLES = 5000


def test_drafts_do_not_change_the_distribution(capsys: Any) -> None:
    exactness = load_script("vllm/exactness.py")
    processes = [["plain", "null", "eagle3", "suffix", "twin"], ["ngram"]]
    found = exactness.draw_all(processes, seed=0, num_samples=SAMPLES, jobs=2)
    text, tests = exactness.table(found)
    with capsys.disabled():
        print(f"\n{text}")
    for method in METHODS:
        assert found[method]["mean_acceptance_length"] > 1.1  # else nothing was tried
    twin = tests.pop("twin")
    assert min(holm([test.p_value for test in tests.values()])) > SIGNIFICANCE > twin.p_value
