"""Times of the Triton kernels with different program sizes on this GPU: the constants in model/cuda come from this.

    python benchmarks/gpu/tune.py [--only attention,draw,small,products] [--json tune.json]

Kernels of Qwen3-8B's shape in bfloat16, under the conditions of a step: inputs that are not in the caches, many calls
in one CUDA graph. Results are the median of several replays, in microseconds per call. Several processes compile all
variants first; Triton caches them on disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from paceline.model.cuda import attention, ops, sample, swiglu
from paceline.model.kv import BLOCK, PagedKV
from paceline.model.shapes import SHAPES

CONFIG = SHAPES["qwen3-8b"]
DEVICE = torch.device("cuda")
CONTEXT = 640
BYTES_PER_S = 4.2e12
# (rows, query tokens per row), and program sizes: tokens per iteration, warps, stages, registers (0: no limit).
STEPS = [(1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (32, 4), (64, 1), (128, 1), (128, 4), (128, 8), (256, 1), (256, 4)]
PROGRAMS = [
    (32, 4, 2, 0), (32, 4, 2, 64), (32, 4, 3, 0), (32, 4, 4, 0), (32, 2, 3, 0), (16, 2, 4, 0),
    (64, 4, 2, 0), (64, 4, 2, 128), (64, 4, 3, 0),
]  # fmt: skip
# Tokens per warp, warps.
DRAWS = [(1024, 1), (2048, 1), (4096, 1), (8192, 1), (1024, 2), (2048, 2), (4096, 2)]
Call = Callable[[int], object]  # the i-th call of a step


def time_us(call: Call, num: int, rounds: int = 7) -> float:
    """The time of one of `num` calls in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num):
            call(i)
    graph.replay()
    found = []
    for _ in range(rounds):
        started, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        done.record()
        torch.cuda.synchronize()
        found.append(started.elapsed_time(done) * 1e3 / num)
    return statistics.median(found)


# ---- attention ----


class Step:
    """Inputs of attention: each row has its own KV blocks, in so many layers that the caches cannot hold them."""

    def __init__(self, num_rows: int, num_queries: int, context: int, num_layers: int) -> None:
        pages = -(-(context + 1) // BLOCK)
        self.num_queries, self.num_layers = num_queries, num_layers
        shape = replace(CONFIG, num_layers=num_layers)
        self.kv = PagedKV(shape, num_rows * pages, torch.bfloat16, DEVICE)
        self.kv.k.normal_(), self.kv.v.normal_()
        tables = torch.randperm(num_rows * pages, device=DEVICE).to(torch.int32).view(num_rows, pages)
        int32 = partial(torch.arange, dtype=torch.int32, device=DEVICE)
        start = int32(num_rows + 1) * num_queries
        full = torch.full((num_rows,), context, dtype=torch.int32, device=DEVICE)
        self.rows = attention.AttentionRows(start, full, int32(num_rows), tables)
        num_heads = CONFIG.num_heads + 2 * CONFIG.num_kv_heads
        heads = torch.randn(num_rows * num_queries, num_heads, CONFIG.head_dim, device=DEVICE).bfloat16()
        self.qkv = heads.split([CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads], 1)
        cos, sin = torch.randn(2, 4096, CONFIG.head_dim // 2, device=DEVICE)
        norm = torch.ones(CONFIG.head_dim, dtype=torch.bfloat16, device=DEVICE)
        self.norm_rope = attention.QKNormRope(cos, sin, norm, norm, 1e-6)
        self.positions = torch.arange(len(heads), device=DEVICE) % context

    def call(self, fused: bool) -> Call:
        """`fused`: the attention kernel applies norm and RoPE to q and k; else a kernel before it does."""
        paged = attention.CudaPagedAttention(self.kv, self.rows, self.num_queries)
        q, k, v = self.qkv
        if fused:
            return lambda i: paged(i % self.num_layers, q, k, v, self.norm_rope)
        rotated = partial(
            ops._norm_rope, positions_T=self.positions, norm_rope=self.norm_rope, norm=self.norm_rope.q_norm
        )
        return lambda i: paged(i % self.num_layers, rotated(q), rotated(k), v)


def as_program(tokens: int, warps: int, stages: int, registers: int) -> Any:
    chosen = attention.tuning

    def tuning(*of: Any) -> dict[str, int | None]:
        program = {"TOKENS": tokens, "num_warps": warps, "num_stages": stages, "maxnreg": registers or None}
        return {"NEW_FIRST": chosen(*of)["NEW_FIRST"], **program}

    return mock.patch.object(attention, "tuning", tuning)


def compile_attention(step: tuple[int, int], program: tuple[int, int, int, int]) -> None:
    with as_program(*program):
        Step(*step, context=40, num_layers=1).call(True)(0)
    torch.cuda.synchronize()


def time_attention() -> Iterator[dict[str, Any]]:
    for num_rows, num_queries in STEPS:
        kv_bytes = num_rows * CONTEXT * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 2
        num_layers = max(2, min(36, -(-(3 << 28) // kv_bytes)))
        step = Step(num_rows, num_queries, CONTEXT, num_layers)
        row = {
            "kernel": "attention",
            "rows": num_rows,
            "queries": num_queries,
            "floor_us": kv_bytes / BYTES_PER_S * 1e6,
        }
        row["before, as it is"] = time_us(step.call(False), 36)
        row["as it is"] = time_us(step.call(True), 36)
        for program in PROGRAMS:
            name = "{} tokens {} warps {} stages {} registers".format(*program)
            with as_program(*program):
                try:
                    row[name] = time_us(step.call(True), 36)
                except Exception as error:  # such as too much shared memory
                    row[name] = f"{type(error).__name__}"
        yield row
        del step
        torch.cuda.empty_cache()


# ---- draws ----


def draw_call(num: int, vocab: int, some: bool) -> Call:
    """A draw from the model's float32 logits; with `some`, from a head's bfloat16 logits of some tokens."""
    rng = np.random.default_rng(0)
    logits = torch.randn(4, num, vocab, device=DEVICE).to(torch.bfloat16 if some else torch.float32)
    keys, at = (torch.as_tensor(rng.integers(0, 2**40, num), device=DEVICE) for _ in range(2))
    one = torch.ones(num, dtype=torch.float64, device=DEVICE)
    ids = torch.arange(0, 4 * vocab, 4, device=DEVICE) if some else None
    return lambda i: sample.draw(logits[i % 4], keys, at, one, 0, ids, margins=some)


def compile_draw(program: tuple[int, int], some: bool) -> None:
    with as_draw(*program):
        draw_call(2, 32000 if some else 151936, some)(0)
    torch.cuda.synchronize()


def as_draw(part: int, warps: int) -> Any:
    return mock.patch.multiple(sample, TOKENS_PER_WARP=part, LARGE_VOCAB=0 if warps == 2 else 1 << 30)


def time_draws() -> Iterator[dict[str, Any]]:
    for num, vocab, some in ((1, 151936, False), (128, 151936, False), (512, 151936, False), (1024, 151936, False),
                             (128, 32000, True)):  # fmt: skip
        row: dict[str, Any] = {"kernel": "draw", "positions": num, "vocab": vocab}
        call = draw_call(num, vocab, some)
        for program in DRAWS:
            with as_draw(*program):
                row["{} tokens {} warps".format(*program)] = time_us(call, 8)
        yield row


# ---- small kernels ----


def time_small() -> Iterator[dict[str, Any]]:
    width, fused = CONFIG.hidden_size, ops.CudaOps()
    weight = torch.ones(width, dtype=torch.bfloat16, device=DEVICE)
    for num in (1, 32, 128, 512, 1024):
        x, y = (torch.randn(num, width, device=DEVICE).bfloat16() for _ in range(2))
        row: dict[str, Any] = {"kernel": "add_norm", "tokens": num}
        for warps in (4, 8, 16):
            sizes = partial(with_warps, ops._row_options, warps)
            with mock.patch.object(ops, "_row_options", sizes):
                row[f"{warps} warps"] = time_us(lambda i: fused.add_norm(x, y, weight, 1e-6), 64)  # noqa: B023
        yield row
        gate_up = torch.randn(num, 2 * CONFIG.intermediate_size, device=DEVICE).bfloat16()
        row = {"kernel": "silu_mul", "tokens": num}
        for block, warps in ((1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (512, 2)):
            with mock.patch.object(ops, "SILU", (block, warps)):
                row[f"{block} wide {warps} warps"] = time_us(lambda i: fused.silu_mul(gate_up), 64)  # noqa: B023
        yield row


def with_warps(sizes: Callable[[torch.Tensor], dict[str, Any]], warps: int, x: torch.Tensor) -> dict[str, Any]:
    return sizes(x) | {"num_warps": warps}


# ---- matmuls ----


def time_products() -> Iterator[dict[str, Any]]:
    """Matmuls of torch's two libraries. 8 weights in turn (2 of the LM head), so that they are not in the caches."""
    c = CONFIG
    shapes = {
        "qkv": (c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
        "o": (c.num_heads * c.head_dim, c.hidden_size),
        "gate_up": (c.hidden_size, 2 * c.intermediate_size),
        "down": (c.intermediate_size, c.hidden_size),
        "lm_head": (c.hidden_size, c.vocab_size),
    }
    for name, (num_in, num_out) in shapes.items():
        weights = [torch.randn(num_out, num_in, device=DEVICE).bfloat16() for _ in range(2 if name == "lm_head" else 8)]
        for num in (1, 8, 32, 128, 256, 512, 1024):
            x = torch.randn(num, num_in, device=DEVICE).bfloat16()
            row: dict[str, Any] = {"kernel": name, "tokens": num}
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                row[library] = time_us(partial(product, x, weights), 24)
            torch.backends.cuda.preferred_blas_library("default")
            if name == "gate_up":
                row["and silu"] = time_us(partial(matmul_then_silu, x, weights), 24)
                row["in one"] = time_us(partial(fused_swiglu, x, weights), 24)
            yield row
        weights.clear()
        torch.cuda.empty_cache()


def product(x: torch.Tensor, weights: list[torch.Tensor], i: int) -> torch.Tensor:
    return torch.nn.functional.linear(x, weights[i % len(weights)])


def matmul_then_silu(x: torch.Tensor, weights: list[torch.Tensor], i: int) -> torch.Tensor:
    return ops.CudaOps().silu_mul(product(x, weights, i))


def fused_swiglu(x: torch.Tensor, weights: list[torch.Tensor], i: int) -> torch.Tensor:
    return swiglu.swiglu(x, weights[i % len(weights)])


PARTS = {"attention": time_attention, "draw": time_draws, "small": time_small, "products": time_products}


def compile_all(wanted: list[str], processes: int) -> None:
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        jobs = []
        if "attention" in wanted:
            kinds = {
                (attention.num_splits(rows, CONFIG.num_kv_heads, queries), queries): (rows, queries)
                for rows, queries in STEPS
            }
            jobs += [pool.submit(compile_attention, step, program) for step in kinds.values() for program in PROGRAMS]
        if "draw" in wanted:
            jobs += [pool.submit(compile_draw, program, some) for program in DRAWS for some in (False, True)]
        for job in jobs:
            job.exception()  # errors are reported when the kernel is timed


def time_all(wanted: list[str], path: Path | None) -> None:
    found = []
    for name in wanted:
        for row in PARTS[name]():
            found.append(row)
            figures = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
            print(", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
            if path is not None:
                path.write_text(json.dumps({"machine": torch.cuda.get_device_name(), "rows": found}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = args.only.split(",")
    compile_all(wanted, args.processes)
    time_all(wanted, args.json)


if __name__ == "__main__":
    main()
