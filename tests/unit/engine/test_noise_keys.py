"""Requests without a noise key are different samples; keys and ids that are none are refused before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_engine
from support import tiny_decoder

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)


def engine(**options: Any) -> LocalEngine:
    return LocalEngine(PagedDecoder(tiny_decoder(), 64), **options)


def texts(engine: LocalEngine, num: int = 3, first: int = 0) -> list[list[int]]:
    found = engine.generate([Request(first + i, (1, 2, 3), SAMPLING) for i in range(num)])
    return [completion.token_ids.tolist() for completion in found]


def test_requests_without_a_key_are_different_samples() -> None:
    running = engine()
    found = texts(running) + texts(running, first=10)
    assert len({tuple(text) for text in found}) == 6


def test_their_keys_follow_from_the_seed_and_the_order_of_submission() -> None:
    assert texts(engine()) == texts(engine(seed=0)) != texts(engine(seed=1))
    drafted = engine(drafter=SuffixDrafter(), policy=StaticPolicy(3))
    assert texts(drafted, 8) == texts(engine(), 8)
    assert sum(trace.num_accepted_tokens for trace in drafted.drain_trace()) > 0
    slow = reference_engine.generate(tiny_decoder(), [Request(i, (1, 2, 3), SAMPLING) for i in range(3)])
    assert texts(engine()) == [completion.token_ids.tolist() for completion in slow]


def test_a_completion_tells_the_key_it_was_drawn_with() -> None:
    running = engine()
    handle = running.submit(Request(0, (1, 2, 3), SAMPLING))
    while running.has_work:
        running.step()
    assert handle.completion is not None and isinstance(handle.completion.request.noise_key, int)
    again = engine(seed=5).generate([handle.completion.request])[0]
    assert again.token_ids.tolist() == handle.completion.token_ids.tolist()


@pytest.mark.parametrize("key", [-1, 2**64, 1.5, "7", True, np.float64(3)])
def test_a_key_that_is_none_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match=r"request 3: noise_key = .*from 0 to 2\*\*64 - 1"):
        Request(3, (1, 2, 3), SAMPLING, key)


@pytest.mark.parametrize("key", [0, 2**64 - 1, np.uint64(2**64 - 1), np.int64(7)])
def test_keys_at_the_ends_are_taken(key: Any) -> None:
    assert len(engine().generate([Request(0, (1, 2, 3), SAMPLING, key)])[0].token_ids) == 12


@pytest.mark.parametrize("prompt", [(1, 2.0, 3), (1, "2"), (True, 1), (None,), np.array([1.5, 2.0])])
def test_token_ids_that_are_no_integers_are_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"request 3: prompt_ids holds .*token ids are integers"):
        Request(3, prompt)


def test_a_request_id_that_is_no_integer_is_refused() -> None:
    with pytest.raises(ValueError, match="request_id must be an integer"):
        Request("a", (1, 2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["max_num_batched_tokens", "max_num_seqs"])
def test_an_engine_that_could_never_run_anything_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"engine.{key} = 0: must be >= 1"):
        engine(**{key: 0})
