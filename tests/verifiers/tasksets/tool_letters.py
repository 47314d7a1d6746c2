"""The taskset of letters.py, with its tool in a server of its own. The harness is an MCP client in this process."""

from __future__ import annotations

import json
from typing import Any

import verifiers.v1 as vf
from counting_tools import CountingTools
from letters import LetterConfig, LetterTask, LetterTaskset
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.mcp import mcp_client


class ToolLetterTaskset(LetterTaskset):
    @classmethod
    def toolsets(cls, config: LetterConfig) -> list[vf.Toolset]:
        return [CountingTools(vf.SharedToolsetConfig())]


class ToolHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    SUPPORTS_MCP = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        (url,) = mcp_urls.values()
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client, mcp_client({"url": url}) as server:
            listed = (await server.list_tools()).tools
            tools = [
                {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema}}
                for tool in listed
            ]
            messages: list[Any] = [{"role": "user", "content": data.prompt}]
            while True:
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                answer = reply.choices[0].message
                messages.append(answer.model_dump(exclude_none=True))
                if not answer.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in answer.tool_calls:
                    result = await server.call_tool(call.function.name, json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})


__all__ = ["LetterTask", "ToolHarness", "ToolLetterTaskset"]
