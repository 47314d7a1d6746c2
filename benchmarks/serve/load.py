"""Many streaming clients against one server, some of which leave early or send nonsense.

    python benchmarks/serve/load.py smollm2-135m --clients 200 --minutes 5 speculation.method=hybrid

Starts `paceline serve MODEL`. Every completed response is compared with `LLM` without drafts. Prints latencies, and the
server's KV blocks, threads, file descriptors and memory before and after. Exits with status 1 if a response is wrong, a
status is 500 or above, or something leaks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

QUESTIONS = [f"What is {a} + {b}?" for a in range(2, 10) for b in range(2, 6)]
NONSENSE: list[dict[str, Any]] = [
    {"model": "?"}, {"prompt": 3}, {"prompt": []}, {"n": -1}, {"temperature": "x"}, {"logit_bias": []}, {"echo": True},
]  # fmt: skip


class Load:
    def __init__(self, url: str, model: str, arguments: argparse.Namespace) -> None:
        self.url, self.model, self.arguments = url, model, arguments
        self.texts: list[tuple[int, str]] = []  # (kind of request, text)
        self.first_s: list[float] = []
        self.total_s: list[float] = []
        self.outcomes = Counter[str]()

    def body(self, kind: int) -> dict[str, Any]:
        return {
            "model": self.model, "prompt": QUESTIONS[kind % len(QUESTIONS)], "seed": kind, "stream": True,
            "max_tokens": 8 + 8 * (kind % 3), "temperature": 0.8 + 0.1 * (kind % 4),
            "presence_penalty": 0.3 * (kind % 2),
        }  # fmt: skip

    async def client(self, number: int, until: float) -> None:
        dice = random.Random(number)
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            while time.monotonic() < until:
                await self.request(client, dice)

    async def request(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        kind, choice = dice.randrange(3 * len(QUESTIONS)), dice.random()
        content = self.body(kind)
        if choice < 0.05:
            answer = await client.post(f"{self.url}/completions", json={**content, **dice.choice(NONSENSE)})
            self.outcomes[f"nonsense: {answer.status_code}"] += 1
            return
        leave_after = dice.randrange(6) if choice < 0.25 else None
        started, text, num = time.perf_counter(), "", 0
        async with client.stream("POST", f"{self.url}/completions", json=content) as answer:
            if answer.status_code != 200:
                self.outcomes[f"status {answer.status_code}"] += 1
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                if num == 0:
                    self.first_s.append(time.perf_counter() - started)
                num += 1
                text += json.loads(line[6:])["choices"][0]["text"]
                if num == leave_after:
                    self.outcomes["left"] += 1
                    return
        self.total_s.append(time.perf_counter() - started)
        self.texts.append((kind, text))
        self.outcomes["complete"] += 1

    async def run(self) -> None:
        until = time.monotonic() + 60 * self.arguments.minutes
        await asyncio.gather(*(self.client(i, until) for i in range(self.arguments.clients)))

    def num_wrong(self) -> int:
        from paceline import LLM, SamplingParams

        kinds = sorted({kind for kind, _ in self.texts})
        bodies = [self.body(kind) for kind in kinds]
        keys = ("seed", "max_tokens", "temperature", "presence_penalty")
        params = [SamplingParams(**{key: each[key] for key in keys}) for each in bodies]
        with LLM(self.model, speculation="none") as llm:
            found = llm.generate([each["prompt"] for each in bodies], params)
        expected = {kind: request.outputs[0].text for kind, request in zip(kinds, found, strict=True)}
        return sum(text != expected[kind] for kind, text in self.texts)


def state(pid: int, root: str) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    metrics = httpx.get(f"{root}/metrics").text
    usage = re.search(r"^paceline_kv_cache_usage (\S+)", metrics, re.MULTILINE)
    running = re.search(r"^paceline_num_requests_running (\S+)", metrics, re.MULTILINE)
    assert usage and running
    return {
        "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
        "file descriptors": len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208
        "memory, MB": int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024,
        "KV blocks in use": float(usage[1]),
        "sequences": float(running[1]),
    }


def percentiles(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=5.0)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "paceline", "serve", arguments.model, *arguments.settings, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            root = url.removesuffix("/v1")
            load = Load(url, arguments.model, arguments)
            warm_up = argparse.Namespace(clients=arguments.clients, minutes=0.2)
            asyncio.run(Load(url, arguments.model, warm_up).run())
            time.sleep(2)
            before = state(server.pid, root)
            asyncio.run(load.run())
            time.sleep(2)
            after = state(server.pid, root)
        finally:
            server.terminate()
        exit_status = server.wait(60)
    print(f"outcomes: {dict(load.outcomes)}")
    print(f"time to first token: {percentiles(load.first_s)}; whole response: {percentiles(load.total_s)}")
    for name, value in before.items():
        print(f"{name}: {value:g} before, {after[name]:g} after")
    wrong = load.num_wrong()
    print(f"{wrong} of {len(load.texts)} complete responses differ from LLM without drafts; exit status {exit_status}")
    failed = any(re.search(r"\b5\d\d$", outcome) for outcome in load.outcomes)
    leaks = any(after[name] > before[name] for name in ("threads", "file descriptors", "KV blocks in use", "sequences"))
    leaks |= after["memory, MB"] > 1.1 * before["memory, MB"]
    raise SystemExit(int(bool(wrong or failed or leaks or exit_status)))


if __name__ == "__main__":
    main()
