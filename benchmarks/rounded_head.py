"""The acceptance of the shipped EAGLE-3 head in float32 and in float8 (speculation.head_dtype, for GPUs), on a CPU.

    python benchmarks/rounded_head.py prompts.jsonl [--temperature 1.0] [--num 64]

SmolLM2-135M with the same prompts and the same noise, once with the head as it is and once with its large products
rounded as on a GPU; here each matrix has one scale. The emitted tokens are the same; the accepted draft tokens are
counted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.build.drafter import drafting_head
from paceline.build.engine import build_engine
from paceline.config import Config
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import assign_head, head_state
from paceline.model.kernels import NativeOps
from paceline.model.layer import FLOAT8
from paceline.model.store import load_tokenizer, resolve
from paceline.speculation.batch import Commits
from paceline.types import Request, SamplingParams, noise_key

LARGEST = torch.finfo(FLOAT8).max
# As model/cuda/float8.py.
ROUNDED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def rounded(x: Tensor, scale: float = 1.0) -> Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST).to(FLOAT8).to(x.dtype) * scale


class Rounding(NativeOps):
    def norm_concat(self, *args: Any) -> Tensor:
        return rounded(super().norm_concat(*args))

    def attend(self, *args: Any) -> Tensor:
        return rounded(super().attend(*args))

    def add_norm(self, *args: Any) -> tuple[Tensor, Tensor]:
        x, h = super().add_norm(*args)
        return x, rounded(h)

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        return rounded(super().silu_mul(gate_up_TI))


def round_products(head: Eagle3Head) -> None:
    pairs = [(name, tensor.clone()) for name, tensor in head_state(head)]
    for name, tensor in pairs:
        if any(part in name for part in ROUNDED):
            tensor.copy_(rounded(tensor, float(tensor.abs().max()) / LARGEST))
    assign_head(head, pairs)
    head.ops = Rounding()


def acceptance(requests: list[Request], k: int, rounds: bool) -> tuple[float, list[float]]:
    """The acceptance length, and the conditional acceptance probability at each draft position."""
    config = Config.model_validate(
        {
            "engine": {"max_num_seqs": 32},
            "speculation": {"method": "eagle3", "policy": "static", "num_speculative_tokens": k},
        }
    )
    engine = build_engine(config)
    head, drafter = drafting_head(config, engine.drafter), engine.drafter
    assert head is not None and drafter is not None
    if rounds:
        round_products(head)
    counts = np.zeros((k, 2))  # by position: decided, accepted
    original = drafter.observe

    def observe(commits: Commits) -> None:
        original(commits)
        for drafted, accepted in zip(commits.num_drafted, commits.num_accepted, strict=True):
            if drafted == k:
                counts[: accepted + 1, 0] += 1
                counts[:accepted, 1] += 1

    drafter.observe = observe  # type: ignore[method-assign]
    engine.generate(requests)
    probabilities = counts[:, 1] / counts[:, 0].clip(1)
    return 1 + float(np.cumprod(probabilities).sum()), probabilities.round(3).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--num", type=int, default=64)
    parser.add_argument("--k", type=int, default=5)
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve("smollm2-135m"))
    lines = args.prompts.read_text().splitlines()[: args.num]
    sampling = SamplingParams(temperature=args.temperature, max_tokens=64)
    requests = []
    for i, line in enumerate(lines):
        chat = [{"role": "user", "content": json.loads(line)["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        requests.append(Request(i, tuple(prompt), sampling, noise_key("rounded head", i), f"{i}"))
    for name, rounds in {"float32": False, "float8": True}.items():
        length, probabilities = acceptance(requests, args.k, rounds)
        print(f"{name}: acceptance length {length:.3f}, by position {probabilities}", flush=True)


if __name__ == "__main__":
    main()
