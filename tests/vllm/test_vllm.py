"""vLLM and Paceline emit the same greedy tokens with the same logprobs, for the same weights and prompts.

`make test-vllm` runs this in vLLM's own environment. Both engines run in the bench's workers.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from real_vllm import SHAPE, greedy, pulled_models, start_vllm

from paceline.bench.process import WorkerError
from paceline.bench.prompts import read_prompts
from paceline.bench.rollout import Bench, Settings
from paceline.chat.template import encode
from paceline.cluster import vllm_python
from paceline.model import store

pytestmark = pytest.mark.vllm


def paceline(directory: Path, prompts: list[list[int]], max_tokens: int, mode: str = "plain") -> dict[str, Any]:
    settings = Settings(models=(str(directory),), engines=("paceline",), modes=(mode,), batches=(8,))
    bench = Bench(settings, read_prompts())
    (case,) = bench.cases()
    with closing(bench._start("paceline")) as worker:
        worker.call("load", **bench._load_settings(case, directory, 0))
        return greedy(worker, prompts, max_tokens)


def assert_same(local_output: dict[str, Any], vllm_output: dict[str, Any]) -> None:
    """Equal tokens; logprobs within 1e-3."""
    assert local_output["token_ids"] == vllm_output["token_ids"]
    differences = [
        abs(a - b)
        for local_logprobs, vllm_logprobs in zip(local_output["logprobs"], vllm_output["logprobs"], strict=True)
        for a, b in zip(local_logprobs, vllm_logprobs, strict=True)
    ]
    assert len(differences) == local_output["num_tokens"] > 0
    assert max(differences) < 1e-3


PROMPTS = [[(7 * i + j * j) % 200 for j in range(5 + 9 * i)] for i in range(6)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_and_logprobs_on_a_tiny_model(checkpoint, family):
    directory = checkpoint(family, **SHAPE)
    with closing(start_vllm(directory)) as worker:
        vllm_output = greedy(worker, PROMPTS, 24)
    assert vllm_output["num_tokens"] == 6 * 24
    assert_same(paceline(directory, PROMPTS, 24), vllm_output)
    if family == "llama":  # the comparison can fail: other weights give other tokens
        with pytest.raises(AssertionError):
            assert_same(paceline(checkpoint(family, seed=1, **SHAPE), PROMPTS, 24), vllm_output)


def test_ngram_draft_counters(checkpoint):
    directory = checkpoint("llama", **SHAPE)
    repeating = [[1, 2, 3, 4] * 8, [9, 8, 7] * 9]
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with closing(start_vllm(directory, "ngram", speculation=lookup)) as worker:
        first = greedy(worker, repeating, 32)
        again = greedy(worker, repeating, 32)
    for reply in (first, again):
        assert 0 < reply["num_drafts"] <= reply["num_draft_tokens"] <= 3 * reply["num_drafts"]
        assert 0 <= reply["num_accepted_tokens"] <= reply["num_draft_tokens"]
    assert first["token_ids"] == again["token_ids"] == paceline(directory, repeating, 32)["token_ids"]


def test_unknown_method_is_reported(checkpoint):
    with pytest.raises(WorkerError, match=r"(?i)no.such.method|speculative"):
        start_vllm(checkpoint("llama", **SHAPE), "no_such_method").close()


@pytest.mark.skipif(not list(pulled_models()), reason="paceline pull smollm2-135m first")
def test_greedy_tokens_and_logprobs_on_real_weights():
    directory = next(pulled_models())
    tokenizer = store.load_tokenizer(directory)
    prompts = [list(encode(tokenizer, prompt)) for prompt in read_prompts()[:6]]
    with closing(start_vllm(directory)) as worker:
        vllm_output = greedy(worker, prompts, 24)
    assert_same(paceline(directory, prompts, 24), vllm_output)


def test_this_interpreter_has_vllm():
    """Otherwise the tests above compare with another installation."""
    assert Path(vllm_python.find_python()).parent.resolve() == Path(sys.executable).parent.resolve()
