"""A draft model that is the target's own first layers: it follows the policy's weights, and nobody else's."""

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


def test_after_a_policy_update_all_layers_still_draft_what_the_target_says() -> None:
    """With all of the target's layers and its noise every draft is right, unless its KV is that of older weights."""
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


def test_prompts_of_older_weights_are_not_shared() -> None:
    """The second request has the prompt of the first, whose KV the drafter may still hold."""
    running, prompt = engine(3), tuple(range(1, 41))
    running.generate([Request(0, prompt, SamplingParams(max_tokens=8, ignore_eos=True), 0)])
    running.update_weights(list(hf_state(tiny_decoder(seed=9))), 1)
    running.drain_trace()
    found = running.generate([Request(1, prompt, SamplingParams(max_tokens=30, ignore_eos=True), 1)])[0]
    assert found.num_draft_tokens > 15 and found.num_accepted_tokens == found.num_draft_tokens


def test_weights_of_its_own_are_refused_and_the_policys_stay() -> None:
    running = engine(2)
    before = checksum(hf_state(running.paged.decoder))
    with pytest.raises(ValueError, match=r"layers:N.*update_weights"):
        running.update_drafter(list(hf_state(first_layers(tiny_decoder(seed=9), 2))), 1)
    assert checksum(hf_state(running.paged.decoder)) == before
