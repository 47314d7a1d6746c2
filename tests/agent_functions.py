"""Agents that are functions, for training runs in tests."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI


async def concurrent(problem: dict[str, Any], client: Any) -> dict[str, Any]:
    """Three calls at once, two of them equal; then one that goes on after each."""
    async with AsyncOpenAI(**client.options, max_retries=0) as ai:

        async def say(messages: list[Any]) -> list[Any]:
            answer = await ai.chat.completions.create(model="any", messages=messages, max_tokens=6)
            return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

        ask = [{"role": "user", "content": problem["prompt"]}]
        other = [{"role": "user", "content": "other"}]
        found = await asyncio.gather(say(ask), say(ask), say(other))
        last = await asyncio.gather(*(say([*messages, {"role": "user", "content": "more"}]) for messages in found))
    text = "".join(message["content"] for messages in last for message in messages if message["role"] == "assistant")
    return {"reward": text.count("a") / max(1, len(text)), "metrics": {"num_letters": len(text)}}
