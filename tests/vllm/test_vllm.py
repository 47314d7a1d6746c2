"""The real vLLM beside Paceline: same weights, same prompts, same greedy tokens, same logprobs.

Run by `make test-vllm` in vLLM's own environment. Both engines are spoken to as the bench speaks to them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from real_vllm import SHAPE, greedy, pulled, vllm

from paceline.bench.process import WorkerError
from paceline.bench.prompts import BUILTIN
from paceline.bench.rollout import Bench, Settings
from paceline.cluster import vllm_python
from paceline.model import store
from paceline.tasks.prompt import encode

pytestmark = pytest.mark.vllm


def paceline(directory: Path, prompts: list[list[int]], max_tokens: int, mode: str = "plain") -> dict[str, Any]:
    bench = Bench(Settings(models=(str(directory),), engines=("paceline",), modes=(mode,), batches=(8,)), BUILTIN)
    (case,) = bench.cases()
    with bench._start("paceline") as worker:
        worker.call("load", **bench._load_settings(case, directory, 0))
        return greedy(worker, prompts, max_tokens)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Token for token; logprobs to 1e-3."""
    assert ours["token_ids"] == theirs["token_ids"]
    gaps = [
        abs(a - b)
        for mine, other in zip(ours["logprobs"], theirs["logprobs"], strict=True)
        for a, b in zip(mine, other, strict=True)
    ]
    assert len(gaps) == ours["num_tokens"] > 0
    assert max(gaps) < 1e-3


PROMPTS = [[(7 * i + j * j) % 200 for j in range(5 + 9 * i)] for i in range(6)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_and_logprobs_on_a_tiny_model(checkpoint, family):
    directory = checkpoint(family, **SHAPE)
    with vllm(directory) as worker:
        theirs = greedy(worker, PROMPTS, 24)
    assert theirs["num_tokens"] == 6 * 24
    assert_same(paceline(directory, PROMPTS, 24), theirs)
    if family == "llama":  # and the comparison can fail: other weights give other tokens
        with pytest.raises(AssertionError):
            assert_same(paceline(checkpoint(family, seed=1, **SHAPE), PROMPTS, 24), theirs)


def test_ngram_counts_its_drafts(checkpoint):
    directory = checkpoint("llama", **SHAPE)
    repeating = [[1, 2, 3, 4] * 8, [9, 8, 7] * 9]
    with vllm(directory, "ngram", speculation={"prompt_lookup_min": 1, "prompt_lookup_max": 3}) as worker:
        first = greedy(worker, repeating, 32)
        again = greedy(worker, repeating, 32)
    for reply in (first, again):
        assert 0 < reply["num_drafts"] <= reply["num_draft_tokens"] <= 3 * reply["num_drafts"]
        assert 0 <= reply["num_accepted_tokens"] <= reply["num_draft_tokens"]
    assert first["token_ids"] == again["token_ids"] == paceline(directory, repeating, 32)["token_ids"]


def test_what_it_can_not_do_is_said(checkpoint):
    with pytest.raises(WorkerError, match=r"(?i)no.such.method|speculative"):
        vllm(checkpoint("llama", **SHAPE), "no_such_method").close()


@pytest.mark.skipif(not list(pulled()), reason="paceline pull smollm2-135m first")
def test_greedy_tokens_and_logprobs_on_real_weights():
    directory = next(pulled())
    tokenizer = store.load_tokenizer(directory)
    prompts = [list(encode(tokenizer, prompt)) for prompt in BUILTIN[:6]]
    with vllm(directory) as worker:
        theirs = greedy(worker, prompts, 24)
    assert_same(paceline(directory, prompts, 24), theirs)


def test_this_interpreter_has_vllm():
    """Otherwise everything above would have compared against some other installation."""
    assert Path(vllm_python.find_python()).parent.resolve() == Path(sys.executable).parent.resolve()
