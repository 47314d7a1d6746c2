"""Structured outputs: parameters, masks after any tokens, and sequences that are preempted, aborted or end early."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from support import letter_tokenizer, tiny_decoder

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.engine.grammar import GrammarCompiler, GrammarError, GrammarMatcher
from paceline.model.paged import PagedDecoder
from paceline.model.weights import hf_state
from paceline.speculation.policy import StaticPolicy
from paceline.structured_outputs import StructuredOutputsParams
from paceline.types import Completion, Request, SamplingParams

VOCAB = 61
EOS = VOCAB - 1
TOKENIZER = letter_tokenizer(VOCAB)
CODE = StructuredOutputsParams(regex="([a-z]{1,3}[A-Z])*[0-7]")


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, (EOS,))


# ---- parameters ----


def test_one_kind_is_given() -> None:
    for values in ({}, {"regex": "a", "json_object": True}, {"json_object": False}):
        with pytest.raises(ValueError, match="give one of json, regex, choice, grammar, json_object"):
            StructuredOutputsParams(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"regex": 3}, "regex"), ({"regex": "\ud800"}, "regex"), ({"choice": []}, "choice"),
        ({"choice": ["a", 3]}, "choice"), ({"choice": "ab"}, "choice"), ({"json": [1]}, "json"),
        ({"json": {"a": {1, 2}}}, "json"), ({"json_object": "yes"}, "json_object"),
        ({"json_object": True, "whitespace_pattern": 1}, "whitespace_pattern"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"structured_outputs\.{name}"):
        StructuredOutputsParams(**values)


def test_params_are_values() -> None:
    a, b = (StructuredOutputsParams(json={"type": "object"}), StructuredOutputsParams(json='{"type": "object"}'))
    assert a == b and hash(a) == hash(b) and a.kind == "json"
    sampling = SamplingParams(structured_outputs=a)
    assert hash(sampling) == hash(SamplingParams(structured_outputs=b))
    assert sampling.logits_parameters == ("structured_outputs",)
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(structured_outputs=a, ignore_eos=True)
    with pytest.raises(ValueError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


# ---- grammars ----

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"json": {"type": "nope"}}, "Invalid type"),
    ({"json": "{"}, "EOF"),
    ({"json": {"not": {}}}, "Unimplemented keys"),
    ({"json": {"$ref": "#"}}, "no text satisfies it"),
    ({"json": {"$ref": "http://127.0.0.1:1/x.json"}}, "not present"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "not present"),
    ({"json": False}, "must be Unicode text"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"grammar": 'start: "é"'}, "no text satisfies it"),  # the vocabulary lacks its bytes
    ({"choice": ["\x00"]}, "choice"),
    ({"grammar": 'start: ("x" a "y")+\na[max_tokens=3]: /[a-z]+/'}, r"max_tokens=… and stop=… are not supported"),
    ({"grammar": 'start: "x" a\na[stop="y"]: /[a-z]+/'}, r"max_tokens=… and stop=… are not supported"),
    ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
    ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, "x-guidance"),
    ({"json": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}}, "not supported. Use anyOf$"),
]


@pytest.mark.parametrize(("values", "reason"), WRONG)
def test_wrong_grammars(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        compiler().compile(StructuredOutputsParams(**values))
    assert "structured_outputs" in str(error.value) and "\n" not in str(error.value)


def test_a_grammar_is_compiled_once_and_the_tokenizer_too() -> None:
    own = compiler()
    first = own.compile(CODE)
    assert own.compile(StructuredOutputsParams(regex=CODE.regex)) is first
    vocabulary = own._vocabulary
    own.compile(StructuredOutputsParams(regex="a"))
    assert own._vocabulary is vocabulary


def test_what_an_engine_needs() -> None:
    for tokenizer, eos, message in ((None, (EOS,), "tokenizer"), (TOKENIZER, (), "end-of-sequence")):
        with pytest.raises(GrammarError, match=message):
            GrammarCompiler(tokenizer, VOCAB, eos).compile(CODE)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GrammarError, match=r"pip install 'paceline\[structured\]'"):
        compiler().compile(CODE)


# ---- masks ----


def mask(matcher: GrammarMatcher | None, ids: list[int]) -> list[int] | None:
    assert matcher is not None
    allowed = matcher.allowed(np.array(ids, np.int32))
    return None if allowed is None else np.flatnonzero(allowed).tolist()


def test_masks_depend_on_the_tokens_only() -> None:
    """One matcher that follows a sequence with drafts, some of them not allowed, and a new one each time."""
    own, dice = compiler(), random.Random(1)
    for structure in (CODE, StructuredOutputsParams(grammar='start: e\ne: /[a-c]+/ | e "X" e | "0" e "1"')):
        following, emitted = own.matcher(structure), list[int]()
        for _ in range(60):
            allowed = mask(following, emitted)
            assert allowed and allowed == mask(own.matcher(structure), emitted)
            draft = list[int]()
            for _ in range(dice.randrange(4)):
                found = mask(following, emitted + draft)
                assert found == mask(own.matcher(structure), emitted + draft)
                draft.append(dice.choice(found) if found and dice.random() < 0.7 else dice.randrange(VOCAB))
            emitted = [*emitted, dice.choice(allowed)]
            if emitted[-1] == EOS:
                assert mask(following, emitted) is None
                emitted = []


def test_an_end_token_comes_only_where_the_text_is_complete() -> None:
    matcher = compiler().matcher(StructuredOutputsParams(regex="ab?"))
    assert mask(matcher, []) == [0]
    assert mask(matcher, [0]) == [1, EOS]
    assert mask(matcher, [0, 1]) == [EOS]
    assert mask(matcher, [0, 1, EOS]) is None and mask(matcher, [1]) is None
    assert mask(matcher, []) == [0]


def test_all_end_tokens_are_allowed_and_padded_ids_are_not() -> None:
    matcher = GrammarCompiler(TOKENIZER, VOCAB + 7, (EOS, 5)).matcher(StructuredOutputsParams(regex="[a-z]{2}"))
    assert mask(matcher, [0, 0]) == [5, EOS]
    assert max(mask(matcher, [0]) or []) < 26


def test_a_limit_ends_the_sequence_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.grammar.LIMITS", {"max_lexer_states": 400, "verbose_errors": False})
    own, structure = compiler(), StructuredOutputsParams(regex="(a|b)*a(a|b){12}")
    matcher, dice, ids = own.matcher(structure), random.Random(0), list[int]()
    while (found := mask(matcher, ids)) and len(ids) < 500:
        ids.append(dice.randrange(2))
    assert found == [] and "too many states" in matcher.error
    for _ in range(5):
        another = own.matcher(structure)
        assert mask(another, ids[: len(ids) // 3]) == mask(compiler().matcher(structure), ids[: len(ids) // 3])
        assert not another.error


def test_near_a_limit_too_masks_depend_on_the_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on earlier masks nor on other sequences, with which a matcher shares the states of its lexer."""
    monkeypatch.setattr("paceline.engine.grammar.LIMITS", {"max_lexer_states": 150, "verbose_errors": False})
    structure = StructuredOutputsParams(regex="(a|b)*a(a|b){12}")
    own, dice = compiler(), random.Random(0)
    matchers, texts = [own.matcher(structure) for _ in range(4)], [list[int]() for _ in range(4)]
    num_ended = 0
    for _ in range(160):
        for matcher, ids in zip(matchers, texts, strict=True):
            found = mask(matcher, ids)
            assert found == mask(compiler_of(own).matcher(structure), ids), len(ids)
            num_ended += not found
            ids.append(dice.randrange(2))
    assert num_ended > 4


def compiler_of(own: GrammarCompiler) -> GrammarCompiler:
    """A new one, with the same vocabulary: to read it takes long."""
    new = compiler()
    new._vocabulary = own._vocabulary
    return new


SLOW = StructuredOutputsParams(grammar='start: s\ns: s s s | s s | "a" |')


def test_a_slow_grammar_ends_its_sequences_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.grammar.MaskTime.MAX_S", 0.05)
    monkeypatch.setattr("paceline.engine.grammar.MaskTime.PER_MASK_S", 0.0001)
    own = compiler()
    slow, another, fast = own.matcher(SLOW), own.matcher(SLOW), own.matcher(CODE)
    ids, masks = list[int](), list[list[int] | None]()
    while (found := mask(slow, ids)) and len(ids) < 100:
        masks.append(found)
        ids.append(0)
    assert found == [] and "take too long" in slow.error  # type: ignore[union-attr]
    assert mask(another, []) == [] and "take too long" in another.error  # type: ignore[union-attr]
    assert mask(fast, []), "another grammar has its own time"
    assert mask(fast, [0] * 10) is None
    del slow, another
    assert mask(own.matcher(SLOW), [0]) == masks[1], "a later request has its own time"


# ---- engines ----


def engine(**options: Any) -> LocalEngine:
    return LocalEngine(PagedDecoder(tiny_decoder(), options.pop("num_blocks", 200)), tokenizer=TOKENIZER, **options)


def drafting(**options: Any) -> LocalEngine:
    return engine(drafter=SuffixDrafter(), policy=StaticPolicy(3), **options)


def requests(num: int = 12, **values: Any) -> list[Request]:
    sampling = SamplingParams(**{"max_tokens": 40, "structured_outputs": CODE, **values})
    return [Request(i, (1, 2, 3), sampling, i, "p") for i in range(num)]


def ids(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids.tolist(), c.finish_reason) for c in completions]


def test_preemption_updates_and_an_exception_change_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    long = StructuredOutputsParams(regex="([a-z]{1,3}[A-Z]){30}[0-7]")

    def requests(num: int = 12) -> list[Request]:
        return [Request(i, (1, 2, 3), SamplingParams(max_tokens=90, structured_outputs=long), i) for i in range(num)]

    expected = ids(engine().generate(requests()))
    assert {reason for _, reason in expected} == {"stop", "length"}
    small = drafting(num_blocks=9, max_num_seqs=6)
    found = small.generate(requests())
    assert ids(found) == expected and sum(c.num_preemptions for c in found) > 0
    assert sum(c.num_accepted_tokens for c in found) > 0

    updated = drafting()
    handles = [updated.submit(request) for request in requests()]
    for step in range(200):
        if not updated.has_work:
            break
        if step % 3 == 1:
            updated.update_weights(hf_state(tiny_decoder()), step)
        if step % 4 == 2:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(updated.runner, "launch", interrupt)
                updated.step()
        updated.step()
    assert ids([handle.completion for handle in handles if handle.completion is not None]) == expected


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_dead_end_ends_one_request_only() -> None:
    """`min_tokens` forbids the end, and the grammar all else."""
    short = StructuredOutputsParams(choice=("a", "bc"))
    sampling = SamplingParams(max_tokens=20, min_tokens=5, structured_outputs=short)
    for make in (engine, drafting):
        own = make()
        before = ids(own.generate(requests()))
        mixed = requests()
        mixed[3] = Request(3, (1, 2, 3), sampling, 3, "p")
        completions = own.generate(mixed)
        dead = completions.pop(3)
        assert dead.finish_reason == "error" and "no token" in str(dead.stop_reason)
        assert TOKENIZER.decode(dead.token_ids.tolist()) in ("a", "bc")
        del before[3]
        assert ids(completions) == before
        assert not own.has_work and not any(own.paged.pool.ref_counts)


def test_a_dead_end_at_the_first_token() -> None:
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(regex="ab"), allowed_token_ids=(1,))
    for make in (engine, drafting):
        (completion,) = make().generate([Request(0, (1, 2), sampling)])
        assert completion.finish_reason == "error" and len(completion.token_ids) == 0


def test_abort_keeps_what_was_emitted() -> None:
    own = drafting()
    handle = own.submit(requests(1)[0])
    own.step()
    own.step()
    own.abort(0)
    assert handle.completion is not None and handle.completion.finish_reason == "abort"
    assert ids(own.generate(requests(1))) == ids(engine().generate(requests(1)))


def test_raw_logprobs_are_those_of_the_model() -> None:
    (found,) = engine().generate(requests(1, logprobs=1))
    assert (found.raw_logprobs <= found.logprobs + 1e-12).all() and (found.raw_logprobs < found.logprobs - 1e-3).any()
    assert found.top_logprobs is not None
    assert (found.top_logprobs.logprobs[:, 0] >= found.raw_logprobs).all()


def test_json_schema() -> None:
    """With a tokenizer that has all characters, in `tests/e2e/test_serve.py`."""
    text = json.dumps({"type": "integer", "minimum": 3, "maximum": 5})
    matcher = compiler().matcher(StructuredOutputsParams(json=text))
    assert [TOKENIZER.decode([token]) for token in mask(matcher, []) or []] == ["3", "4", "5"]
