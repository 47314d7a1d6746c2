"""`transformers.generate` as a bench worker: sdpa attention, dynamic KV cache, left padding.

Speculation is Hugging Face's prompt lookup (mode ngram), which supports one sequence at a time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Never stops generation; records the end time of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Worker:
    def load(self, model: str, dtype: str, device: str, threads: int, **_: Any) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model = self.model.to(device).eval()
        # Use the arguments of `run` only: the model's generation_config may set top_k, penalties and an eos_token_id.
        self.model.generation_config = GenerationConfig()
        return {}

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        temperature: float,
        seed: int,
        mode: str,
        k: int,
        **_: Any,
    ) -> dict[str, Any]:
        if mode not in ("plain", "ngram"):
            raise ValueError(f"transformers has no {mode} drafter")
        if mode == "ngram" and len(prompts) > 1:
            raise ValueError("transformers speculates at batch size 1 only")
        torch.manual_seed(seed)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if mode == "ngram":
            options["prompt_lookup_num_tokens"] = k
        clock = Clock()
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                use_cache=True,
                stopping_criteria=StoppingCriteriaList([clock]),
                **options,
            )
        seconds = time.perf_counter() - start
        tokens = out[:, width:].tolist()
        return {
            "seconds": seconds,
            "num_tokens": sum(map(len, tokens)),
            "step_s": [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)],  # the first is the prefill
            "token_ids": tokens,
        }
