"""Speed-ups of the speculation policies over plain decoding on this machine, with history drafts.

    python benchmarks/history/live.py [--temperature 1.0] [--batch 1,4,16] [--rounds 3] [--json FILE]

SmolLM2-135M generates completions of a few prompts of the recorded run, with drafter `suffix`. A first epoch fills the
history, and `das` and `auto` collect their statistics in it. Then every policy generates a second epoch (other seeds)
with that same history, and must emit the same tokens. A round runs all policies; results are the medians over rounds of
plain time / time. The cost table is measured on this machine at the start.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from printed_budgets import printed
from rich.console import Console
from rich.table import Table

from paceline.build.config import load_config
from paceline.build.cost import measured_costs
from paceline.build.engine import build_engine
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.cost import CostTable
from paceline.speculation.das import DasPolicy
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import Completion, Request, SamplingParams, noise_key

DATA = Path(__file__).resolve().parents[1] / "data" / "smollm2-gsm8k-t1.0.jsonl.xz"
LONGEST = 7
POLICIES: dict[str, Callable[[CostTable], SpeculationPolicy]] = {
    "plain": lambda costs: StaticPolicy(0),
    "static 1": lambda costs: StaticPolicy(1),
    "static 3": lambda costs: StaticPolicy(3),
    "static 5": lambda costs: StaticPolicy(5),
    "static 7": lambda costs: StaticPolicy(7),
    "das, printed": lambda costs: DasPolicy(costs, LONGEST, solve=printed),
    "das": lambda costs: DasPolicy(costs, LONGEST),
    "auto": lambda costs: AutoPolicy(costs, LONGEST),
}


def prompts(num: int) -> dict[str, tuple[int, ...]]:
    """The prompts of the recorded run's first problems, by problem."""
    found: dict[str, tuple[int, ...]] = {}
    with lzma.open(DATA, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            if len(found) == num and record["problem"] not in found:
                return found
            found[record["problem"]] = tuple(record["prompt_ids"])
    return found


def generate(
    engine: LocalEngine,
    requests: list[Request],
    drafter: SuffixDrafter | None,
    policy: SpeculationPolicy,
    acceptance: dict[str, np.ndarray] | None = None,
) -> tuple[float, list[Completion]]:
    engine.set_drafter(drafter, policy)
    if acceptance is not None:
        engine.load_state_dict({"acceptance": acceptance})
    engine.paged.pool.reset_prefix_cache()
    engine.drain_trace()
    started = time.perf_counter()
    found = engine.generate(requests)
    return time.perf_counter() - started, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", default="1,4,16", help="sequences at a time")
    parser.add_argument("--problems", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160, help="most tokens per sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(size) for size in args.batch.split(",")]
    config = load_config(None, [f"engine.max_num_seqs={max(batches)}", "speculation.method=none"])
    engine = build_engine(config)
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.tokens)

    def epoch(number: int, samples: int) -> list[Request]:
        return [
            Request(i * samples + j, ids, sampling, noise_key(number, name, j), name)
            for i, (name, ids) in enumerate(prompts(args.problems).items())
            for j in range(samples)
        ]

    first = SuffixDrafter()
    generate(engine, epoch(0, args.samples), first, StaticPolicy(3))
    engine.set_drafter(None)
    history = first.state_dict()
    statistics_of = {}
    for name in ("das, printed", "das", "auto"):
        policy = POLICIES[name](measured_costs(engine.paged, engine.runner, config))
        generate(engine, epoch(0, args.samples), SuffixDrafter(), policy)
        statistics_of[name] = engine.state_dict()["acceptance"]
        engine.set_drafter(None)
    results = []
    table = Table(title=f"T={args.temperature:g}: plain time / time, {args.rounds} rounds")
    for name in ("batch", *POLICIES):
        table.add_column(name, justify="right")
    for batch in batches:
        engine.scheduler.max_num_seqs = batch
        requests = epoch(1, min(args.samples, 4 * batch))
        ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
        for turn in range(args.rounds):
            seconds, tokens = {}, {}
            for name in POLICIES if turn % 2 == 0 else reversed(POLICIES):
                drafter = None if name == "plain" else SuffixDrafter()
                if drafter is not None:
                    drafter.load_state_dict(history)
                costs = measured_costs(engine.paged, engine.runner, config)
                seconds[name], found = generate(
                    engine, requests, drafter, POLICIES[name](costs), statistics_of.get(name)
                )
                tokens[name] = [completion.token_ids.tolist() for completion in found]
            assert all(emitted == tokens["plain"] for emitted in tokens.values()), "speculation changed a token"
            for name in POLICIES:
                ratios[name].append(seconds["plain"] / seconds[name])
        medians = {name: statistics.median(found) for name, found in ratios.items()}
        results.append({"batch": batch, "temperature": args.temperature, "speedup": medians, "rounds": ratios})
        table.add_row(str(batch), *(f"{median:.2f}" for median in medians.values()))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
