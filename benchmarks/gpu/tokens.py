"""Tokens per second of SmolLM2-135M on one GPU, with real weights, the shipped head and GSM8K prompts at T=1: plain
decoding, EAGLE-3 and hybrid drafts, with policies `static` and `auto`.

    python benchmarks/gpu/tokens.py --model DIR --prompts gsm8k-train.jsonl --batch 1,32,128 --json tokens.json

Each mode has its own engine; a round runs all modes. Every round has new noise, so a history has other samples of a
problem, never the same tokens. Results are medians over rounds; a speed-up is relative to plain decoding of the same
round. Under rule `coupled` tokens must not depend on the mode: the number of samples that differ is printed too. In
bfloat16 some may differ at near-ties, as between any two batch sizes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.chat.template import encode
from paceline.types import Request, SamplingParams, noise_key

MODES = {
    "plain": ("none", "static"),
    "eagle3": ("eagle3", "static"),
    "hybrid": ("hybrid", "static"),
    "hybrid auto": ("hybrid", "auto"),
    "eagle3 auto": ("eagle3", "auto"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True, help="jsonl with `question`")
    parser.add_argument("--batch", default="1,32,128")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    questions = [json.loads(line)["question"] for line in args.prompts.read_text("utf-8").splitlines()[-128:]]
    found: list[dict[str, Any]] = []
    for batch in map(int, args.batch.split(",")):
        engines = {}
        for mode in args.modes.split(","):
            method, policy = MODES[mode]
            engines[mode] = build_engine(load_config(None, [
                f"model.name={args.model}", f"model.device={args.device}", f"model.dtype={args.dtype}",
                f"engine.max_num_seqs={batch}", "engine.max_num_batched_tokens=8192", f"speculation.method={method}",
                f"speculation.policy={policy}", f"speculation.num_speculative_tokens={args.k}",
            ]))  # fmt: skip
        sampling = SamplingParams(max_tokens=args.max_tokens)
        tokenizer = next(iter(engines.values())).tokenizer
        prompts = [encode(tokenizer, question) for question in questions]
        rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in engines}
        tokens: dict[str, list[list[int]]] = {mode: [] for mode in engines}
        for round in range(args.rounds + 1):  # the first one captures graphs
            requests = [
                Request(i, prompts[i % len(prompts)], sampling, noise_key(batch, round, i), f"{i % len(prompts)}")
                for i in range(max(batch, 8))
            ]
            for mode, engine in engines.items():
                started = time.perf_counter()
                completions = engine.generate(requests)
                seconds = time.perf_counter() - started
                traces = [t for t in engine.drain_trace() if t.num_rows == batch]
                drafts = sum(c.num_drafts for c in completions)
                figures = {
                    "tokens_per_s": sum(len(c.token_ids) for c in completions) / seconds,
                    "step_ms": 1e3 * float(np.median([t.total_s for t in traces])),
                    "device_ms": 1e3 * float(np.median([t.forward_s for t in traces])),
                    "mean_acceptance_length": 1 + sum(c.num_accepted_tokens for c in completions) / max(1, drafts),
                }  # fmt: skip
                if round:
                    tokens[mode] += [c.token_ids.tolist() for c in completions]
                    rounds[mode].append(figures)
        for mode, each in rounds.items():
            for figures, plain in zip(each, rounds["plain"], strict=True):
                figures["speedup"] = figures["tokens_per_s"] / plain["tokens_per_s"]
            row = {key: float(np.median([figures[key] for figures in each])) for key in each[0]}
            row |= {"samples": len(tokens[mode])}
            row |= {"differ": sum(a != b for a, b in zip(tokens[mode], tokens["plain"], strict=True))}
            found.append({"mode": mode, "batch": batch, **row})
            print({key: round_(value) for key, value in found[-1].items()}, flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1))


def round_(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
