"""What this card takes for the linear layers of a step alone.

    python benchmarks/gpu/floors.py [--model qwen3-8b] [--json floors.json]

All linears and the LM head by the framework's product in one CUDA graph, bfloat16, normally distributed weights, median
of as many replays as half a second has, after half a second of them: at many tokens the card's limit of power decides,
and the first replays after a pause do not know it.
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
    given = parser.parse_args()
    weights = make_weights(SHAPES[given.model])
    found = {}
    for num in TOKENS:
        found[num] = time_ms(weights, num)
        print(f"{num:5} tokens  {found[num]:6.2f} ms")
    if given.json is not None:
        given.json.write_text(
            json.dumps({"machine": torch.cuda.get_device_name(), "model": given.model, "ms": found}, indent=1)
        )


def make_weights(config: ModelConfig) -> list[torch.Tensor]:
    """[out, in] of every product, as packed as the engine has them."""
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
    linear(inputs[weights[0].shape[1]], weights[0])  # what the library does but once is done before a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)
    replays(graph)
    return statistics.median(replays(graph))


def replays(graph: torch.cuda.CUDAGraph) -> list[float]:
    """Of SECONDS, each in ms."""
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
