"""One suite over every engine: plain torch in both precisions, and the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import reference_engine
import torch
from support import check_blocks, tiny_decoder

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.kernels import pack_for_inference
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.weights import checksum, hf_state
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

Make = Callable[..., LocalEngine]


def build(dtype: torch.dtype, native: bool, **options: object) -> LocalEngine:
    decoder = tiny_decoder(dtype)
    if native:
        pack_for_inference(decoder)
    paged = PagedDecoder(decoder, 64)
    return LocalEngine(
        paged, sampler=Sampler(native=native), drafter=SuffixDrafter(), policy=StaticPolicy(3), **options
    )


ENGINES: dict[str, Make] = {
    "torch float64": lambda **o: build(torch.float64, False, **o),
    "torch float32": lambda **o: build(torch.float32, False, **o),
    "kernels": lambda **o: build(torch.float32, True, **o),
}


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Make:
    return ENGINES[request.param]


def requests() -> list[Request]:
    rng = np.random.default_rng(1)
    kinds = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0.0),
        SamplingParams(max_tokens=20, temperature=0.8, top_k=7),
        SamplingParams(max_tokens=20, top_p=0.7, min_p=0.02, ignore_eos=True),
    ]
    return [
        Request(i, tuple(rng.integers(0, 60, rng.integers(1, 30)).tolist()), kinds[i % 4], 17 * i, str(i % 3))
        for i in range(12)
    ]


def test_equal_to_the_reference_engine(make: Make) -> None:
    """Up to near-ties, which these random models do not have in float32."""
    expected = reference_engine.generate(tiny_decoder(torch.float64), requests())
    engine = make(max_num_batched_tokens=24)
    engine.generate(requests())  # so that there is a history to draft from
    found = engine.generate(requests())
    assert sum(c.num_accepted_tokens for c in found) > 0
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    for a, b in zip(found, expected, strict=True):
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)  # float32 logits of scale ~10 against float64
        assert np.allclose(a.raw_logprobs, b.raw_logprobs, atol=1e-4)


def test_handles_traces_and_blocks(make: Make) -> None:
    engine = make()
    handles = [engine.submit(r) for r in requests()]
    finished = []
    while engine.has_work:
        finished += engine.step()
        check_blocks(engine)
    assert {c.request.request_id for c in finished} == set(range(12))
    assert all(h.done for h in handles)
    traces = engine.drain_trace()
    assert sum(t.num_emitted for t in traces) == sum(len(c.token_ids) for c in finished)
    assert [t.step for t in traces] == list(range(len(traces)))
    assert all(t.total_s >= t.draft_s + t.forward_s + t.sample_s > 0 for t in traces)
    assert engine.drain_trace() == []


def test_all_weights_are_updated(make: Make) -> None:
    engine = make()
    sent = [(n, t.to(engine.paged.decoder.dtype)) for n, t in hf_state(tiny_decoder(seed=4))]
    assert engine.update_weights(sent, 1).checksum == checksum(sent)
    expected = reference_engine.generate(tiny_decoder(torch.float64, seed=4), requests()[:4])
    for _ in range(2):
        found = engine.generate(requests()[:4])
        assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]
    assert sum(c.num_accepted_tokens for c in found) > 0


def test_close_aborts_requests_and_frees_blocks(make: Make) -> None:
    engine = make()
    handle = engine.submit(requests()[0])
    engine.step()
    engine.close()
    assert handle.completion.finish_reason in ("abort", "stop", "length")
    assert not any(engine.paged.pool.ref_counts)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}])
def test_weights_that_are_not_finite_are_an_error(make: Make, sampling: dict[str, float]) -> None:
    engine = make()
    engine.paged.decoder.norm.data[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        engine.generate([Request(0, (1, 2, 3), SamplingParams(**sampling))])
    assert not engine.has_work
