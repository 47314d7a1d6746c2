"""Acceptance length by drafter in vLLM and in Paceline's local engine, with the same model, prompts and greedy tokens.

    .venv-vllm/bin/python benchmarks/vllm/acceptance.py

SmolLM2-135M. Each engine runs in its own process. The prompts run twice, so that there is a history to draft from.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from paceline.bench.prompts import read_prompts
from paceline.build.config import load_config
from paceline.build.run import build_rollout_engine
from paceline.chat.template import encode
from paceline.model import store
from paceline.speculation.metrics import summarise
from paceline.types import Request, SamplingParams

METHODS = ("none", "ngram", "eagle3", "suffix")
ENGINES = ("local", "vllm")


def measure(kind: str, method: str, num_prompts: int, num_tokens: int, model: str = "smollm2-135m") -> dict[str, Any]:
    base = [f"model.name={model}", f"engine.kind={kind}", "engine.max_num_seqs=8", "engine.kv_tokens=8192"]
    draft = [f"speculation.method={method}", "speculation.rule=rejection", "speculation.num_speculative_tokens=3"]
    engine = build_rollout_engine(load_config(None, [*base, "engine.graphs=false", *draft]))
    tokenizer = store.load_tokenizer(store.resolve(model))
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [encode(tokenizer, prompt) for prompt in read_prompts()[:num_prompts]]
    tokens = []
    started = time.perf_counter()
    try:
        for i in range(2):
            wanted = [Request(100 * i + j, prompt, sampling, j, str(j)) for j, prompt in enumerate(prompts)]
            handles = [engine.submit(request) for request in wanted]
            while not all(handle.done for handle in handles):
                engine.step()
            tokens += [handle.completion.token_ids.tolist() for handle in handles if handle.completion is not None]
        figures = summarise([], engine.drain_trace())
    finally:
        engine.close()
    return figures | {"token_ids": tokens, "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "METHOD"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.prompts, args.tokens)))
        return
    print(f"{'drafter':8} {'local':>7} {'vLLM':>7}   same sequences")
    for method in METHODS:
        found = []
        for kind in ENGINES:
            command = [sys.executable, __file__, "--one", kind, method]
            command += ["--prompts", str(args.prompts), "--tokens", str(args.tokens)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        local, vllm = found
        same = sum(a == b for a, b in zip(local["token_ids"], vllm["token_ids"], strict=True)) / len(local["token_ids"])
        lengths = " ".join(f"{each['mean_acceptance_length']:7.3f}" for each in found)
        print(f"{method:8} {lengths}   {same:.0%}", flush=True)


if __name__ == "__main__":
    main()
