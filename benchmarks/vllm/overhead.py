"""The overhead of Paceline's VllmEngine over vLLM's own LLM.generate, with the same model, prompts and seeds.

    .venv-vllm/bin/python benchmarks/vllm/overhead.py

Both run in this process, in turn. Results are medians over rounds of the ratio, of wall time and of this process's CPU
time. CPU time is also valid on a busy machine (with OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from paceline.bench.prompts import read_prompts
from paceline.build.config import load_config
from paceline.build.run import build_rollout_engine
from paceline.build.vllm import vllm_options
from paceline.chat.template import encode
from paceline.cluster.vllm_python import in_this_process
from paceline.model import store
from paceline.model.hf_shape import read_shape
from paceline.types import Request, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    base = [
        f"model.name={args.model}",
        "engine.kind=vllm",
        "engine.graphs=false",
        "engine.kv_tokens=16384",
        "speculation.method=none",
    ]
    config = load_config(None, [*base, f"engine.max_num_seqs={args.batch}", "engine.prefix_sharing=false"])
    directory = store.resolve(config.model.name)
    tokenizer = store.load_tokenizer(directory)
    texts = read_prompts()
    prompts = [encode(tokenizer, texts[i % len(texts)]) for i in range(args.batch)]
    engine = build_rollout_engine(config)
    with in_this_process():
        from vllm import LLM
        from vllm import SamplingParams as VllmSampling

        llm = LLM(**vllm_options(config, directory, read_shape(directory)), skip_tokenizer_init=True)
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    counter = iter(range(10**9))

    def through_paceline() -> Any:
        handles = [engine.submit(Request(next(counter), p, sampling, i)) for i, p in enumerate(prompts)]
        while not all(handle.done for handle in handles):
            engine.step()
        return [handle.completion.token_ids.tolist() for handle in handles if handle.completion is not None]

    def directly() -> Any:
        params = [
            VllmSampling(max_tokens=args.tokens, ignore_eos=True, seed=i, logprobs=0, detokenize=False)
            for i in range(len(prompts))
        ]
        wanted: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(o.outputs[0].token_ids) for o in llm.generate(wanted, params, use_tqdm=False)]

    assert through_paceline() == directly()  # the same tokens; this is also the warm-up
    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    times: dict[tuple[str, str], list[float]] = {}
    for i in range(args.rounds):
        for name, run in sorted({"paceline": through_paceline, "direct": directly}.items(), reverse=bool(i % 2)):
            before = {clock: read() for clock, read in clocks.items()}
            run()
            for clock, read in clocks.items():
                times.setdefault((name, clock), []).append(read() - before[clock])
    for clock in clocks:
        ours, direct = times["paceline", clock], times["direct", clock]
        ratio = statistics.median(a / b for a, b in zip(ours, direct, strict=True))
        medians = statistics.median(ours), statistics.median(direct)
        print(f"{clock} time: {medians[0]:.3f} s with VllmEngine, {medians[1]:.3f} s directly")
        print(f"  overhead: median of the rounds {ratio - 1:+.1%}, of the best {min(ours) / min(direct) - 1:+.1%}")


if __name__ == "__main__":
    main()
