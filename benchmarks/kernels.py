"""Times of the CPU kernels and of plain torch, with the shapes of SmolLM2-135M or of any Hugging Face directory.

    python benchmarks/kernels.py --threads 2 --json kernels.json

Both run in turn in one process. Each call uses another layer's weights, so that they are read from memory as in a real
step. Results are the best time of each call, since the machine may be busy. Three tables: a pass over all linear layers
with 1 to 256 rows, the attention of one layer, and the sampling of one position.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from paceline.model import kernels
from paceline.model.attention import Attention, PagedAttention
from paceline.model.config import ModelConfig
from paceline.model.kv import BLOCK, BatchPlan, PagedKV
from paceline.model.layer import Linear
from paceline.model.sample import Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.report.table import check_writable, render, write_json

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=100_000.0,
    max_positions=8192,
    tie_embeddings=True,
)


def best_ms(calls: Sequence[Callable[[int], Any]], seconds: float) -> list[float]:
    """The best time of each call, run in turn for this many seconds and at least three rounds. Calls get the round."""
    best, end, rounds = [float("inf")] * len(calls), perf_counter() + seconds, 0
    while rounds < 3 or perf_counter() < end:
        for i, call in enumerate(calls):
            start = perf_counter()
            call(rounds)
            best[i] = min(best[i], (perf_counter() - start) * 1e3)
        rounds += 1
    return best


def linears(config: ModelConfig, rows: list[int], seconds: float) -> list[dict[str, Any]]:
    c, heads = config, config.num_heads + 2 * config.num_kv_heads
    inner = {
        "qkv": (c.hidden_size, heads * c.head_dim),
        "o": (c.num_heads * c.head_dim, c.hidden_size),
        "gate_up": (c.hidden_size, 2 * c.intermediate_size),
        "down": (c.intermediate_size, c.hidden_size),
    }
    shapes = [shape for _ in range(c.num_layers) for shape in inner.values()] + [(c.hidden_size, c.vocab_size)]
    weights = [torch.randn(num_out, num_in) * 0.02 for num_in, num_out in shapes]
    packed = []
    for weight in weights:
        linear = Linear(weight.shape[1], weight.shape[0])
        linear.panels, linear.weight = kernels.pack(weight), None
        packed.append(linear)
    ops, out = kernels.NativeOps(), []
    for num_rows in rows:
        inputs = {num_in: torch.randn(num_rows, num_in) for num_in, _ in shapes}
        kinds: dict[tuple[int, int], list[float]] = {}  # the best time of each shape: [torch, paceline]
        end, rounds = perf_counter() + seconds, 0
        while rounds < 2 or perf_counter() < end:
            for weight, linear in zip(weights, packed, strict=True):
                x, best = inputs[linear.num_in], kinds.setdefault((linear.num_out, linear.num_in), [np.inf, np.inf])
                start = perf_counter()
                F.linear(x, weight)
                middle = perf_counter()
                ops.linear(x, linear)
                best[0], best[1] = min(best[0], middle - start), min(best[1], perf_counter() - middle)
            rounds += 1
        ms = [sum(kinds[num_out, num_in][side] for num_in, num_out in shapes) * 1e3 for side in (0, 1)]
        flops = 2 * num_rows * sum(num_in * num_out for num_in, num_out in shapes)
        out.append(
            {
                "rows": num_rows,
                "torch_ms": ms[0],
                "paceline_ms": ms[1],
                "speedup": ms[0] / ms[1],
                "paceline_gflops": flops / ms[1] / 1e6,
            }
        )
    return out


def attend(attention: Attention, num_layers: int, q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
    return attention(i % num_layers, q, k, v)


def attentions(config: ModelConfig, seconds: float) -> list[dict[str, Any]]:
    out = []
    for num_rows, num_query, context in [(1, 1, 150), (1, 8, 150), (16, 1, 150), (4, 1, 1000), (1, 256, 512)]:
        width = -(-context // BLOCK)
        kv = PagedKV(config, num_rows * width, torch.float32, "cpu", transposed=True)
        kv.k.normal_(), kv.v.normal_()
        tokens = num_rows * num_query
        plan = BatchPlan(
            tokens=np.zeros(tokens, np.int64),
            positions=np.tile(np.arange(context - num_query, context), num_rows),
            query_start=np.arange(num_rows + 1, dtype=np.int32) * num_query,
            context=np.full(num_rows, context, np.int32),
            block_tables=np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width),
            logits_at=np.arange(tokens),
        )
        q, k, v = (
            torch.randn(tokens, n, config.head_dim)
            for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        kinds = PagedAttention(kv, plan), kernels.NativePagedAttention(kv, plan)
        calls = [partial(attend, kind, config.num_layers, q, k, v) for kind in kinds]
        ms = best_ms(calls, seconds)
        shape = {"rows": num_rows, "queries": num_query, "context": context}
        out.append({**shape, "torch_us": ms[0] * 1e3, "paceline_us": ms[1] * 1e3, "speedup": ms[0] / ms[1]})
    return out


def draw(
    sampler: Sampler, logits: Tensor, keys: np.ndarray, positions: np.ndarray, params: SamplingArrays, i: int
) -> None:
    sampler.draw(logits, keys, positions, params)


def draws(vocab: int, seconds: float) -> list[dict[str, Any]]:
    """Logits in which a few tokens have far higher values than the others, as in a language model."""
    num, out = 8, []
    logits = torch.randn(num, vocab) * 2.5
    logits[:, :20] += torch.linspace(14, 6, 20)
    keys, positions = np.arange(num, dtype=np.uint64) * 977, np.arange(num)
    cases = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 50, 1.0, 0.0), (1.0, 0, 0.95, 0.0)]
    for case in [*cases, (1.0, 0, 1.0, 0.05)]:
        dtypes = (np.float32, np.int32, np.float32, np.float32)
        params = SamplingArrays(*(np.full(num, x, dtype) for x, dtype in zip(case, dtypes, strict=True)))
        ms = best_ms(
            [partial(draw, s, logits, keys, positions, params) for s in (Sampler(), Sampler(native=True))], seconds
        )
        names = ("temperature", "top_k", "top_p", "min_p")
        row = dict(zip(names, case, strict=True))
        out.append({**row, "torch_ms": ms[0] / num, "paceline_ms": ms[1] / num, "speedup": ms[0] / ms[1]})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory with the shapes to use")
    parser.add_argument("--rows", default="1,2,4,8,16,64,256")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=3.0, help="per line of a table")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check_writable(args.json)
    if args.threads:
        torch.set_num_threads(args.threads)
    config = ModelConfig.from_hf(json.loads((args.model / "config.json").read_text())) if args.model else SMOLLM2
    console, both = Console(), {"torch_ms": "torch ms", "paceline_ms": "paceline ms", "speedup": "speedup"}
    result: dict[str, Any] = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    with torch.inference_mode():
        result["linear"] = linears(config, [int(n) for n in args.rows.split(",")], args.seconds)
        columns = {"rows": "rows", **both, "paceline_gflops": "paceline GFLOP/s"}
        console.print(render(result["linear"], columns, f"A pass over all linear layers, {result['threads']} threads"))
        result["attention"] = attentions(config, args.seconds)
        columns = {"rows": "rows", "queries": "queries", "context": "context", "torch_us": "torch µs"}
        columns |= {"paceline_us": "paceline µs", "speedup": "speedup"}
        console.print(render(result["attention"], columns, "Attention of one layer"))
        result["draw"] = draws(config.vocab_size, args.seconds)
        columns = {"temperature": "temperature", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p", **both}
        console.print(render(result["draw"], columns, "Sampling of one position, in batches of 8"))
    if args.json:
        write_json(args.json, result)


if __name__ == "__main__":
    main()
