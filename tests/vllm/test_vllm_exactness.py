"""vLLM's samples with drafts have the same distribution as those without: a short benchmarks/vllm/exactness.py."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import load_script

from paceline.verify.chi_square import SIGNIFICANCE, holm

pytestmark = pytest.mark.vllm
METHODS = ("ngram", "eagle3", "suffix")
SAMPLES = 5000


def test_drafts_do_not_change_the_distribution(capsys: Any) -> None:
    exactness = load_script("vllm/exactness.py")
    processes = [["plain", "null", "eagle3", "suffix", "broken"], ["ngram"]]
    found = exactness.draw_all(processes, seed=0, num_samples=SAMPLES, jobs=2)
    text, tests = exactness.table(found)
    with capsys.disabled():
        print(f"\n{text}")
    for method in METHODS:
        assert found[method]["mean_acceptance_length"] > 1.1  # otherwise speculation is not tested
    broken = tests.pop("broken")
    assert min(holm([test.p_value for test in tests.values()])) > SIGNIFICANCE > broken.p_value
