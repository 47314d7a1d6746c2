"""Accuracy of a served model on your problems, asked like an evaluation harness does: many requests at once, a stop
string, and the last number of each answer.

paceline serve smollm2-135m &
pip install openai
python examples/evaluate.py problems.jsonl [URL]     # {"prompt": "What is 2 + 3?", "answer": "5"}
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

NUM_SAMPLES, AT_ONCE = 4, 64  # samples of a problem; requests at the same time


def last_number(text: str) -> float | None:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


async def main() -> None:
    problems = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
    if not problems:
        sys.exit(f"{sys.argv[1]} has no problems")
    for problem in problems:
        if last_number(str(problem["answer"])) is None:
            sys.exit(f"{sys.argv[1]}: the answer {problem['answer']!r} is not a number")
    url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:
        model = (await client.models.list()).data[0].id
        slots = asyncio.Semaphore(AT_ONCE)

        async def ask(seed: int, problem: dict[str, Any]) -> float:
            """The share of right samples."""
            async with slots:
                answer = await client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": problem["prompt"]}], n=NUM_SAMPLES, seed=seed,
                    max_tokens=128, stop=["\n\n"],
                )  # fmt: skip
            texts = [choice.message.content or "" for choice in answer.choices]
            right = last_number(str(problem["answer"]))
            return sum(last_number(text) == right for text in texts) / len(texts)

        shares = await asyncio.gather(*(ask(seed, problem) for seed, problem in enumerate(problems)))
    mean = sum(shares) / len(shares)
    error = (sum((share - mean) ** 2 for share in shares) / len(shares) / max(1, len(shares) - 1)) ** 0.5
    print(f"{len(problems)} problems × {NUM_SAMPLES} samples: accuracy {mean:.3f} ± {1.96 * error:.3f}")


asyncio.run(main())
