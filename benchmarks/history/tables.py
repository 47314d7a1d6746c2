"""The shipped cost tables of vLLM on an H200, computed from measured step times.

    python benchmarks/history/tables.py             prints how each number is computed
    python benchmarks/history/tables.py --write     writes src/paceline/costs/*.json

Only whole steps were measured: with EAGLE-3 and k tokens, B rows take V(B, B(1+k)) + k·d(B), a verification and k
passes of the head. The time of the model's linear layers alone, L(tokens), separates the two:

    d(B) = median over k of (step(B, k) - plain(B) - (L(B(1+k)) - L(B))) / k,  never falling in B
    V(B, B(1+k)) = step(B, k) - k·d(B)

For 64 and 256 rows only plain steps were measured; there V(B, B(1+k)) = plain(B) + L(B(1+k)) - L(B).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from paceline.speculation.cost import CostTable, Point

PLAIN_MS = {1: 5.24, 8: 5.63, 32: 6.17, 64: 7.13, 128: 9.54, 256: 15.53}
EAGLE3_MS = {
    1: {1: 5.57, 8: 5.82, 32: 6.67, 128: 12.49},
    3: {1: 6.16, 8: 6.51, 32: 7.77, 128: 18.55},
    5: {1: 6.65, 8: 7.16, 32: 9.50, 128: 26.47},
    7: {1: 7.35, 8: 7.69, 32: 10.68, 128: 31.88},
}
NGRAM_K3_MS = {1: 7.72, 8: 8.33, 32: 10.68, 128: 25.26}
LINEARS_MS = {
    1: 4.16, 4: 4.19, 8: 4.37, 16: 4.17, 32: 4.26, 64: 4.31, 128: 4.76, 256: 6.98, 512: 12.24, 1024: 24.44
}  # fmt: skip

CONTEXT = 640  # tokens of a row, on average: a prompt of 512 and half of a completion of 256
KV_BYTES, BYTES_PER_S = 147_456, 4.2e12  # per token: 36 layers x 8 heads x 128 x 2 x 2 bytes; memory bandwidth
HISTORY_S = 2e-6  # per row and step: Paceline's history drafter in C, measured
SOURCE = "vLLM 0.25.1 measured on one H200, Qwen3-8B shape, 512+256 tokens; taken apart by benchmarks/history/tables.py"
FOLDER = Path(__file__).parents[2] / "src" / "paceline" / "costs"


def linears_ms(num_tokens: int) -> float:
    """Interpolated, and made non-decreasing: if fewer tokens were measured to take longer, the lower time is used for
    both, since the time is that of reading the weights. Proportional above 1024 tokens."""
    sizes, times = np.array(list(LINEARS_MS)), np.array(list(LINEARS_MS.values()))
    times = np.minimum.accumulate(times[::-1])[::-1]
    return float(np.interp(num_tokens, sizes, times)) * max(1.0, num_tokens / sizes[-1])


def head_ms() -> dict[int, float]:
    """d(B)"""
    found: dict[int, float] = {}
    for rows in EAGLE3_MS[1]:
        passes = [
            (EAGLE3_MS[k][rows] - PLAIN_MS[rows] - linears_ms(rows * (1 + k)) + linears_ms(rows)) / k for k in EAGLE3_MS
        ]
        found[rows] = max([float(np.median(passes)), *found.values()])
    return found


def points() -> list[Point]:
    """V(B, B(1+k)), k = 0 for plain steps."""
    head = head_ms()
    found = []
    for rows, plain in PLAIN_MS.items():
        found.append(Point(rows, rows, rows * CONTEXT, round(plain / 1e3, 8)))
        for k in EAGLE3_MS:
            tokens = rows * (1 + k)
            ms = EAGLE3_MS[k][rows] - k * head[rows] if rows in head else plain + linears_ms(tokens) - linears_ms(rows)
            found.append(Point(rows, tokens, rows * (CONTEXT + k), round(ms / 1e3, 8)))
    return found


def tables() -> list[CostTable]:
    steps = points()
    verify_s = {(p.num_rows, p.num_query_tokens): p.seconds for p in steps}
    eagle3 = [(rows, k, round(k * ms / 1e3, 8)) for rows, ms in head_ms().items() for k in (1, 7)]
    # The time of an n-gram lookup on the host does not depend on the draft length.
    ngram = [
        (rows, k, round(ms / 1e3 - verify_s[rows, 4 * rows], 8)) for rows, ms in NGRAM_K3_MS.items() for k in (1, 7)
    ]
    history = [(rows, k, rows * HISTORY_S) for rows in (1, 256) for k in (1, 7)]
    per_context_token_s = round(KV_BYTES / BYTES_PER_S, 11)
    name = "vllm-h200-qwen3-8b"
    return [
        CostTable(
            name,
            steps,
            {"eagle3": eagle3, "ngram": ngram, "suffix": history},
            per_context_token_s,
            f"{SOURCE}. suffix: 2 µs per row and step, what this project's history drafter takes.",
        ),
        CostTable(
            f"{name}-hosted",
            steps,
            {"eagle3": eagle3, "ngram": ngram, "suffix": ngram},
            per_context_token_s,
            f"{SOURCE}. suffix: what n-gram takes there, a proposer in vLLM's own host loop.",
        ),
    ]


def main() -> None:
    print("head, ms per pass:", {rows: round(ms, 3) for rows, ms in head_ms().items()})
    for table in tables():
        print(f"\n{table.name}: {table.source}")
        for point in table.points:
            print(f"{point.num_rows:4d} rows {point.num_query_tokens:5d} tokens {1e3 * point.seconds:7.3f} ms")
        if "--write" in sys.argv[1:]:
            table.save(FOLDER / f"{table.name}.json")


if __name__ == "__main__":
    main()
