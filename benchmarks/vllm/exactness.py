"""Chi-square tests of vLLM's samples with drafts against its samples without, on a model with four tokens.

    .venv-vllm/bin/python benchmarks/vllm/exactness.py --jobs 2

Each sequence is a bin. Null arms have no drafts either; broken arms must be detected. Each arm has its own seeds and
process. Takes about a quarter of an hour on two CPU cores. `paceline verify` has the same test for the local engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from paceline.build.config import load_config
from paceline.build.run import build_rollout_engine
from paceline.cluster import vllm_sampler
from paceline.cluster.vllm_python import environment
from paceline.speculation.metrics import summarise
from paceline.types import Request, SamplingParams, noise_key
from paceline.verify.chi_square import ChiSquareTest, holm, homogeneity

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from tiny_run import write_head, write_model

VOCAB, LENGTH, TEMPERATURE = 4, 4, 0.8
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
DRAFT = ["speculation.num_speculative_tokens=3", "speculation.rule=rejection"]
HISTORY = ["speculation.method=suffix", *DRAFT]
METHODS = {
    "ngram": ["speculation.method=ngram", "speculation.prompt_lookup_min=1", *DRAFT],
    "eagle3": DRAFT,  # and a head, see `draw`
    "suffix": HISTORY,
}
# Broken samplers: the temperature of drafted positions is multiplied by this factor.
BROKEN = {"broken": 0.7, "slight": 0.95}


def draw(arm: str, seed: int, num_samples: int) -> dict[str, Any]:
    """How often each sequence was sampled, and metrics of the drafts. An arm without a method is plain decoding."""
    method = HISTORY if arm in BROKEN else METHODS.get(arm, [])
    if arm in BROKEN:
        break_sampler(BROKEN[arm])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", vocab_size=VOCAB, head_dim=32, num_layers=3, eos_token_ids=())
        if arm == "eagle3":
            method = [*write_head(folder, layers=(1, 2, 3), num_tokens=VOCAB - 1), *method]
        base = [f"model.name={str(folder / 'model')!r}", "engine.kind=vllm", "engine.graphs=false", "engine.threads=1"]
        engine = build_rollout_engine(load_config(None, [*base, "engine.max_num_seqs=256", *method]))
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, ignore_eos=True)
    started = time.perf_counter()
    try:
        wanted = (Request(i, PROMPT, sampling, noise_key(seed, arm, i), "one") for i in range(num_samples))
        handles = [engine.submit(request) for request in wanted]
        while engine.has_work:
            engine.step()
        figures = summarise([], engine.drain_trace())
    finally:
        engine.close()
    tokens = np.array([handle.completion.token_ids for handle in handles if handle.completion is not None])
    counts = np.bincount(tokens @ VOCAB ** np.arange(LENGTH), minlength=VOCAB**LENGTH)
    return figures | {"counts": counts.tolist(), "seconds": time.perf_counter() - started}


def break_sampler(factor: float) -> None:
    from vllm.v1.sample import rejection_sampler

    vllm_sampler.check_sampler = lambda device: None
    expand = vllm_sampler.expand_batch_to_tokens
    rejection_sampler.expand_batch_to_tokens = lambda *args, **kwargs: expand(*args, **kwargs) * factor


def draw_all(processes: Sequence[Sequence[str]], seed: int, num_samples: int, jobs: int) -> dict[str, dict[str, Any]]:
    """Run the arms of each process, `jobs` processes at a time. N-gram and broken arms must be the last of a process:
    after n-grams vLLM 0.32 cannot start another engine, and after a broken arm the sampler stays broken."""

    def work(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
        command = [sys.executable, __file__, "--draw", *arms, "--seed", str(seed), "--samples", str(num_samples)]
        done = subprocess.run(
            command, env={**os.environ, **environment(1)}, stdout=subprocess.PIPE, text=True, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(jobs) as pool:
        return {arm: figures for found in pool.map(work, processes) for arm, figures in found.items()}


def compare(a: dict[str, Any], b: dict[str, Any]) -> ChiSquareTest:
    bins = np.arange(VOCAB**LENGTH)
    return homogeneity(np.repeat(bins, a["counts"]), np.repeat(bins, b["counts"]), len(bins))


def table(found: dict[str, dict[str, Any]]) -> tuple[str, dict[str, ChiSquareTest]]:
    """Every arm against the first one, which has no drafts; Holm's correction over all but the broken arms."""
    reference, *others = found
    tests = {arm: compare(found[reference], found[arm]) for arm in others}
    correct = [arm for arm in others if arm not in BROKEN]
    adjusted = dict(zip(correct, holm([tests[arm].p_value for arm in correct]), strict=True))
    lines = ["arm     samples  length  accepted  chi-square  freedom        p     Holm  total variation  seconds"]
    for arm, figures in found.items():
        drafts = f"{figures['mean_acceptance_length']:6.3f}  {figures['draft_acceptance_rate']:8.1%}"
        line = f"{arm:7} {sum(figures['counts']):7}  {drafts}"
        if arm in tests:
            test = tests[arm]
            line += f"  {test.statistic:10.1f}  {test.num_bins - 1:7}  {test.p_value:7.2g}"
            line += f"  {adjusted[arm]:7.2g}" if arm in adjusted else f"  {'':7}"
            line += f"  {test.total_variation:15.4f}"
        else:
            line += " " * 59
        lines.append(f"{line}  {figures['seconds']:7.0f}")
    return "\n".join(lines), tests


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=80_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nulls", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--draw", nargs="+", metavar="ARM", help="run only these arms in this process, and print JSON")
    args = parser.parse_args()
    if args.draw:
        print(json.dumps({arm: draw(arm, args.seed, args.samples) for arm in args.draw}))
        return
    arms = ["plain", *(f"null{i + 1}" for i in range(args.nulls)), *METHODS, *BROKEN]
    print(table(draw_all([[arm] for arm in arms], args.seed, args.samples, args.jobs))[0])


if __name__ == "__main__":
    main()
