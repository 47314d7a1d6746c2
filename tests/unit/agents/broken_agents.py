"""Agents that are functions, for tests."""

from __future__ import annotations

import sys
import time
from typing import Any

import openai

ASK: list[Any] = [{"role": "user", "content": "add"}]


async def good(problem: dict[str, Any], client: Any) -> dict[str, Any]:
    async with openai.AsyncOpenAI(**client.options) as ai:
        answer = await ai.chat.completions.create(model=client.model, messages=ASK)
        return {"reward": len(answer.choices[0].message.content or ""), "metrics": {"answer": int(problem["answer"])}}


def not_async(problem: dict[str, Any], client: Any) -> int:
    with openai.OpenAI(**client.options) as ai:
        return len(ai.chat.completions.create(model=client.model, messages=ASK).choices[0].message.content or "")


async def silent(problem: dict[str, Any], client: Any) -> None:
    await good(problem, client)


async def asks_twice(problem: dict[str, Any], client: Any) -> None:
    await good(problem, client)
    await good(problem, client)


async def raises(problem: dict[str, Any], client: Any) -> None:
    raise KeyError("lost")


async def tells(problem: dict[str, Any], client: Any) -> None:
    raise KeyError(f"{client.base_url} {client.api_key}")


async def exits(problem: dict[str, Any], client: Any) -> None:
    sys.exit(3)


async def stops(problem: dict[str, Any], client: Any) -> None:
    raise StopIteration


async def text(problem: dict[str, Any], client: Any) -> str:
    return "much"


def blocks(problem: dict[str, Any], client: Any) -> None:
    time.sleep(3)


async def blocks_its_loop(problem: dict[str, Any], client: Any) -> None:
    time.sleep(3)


async def no_arguments() -> None: ...
