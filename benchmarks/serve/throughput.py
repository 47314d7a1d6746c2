"""Tokens per second through HTTP, of one or several servers, in one interleaved run.

    python benchmarks/serve/throughput.py --server paceline=http://127.0.0.1:8000/v1 --server vllm=http://127.0.0.1:8001/v1

Every server gets the same requests, which generate all of --max-tokens (`ignore_eos`). Each round has seeds of its own:
a history drafter must not see the same completions again. With --llm MODEL, the same requests are also run by
`paceline.LLM` in this process, without HTTP: give it the server's settings, for example with
--set speculation.method=none. A round is --waves times as many requests as run at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

PROMPTS = [
    f"Write one sentence about {topic}."
    for topic in (
        "rain", "the moon", "a small bridge", "winter", "old books", "a red bicycle", "the sea", "bread", "a town",
        "maps", "music", "an orchard", "trains", "a lamp", "birds", "the desert",
    )
]  # fmt: skip


def body(model: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": PROMPTS[seed % len(PROMPTS)],
        "max_tokens": arguments.max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "stream": arguments.stream,
    }


async def ask(client: httpx.AsyncClient, url: str, content: dict[str, Any]) -> None:
    if not content["stream"]:
        answer = await client.post(f"{url}/completions", json=content)
        answer.raise_for_status()
        num = answer.json()["usage"]["completion_tokens"]
        assert num == content["max_tokens"], f"{num} tokens"
        return
    async with client.stream("POST", f"{url}/completions", json=content) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_lines():
            pass


async def round_of(url: str, model: str, num: int, seeds: range, arguments: argparse.Namespace) -> float:
    """Seconds for these requests, `num` at the same time."""
    limits = httpx.Limits(max_connections=num)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        started = time.perf_counter()
        await asyncio.gather(*(ask(client, url, body(model, seed, arguments)) for seed in seeds))
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--llm", metavar="MODEL")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="settings of --llm")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs: dict[str, Callable[[int, range], Awaitable[float]]] = {}
    for each in arguments.server:
        name, _, url = each.partition("=")
        model = httpx.get(f"{url}/models", timeout=60).json()["data"][0]["id"]
        runs[name] = lambda num, seeds, url=url, model=model: round_of(url, model, num, seeds, arguments)
    if arguments.llm:
        runs["LLM"] = without_http(arguments)
    rows = asyncio.run(measure(runs, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps({"settings": vars(arguments), "rows": rows}, indent=1, default=str))


def without_http(arguments: argparse.Namespace) -> Callable[[int, range], Awaitable[float]]:
    from paceline import LLM, SamplingParams
    from paceline.build.config import load_config

    llm = LLM.from_config(load_config(None, [f"model.name={arguments.llm!r}", *arguments.set]))

    async def run(num: int, seeds: range) -> float:
        params = [SamplingParams(max_tokens=arguments.max_tokens, seed=seed, ignore_eos=True) for seed in seeds]
        llm.engine.scheduler.max_num_seqs = num
        started = time.perf_counter()
        llm.generate([PROMPTS[seed % len(PROMPTS)] for seed in seeds], params, progress=False)
        return time.perf_counter() - started

    return run


async def measure(
    runs: dict[str, Callable[[int, range], Awaitable[float]]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for num in map(int, arguments.concurrency.split(",")):
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        size = num * arguments.waves
        for i in range(arguments.rounds + 1):
            for name, run in runs.items():
                found = await run(num, range(i * size, (i + 1) * size))
                if i:  # the first round warms up
                    seconds[name].append(found)
        rates = {name: size * arguments.max_tokens / statistics.median(each) for name, each in seconds.items()}
        first = next(iter(rates.values()))
        shown = ", ".join(f"{name} {rate:.1f} tokens/s ({rate / first:.2f}x)" for name, rate in rates.items())
        print(f"{num} at the same time: {shown}", flush=True)
        rows.append({"concurrency": num, "tokens_per_s": rates, "seconds": seconds})
    return rows


if __name__ == "__main__":
    main()
