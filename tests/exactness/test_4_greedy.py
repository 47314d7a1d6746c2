"""Level 4: the same greedy tokens as Hugging Face's `generate`, on real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.build.model import build_decoder
from paceline.types import Request, SamplingParams
from paceline.verify import identity

PROMPTS = ("What is the capital of France?", "Count from one to five in words.", "def fibonacci(n):")


@pytest.mark.slow
def test_greedy_identity_on_smollm2(smollm2: Path) -> None:
    engine = build_engine(load_config(None, [f"model.name={smollm2}", "speculation.method=suffix"]))
    prompts = [engine.tokenizer.encode(text) for text in PROMPTS]
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    found = identity.tokens_of(
        engine.generate([Request(i, tuple(p), sampling, problem=str(i)) for i, p in enumerate(prompts)])
    )
    expected = identity.transformers_greedy(smollm2, prompts, 24)
    assert identity.first_differences(expected, found) == []
    # Broken: one layer of thirty has a norm with the wrong sign.
    engine.paged.decoder.layers[3].post_norm.data.neg_()
    engine.paged.pool.reset_prefix_cache()
    broken = identity.tokens_of(
        engine.generate([Request(i, tuple(p), sampling, problem=str(i)) for i, p in enumerate(prompts)])
    )
    assert identity.first_differences(expected, broken)


def test_bfloat16_on_a_cpu_is_refused(smollm2: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.dtype"):
        build_decoder(load_config(None, ["model.dtype=bfloat16"]), smollm2)


def test_first_differences() -> None:
    differences = identity.first_differences([[1, 2, 3], [1, 2], [5]], [[1, 2, 3], [1, 9], [5, 6]])
    assert [(d.request, d.position, d.expected, d.found) for d in differences] == [(1, 1, 2, 9), (2, 1, None, 6)]
