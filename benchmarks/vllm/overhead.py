"""What it costs to speak to vLLM through VllmEngine, against vLLM's own LLM.generate: same model, prompts, seeds.

    .venv-vllm/bin/python benchmarks/vllm/overhead.py

Both in this process, in turns. Figures are medians of the rounds' ratios, by the clock and by the CPU time of this
process: the latter also means something on a machine that others use (there with OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from paceline.bench.prompts import BUILTIN
from paceline.build.run import build_rollout_engine
from paceline.build.vllm import vllm_options
from paceline.cluster.vllm_python import in_this_process
from paceline.config import load_config
from paceline.model import store
from paceline.model.hf_shape import read_shape
from paceline.tasks.prompt import encode
from paceline.types import Request, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    given = [f"model.name={options.model}", "engine.kind=vllm", "engine.graphs=false", "engine.kv_tokens=16384"]
    config = load_config(None, [*given, f"engine.max_num_seqs={options.batch}", "engine.prefix_sharing=false"])
    directory = store.resolve(config.model.name)
    tokenizer = store.load_tokenizer(directory)
    prompts = [encode(tokenizer, BUILTIN[i % len(BUILTIN)]) for i in range(options.batch)]
    ours = build_rollout_engine(config)
    with in_this_process():
        from vllm import LLM
        from vllm import SamplingParams as VllmSampling

        theirs = LLM(**vllm_options(config, directory, read_shape(directory)), skip_tokenizer_init=True)
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    counter = iter(range(10**9))

    def through_us() -> Any:
        handles = [ours.submit(Request(next(counter), p, sampling, i)) for i, p in enumerate(prompts)]
        while not all(handle.done for handle in handles):
            ours.step()
        return [handle.completion.token_ids.tolist() for handle in handles if handle.completion is not None]

    def directly() -> Any:
        params = [
            VllmSampling(max_tokens=options.tokens, ignore_eos=True, seed=i, logprobs=0, detokenize=False)
            for i in range(len(prompts))
        ]
        wanted: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(o.outputs[0].token_ids) for o in theirs.generate(wanted, params, use_tqdm=False)]

    assert through_us() == directly()  # the same work, and both are warm now
    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    times: dict[tuple[str, str], list[float]] = {}
    for i in range(options.rounds):
        for name, run in sorted({"us": through_us, "direct": directly}.items(), reverse=bool(i % 2)):
            before = {clock: read() for clock, read in clocks.items()}
            run()
            for clock, read in clocks.items():
                times.setdefault((name, clock), []).append(read() - before[clock])
    for clock in clocks:
        us, direct = times["us", clock], times["direct", clock]
        ratio = statistics.median(a / b for a, b in zip(us, direct, strict=True))
        print(f"{clock} time: {statistics.median(us):.3f} s through us, {statistics.median(direct):.3f} s directly")
        print(f"  overhead: median of the rounds {ratio - 1:+.1%}, of the best {min(us) / min(direct) - 1:+.1%}")


if __name__ == "__main__":
    main()
