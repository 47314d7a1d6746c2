"""Levels 1 and 3 for sampling parameters that change logits before the temperature: penalties, biases and exclusions.

Most of them depend on the tokens before a position, which at a drafted position include the draft before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support import letter_tokenizer, tiny_decoder

from paceline.config import ARCHITECTURES
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine import logits_processor, runner
from paceline.engine.engine import LocalEngine
from paceline.engine.sequence import Sequence
from paceline.model.decoder import first_layers
from paceline.model.kernels import pack_for_inference
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.policy import StaticPolicy
from paceline.structured_outputs import StructuredOutputsParams
from paceline.types import Completion, Request, SamplingParams
from paceline.verify.cases import DRAFTERS, RULES, SAMPLING_DRAFTERS, TableCase
from paceline.verify.enumeration import Enumeration, brute_force, enumerate_engine, total_variation
from paceline.verify.known import OTHER_REQUEST

EXACT = 1e-12  # float64 products of a few dozen factors

# Values that change the distribution of three tokens, the last of which ends a sequence.
PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "frequency_penalty": {"frequency_penalty": 1.1},
    "presence_penalty": {"presence_penalty": -1.3},
    "logit_bias": {"logit_bias": {0: 1.5, 2: -2.0}},
    "allowed_token_ids": {"allowed_token_ids": (0, 1)},
    "bad_words": {"bad_words": ((1, 1), (0, 1, 0))},
    "min_tokens": {"min_tokens": 2},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="a|b(ab|b)?|(ab)*")},
    # After "b" only "b" is allowed, which is a bad word: the sequence ends there.
    "dead_end": {"structured_outputs": StructuredOutputsParams(regex="a(a|b)*|bb"), "bad_words": ((1, 1),)},
    # "ab" is complete, but too short: the sequence ends there.
    "early_end": {"structured_outputs": StructuredOutputsParams(choice=("ab", "aaa", "bba", "bab")), "min_tokens": 3},
    "all": {
        "repetition_penalty": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.5, "logit_bias": {1: 0.8},
        "bad_words": ((1, 2),), "min_tokens": 1, "temperature": 1.5, "min_p": 0.02,
        "structured_outputs": StructuredOutputsParams(regex="a(a|b)*b?|b|ba+"),
    },
}  # fmt: skip
# A penalty of tokens in prompt or output depends on a draft only if the prompt lacks its tokens.
PROMPTS = {"repetition_penalty": (0, 0, 0)}
BY_OUTPUT = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "bad_words", "min_tokens", "structured_outputs",
    "dead_end", "early_end", "all",
)  # fmt: skip
TOKENIZER = letter_tokenizer(3)


def allows(structure: StructuredOutputsParams) -> Callable[[tuple[int, ...]], bool]:
    """By trying all continuations with Python's own regular expressions."""
    pattern = structure.regex or "|".join(structure.choice or ())

    @cache
    def check(token_ids: tuple[int, ...]) -> bool:
        *before, last = token_ids
        text = "".join("ab"[token] for token in before)
        if last == 2:
            return re.fullmatch(pattern, text) is not None
        ends = ("".join(letters) for num in range(4) for letters in product("ab", repeat=num))
        return any(re.fullmatch(pattern, f"{text}{'ab'[last]}{end}") for end in ends)

    return check


def enumerate_case(rule: str, drafter: str, name: str) -> tuple[Enumeration, float, float]:
    """The engine's distribution; its distance to brute force; and that of brute force to no parameters."""
    prompt, values = PROMPTS.get(name, (0, 1, 0)), PARAMETERS[name]
    k = 1 if rule == "coupled" and drafter in SAMPLING_DRAFTERS else 2  # enumeration branches at its draws too
    case = TableCase(3, k)
    request = Request(0, prompt, SamplingParams(max_tokens=3, **values), 0)
    found = enumerate_engine(lambda s: case.engine(rule, drafter, s, 4, tokenizer=TOKENIZER), request, (OTHER_REQUEST,))
    structure = request.sampling.structured_outputs
    exact = brute_force(case.decoder(), request, None if structure is None else allows(structure))
    plain = brute_force(case.decoder(), Request(0, prompt, SamplingParams(max_tokens=3), 0))
    return found, total_variation(found.distribution, exact), total_variation(exact, plain)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_with_every_rule_and_drafter(name: str, rule: str, drafter: str) -> None:
    found, distance, effect = enumerate_case(rule, drafter, name)
    assert sum(found.distribution.values()) == pytest.approx(1, abs=1e-12)
    assert distance < EXACT
    assert found.num_reused == 0, "draws are not independent"
    assert effect > 1e-2, "the parameter changes the distribution"
    assert found.num_draft_tokens > 0
    if drafter not in ARCHITECTURES:  # heads lack token 0, so some of these distributions accept none of their drafts
        assert found.num_accepted_tokens > 0


def without_draft(processor: Callable[..., bool]) -> Callable[..., bool]:
    """Broken: the tokens before a drafted position lack the draft."""

    def process(logits_V: torch.Tensor, sequence: Sequence, output_ids: np.ndarray) -> bool:
        return processor(logits_V, sequence, sequence.emitted)

    return process


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BY_OUTPUT)
def test_a_parameter_computed_without_the_draft_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, rule: str
) -> None:
    monkeypatch.setattr(logits_processor, "_process", without_draft(logits_processor._process))
    drafter = "draft_model" if name == "repetition_penalty" else "ngram"
    assert enumerate_case(rule, drafter, name)[1] > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_that_is_ignored_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, rule: str) -> None:
    monkeypatch.setattr(runner, "process_logits", lambda logits_PV, batch: logits_PV)
    assert enumerate_case(rule, "ngram", name)[1] > 1e-2


# ---- level 3: the same tokens with drafts and without ----

VOCAB = 61
SAMPLINGS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "frequency_penalty": {"frequency_penalty": 0.3},
    "presence_penalty": {"presence_penalty": 0.8},
    "logit_bias": {"logit_bias": {5: 4.0, 7: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(0, VOCAB, 2))},
    "bad_words": {"bad_words": [(token,) for token in range(0, VOCAB, 3)] + [(1, 1), (2, 4)]},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": tuple(range(0, VOCAB, 5)), "ignore_eos": False},
    "structured_outputs": {
        "structured_outputs": StructuredOutputsParams(regex="([a-z]{1,3}[A-Z])*[0-7]"), "ignore_eos": False,
        "bad_words": [(3,)],
    },
    "greedy": {"repetition_penalty": 1.2, "temperature": 0.0},
    "truncated": {"frequency_penalty": 0.2, "top_k": 9, "min_p": 0.01, "allowed_token_ids": tuple(range(40))},
}  # fmt: skip


def engines(native: bool) -> Iterator[LocalEngine]:
    """Without drafts, with a history, with a draft model."""
    decoder = tiny_decoder(torch.float32 if native else torch.float64)
    if native:
        pack_for_inference(decoder)
    tokenizer = letter_tokenizer(VOCAB)
    draft = DraftModelDrafter(PagedDecoder(first_layers(decoder, 2), 200), Sampler(native=native))
    for drafter in (None, SuffixDrafter(), draft):
        yield LocalEngine(
            PagedDecoder(decoder, 200), sampler=Sampler(native=native), drafter=drafter, policy=StaticPolicy(3),
            tokenizer=tokenizer,
        )  # fmt: skip


def requests() -> list[Request]:
    """One of each sampling and one without, twice, in one batch."""
    common: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 2}
    kinds = [SamplingParams(**(common | values)) for values in [*SAMPLINGS.values(), {}]]
    return [Request(i, (1, 2, 3, i % 7), sampling, i, "p") for i, sampling in enumerate(kinds + kinds)]


def same(a: Completion, b: Completion) -> bool:
    assert a.top_logprobs is not None and b.top_logprobs is not None
    return (
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs, b.logprobs)
        and np.array_equal(a.raw_logprobs, b.raw_logprobs)
        and np.array_equal(a.top_logprobs.token_ids, b.top_logprobs.token_ids)
        and np.array_equal(a.top_logprobs.logprobs, b.top_logprobs.logprobs)
        and (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
    )


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "float64"])
def test_the_same_tokens_with_drafts_and_without(native: bool) -> None:
    plain, *drafting = engines(native)
    expected = plain.generate(requests())
    for engine in drafting:
        engine.generate(requests())  # so that there is a history to draft from
        found = engine.generate(requests())
        for a, b in zip(found, expected, strict=True):
            assert a.num_accepted_tokens > 0 or len(b.token_ids) < 5
            if native:
                assert same(a, b)  # the kernels' bits do not depend on the batch
            else:
                assert np.array_equal(a.token_ids, b.token_ids)
                assert np.allclose(a.raw_logprobs, b.raw_logprobs, atol=1e-9)


def test_a_parameter_computed_without_the_draft_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_processor, "_process", without_draft(logits_processor._process))
    plain, history, _ = engines(native=True)
    expected = plain.generate(requests())
    history.generate(requests())
    found = history.generate(requests())
    names = [*SAMPLINGS, "none"]
    different = {names[i % len(names)] for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not same(a, b)}
    assert {"repetition_penalty", "frequency_penalty", "presence_penalty", "structured_outputs"} <= different
    assert not {"none", "logit_bias", "allowed_token_ids"} & different
