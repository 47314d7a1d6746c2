"""The speed of policy `auto` relative to plain decoding, with every drafter and on new prompts: is it ever slower?

    python benchmarks/history/never_slower.py [--drafters useless,ngram,suffix,eagle3,hybrid] [--batch 1,4,16,64]
        [--tokens 64] [--rounds 6] [--json FILE]

SmolLM2-135M at temperature 1. Every round has new prompts (GSM8K questions), so a history has only the tokens of the
same round. Plain decoding and every drafter with `auto` run the same requests, one step each in turn, and must emit the
same tokens. Results are the medians over rounds of plain time / time; below 1 is slower than plain.

`useless` drafts random tokens with random confidence; its policy has no statistics at the start of each round. The
others are engines as `paceline train` builds them, and keep their statistics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from live import prompts
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.build.config import load_config
from paceline.build.cost import measured_costs
from paceline.build.engine import build_engine
from paceline.config import Config
from paceline.engine.engine import LocalEngine
from paceline.speculation.auto import AutoPolicy
from paceline.types import Completion, Request, SamplingParams, StepTrace, noise_key
from paceline.verify.drafters import AdversarialDrafter

K = 4
DRAFTERS = ("useless", "ngram", "suffix", "eagle3", "hybrid")


def settings(drafter: str, max_num_seqs: int) -> Config:
    if drafter in ("plain", "useless"):
        return load_config(None, [f"engine.max_num_seqs={max_num_seqs}", "speculation.method=none"])
    chosen = f"speculation.method={drafter}", "speculation.policy=auto", f"speculation.num_speculative_tokens={K}"
    return load_config(None, [f"engine.max_num_seqs={max_num_seqs}", *chosen])


def timed(
    engines: dict[str, LocalEngine], requests: list[Request]
) -> tuple[dict[str, float], dict[str, list[list[int]]], dict[str, list[StepTrace]]]:
    """Seconds, tokens and traces by engine. The engines run one step each in turn, so that changes of the machine's
    speed affect all of them."""
    seconds = dict.fromkeys(engines, 0.0)
    completions: dict[str, list[Completion]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.reset_prefix_cache()
        engine.drain_trace()
        for request in requests:
            engine.submit(request)
    while running := {name: engine for name, engine in engines.items() if engine.has_work}:
        for name, engine in running.items():
            started = time.perf_counter()
            completions[name] += engine.step()
            seconds[name] += time.perf_counter() - started
    ordered = {name: sorted(done, key=lambda c: c.request.request_id) for name, done in completions.items()}
    tokens = {name: [c.token_ids.tolist() for c in done] for name, done in ordered.items()}
    return seconds, tokens, {name: engine.drain_trace() for name, engine in engines.items()}


def measure(
    engines: dict[str, LocalEngine], rounds: Iterator[list[Request]], num_rounds: int, batch: int
) -> list[dict[str, Any]]:
    """One row per drafter."""
    timed(engines, next(rounds))  # warm-up
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    traces: dict[str, list[StepTrace]] = {name: [] for name in engines}
    for _ in track(range(num_rounds), f"batch {batch}", transient=True):
        if "useless" in engines:
            engine, config = engines["useless"], settings("useless", batch)
            costs = measured_costs(engine.paged, engine.runner, config)
            policy = AutoPolicy(costs, K, AdversarialDrafter.name)
            engine.set_drafter(AdversarialDrafter(engine.model_config.vocab_size), policy)
        seconds, tokens, found = timed(engines, next(rounds))
        assert all(emitted == tokens["plain"] for emitted in tokens.values()), "speculation changed a token"
        for name in engines:
            traces[name] += found[name]
            ratios[name].append(seconds["plain"] / seconds[name])
    return [
        {
            "batch": batch,
            "drafter": name,
            "ratio": statistics.median(ratios[name]),
            "rounds": ratios[name],
            "verified_per_token": sum(t.num_draft_tokens for t in of) / sum(t.num_emitted for t in of),
            "accepted_per_token": sum(t.num_accepted_tokens for t in of) / sum(t.num_emitted for t in of),
            "draft_share": sum(t.draft_s for t in of) / sum(t.total_s for t in of),
        }
        for name, of in traces.items()
        if name != "plain"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", default=",".join(DRAFTERS))
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--tokens", type=int, default=64, help="per sequence")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    drafters, batches = args.drafters.split(","), [int(size) for size in args.batch.split(",")]
    if unknown := set(drafters) - set(DRAFTERS):
        parser.error(f"--drafters: {', '.join(sorted(unknown))}: choose from {', '.join(DRAFTERS)}")
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    every = list(prompts(10**9).items())
    results = []
    for batch in batches:

        def rounds(batch: int = batch) -> Iterator[list[Request]]:
            """The recorded run has some hundred prompts; after that they repeat, with other noise."""
            for turn in range(10**9):
                some = [(batch * turn + i) % len(every) for i in range(batch)]
                keys = [noise_key("never slower", turn, i) for i in some]
                yield [
                    Request(i, every[at][1], sampling, key, f"{turn} {every[at][0]}")
                    for i, (at, key) in enumerate(zip(some, keys, strict=True))
                ]

        engines = {name: build_engine(settings(name, batch)) for name in ("plain", *drafters)}
        results += measure(engines, rounds(), args.rounds, batch)
        engines.clear()  # their KV memory
    table = Table(title=f"plain time / time under auto, {args.rounds} rounds")
    for name in ("batch", "drafter", "median", "all rounds", "verified per token", "accepted", "time in drafting"):
        table.add_column(name, justify="right")
    for row in results:
        each = " ".join(f"{ratio:.2f}" for ratio in islice(row["rounds"], 12))
        shares = (f"{row[key]:.3f}" for key in ("verified_per_token", "accepted_per_token", "draft_share"))
        table.add_row(str(row["batch"]), row["drafter"], f"{row['ratio']:.3f}", each, *shares)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
