"""A vLLM worker for the bench and the tests: prompt tokens in, completion tokens out.

`paceline.bench.serve` runs it with vLLM's interpreter. It imports vLLM and nothing of Paceline. A worker has one LLM,
with fixed speculation settings. The engine runs in this process, with this process's OpenMP threads.
"""

from __future__ import annotations

import time
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}


class Worker:
    def load(
        self,
        model: str,
        dtype: str,
        mode: str,
        k: int,
        max_num_seqs: int,
        max_model_len: int,
        speculation: dict[str, Any] | None = None,
        prefix_caching: bool = False,
        options: dict[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        speculative = None
        if mode != "plain":
            speculative = {"method": mode, "num_speculative_tokens": k, **(speculation or {})}
        self.llm = LLM(
            model=model,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=prefix_caching,
            speculative_config=speculative,
            disable_log_stats=False,  # the log stats have the speculation counters
            seed=0,
            **(options or {}),
        )
        self.step_s: list[float] = []
        self._time_steps()
        return {}

    def _time_steps(self) -> None:
        step = self.llm.llm_engine.step

        def timed() -> Any:
            start = time.perf_counter()
            outputs = step()
            self.step_s.append(time.perf_counter() - start)
            return outputs

        self.llm.llm_engine.step = timed

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        temperature: float,
        logprobs: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        # No seed per request: vLLM would then sample row by row. The LLM has a seed.
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if logprobs else None,
        )
        before = self._counters()
        self.step_s.clear()
        start = time.perf_counter()
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        samples = [output.outputs[0] for output in outputs]
        reply: dict[str, Any] = {
            "seconds": seconds,
            "num_tokens": sum(len(sample.token_ids) for sample in samples),
            "step_s": self.step_s[1:],  # the first step is the prefill
            "token_ids": [list(sample.token_ids) for sample in samples],
            **{name: value - before[name] for name, value in self._counters().items()},
        }
        if logprobs:
            reply["logprobs"] = [
                [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
                for sample in samples
            ]
        return reply

    def _counters(self) -> dict[str, int]:
        found = dict.fromkeys(COUNTERS.values(), 0)
        for metric in self.llm.get_metrics():
            if metric.name in COUNTERS:
                found[COUNTERS[metric.name]] += int(metric.value)
        return found
