"""EAGLE-3 on a CUDA device: in float64 the same drafts and updates as on a CPU, and drafts change no token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_head

from paceline.config import DraftSection
from paceline.draft.acceptance import measure
from paceline.draft.head_batch import Example, make_head_batch
from paceline.draft.learner import DraftLearner
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.gpu


def generate(device: str, method: str) -> list[Completion]:
    decoder = tiny_decoder().to(device)
    sampler, drafter = Sampler(), None
    if method != "none":
        drafter = Eagle3Drafter(tiny_head(tiny_decoder()).to(device), decoder.embed, sampler, 128)
        drafter = drafter if method == "eagle3" else HybridDrafter(SuffixDrafter(), drafter, 0.1)
    engine = LocalEngine(PagedDecoder(decoder, 128), sampler=sampler, drafter=drafter, policy=StaticPolicy(4))
    prompts = [(1, 2, 3), tuple(range(4, 40)), (7, 8)]
    return engine.generate([Request(i, prompts[i % 3], SamplingParams(max_tokens=40), i, "p") for i in range(9)])


@pytest.mark.parametrize("method", ["eagle3", "hybrid"])
def test_drafts_equal_the_cpus_and_change_no_token(method: str) -> None:
    plain, cuda, cpu = generate("cuda", "none"), generate("cuda", method), generate("cpu", method)
    assert [c.token_ids.tolist() for c in cuda] == [c.token_ids.tolist() for c in plain]
    assert [c.token_ids.tolist() for c in cuda] == [c.token_ids.tolist() for c in cpu]
    assert [c.num_accepted_tokens for c in cuda] == [c.num_accepted_tokens for c in cpu]
    assert sum(c.num_drafts for c in cuda) > 20


def examples() -> list[Example]:
    rng = np.random.default_rng(0)
    return [Example(rng.integers(0, 60, n).astype(np.int32), np.arange(n) >= 5) for n in (30, 44, 21, 38)]


@pytest.mark.parametrize("loss", ["kl", "acceptance"])
def test_updates_of_a_head_equal_the_cpus(loss: str) -> None:
    """In float64 the two devices differ in the last bits only."""
    found = {}
    for device in ("cpu", "cuda"):
        decoder, head = tiny_decoder().to(device), tiny_head(tiny_decoder()).to(device)
        learner = DraftLearner(head, DraftSection(loss=loss, warmup_steps=0, schedule="constant"), num_steps=9)
        head_batch = make_head_batch(decoder, examples(), head.config.aux_layers)
        reports = [learner.update(head_batch, decoder.embed) for _ in range(5)]
        assert all(parameter.grad is None for parameter in decoder.parameters())
        found[device] = [r.loss for r in reports], dict(head.named_parameters())
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=1e-9)
    for name, parameter in found["cpu"][1].items():
        torch.testing.assert_close(found["cuda"][1][name].cpu(), parameter, rtol=1e-6, atol=1e-8)


def test_a_float32_head_is_trained_in_bfloat16() -> None:
    decoder, head = tiny_decoder(torch.float32).cuda(), tiny_head(tiny_decoder(torch.float32)).cuda()
    learner = DraftLearner(head, DraftSection(learning_rate=3e-3, warmup_steps=0, schedule="constant"), num_steps=99)
    head_batch = make_head_batch(decoder, examples(), head.config.aux_layers)
    losses = [learner.update(head_batch, decoder.embed).loss for _ in range(60)]
    assert losses[-1] < losses[0] - 0.5
    assert measure(head, decoder.embed, head_batch, 3, 1.0)["coupled"].mean_length > 1
