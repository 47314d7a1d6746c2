"""The time of a step's linear layers alone on this GPU, by number of tokens.

    python benchmarks/gpu/floors.py [--model qwen3-8b] [--json floors.json]

All linear layers and the LM head with torch's matmul in one CUDA graph, bfloat16, normally distributed weights. The
result is the median of half a second of replays, after half a second of warm-up: with many tokens the GPU's power limit
determines the time, and it takes effect only after some replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import linear

from paceline.model.config import ModelConfig
from paceline.model.shapes import SHAPES

TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024)
SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    weights = make_weights(SHAPES[args.model])
    found = {}
    for num in TOKENS:
        found[num] = time_ms(weights, num)
        print(f"{num:5} tokens  {found[num]:6.2f} ms")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"machine": torch.cuda.get_device_name(), "model": args.model, "ms": found}, indent=1)
        )


def make_weights(config: ModelConfig) -> list[torch.Tensor]:
    """[out, in] of every matmul, fused as in the engine."""
    hidden, head = config.hidden_size, config.head_dim
    layer = [
        ((config.num_heads + 2 * config.num_kv_heads) * head, hidden),
        (hidden, config.num_heads * head),
        (2 * config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
    ]
    shapes = layer * config.num_layers + [(config.vocab_size, hidden)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in shapes]


@torch.inference_mode()
def time_ms(weights: list[torch.Tensor], num_tokens: int) -> float:
    sizes = {weight.shape[1] for weight in weights}
    inputs = {size: torch.randn(num_tokens, size, device="cuda", dtype=torch.bfloat16) for size in sizes}
    linear(inputs[weights[0].shape[1]], weights[0])  # the library initialises itself before a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)
    replays(graph)
    return statistics.median(replays(graph))


def replays(graph: torch.cuda.CUDAGraph) -> list[float]:
    """The times of all replays within SECONDS, in ms."""
    found, until = [], time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        started, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        done.record()
        done.synchronize()
        found.append(started.elapsed_time(done))
    return found


if __name__ == "__main__":
    main()
