"""An agent with two tools, written with `openai` as for any other model. It reads a problem from standard input and
prints its reward.

    paceline train configs/agent.toml
"""

import json
import re
import sys

from openai import OpenAI

MAX_TURNS = 6
SYSTEM = "You can't calculate. Use a tool, then write its result."


def tool(name: str) -> dict:
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("add"), tool("multiply")]


def use(name: str, arguments: str) -> str:
    try:
        values = json.loads(arguments)
        a, b = int(values["a"]), int(values["b"])
    except (KeyError, TypeError, ValueError):
        return "error: give a and b"
    if max(abs(a), abs(b)) > 10**9:
        return "error: too large"
    results = {"add": a + b, "multiply": a * b}
    return str(results.get(name, "error: there is no such tool"))


def example(name: str, a: int, b: int) -> list[dict]:
    """A conversation, so that a small model knows how to call a tool."""
    word, result = {"add": "plus", "multiply": "times"}[name], use(name, json.dumps({"a": a, "b": b}))
    call = {"id": "example00", "type": "function", "function": {"name": name, "arguments": json.dumps({"a": a, "b": b})}}
    return [
        {"role": "user", "content": f"What is {a} {word} {b}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "example00", "content": result},
        {"role": "assistant", "content": f"The result is {result}."},
    ]


def reward(answer: str, results: list[str], expected: int) -> float:
    """1 for the right answer; a part of it for the right call, so that there is something to learn from early."""
    numbers = re.findall(r"\d+", answer)
    is_right = bool(numbers) and numbers[-1] == str(expected)
    return 0.7 * is_right + 0.3 * (str(expected) in results)


def main() -> None:
    problem = json.load(sys.stdin)
    client, results = OpenAI(), []  # OPENAI_BASE_URL and OPENAI_API_KEY are in the environment
    examples = [*example("add", 31, 9), *example("multiply", 14, 6), *example("add", 8, 25)]
    messages = [{"role": "system", "content": SYSTEM}, *examples, {"role": "user", "content": problem["prompt"]}]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(model="gpt-5-mini", messages=messages, tools=TOOLS, max_tokens=48)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            results.append(use(call.function.name, call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": results[-1]})
    print(json.dumps({"reward": reward(message.content or "", results, int(problem["answer"]))}))


if __name__ == "__main__":
    main()
