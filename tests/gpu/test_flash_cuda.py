"""The engine generates beside a deterministic backward pass: nothing that it runs is refused under torch's flag, and
its tokens are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.model.cuda.ops import CudaOps
from paceline.model.flash import Segments, _deterministic, flash_attention
from paceline.model.paged import PagedDecoder
from paceline.model.sample import process
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

pytestmark = pytest.mark.gpu

KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.02, "top_p": 0.9}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_generation_under_the_flag(rule: str, dtype: torch.dtype) -> None:
    def tokens() -> list[list[int]]:
        decoder = tiny_decoder(dtype, head_dim=16).to("cuda")
        if dtype == torch.bfloat16:  # plain torch may round differently under the flag
            decoder.ops = CudaOps()
        paged = PagedDecoder(decoder, 64)
        engine = LocalEngine(paged, drafter=SuffixDrafter(), policy=StaticPolicy(3), rule=rule)
        requests = [
            Request(i, (1, 2, 3, 1, 2), SamplingParams(max_tokens=20, ignore_eos=True, **kind), i, "problem")
            for i, kind in enumerate(KINDS)
        ]
        return [completion.token_ids.tolist() for completion in engine.generate(requests)]

    expected = tokens()
    with _deterministic():
        assert tokens() == expected


def test_truncation_under_the_flag_equals_the_cpus() -> None:
    logits = torch.randn(16, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    params = SamplingArrays.of([SamplingParams(top_p=0.8)] * 16, np.ones(16, np.int64))
    expected = process(logits, params)
    with _deterministic():
        found = process(logits.cuda(), params).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert expected.isinf().any()


def test_a_backward_pass_is_deterministic_without_the_flag() -> None:
    """`flash_backward` sets the flag itself, and the gradients of a long segment have equal bits."""
    noise = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4096, 8, 64, device="cuda", generator=noise).bfloat16()
    at = torch.tensor([0, 4096], dtype=torch.int32, device="cuda")

    def gradients() -> list[torch.Tensor]:
        q, k, v = (x.clone().requires_grad_(True) for _ in range(3))
        flash_attention(q, k, v, Segments(at, at, 4096, 4096)).square().sum().backward()
        assert q.grad is not None and k.grad is not None and v.grad is not None
        return [q.grad, k.grad, v.grad]

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()
