"""The shipped head and the history drafter: same tokens and acceptance length in vLLM as in the local engine."""

from __future__ import annotations

from typing import Any

import pytest
from real_vllm import pulled_models
from scripts import load_script

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not list(pulled_models()), reason="paceline pull smollm2-135m first"),
]


@pytest.mark.parametrize("method", ["eagle3", "suffix"])
def test_same_acceptance_length(method: str, capsys: Any) -> None:
    measure = load_script("vllm/acceptance.py").measure
    local, vllm = (measure(kind, method, num_prompts=3, num_tokens=32) for kind in ("local", "vllm"))
    with capsys.disabled():
        lengths = " and ".join(f"{found['mean_acceptance_length']:.3f}" for found in (local, vllm))
        print(f"\n  {method}: acceptance length {lengths} (local, vLLM)")
    assert local["token_ids"] == vllm["token_ids"]
    assert local["num_drafts"] > 20 and local["mean_acceptance_length"] > 1.5
    # vLLM also drafts beyond a sequence's end, and not before its first token. With a few dozen drafts this matters.
    assert vllm["mean_acceptance_length"] == pytest.approx(local["mean_acceptance_length"], rel=0.1)
