"""The shipped head and our history, in vLLM's engine and in ours: the same greedy tokens, right as often."""

from __future__ import annotations

from typing import Any

import pytest
from real_vllm import pulled
from scripts import load_script

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not list(pulled()), reason="paceline pull smollm2-135m first"),
]


@pytest.mark.parametrize("method", ["eagle3", "suffix"])
def test_drafts_are_right_as_often(method: str, capsys: Any) -> None:
    measure = load_script("vllm/acceptance.py").measure
    local, vllm = (measure(kind, method, num_prompts=3, num_tokens=32) for kind in ("local", "vllm"))
    with capsys.disabled():
        print(f"\n  {method}: {local['mean_acceptance_length']:.3f} here, {vllm['mean_acceptance_length']:.3f} in vLLM")
    assert local["token_ids"] == vllm["token_ids"]
    assert local["num_drafts"] > 20 and local["mean_acceptance_length"] > 1.5
    # vLLM drafts beyond a sequence's end and not before its first token: some drafts more or less, out of a few dozen.
    assert vllm["mean_acceptance_length"] == pytest.approx(local["mean_acceptance_length"], rel=0.1)
