"""What this card takes for the linear layers of a step alone: how fast it is beside the one that others measured on.

    python benchmarks/gpu/floors.py [--model qwen3-8b] [--json floors.json]

All linears and the LM head by the framework's product in one CUDA graph, bfloat16, normally distributed weights, median
of as many replays as half a second has, after half a second of them (at many tokens the card's limit of power decides).
Beside it what the card had that vLLM's steps of `steps.py` were measured on.
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
VLLMS_CARD_MS = {"qwen3-8b": dict(zip(TOKENS, (4.16, 4.37, 4.26, 4.31, 4.76, 6.98, 12.24, 24.44), strict=True))}
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
        beside = VLLMS_CARD_MS.get(given.model, {}).get(num)
        print(f"{num:5} tokens  {found[num]:6.2f} ms" + (f"  {found[num] / beside:.3f} of {beside}" if beside else ""))
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": torch.cuda.get_device_name(), "ms": found}, indent=1))


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
    linear(inputs[weights[0].shape[1]], weights[0])  # the library wants its workspace before a graph is captured
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
