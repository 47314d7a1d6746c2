"""Many agents at once: the share of time in which the engine has work.

    python benchmarks/agents/utilisation.py --agents 64
    python benchmarks/agents/utilisation.py --agents 64 --minutes 10

Each agent is a thread of this process with OpenAI's client: two turns with SmolLM2-135M, and a tool that takes
`--tool-s`. The engine is busy while it steps. With `--minutes`, rounds repeat for so long; a round
that takes longer than `--deadline-s` is a deadlock, and an error.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from paceline.build.config import make_config
from paceline.build.run import build_collector, build_engine
from paceline.build.task import build_rewarder, build_task
from paceline.rl.stage_timer import StageTimer

HERE = Path(__file__).parent


async def two_turns(problem: dict[str, Any], client: Any) -> float:
    import asyncio

    async with AsyncOpenAI(**client.options, max_retries=0) as ai:
        messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
        answer = await ai.chat.completions.create(model=client.model, messages=messages, max_tokens=24)
        await asyncio.sleep(problem["tool_s"])
        messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
        answer = await ai.chat.completions.create(model=client.model, messages=messages, max_tokens=24)
    return float(len(answer.choices[0].message.content or ""))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--tool-s", type=float, default=0.2)
    parser.add_argument("--minutes", type=float, default=0.0, help="repeat for so long; 0: one round")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="of a round")
    parser.add_argument("--out", type=Path, default=Path("runs/agents"))
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"Write about the number {i}.", "tool_s": arguments.tool_s} for i in range(arguments.agents)]
    path = arguments.out.resolve() / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.chdir(HERE)  # the function is found by the name of this file
    config = make_config(
        {
            "model": {"name": arguments.model},
            "engine": {"max_num_seqs": arguments.agents, "kv_tokens": 256 * arguments.agents},
            "speculation": {"method": "none"},
            "sampling": {"max_tokens": 48},
            "task": {
                "kind": "agent", "name": str(path), "agent": "utilisation:two_turns", "held_out": 0,
                "max_parallel": arguments.agents,
            },
            "reward": {"functions": ["env"]},
        }
    )  # fmt: skip
    engine, task, rewarder = build_engine(config), build_task(config), build_rewarder(config)
    collector = build_collector(config, engine, rewarder)
    until, num = time.monotonic() + 60 * arguments.minutes, 0
    while True:
        print(one_round(collector, task.train, num, arguments.deadline_s), flush=True)
        num += 1
        if time.monotonic() >= until:
            break
    for each in (collector, task, rewarder, engine):
        each.close()


def one_round(collector: Any, problems: Any, num: int, deadline_s: float) -> str:
    started = time.perf_counter()

    def check(done: int, total: int) -> None:
        if time.perf_counter() - started > deadline_s:
            raise RuntimeError(f"a deadlock: {done} of {total} agents ended within {deadline_s:g} s")

    found = collector.collect(f"round {num}", list(enumerate(problems)), 1, num, timer=StageTimer(), on_progress=check)
    wall_s = time.perf_counter() - started
    traces = collector.engine.drain_trace()
    rollouts = [rollout for group in found.groups for rollout in group.rollouts]
    failures = [rollout.failure for rollout in rollouts if rollout.failure]
    busy_s = sum(trace.total_s for trace in traces)
    rows = sum(trace.num_rows for trace in traces) / max(1, len(traces))
    tokens = sum(trace.num_emitted for trace in traces)
    return (
        f"{len(problems)} agents: {wall_s:.1f} s, engine busy {busy_s / wall_s:.0%}, {rows:.1f} sequences per step, "
        f"{tokens / wall_s:.0f} tokens/s, {len(rollouts)} sequences, {len(failures)} failures {failures[:1] or ''}"
    )


if __name__ == "__main__":
    main()
