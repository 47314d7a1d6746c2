"""A coding agent: it may run programs in a sandbox before it answers. `paceline train examples/agents/coder.toml`"""

import json
import sys

from openai import OpenAI

from paceline import run_python

source = {"type": "object", "properties": {"source": {"type": "string"}}, "required": ["source"]}
tool = {"name": "run_python", "description": "Run a Python program; returns what it prints.", "parameters": source}
problem = json.load(sys.stdin)
messages = [{"role": "user", "content": problem["prompt"] + " End with the function in a ```python block."}]
client = OpenAI()
for _ in range(6):
    answer = client.chat.completions.create(
        model="gpt-5-mini", messages=messages, tools=[{"type": "function", "function": tool}]
    )
    messages.append(answer.choices[0].message)
    if not answer.choices[0].message.tool_calls:
        break
    for call in answer.choices[0].message.tool_calls:
        found = run_python(str(json.loads(call.function.arguments).get("source", "")), timeout_s=5)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found.stdout + found.stderr})
