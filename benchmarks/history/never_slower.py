"""Is `auto` ever slower than plain decoding? With a drafter that guesses at random and says that it is sure.

    python benchmarks/history/never_slower.py [--batch 1,4,16,64] [--tokens 64] [--rounds 5] [--json FILE]

One engine, the same requests, the same tokens: plain and `auto` in turn, round by round; the figure is the median of
the rounds' ratios. Below 1: slower than plain. The policy begins each round knowing nothing of the drafter. `static` (4
tokens, always) is what the same drafter costs without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.bench.prompts import BUILTIN
from paceline.build import build_engine
from paceline.build.cost import measured_costs
from paceline.config import load_config
from paceline.engine.engine import LocalEngine
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.policy import StaticPolicy
from paceline.tasks.prompt import encode
from paceline.types import Request, SamplingParams
from paceline.verify.drafters import AdversarialDrafter

K = 4


def timed(engine: LocalEngine, requests: list[Request]) -> tuple[float, list[list[int]], float]:
    """Seconds, the tokens, and the share of verified drafts per emitted token."""
    engine.paged.pool.forget_all()
    engine.drain_trace()
    started = time.perf_counter()
    found = engine.generate(requests)
    seconds = time.perf_counter() - started
    traces = engine.drain_trace()
    drafted = sum(t.num_draft_tokens for t in traces) / sum(t.num_emitted for t in traces)
    return seconds, [c.token_ids.tolist() for c in found], drafted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--tokens", type=int, default=64, help="per sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(size) for size in args.batch.split(",")]
    config = load_config(None, [f"engine.max_num_seqs={max(batches)}"])
    engine = build_engine(config)
    prompts = [encode(engine.tokenizer, BUILTIN[i % len(BUILTIN)]) for i in range(max(batches))]
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    vocab = engine.model_config.vocab_size
    table = Table(title=f"A useless drafter, {args.rounds} rounds: plain time / time")
    for name in ("batch", "auto", "auto, all rounds", "verified per token", "static"):
        table.add_column(name, justify="right")
    results = []
    for batch in batches:
        requests = [Request(i, tuple(prompt), sampling, i) for i, prompt in enumerate(prompts[:batch])]
        ratios: dict[str, list[float]] = {"auto": [], "static": []}
        drafted = 0.0
        engine.set_drafter(None)
        timed(engine, requests)  # warm
        for turn in range(args.rounds):
            costs = measured_costs(engine.paged, engine.runner, config)
            arms = {"plain": (None, StaticPolicy(0)), "auto": (AdversarialDrafter(vocab), AutoPolicy(costs, K))}
            if turn == 0:
                arms["static"] = AdversarialDrafter(vocab), StaticPolicy(K)
            seconds, tokens = {}, {}
            for name in arms if turn % 2 == 0 else reversed(arms):
                engine.set_drafter(*arms[name])
                seconds[name], tokens[name], share = timed(engine, requests)
                drafted = share if name == "auto" else drafted
            assert all(said == tokens["plain"] for said in tokens.values()), "speculation changed a token"
            for name in ratios:
                if name in seconds:
                    ratios[name].append(seconds["plain"] / seconds[name])
        median = statistics.median(ratios["auto"])
        results.append({"batch": batch, "auto": median, "rounds": ratios["auto"], "static": ratios["static"][0]})
        table.add_row(
            str(batch),
            f"{median:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in ratios["auto"]),
            f"{drafted:.3f}",
            f"{ratios['static'][0]:.3f}",
        )
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
