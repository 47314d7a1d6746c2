"""A draft model of the target's first layers: it always has the policy's weights."""

from __future__ import annotations

import pytest
from support import tiny_decoder

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import first_layers
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.weights import checksum, hf_state
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams


def engine(num_layers: int) -> LocalEngine:
    decoder = tiny_decoder()
    drafter = DraftModelDrafter(PagedDecoder(first_layers(decoder, num_layers), 64), Sampler())
    return LocalEngine(PagedDecoder(decoder, 64), drafter=drafter, policy=StaticPolicy(3))


def requests(first: int = 0) -> list[Request]:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    return [Request(first + i, (1, 2, 3, 4 + i), sampling, first + i) for i in range(3)]


def test_all_layers_are_accepted_after_a_policy_update() -> None:
    """With all layers and the noise of the target every draft token is accepted, unless KV of older weights is used."""
    running = engine(3)
    for request in requests():
        running.submit(request)
    for _ in range(4):
        running.step()
    running.update_weights(list(hf_state(tiny_decoder(seed=9))), 1, "recompute")
    running.drain_trace()
    while running.has_work:
        running.step()
    traces = running.drain_trace()
    assert sum(trace.num_draft_tokens for trace in traces) > 30
    assert all(trace.num_accepted_tokens == trace.num_draft_tokens for trace in traces)


def test_prefix_cache_of_older_weights_is_not_used() -> None:
    """The second request has the same prompt as the first, which the drafter may have cached."""
    running, prompt = engine(3), tuple(range(1, 41))
    running.generate([Request(0, prompt, SamplingParams(max_tokens=8, ignore_eos=True), 0)])
    running.update_weights(list(hf_state(tiny_decoder(seed=9))), 1)
    running.drain_trace()
    found = running.generate([Request(1, prompt, SamplingParams(max_tokens=30, ignore_eos=True), 1)])[0]
    assert found.num_draft_tokens > 15 and found.num_accepted_tokens == found.num_draft_tokens


def test_refuses_other_weights() -> None:
    running = engine(2)
    before = checksum(hf_state(running.paged.decoder))
    with pytest.raises(ValueError, match=r"layers:N.*update_weights"):
        running.update_drafter(list(hf_state(first_layers(tiny_decoder(seed=9), 2))), 1)
    assert checksum(hf_state(running.paged.decoder)) == before
