"""`LLM` on a tiny model: prompts, parameters and outputs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_run import write_model

import paceline
from paceline import LLM, SamplingParams
from paceline.outputs import completion_text
from paceline.types import Completion, Request

STATIC = {"method": "suffix", "policy": "static", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llm") / "model"
    write_model(folder)
    return str(folder)


def make(model: str, speculation: Any = STATIC) -> LLM:
    return LLM(model, speculation=speculation, device="cpu", engine={"max_num_seqs": 8, "kv_tokens": 4096})


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with make(model) as llm:
        yield llm


def tokens(outputs: list[paceline.RequestOutput]) -> list[list[list[int]]]:
    return [[output.token_ids for output in request.outputs] for request in outputs]


def test_the_import_is_light() -> None:
    program = (
        "import sys, paceline; print(sys.modules.keys() & {'torch', 'transformers', 'numpy'}, 'LLM' in dir(paceline))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "set()"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paceline.nothing


@pytest.mark.parametrize("seed", [None, 5])
def test_samples_are_the_same_with_drafts_and_without(model: str, seed: int | None) -> None:
    params = SamplingParams(n=3, seed=seed, max_tokens=40, ignore_eos=True, repetition_penalty=1.1, logprobs=2)
    with make(model) as drafting, make(model, "none") as plain:
        found, expected = drafting.generate(["abc", "xyz"], params), plain.generate(["abc", "xyz"], params)
        assert tokens(found) == tokens(expected)
        again = drafting.generate(["abc", "xyz"], params)
        assert tokens(again) == tokens(plain.generate(["abc", "xyz"], params))
        assert (tokens(again) == tokens(found)) == (seed is not None)
        assert sum(sum(o.drafted) for r in again for o in r.outputs) > 0
        assert not any(any(o.drafted) for r in expected for o in r.outputs)
    for request in found:
        assert len({tuple(output.token_ids) for output in request.outputs}) == 3, "samples differ"
        assert [output.index for output in request.outputs] == [0, 1, 2]


def test_output_fields(llm: LLM) -> None:
    (request,) = llm.generate("abc", SamplingParams(max_tokens=12, temperature=0.7, logprobs=3, ignore_eos=True))
    assert request.prompt == "abc" and request.prompt_token_ids == llm.tokenizer.encode("abc")
    (output,) = request.outputs
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    for column in (output.token_ids, output.logprobs, output.raw_logprobs, output.top_logprobs, output.drafted):
        assert column is not None and len(column) == 12
    assert output.top_logprobs is not None
    for token, raw, top in zip(output.token_ids, output.raw_logprobs, output.top_logprobs, strict=True):
        assert list(top.values()) == sorted(top.values(), reverse=True) and len(top) == 3
        assert top.get(token, raw) == pytest.approx(raw, abs=1e-9)
    assert output.finish_reason == "length" and output.stop_reason is None and output.versions == [0] * 12
    (plain,) = llm.generate("abc", SamplingParams(max_tokens=2))
    assert plain.outputs[0].top_logprobs is None


def test_forms_of_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=1)
    ids = llm.tokenizer.encode("hello")
    one = tokens(llm.generate("hello", params))
    assert one == tokens(llm.generate(["hello"], params)) == tokens(llm.generate(ids, params))
    assert one == tokens(llm.generate(np.array(ids), params))  # type: ignore[arg-type]
    assert tokens(llm.generate(["hello", ids], params)) == one + one
    assert llm.generate(ids, params)[0].prompt is None
    assert llm.generate([], params) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(max_tokens=5, n=2, ignore_eos=True)]
    assert [[len(ids) for ids in request] for request in tokens(llm.generate(["a", "b"], params))] == [[3], [5, 5]]
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], params)


def test_chat_applies_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    llm.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    try:
        params = SamplingParams(max_tokens=4, seed=2)
        (answer,) = llm.chat(messages, params)
        assert answer.prompt == "<user>hi<a>"
        assert tokens([answer]) == tokens(llm.generate("<user>hi<a>", params))
        assert tokens(llm.chat([messages, messages], params)) == tokens([answer, answer])
        for wrong in ("hi", ["hi"], [[]]):
            with pytest.raises(ValueError, match="chat: "):
                llm.chat(wrong, params)  # type: ignore[arg-type]
    finally:
        llm.tokenizer.chat_template = None


def test_a_stop_string_is_not_in_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
    (free,) = llm.generate("abc", params)
    text = free.outputs[0].text
    stop = text[10:12]
    (stopped,) = llm.generate("abc", SamplingParams(max_tokens=60, seed=3, ignore_eos=True, stop=stop))
    output = stopped.outputs[0]
    assert output.finish_reason == "stop" and output.stop_reason == stop
    assert output.text == text[: text.index(stop)]
    assert output.token_ids == free.outputs[0].token_ids[: len(output.token_ids)]


def test_text_is_cut_at_the_match_that_ended_it() -> None:
    """Not at one within the first `min_tokens` tokens."""

    class Letters:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(chr(97 + i) for i in ids)

    ids = np.array([0, 1, 2, 0, 1], np.int32)
    none = np.zeros(5)
    completion = Completion(
        Request(0, (1,)), ids, none, none, none, none, none, (), finish_reason="stop", stop_reason="ab"
    )
    assert completion_text(completion, Letters()) == "abc"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(""), "prompt ''"),
        (lambda llm: llm.generate([[]]), "prompt_ids is empty"),
        (lambda llm: llm.generate([[10**6]]), "not in the vocabulary"),
        (lambda llm: llm.generate("\ud800"), "Unicode"),
        (lambda llm: llm.generate([[1] * 600]), "the model's context"),
    ],
)
def test_bad_input_is_refused_and_loses_nothing(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(llm)
    assert not llm.engine.has_work
    assert len(llm.generate("abc", SamplingParams(max_tokens=2))) == 1


def test_bad_settings_are_refused(model: str) -> None:
    with pytest.raises(ValueError, match=r"speculation\.method"):
        LLM(model, speculation="medusa", device="cpu")
    with pytest.raises(ValueError, match=r"engine\.max_seqs"):
        LLM(model, device="cpu", engine={"max_seqs": 3})
    with pytest.raises(ValueError, match="sections of the config"):
        LLM(model, device="cpu", max_num_seqs=3)  # type: ignore[arg-type]
