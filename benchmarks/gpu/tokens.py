"""Tokens per second of SmolLM2-135M with real weights, the shipped head and real prompts at T=1, plain and hybrid.

    python benchmarks/gpu/tokens.py --model DIR --prompts gsm8k-train.jsonl --batch 1,32,128 --json tokens.json

Modes take turns, round by round, with one engine each; every round draws with noise of its own, so that a history
knows other samples of its problems, never the very tokens. A figure is the median of the rounds, a speed-up that of the
rounds' own. Tokens must not depend on the mode (rule `coupled`): how many samples differ is printed too. In bfloat16
two tokens may come so close that rounding decides, as between any two batch sizes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline.build import build_engine
from paceline.config import load_config
from paceline.tasks.prompt import encode
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds: at least 1")
    questions = [json.loads(line)["question"] for line in given.prompts.read_text("utf-8").splitlines()[-128:]]
    found: list[dict[str, Any]] = []
    for batch in map(int, given.batch.split(",")):
        engines = {}
        for mode in given.modes.split(","):
            method, policy = MODES[mode]
            engines[mode] = build_engine(load_config(None, [
                f"model.name={given.model}", f"model.device={given.device}", f"model.dtype={given.dtype}",
                f"engine.max_num_seqs={batch}", "engine.max_num_batched_tokens=8192", f"speculation.method={method}",
                f"speculation.policy={policy}", f"speculation.num_speculative_tokens={given.k}",
            ]))  # fmt: skip
        sampling = SamplingParams(max_tokens=given.max_tokens)
        tokenizer = next(iter(engines.values())).tokenizer
        prompts = [encode(tokenizer, question) for question in questions]
        rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in engines}
        said: dict[str, list[list[int]]] = {mode: [] for mode in engines}
        for round in range(given.rounds + 1):  # the first one captures graphs
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
                    said[mode] += [c.token_ids.tolist() for c in completions]
                    rounds[mode].append(figures)
        for mode, each in rounds.items():
            for figures, plain in zip(each, rounds["plain"], strict=True):
                figures["speedup"] = figures["tokens_per_s"] / plain["tokens_per_s"]
            row = {key: float(np.median([figures[key] for figures in each])) for key in each[0]}
            row |= {"samples": len(said[mode])}
            row |= {"differ": sum(a != b for a, b in zip(said[mode], said["plain"], strict=True))}
            found.append({"mode": mode, "batch": batch, **row})
            print({key: round_(value) for key, value in found[-1].items()}, flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1))


def round_(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
