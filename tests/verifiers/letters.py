"""A taskset for `verifiers` whose harness runs in this process and needs no network but the loopback interface.

The policy says a letter as often as it can. After each answer the harness tells it how often it did, by a tool if the
policy calls one. At the end it asks two questions at once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI

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
    infinite: bool = False


class LetterTaskset(vf.Taskset[LetterTask, LetterConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.infinite

    def load(self) -> Iterator[LetterTask]:
        num = 10**9 if self.config.infinite else self.config.num_tasks
        for i in range(num):
            letter = chr(97 + i % 26)
            yield LetterTask(LetterData(prompt=f"say {letter}", letter=letter, description=str(i // 26)))


class ChatConfig(vf.HarnessConfig):
    turns: int = 2
    branches: int = 2  # questions at once, after the turns
    temperature: float = 0.1  # the run's is used
    trouble: str = ""  # "raise", "block", "hang", "logit_bias" or "flood"


class ChatHarness(vf.Harness[ChatConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await self._converse(client, ctx.model, data.prompt)
        return vf.ProgramResult(0, "", "")

    async def _converse(self, client: AsyncOpenAI, model: str, prompt: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        for _ in range(self.config.turns):
            await self._cause_trouble(messages)
            answer = await self._ask(client, model, messages)
            messages += [answer.model_dump(exclude_none=True), *self._observations(answer)]
        questions = [[*messages, {"role": "user", "content": f"again, {i}"}] for i in range(self.config.branches)]
        await asyncio.gather(*(self._ask(client, model, question) for question in questions))

    async def _ask(self, client: AsyncOpenAI, model: str, messages: list):
        options = {"logit_bias": {"1": 5}} if self.config.trouble == "logit_bias" else {}
        reply = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, temperature=self.config.temperature, **options
        )
        return reply.choices[0].message

    @staticmethod
    def _observations(answer) -> list:
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

    async def _cause_trouble(self, messages: list) -> None:
        trouble = self.config.trouble if "say b" in messages[0]["content"] else ""
        if trouble == "raise":
            raise RuntimeError("the harness is broken")
        if trouble == "hang":
            await asyncio.sleep(3600)
        if trouble == "block":
            time.sleep(20)


__all__ = ["ChatHarness", "LetterTaskset"]
