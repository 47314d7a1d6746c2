"""Logits parameters against transformers' processors, and what surrounds them: stops, reports and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import LetterTokenizer, tiny_decoder
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.checks import bad_word_ids
from paceline.engine.engine import LocalEngine
from paceline.engine.logits_processor import _process
from paceline.engine.sequence import Sequence
from paceline.model.attention import PackedAttention
from paceline.model.paged import PagedDecoder
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams, seeded_noise_key, with_noise_key
from paceline.verify.table import Table, TableDecoder

PROMPT, OUTPUT, VOCAB = (1, 2, 3), (4, 2, 4), 12
EOS = 9


def processed(logits_V: torch.Tensor, **values: Any) -> torch.Tensor:
    sampling = SamplingParams(max_tokens=20, **values)
    request = Request(0, PROMPT, sampling)
    sequence = Sequence(request, 0, 100, (EOS,), bad_word_ids(sampling.bad_words, None))
    found = logits_V.clone()
    _process(found, sequence, np.array(OUTPUT))
    return found


@pytest.mark.parametrize(
    ("values", "reference"),
    [
        ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
        ({"bad_words": ((5,), (2, 4, 6), (3, 7), (8, 4, 1))}, NoBadWordsLogitsProcessor([[5], [2, 4, 6], [3, 7]], -1)),
        ({"min_tokens": 4}, MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, EOS)),
        ({"min_tokens": 3}, MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, EOS)),
        ({"logit_bias": {0: 1.5, 7: -3.0}}, SequenceBiasLogitsProcessor([[[0], 1.5], [[7], -3.0]])),
    ],
    ids=["repetition_penalty", "bad_words", "min_tokens", "min_tokens reached", "logit_bias"],
)
def test_equal_to_transformers(values: dict[str, Any], reference: LogitsProcessor) -> None:
    logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    expected = reference(torch.tensor([[*PROMPT, *OUTPUT]]), logits_V.clone().unsqueeze(0))[0]
    assert torch.equal(processed(logits_V, **values), expected)


def test_penalties_count_the_output_only() -> None:
    logits_V = torch.zeros(VOCAB)
    assert processed(logits_V, frequency_penalty=0.5)[[1, 2, 3, 4, 5]].tolist() == [0, -0.5, 0, -1.0, 0]
    assert processed(logits_V, presence_penalty=0.5)[[1, 2, 3, 4, 5]].tolist() == [0, -0.5, 0, -0.5, 0]


def test_bad_words_have_a_form_with_a_space() -> None:
    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [{" ": 0}.get(letter, ord(letter) - 96) for letter in text]

    words = SamplingParams(bad_words=["ab", " c", (7, 8), [9]]).bad_words
    assert bad_word_ids(words, Tokenizer()) == ((1, 2), (0, 1, 2), (0, 3), (7, 8), (9,))


# ---- stops ----


def table_engine(**options: Any) -> LocalEngine:
    return LocalEngine(TableDecoder(Table(6, 1), eos_token_ids=(5,)), **options)


def test_no_stop_before_min_tokens() -> None:
    stops: dict[str, Any] = {"stop": ("ab", "ba"), "stop_token_ids": (4,), "max_tokens": 40}
    drafting = table_engine(tokenizer=LetterTokenizer(), drafter=SuffixDrafter(), policy=StaticPolicy(3))
    plain = table_engine(tokenizer=LetterTokenizer())
    requests = [
        Request(i, (0, 1, 0), SamplingParams(min_tokens=min_tokens, **stops), i, "p")
        for i, min_tokens in enumerate((0, 1, 7, 20) * 8)
    ]
    expected = plain.generate(requests)
    drafting.generate(requests)
    found = drafting.generate(requests)
    assert sum(c.num_accepted_tokens for c in found) > 0
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]
    assert [c.stop_reason for c in found] == [c.stop_reason for c in expected]
    assert {c.finish_reason for c in expected} == {"stop"}
    for c in expected:
        text, num = LetterTokenizer().decode(c.token_ids.tolist()), c.request.sampling.min_tokens
        assert len(text) > num
        assert "f" not in text[:num] and "e" not in text[:num]  # the EOS token and the stop token
        assert not {"ab", "ba"} & {text[i : i + 2] for i in range(max(num - 1, 0), len(text) - 2)}, "it stops at once"
    assert any("ab" in LetterTokenizer().decode(c.token_ids.tolist())[:-2] for c in expected), "a match was passed over"


class ByteTokenizer:
    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("min_tokens", [0, 1])
def test_a_stop_string_that_ends_in_a_character_of_several_tokens(min_tokens: int) -> None:
    sequence = Sequence(Request(0, (3,), SamplingParams(max_tokens=9, stop=("😀",), min_tokens=min_tokens)), 0, 100, ())
    ids = list("a😀b".encode())
    assert sequence.find_stop(ids, 1, ByteTokenizer().decode) == (5, "😀")


def test_a_stop_string_that_begins_before_min_tokens_counts() -> None:
    sampling = SamplingParams(max_tokens=9, stop=("ab",), min_tokens=1)
    sequence = Sequence(Request(0, (3,), sampling), 0, 100, ())
    assert sequence.find_stop([0, 1], 1, LetterTokenizer().decode) == (2, "ab")
    sampling = SamplingParams(max_tokens=9, stop=("ab",), min_tokens=2)
    sequence = Sequence(Request(0, (3,), sampling), 0, 100, ())
    assert sequence.find_stop([0, 1, 0, 0, 1, 2], 1, LetterTokenizer().decode) == (5, "ab")


# ---- reports ----


def test_top_logprobs_are_raw_and_best_first() -> None:
    decoder = tiny_decoder()
    engine = LocalEngine(PagedDecoder(decoder, 64), drafter=SuffixDrafter(), policy=StaticPolicy(3))
    sampling = SamplingParams(
        temperature=0.8, top_k=9, frequency_penalty=0.4, logprobs=4, max_tokens=30, ignore_eos=True
    )
    requests = [Request(i, (1, 2, 3), sampling, 5, "p") for i in range(2)]
    engine.generate(requests)
    for completion in engine.generate(requests):
        assert completion.num_accepted_tokens > 0
        tokens = torch.tensor([1, 2, 3, *completion.token_ids.tolist()])
        hidden = decoder(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])).hidden
        raw = decoder.logits(hidden[2:-1]).log_softmax(-1)
        top = completion.top_logprobs
        assert top is not None and top.token_ids.shape == top.logprobs.shape == (30, 4)
        assert np.array_equal(top.token_ids, raw.topk(4).indices.numpy())
        assert np.allclose(top.logprobs, raw.topk(4).values.numpy(), atol=1e-9)
        emitted = raw.gather(-1, tokens[3:].unsqueeze(-1))[:, 0].numpy()
        assert np.allclose(completion.raw_logprobs, emitted, atol=1e-9)
        assert not np.allclose(completion.logprobs, emitted, atol=1e-3), "processed"


def test_an_interrupted_step_leaves_no_top_logprobs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception comes after they were added and before their tokens are counted."""
    engine = table_engine()
    sampling = SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)
    handle = engine.submit(Request(0, (0, 1), sampling, 3))
    engine.step()
    add = Sequence.add_top_logprobs

    def interrupt(self: Sequence, *args: Any) -> None:
        add(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sequence, "add_top_logprobs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.setattr(Sequence, "add_top_logprobs", add)
    while engine.has_work:
        engine.step()
    (expected,) = table_engine().generate([Request(0, (0, 1), sampling, 3)])
    found = handle.completion
    assert found is not None and found.top_logprobs is not None and expected.top_logprobs is not None
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert np.array_equal(found.top_logprobs.token_ids, expected.top_logprobs.token_ids)


# ---- seeds and refusals ----


def test_a_seed_determines_the_tokens_in_any_engine() -> None:
    request = Request(0, (0, 1), SamplingParams(max_tokens=12, seed=7, ignore_eos=True))
    other = Request(1, (0, 1), SamplingParams(max_tokens=12, ignore_eos=True))
    first = table_engine(seed=1).generate([request, other])
    second = table_engine(seed=2).generate([other, request])[::-1]
    assert np.array_equal(first[0].token_ids, second[0].token_ids)
    assert not np.array_equal(first[1].token_ids, second[1].token_ids)
    assert with_noise_key(request, 5, 6).noise_key == seeded_noise_key(7, 0) != seeded_noise_key(7, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 2}, "sampling.n = 2"),
        ({"logprobs": 7}, "the vocabulary has 6"),
        ({"logit_bias": {6: 1.0}}, "sampling.logit_bias: token id 6 is not in the vocabulary"),
        ({"allowed_token_ids": [0, -1]}, "sampling.allowed_token_ids: token id -1"),
        ({"bad_words": [(0, 8)]}, "sampling.bad_words: token id 8"),
        ({"stop_token_ids": [2**70]}, "sampling.stop_token_ids: token id"),
        ({"bad_words": ["x"]}, "needs a tokenizer"),
        ({"allowed_token_ids": [5], "min_tokens": 1}, "leave no token"),
        ({"allowed_token_ids": [1, 2], "bad_words": [(1,), (0, 2)]}, "leave no token"),
    ],
)
def test_requests_that_cannot_run_are_refused(values: dict[str, Any], message: str) -> None:
    engine = table_engine()
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(3, (0, 1), SamplingParams(max_tokens=4, **values)))
    assert not engine.has_work


@pytest.mark.parametrize(
    "values",
    [
        {"n": 0},
        {"seed": 1.5},
        {"logprobs": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"frequency_penalty": 2.5},
        {"presence_penalty": float("nan")},
        {"logit_bias": {1: 101}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": 3},
        {"allowed_token_ids": []},
        {"allowed_token_ids": 5},
        {"bad_words": [""]},
        {"bad_words": ["\ud800"]},
        {"stop": "\ud800"},
        {"repetition_penalty": 1e-300},
        {"bad_words": [()]},
        {"bad_words": 4},
        {"stop": [1]},
    ],
)
def test_bad_values_name_themselves(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"sampling.{next(iter(values))} = "):
        SamplingParams(**values)


def test_sequences_and_dicts_are_normalised() -> None:
    params = SamplingParams(stop="x", logit_bias={"7": 1, 2: 0.5}, bad_words=[[1, 2], "y"], stop_token_ids=[3])
    assert params.stop == ("x",) and params.logit_bias == ((2, 0.5), (7, 1)) and params.bad_words == ((1, 2), "y")
    assert hash(params) == hash(
        SamplingParams(stop=["x"], logit_bias={2: 0.5, 7: 1}, bad_words=((1, 2), "y"), stop_token_ids=(3,))
    )
    assert params.logits_parameters == ("bad_words", "logit_bias")
    assert SamplingParams(stop=None, bad_words=None).logits_parameters == ()  # type: ignore[arg-type]
