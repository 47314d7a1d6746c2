"""Heads written by Paceline load in vLLM and have the same acceptance length there, with greedy drafting.

Both engines emit the same greedy tokens, so they draft at the same positions. A draft may differ only if its two best
tokens are equal up to rounding. The last step of a sequence is counted differently (vLLM drafts beyond the end), so the
sequences are long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_vllm import SHAPE, greedy, pulled_models, start_vllm

from paceline.bench.paceline_worker import Worker
from paceline.bench.prompts import read_prompts
from paceline.chat.template import encode
from paceline.config import DraftSection
from paceline.draft.head_batch import Example, make_head_batch
from paceline.draft.learner import DraftLearner
from paceline.model import store, weights
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head, head_config, init_head
from paceline.model.head_files import resolve_head, save_head
from paceline.model.provenance import Provenance
from paceline.model.weights import ModelError

pytestmark = pytest.mark.vllm
K = 3
PROVENANCE = Provenance("tiny", None, "its own completions", seed=0, num_steps=60, num_tokens=0)


def acceptance(reply: dict[str, Any]) -> float:
    assert reply["num_drafts"] > 100
    return 1 + reply["num_accepted_tokens"] / reply["num_drafts"]


def paceline(model: Path, prompts: list[list[int]], max_tokens: int, head: Path | None = None) -> dict[str, Any]:
    drafts = {"method": "eagle3", "policy": "static", "head": str(head), "num_speculative_tokens": K}
    speculation = drafts if head else {"method": "none"}
    worker = Worker()
    worker.load({"model": {"name": str(model)}, "engine": {"max_num_seqs": 8}, "speculation": speculation})
    return worker.run(prompts, max_tokens, temperature=0.0, seed=0)


def in_vllm(model: Path, prompts: list[list[int]], max_tokens: int, head: Path, **load: Any) -> dict[str, Any]:
    with closing(start_vllm(model, "eagle3", speculation={"model": str(head)}, **load)) as worker:
        return greedy(worker, prompts, max_tokens)


PROMPTS = [[(7 * i + j * j) % 200 for j in range(5 + 3 * i)] for i in range(6)]
NUM_TOKENS = 96


@pytest.fixture(scope="module")
def tiny(checkpoint: Callable[..., Path]) -> tuple[Path, Decoder, list[Example]]:
    """A target, and its completions."""
    model = checkpoint("llama", num_hidden_layers=6, **SHAPE)
    completions = paceline(model, PROMPTS, NUM_TOKENS)["token_ids"]
    examples = [
        Example(np.array(prompt + tokens, np.int32), np.arange(len(prompt) + len(tokens)) >= len(prompt))
        for prompt, tokens in zip(PROMPTS, completions, strict=True)
    ]
    return model, weights.load(model).requires_grad_(False), examples


def trained(decoder: Decoder, examples: list[Example], **changes: Any) -> Eagle3Head:
    """A head that is trained on these completions. Its vocabulary lacks some of their tokens."""
    used = np.unique(np.concatenate([example.tokens[example.loss_mask] for example in examples]))
    ids = torch.as_tensor(np.delete(used, slice(None, None, 8)))
    head = init_head(replace(head_config(decoder.config, len(ids), (1, 3, 6)), **changes), ids)
    if head.embed is not None:  # different from the target's
        torch.nn.init.normal_(head.embed.weight, generator=torch.Generator().manual_seed(0))
    head_batch = make_head_batch(decoder, examples, head.config.aux_layers)
    learner = DraftLearner(head, DraftSection(warmup_steps=0, learning_rate=3e-3), num_steps=60)
    for _ in range(60):
        learner.update(head_batch, decoder.embed)
    return head


VARIANTS = [{}, {"norm_before_residual": True, "fc_norm": True, "own_embedding": True}]


@pytest.mark.parametrize("changes", VARIANTS, ids=["plain", "variant"])
def test_tiny_head_has_the_same_acceptance_in_vllm(tiny, tmp_path, changes):
    model, decoder, examples = tiny
    save_head(trained(decoder, examples, **changes), tmp_path, PROVENANCE, dtype=torch.float32)
    local_output, vllm_output = (run(model, PROMPTS, NUM_TOKENS, tmp_path) for run in (paceline, in_vllm))
    assert local_output["token_ids"] == vllm_output["token_ids"]
    assert acceptance(local_output) > 1.5
    assert acceptance(vllm_output) == pytest.approx(acceptance(local_output), rel=0.03)
    if not changes:  # the comparison can fail: with wrong layers the acceptance differs
        config = json.loads((tmp_path / "config.json").read_text())
        config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
        (tmp_path / "config.json").write_text(json.dumps(config))
        wrong = in_vllm(model, PROMPTS, NUM_TOKENS, tmp_path)
        assert acceptance(wrong) != pytest.approx(acceptance(local_output), rel=0.03)


def shipped() -> Path | None:
    try:
        return resolve_head(None, "smollm2-135m")
    except ModelError:
        return None


@pytest.mark.skipif(not list(pulled_models()), reason="paceline pull smollm2-135m first")
@pytest.mark.skipif(shipped() is None, reason="no head ships for smollm2-135m")
def test_shipped_head_has_the_same_acceptance_in_vllm():
    model, head = store.resolve("smollm2-135m"), shipped()
    tokenizer = store.load_tokenizer(model)
    prompts = [list(encode(tokenizer, prompt)) for prompt in read_prompts()[:8]]
    local_output = paceline(model, prompts, 128, head)
    vllm_output = in_vllm(model, prompts, 128, head, max_model_len=384)
    assert local_output["token_ids"] == vllm_output["token_ids"]
    assert acceptance(local_output) > 2
    assert acceptance(vllm_output) == pytest.approx(acceptance(local_output), rel=0.03)
