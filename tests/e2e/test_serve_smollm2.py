"""The server with a real model and its EAGLE-3 head, under several clients at once: the tokens of `LLM` without
drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from serving import Served, serving

from paceline import LLM, SamplingParams, StructuredOutputsParams
from paceline.model.store import load_tokenizer

HEAD = {"method": "hybrid", "policy": "static", "num_speculative_tokens": 3}
QUESTIONS = ["What is 3 + 4?", "Name a colour.", "Count from 1 to 9.", "Say hello in French."]


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[Served]:
    with serving("smollm2-135m", speculation=HEAD) as served:
        yield served


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Iterator[LLM]:
    with LLM("smollm2-135m", speculation="none", device="cpu") as llm:
        yield llm


def ask(client: OpenAI, i: int) -> dict[str, Any]:
    """Half of the clients stream."""
    common: dict[str, Any] = {
        "model": "smollm2-135m", "messages": [{"role": "user", "content": QUESTIONS[i % 4]}], "seed": i,
        "max_tokens": 32, "stop": ["\n\n"], "presence_penalty": 0.2 * (i % 2), "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    if i % 2:
        answer: Any = client.chat.completions.create(**common)
        choice = answer.choices[0]
        return {"text": choice.message.content, "ids": choice.token_ids, "reason": choice.finish_reason}
    events: list[Any] = list(client.chat.completions.create(stream=True, **common))
    return {
        "text": "".join(event.choices[0].delta.content or "" for event in events),
        "ids": [token for event in events for token in event.choices[0].token_ids],
        "reason": events[-1].choices[0].finish_reason,
    }


def test_the_example(served: Served) -> None:
    example = Path(__file__).parents[2] / "examples" / "openai_client.py"
    done = subprocess.run([sys.executable, example, served.url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4 and done.stdout.count("logprob -") == 2


def test_clients_get_the_tokens_of_llm_without_drafts(served: Served, plain: LLM) -> None:
    client = served.client()
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda i: ask(client, i), range(12)))
    params = [SamplingParams(seed=i, max_tokens=32, stop=("\n\n",), presence_penalty=0.2 * (i % 2)) for i in range(12)]
    expected = plain.chat([[{"role": "user", "content": QUESTIONS[i % 4]}] for i in range(12)], params)
    for answer, request in zip(found, expected, strict=True):
        (output,) = request.outputs
        assert answer == {"text": output.text, "ids": output.token_ids, "reason": output.finish_reason}
    figures = httpx.get(f"{served.root}/metrics").text.splitlines()
    accepted = next(line for line in figures if line.startswith("paceline_spec_decode_num_accepted_tokens_total "))
    assert float(accepted.split()[1]) > 20


# ---- structured outputs ----

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
ABOUT = [{"role": "user", "content": "Describe a person as JSON with name, age and colours."}]
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nAnswer with <tool_call>{...}</tool_call>. Tools: {{ tools | tojson }}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMATS = {  # what the template says about calls
    "hermes": "<tool_call>{...}</tool_call>",
    "mistral": "[TOOL_CALLS][{...}]",
    "llama3_json": '{"name": ..., "parameters": ...}',
}


def accepted(served: Served) -> float:
    figures = httpx.get(f"{served.root}/metrics").text.splitlines()
    line = next(line for line in figures if line.startswith("paceline_spec_decode_num_accepted_tokens_total "))
    return float(line.split()[1])


def test_json_of_a_schema(served: Served, plain: LLM) -> None:
    """With drafts of a history and of a head, the tokens of `LLM` without drafts."""
    client, before = served.client(), accepted(served)
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

    def ask(seed: int) -> Any:
        return client.chat.completions.create(
            model="smollm2-135m", messages=ABOUT, response_format=form, seed=seed, max_tokens=160,  # type: ignore[arg-type]
            extra_body={"return_token_ids": True},
        ).choices[0]  # fmt: skip

    with ThreadPoolExecutor(6) as clients:
        found = list(clients.map(ask, range(6)))
    structure = StructuredOutputsParams(json=PERSON)
    params = [SamplingParams(seed=seed, max_tokens=160, structured_outputs=structure) for seed in range(6)]
    expected = [request.outputs[0] for request in plain.chat([ABOUT] * 6, params)]
    assert [choice.token_ids for choice in found] == [output.token_ids for output in expected]
    complete = [json.loads(choice.message.content) for choice in found if choice.finish_reason == "stop"]
    assert len(complete) >= 3
    for person in complete:
        assert person.keys() == {"name", "age", "colours"} and len(person["name"]) <= 20 and 0 <= person["age"] <= 120
        assert set(person["colours"]) <= {"red", "green", "blue"} and len(person["colours"]) <= 3
    assert accepted(served) > before + 20


def test_any_json_object(served: Served) -> None:
    extra = {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}
    answers = [
        served.client().chat.completions.create(
            model="smollm2-135m", messages=ABOUT, seed=seed, max_tokens=200, temperature=0.5,  # type: ignore[arg-type]
            extra_body=extra if seed % 2 else {"response_format": {"type": "json_object"}},
        ).choices[0]
        for seed in range(6)
    ]  # fmt: skip
    complete = [json.loads(choice.message.content or "") for choice in answers if choice.finish_reason == "stop"]
    assert len(complete) >= 2 and all(isinstance(value, dict) for value in complete)


@pytest.mark.parametrize("form", FORMATS)
def test_forced_tool_calls(smollm2: Path, tmp_path: Path, form: str) -> None:
    """The model with a chat template that has tools, in each format."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in smollm2.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    tokenizer = load_tokenizer(smollm2)
    tokenizer.chat_template = TOOLS_TEMPLATE.replace(FORMATS["hermes"], FORMATS[form])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    weather = {"city": {"type": "string", "maxLength": 15}, "unit": {"enum": ["C", "F"]}}
    schema = {"type": "object", "properties": weather, "required": ["city", "unit"], "additionalProperties": False}
    tools: Any = [
        {"type": "function", "function": {"name": "get_weather", "parameters": schema}},
        {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
    ]
    with serving(folder, "--served-model-name", "tools") as served:
        for choice in ("required", "get_weather"):
            forced: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
            (answer,) = served.client().chat.completions.create(
                model="tools", messages=[{"role": "user", "content": "How warm is it in Paris?"}], tools=tools,
                tool_choice=forced, parallel_tool_calls=False, seed=1, max_tokens=200,
            ).choices  # fmt: skip
            assert answer.message.tool_calls is not None, answer
            (call,) = answer.message.tool_calls
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_weather":
                assert arguments.keys() == {"city", "unit"} and arguments["unit"] in ("C", "F")
            assert call.function.name in ("get_weather", "get_time")
            assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
            assert choice == "required" or call.function.name == choice
