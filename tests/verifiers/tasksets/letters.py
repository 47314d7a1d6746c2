"""A taskset for `verifiers` whose harness runs in this process and needs no network but the loopback interface.

The policy says a letter as often as it can. After each answer the harness tells it how often it did, by a tool if the
policy calls one. At the end it asks two questions at once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "how often a letter is in a text",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
]


class LetterData(vf.TaskData):
    letter: str = ""


class LetterTask(vf.Task[LetterData]):
    @vf.reward(weight=2.0)
    async def share(self, task: LetterData, trace: vf.Trace) -> float:
        if trace.info.get("trouble") == "score":
            raise RuntimeError("the reward is broken")
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return text.count(task.letter) / max(len(text), 1)

    @vf.reward(weight=0.5)
    async def done(self, trace: vf.Trace) -> float:
        return float(trace.num_turns > 1)

    @vf.metric
    async def num_turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class LetterConfig(vf.TasksetConfig):
    num_tasks: int = 12
    copies: int = 1
    infinite: bool = False


class LetterTaskset(vf.Taskset[LetterTask, LetterConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.infinite

    def load(self) -> Iterator[LetterTask]:
        for i in count():
            if not self.config.infinite and i == self.config.num_tasks * self.config.copies:
                return
            i %= self.config.num_tasks if self.config.copies > 1 else 10**9
            letter = chr(97 + i % 26)
            yield LetterTask(LetterData(prompt=f"say {letter}", letter=letter, description=str(i // 26)))


class ChatConfig(vf.HarnessConfig):
    turns: int = 2
    branches: int = 2  # questions at once, after the turns
    temperature: float = 0.1  # the run's is used
    tolerant: bool = False  # ends without an error if a call is refused
    trouble: str = ""  # when asked for b: "raise", "block", "hang", "logit_bias" or "score"


class ChatHarness(vf.Harness[ChatConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        trouble = self.config.trouble if data.prompt == "say b" else ""
        http = httpx.AsyncClient(verify=False)  # to read certificates takes longer than the rest of a sample
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http) as client:
            try:
                await self._converse(client, ctx.model, data.prompt, trouble)
            except APIStatusError:
                if not self.config.tolerant:
                    raise
        trace.info["trouble"] = trouble
        return vf.ProgramResult(0, "", "")

    async def _converse(self, client: AsyncOpenAI, model: str, prompt: str, trouble: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        if trouble == "raise":
            raise RuntimeError("the harness is broken")
        if trouble == "hang":
            await asyncio.sleep(3600)
        if trouble == "block":
            time.sleep(20)
        options = {"logit_bias": {"1": 5}} if trouble == "logit_bias" else {}

        async def ask(messages: list[Any]) -> Any:
            temperature = self.config.temperature
            reply = await client.chat.completions.create(
                model=model, messages=messages, tools=TOOLS, temperature=temperature, **options
            )
            return reply.choices[0].message

        for _ in range(self.config.turns):
            answer = await ask(messages)
            messages += [answer.model_dump(exclude_none=True), *self._observations(answer)]
        questions = [[*messages, {"role": "user", "content": f"again, {i}"}] for i in range(self.config.branches)]
        await asyncio.gather(*map(ask, questions))

    @staticmethod
    def _observations(answer: Any) -> list[Any]:
        if not answer.tool_calls:
            return [{"role": "user", "content": f"{len(answer.content or '')} letters"}]
        return [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": str(len(json.loads(call.function.arguments)["text"])),
            }
            for call in answer.tool_calls
        ]


__all__ = ["ChatHarness", "LetterTaskset"]
