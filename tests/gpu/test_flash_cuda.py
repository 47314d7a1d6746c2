"""The engine generates beside a deterministic backward pass: nothing that it runs is refused under torch's flag, and
its tokens are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder

from paceline.build.model import build_cuda_ops, build_sampler
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.model.flash import Segments, _deterministic, flash_attention
from paceline.model.paged import PagedDecoder
from paceline.model.sample import process
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

pytestmark = pytest.mark.gpu

KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.02, "top_p": 0.9}]


@pytest.mark.parametrize("kind", ["float32", "default", "invariant"])
@pytest.mark.parametrize("rule", RULES)
def test_generation_under_the_flag(rule: str, kind: str) -> None:
    """The kernels are for bfloat16, where plain torch may round differently under the flag."""

    def generated() -> list[tuple[list[int], list[float]]]:
        decoder = tiny_decoder(torch.float32 if kind == "float32" else torch.bfloat16, head_dim=16).to("cuda")
        if kind != "float32":
            decoder.ops = build_cuda_ops(decoder, kind == "invariant")
        paged, sampler = PagedDecoder(decoder, 64), build_sampler(decoder)
        engine = LocalEngine(paged, sampler=sampler, drafter=SuffixDrafter(), policy=StaticPolicy(3), rule=rule)
        requests = [
            Request(i, (1, 2, 3, 1, 2), SamplingParams(max_tokens=20, ignore_eos=True, **kind), i, "problem")
            for i, kind in enumerate(KINDS)
        ]
        # Logprobs of plain torch may round differently under the flag.
        return [
            (c.token_ids.tolist(), c.logprobs.tolist() if kind == "invariant" else [])
            for c in engine.generate(requests)
        ]

    expected = generated()
    with _deterministic():
        assert generated() == expected


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
