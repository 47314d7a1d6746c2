"""Batch-invariant products and attention on one GPU: which of torch's products have the reference's bits, and times.

    python benchmarks/gpu/invariance.py --json invariance.json [--only products,attention,prompts] [--model qwen3-8b,…]

Products: for each matrix of a model and each number of parts of the input dimension, the numbers of tokens at which
torch's product has the bits of `triton_product`, and the times of both (us, median). Attention: whether tiles of all
sizes have the same bits, and times beside those of the kernels that are not invariant. Prompts: times of a whole pass
over 8192 tokens of a prompt with both kinds of kernels, and of the comparison of products when an engine starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from paceline.bench.random_weights import random_decoder
from paceline.model.attention import GatheredAttention
from paceline.model.config import ModelConfig
from paceline.model.cuda.attention import AttentionRows, CudaPagedAttention, QKNormRope
from paceline.model.cuda.graphs import SIZES
from paceline.model.cuda.invariant import InvariantOps
from paceline.model.cuda.invariant_attention import InvariantPagedAttention
from paceline.model.cuda.invariant_product import is_equal, library_product, make_examples, triton_product
from paceline.model.cuda.ops import CudaOps
from paceline.model.kv import BLOCK, BatchPlan, BlockTable, PagedKV
from paceline.model.layer import Linear
from paceline.model.paged import PagedDecoder, Span
from paceline.model.rope import Rope
from paceline.model.shapes import SHAPES

CUDA = torch.device("cuda")
NUM_PROMPT_TOKENS, NUM_ROUNDS = 8192, 5
TIMED = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 4096, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="products,attention,prompts")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in args.model.split(","):
        parts = {"products": products, "attention": attention, "prompts": prompts}
        found[name] = {part: parts[part](SHAPES[name]) for part in args.only.split(",")}
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1))


def products(config: ModelConfig) -> list[dict[str, Any]]:
    rows = []
    for name, (num_in, num_out) in matrices(config).items():
        linear = random_linear(num_in, num_out)
        examples = make_examples(linear)
        dtype = torch.float32 if name == "lm_head" else None
        for parts in (1,) if name == "lm_head" else (1, 2, 4):
            if num_in % (16 * parts):
                continue
            equal = [size for size in SIZES if is_equal(examples, size, parts, dtype)]
            times = {size: product_times(linear, size, parts, dtype) for size in TIMED}
            rows.append({"matrix": name, "parts": parts, "equal": equal, "times_us": times})
            other = [size for size in SIZES if size not in equal]
            print(
                f"{name} [{num_out}, {num_in}] in {parts}: not equal at {other if len(other) < len(SIZES) else 'any'}"
            )
            print("  library / triton: " + "  ".join(f"{n}: {a:.1f} / {b:.1f}" for n, (a, b) in times.items()))
    return rows


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    d, i, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return {
        "qkv": (d, heads + 2 * config.num_kv_heads * config.head_dim), "o": (heads, d), "gate_up": (d, 2 * i),
        "down": (i, d), "lm_head": (d, config.vocab_size),
    }  # fmt: skip


def random_linear(num_in: int, num_out: int) -> Linear:
    linear = Linear(num_in, num_out).to(CUDA, torch.bfloat16).requires_grad_(False)
    assert linear.weight is not None
    linear.weight.normal_(0, num_in**-0.5)
    return linear


def product_times(linear: Linear, num_tokens: int, parts: int, dtype: torch.dtype | None) -> tuple[float, float]:
    x = torch.randn(num_tokens, linear.num_in, device=CUDA).bfloat16()
    library = time_us(lambda: library_product(x, linear, parts, dtype))
    return library, time_us(lambda: triton_product(x, linear, parts, dtype))


def time_us(run: Any) -> float:
    """Of one call, with the cache flushed before it, as a step reads other weights in between."""
    return 1e3 * float(triton.testing.do_bench(run, warmup=5, rep=20, return_mode="median"))


def attention(config: ModelConfig) -> list[dict[str, Any]]:
    rows = []
    for num_rows, num_queries, context in (
        *((n, q, 640) for n in (1, 8, 32, 128) for q in (1, 4, 8)), (1, 1, 8192), (8, 4, 8192), (1, 2048, 2048),
        (1, 8192, 8192), (8, 1024, 1024),
    ):  # fmt: skip
        row = attention_times(config, num_rows, num_queries, context)
        rows.append(row)
        print(
            " ".join(
                f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    return rows


def attention_times(config: ModelConfig, num_rows: int, num_queries: int, context: int) -> dict[str, Any]:
    """Compares the bits of the last queries, computed in tiles of several sizes."""
    generator = torch.Generator(CUDA).manual_seed(0)
    blocks = -(-context // BLOCK)
    kv = PagedKV(replace(config, num_layers=1), num_rows * blocks, torch.bfloat16, CUDA)
    kv.k.normal_(generator=generator)
    kv.v.normal_(generator=generator)
    heads, groups, dim = config.num_heads, config.num_kv_heads, config.head_dim
    tables = np.random.default_rng(0).permutation(num_rows * blocks).astype(np.int32).reshape(num_rows, blocks)
    x = torch.randn(num_rows, num_queries, heads + 2 * groups, dim, generator=generator, device=CUDA).bfloat16()
    cos, sin = Rope(config).tables(torch.empty(1, device=CUDA, dtype=torch.bfloat16))
    norm = torch.ones(dim, device=CUDA, dtype=torch.bfloat16) if config.qk_norm else None
    apply = QKNormRope(cos, sin, norm, norm, 1e-6)

    def plan(first: int, num: int) -> BatchPlan:
        start = context - num_queries + first
        positions = np.tile(np.arange(start, start + num), num_rows)
        return BatchPlan(
            positions * 0, positions, np.arange(0, num_rows * num + 1, num).astype(np.int32),
            np.full(num_rows, start + num, np.int32), tables, np.array([0]),
        )  # fmt: skip

    def run(first: int, num: int) -> torch.Tensor:
        q, k, v = x[:, first : first + num].flatten(0, 1).split([heads, groups, groups], 1)
        return InvariantPagedAttention.of_plan(kv, plan(first, num))(0, q, k, v, apply).unflatten(0, (num_rows, num))

    whole = run(0, num_queries)
    equal = {}
    for num in sorted({1, 2, 4, 8, 16, 32, 64, 100} & set(range(1, num_queries + 1))):
        first = num_queries - num
        equal[num] = bool(torch.equal(run(first, num), whole[:, first:]))
    q, k, v = x.flatten(0, 1).split([heads, groups, groups], 1)
    own = InvariantPagedAttention.of_plan(kv, plan(0, num_queries))
    times = {"invariant_us": time_us(lambda: own(0, q, k, v, apply))}
    if num_queries <= 16:
        a = plan(0, num_queries)
        on_device = [
            torch.as_tensor(each, device=CUDA) for each in (a.query_start, a.context, np.arange(num_rows), tables)
        ]
        on_device[2] = on_device[2].int()
        other = CudaPagedAttention(kv, AttentionRows(*on_device), num_queries)
        times["default_us"] = time_us(lambda: other(0, q, k, v, apply))
    else:
        gathered = GatheredAttention(kv, plan(0, num_queries))
        contiguous = [each.contiguous() for each in (q, k, v)]
        times["default_us"] = time_us(lambda: gathered(0, *contiguous))
    return {
        "rows": num_rows, "queries": num_queries, "context": context, "tile": own.size, "splits": own.splits,
        "equal": all(equal.values()) or str(equal), **times,
    }  # fmt: skip


def prompts(config: ModelConfig) -> dict[str, float]:
    decoder = random_decoder(config, torch.bfloat16, CUDA)
    started = time.perf_counter()
    ops = {"default": CudaOps(), "invariant": InvariantOps(decoder)}
    torch.cuda.synchronize()
    compared_s = time.perf_counter() - started
    paged, table = PagedDecoder(decoder, NUM_PROMPT_TOKENS // BLOCK), BlockTable()
    paged.pool.reserve(table, NUM_PROMPT_TOKENS)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, NUM_PROMPT_TOKENS).astype(np.int32)
    times: dict[str, list[float]] = {name: [] for name in ops}
    for _ in range(1 + NUM_ROUNDS):
        for name, seconds in times.items():
            decoder.ops = ops[name]
            torch.cuda.synchronize()
            started = time.perf_counter()
            paged.forward([Span(ids, 0, table, 1)])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    found = {f"{name}_s": statistics.median(seconds[1:]) for name, seconds in times.items()}
    found |= {"ratio": found["invariant_s"] / found["default_s"], "compared_s": compared_s}
    print(f"prompt of {NUM_PROMPT_TOKENS} tokens: " + " ".join(f"{key} {value:.3f}" for key, value in found.items()))
    return found


if __name__ == "__main__":
    main()
