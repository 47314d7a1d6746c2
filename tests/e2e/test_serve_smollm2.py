"""The server with a real model and its EAGLE-3 head, under several clients at once: the tokens of `LLM` without
drafts."""

from __future__ import annotations

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

from paceline import LLM, SamplingParams

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
