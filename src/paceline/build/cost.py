"""Measures the cost table of an engine on this machine: the time of steps by number of rows and tokens.

The table is measured once and cached with the models. Its file name is a hash of everything that the times depend on.
The timed steps run on padding tokens, in free KV blocks that are freed again, so they leave no trace in the engine.

Draft times are not measured: policies estimate them while they run. The exception is a head that drafts on the device
at the end of a step. A policy sees only that the step is longer, so its draft time is measured at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import __version__, native
from paceline.config import Config
from paceline.console import SafeConsole
from paceline.engine.runner import Runner
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.engine.sequence_table import SequenceTable
from paceline.model.kv import BLOCK
from paceline.model.lora import adapters_of
from paceline.model.paged import PagedDecoder
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.cost_files import cost_table_of
from paceline.types import Request, SamplingParams

QUERIES = (1, 2, 3, 4, 6, 8)  # query tokens of a row
CONTEXT, LONG_CONTEXT = 64, 512  # context tokens of a row; the difference gives the time per context token
BUDGET_S = 8.0  # for measuring every step once, the smallest first; the cost table extrapolates to the others
REPEAT_BUDGET_S = 10.0  # for this and for repeating quick steps
QUICK_S = 0.1  # only quicker steps are measured again
NUM_ROUNDS = 3

Timer = Callable[[int, int, int], float]  # (rows, query tokens per row, context tokens per row) -> seconds
DraftTimer = Callable[[int, int, int, int], float]  # also: draft tokens per row that are proposed at the end


def measured_costs(
    paged: PagedDecoder, runner: Runner, config: Config, draft_costs: Mapping[str, float] | None = None
) -> CostTable:
    """The table that speculation.cost_table names, or this machine's, measured if it is not cached. `draft_costs`: the
    time of a draft token relative to a step of the target, by drafter (`relative_draft_cost`). Policies replace it by
    what they measure."""
    if config.speculation.cost_table is not None:
        return cost_table_of(config.speculation.cost_table)
    identity = identity_of(paged, config)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = native.cache_dir() / "costs" / f"{digest}.json"
    table = _read_cached(path) or _measure_and_cache(paged, runner, config, identity, path)
    plain = {p.num_rows: p.seconds for p in table.points if p.num_query_tokens == p.num_rows}
    drafts = {
        drafter: [(rows, k, k * cost * seconds) for rows, seconds in plain.items() for k in (1, 8)]
        for drafter, cost in (draft_costs or {}).items()
    }
    k, max_rows = config.speculation.num_speculative_tokens, config.engine.max_num_seqs
    if drafts and runner.drafts_on_device and isinstance(k, int):
        some_rows = sorted({min(4**i, max_rows) for i in range(max_rows.bit_length() // 2 + 2)})
        measured = measure_drafts(partial(time_step, paged, runner), partial(_tokens_per_row, paged), some_rows, k)
        drafts = {drafter: measured or estimated for drafter, estimated in drafts.items()}
    return CostTable(table.name, table.points, drafts, table.per_context_token_s, table.source)


def identity_of(paged: PagedDecoder, config: Config) -> dict[str, Any]:
    """Everything that the times depend on."""
    decoder = paged.decoder
    cuda = decoder.device.type == "cuda"
    return {
        "paceline": __version__,
        "model": {key: str(value) for key, value in asdict(decoder.config).items()},
        "dtype": str(decoder.dtype),
        "device": torch.cuda.get_device_name(decoder.device) if cuda else cpu_name(),
        "clock": "device" if cuda else "host",
        "threads": None if cuda else torch.get_num_threads(),
        "native": decoder.embed.panels is not None or type(decoder.ops).__name__,
        "graphs": config.engine.graphs if cuda else None,
        "aux_layers": paged.aux_layers,
        "adapters": sum(p.numel() for lora in adapters_of(decoder) for p in lora.parameters()),
        "max_num_seqs": config.engine.max_num_seqs,
        "max_num_batched_tokens": config.engine.max_num_batched_tokens,
    }


def hardware_name(device: str) -> str:
    """The GPU's name, or the CPU's with the number of threads. Only the device itself if this process does not use the
    GPU: asking for the name would take memory there."""
    if torch.device(device).type != "cpu":
        return torch.cuda.get_device_name(device) if torch.cuda.is_initialized() else device
    num_threads = torch.get_num_threads()
    return f"{cpu_name()}, {num_threads} thread{'s' if num_threads > 1 else ''}"


def cpu_name() -> str:
    """The CPU's name in /proc/cpuinfo; on ARM its identification numbers."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    number = " ".join(fields[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in fields)
    return fields.get("model name") or f"{platform.machine()} {number}".strip()


def _read_cached(path: Path) -> CostTable | None:
    if not path.is_file():
        return None
    try:
        return CostTable.load(path)
    except ValueError as error:
        warnings.warn(f"{error}; measuring again", stacklevel=4)
        return None


def _measure_and_cache(
    paged: PagedDecoder, runner: Runner, config: Config, identity: dict[str, Any], path: Path
) -> CostTable:
    console = SafeConsole(stderr=True)
    started = time.perf_counter()
    with console.status("measuring step times on this machine (once; about ten seconds)"):
        points, per_context_token_s = measure(
            partial(time_step, paged, runner),
            partial(_tokens_per_row, paged),
            config.engine.max_num_seqs,
            config.engine.max_num_batched_tokens,
        )
    threads = f", {identity['threads']} threads" if identity["threads"] else ""
    source = f"measured on {identity['device']}{threads}, {identity['dtype']}"
    table = CostTable(path.stem, points, {}, per_context_token_s, source)
    console.print(f"measured step times on this machine in {time.perf_counter() - started:.1f} s")
    _cache(table, path)
    return table


def _cache(table: CostTable, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            table.save(Path(scratch) / path.name)
            os.replace(Path(scratch) / path.name, path)
    except OSError as error:
        warnings.warn(
            f"the cost table can't be written to {path.parent} ({error.strerror}) and is measured at every start; set "
            "PACELINE_CACHE to a writable folder",
            stacklevel=4,
        )


def measure(
    timer: Timer, tokens_per_row: Callable[[int], int], max_num_seqs: int, max_num_batched_tokens: int
) -> tuple[list[Point], float]:
    """Points of a cost table, and seconds per context token. `tokens_per_row(rows)`: how many tokens each of `rows`
    rows may have."""
    all_rows = sorted({min(2**i, max_num_seqs) for i in range(max_num_seqs.bit_length() + 1)})
    context = {rows: min(CONTEXT, tokens_per_row(rows) - max(QUERIES)) for rows in all_rows}
    steps = [(r, q) for r in all_rows for q in QUERIES if r * q <= max_num_batched_tokens and context[r] > 0]
    # Steps without draft tokens first: points with draft tokens are relative to them.
    steps.sort(key=lambda step: (step[1] > 1, step[0] * step[1]))
    if not steps:  # the KV cache has room for a single token only
        context, steps = {1: 0}, [(1, 1)]
    timer(*steps[0], context[steps[0][0]])  # warm up
    best: dict[tuple[int, int], float] = {}
    spent_s, token_s = 0.0, 0.0
    for round in range(NUM_ROUNDS):  # the best of several rounds: other processes may disturb one of them
        for rows, queries in steps:
            known_s = best.get((rows, queries))
            if round and (known_s is None or known_s > QUICK_S):
                continue
            if best and spent_s + token_s * rows * queries > (REPEAT_BUDGET_S if round else BUDGET_S):
                break
            seconds = timer(rows, queries, context[rows])
            spent_s += seconds
            token_s = seconds / (rows * queries)
            best[rows, queries] = min(seconds, known_s or seconds)
    points = [
        Point(rows, rows * queries, rows * (context[rows] + queries), seconds)
        for (rows, queries), seconds in sorted(best.items())
        if (rows, 1) in best
    ]
    return points, _per_context_token_s(timer, tokens_per_row, best)


def _per_context_token_s(
    timer: Timer, tokens_per_row: Callable[[int], int], best: Mapping[tuple[int, int], float]
) -> float:
    """Measured with the largest number of rows that is quick: more context tokens, less noise."""
    quick = [rows for (rows, queries), seconds in best.items() if queries == 1 and seconds <= QUICK_S]
    rows = max((rows for rows in quick if tokens_per_row(rows) > LONG_CONTEXT), default=1)
    longer = min(LONG_CONTEXT, tokens_per_row(rows) - 1)
    if longer <= CONTEXT:
        return 0.0
    pairs = [(timer(rows, 1, CONTEXT), timer(rows, 1, longer)) for _ in range(NUM_ROUNDS)]
    short_s, long_s = (min(times) for times in zip(*pairs, strict=True))
    return max(0.0, (long_s - short_s) / (rows * (longer - CONTEXT)))


def measure_drafts(
    timer: DraftTimer, tokens_per_row: Callable[[int], int], all_rows: Iterable[int], k: int
) -> list[tuple[int, int, float]]:
    """(rows, draft tokens, seconds): how much longer a step takes if it proposes draft tokens at its end, one or k per
    row. Numbers of rows that do not fit into the KV cache are left out."""
    found = []
    for rows in all_rows:
        context = min(CONTEXT, tokens_per_row(rows) - 2 - k)
        if context > 0:
            lengths = sorted({1, k})
            rounds = [[timer(rows, 1, context, length) for length in (0, *lengths)] for _ in range(NUM_ROUNDS)]
            plain_s, *drafting_s = (min(times) for times in zip(*rounds, strict=True))
            found += [(rows, length, max(0.0, s - plain_s)) for length, s in zip(lengths, drafting_s, strict=True)]
    return found


def _tokens_per_row(paged: PagedDecoder, num_rows: int) -> int:
    return min(paged.pool.num_free // num_rows * BLOCK, paged.decoder.config.max_positions)


def time_step(
    paged: PagedDecoder, runner: Runner, num_rows: int, num_queries: int, context: int, draft_length: int = 0
) -> float:
    """Seconds of one step: each of `num_rows` rows verifies num_queries - 1 draft tokens after `context` tokens, and
    the device proposes `draft_length` tokens per row at the end. On a GPU it is the device's time: the host's work
    overlaps with it."""
    request = Request(-1, (0,) * (context + 1), SamplingParams(max_tokens=num_queries), noise_key=0)
    num_tokens = context + num_queries + draft_length
    sequences = [Sequence(request, -1 - i, 1 + num_tokens, ()) for i in range(num_rows)]  # no request has these numbers
    runner.set_draft_length(draft_length)
    try:
        for sequence in sequences:
            sequence.num_computed = context
            assert paged.pool.reserve(sequence.table, num_tokens)
        table, slots = SequenceTable(num_rows), np.arange(num_rows)
        table.add(*sequences)
        rows = ScheduledBatch.make(table, slots, np.ones(num_rows, np.int64), np.ones(num_rows, bool))
        rows.set_drafts(np.zeros((num_rows, num_queries - 1), np.int32), np.full(num_rows, num_queries - 1), 0)
        if paged.decoder.device.type == "cuda":
            runner.launch(rows, {}).wait()  # the first step compiles kernels and captures a graph
            # A device that has paused is slower, so the step that counts begins when another one ends.
            before, pending = runner.launch(rows, {}), runner.launch(rows, {})
            before.wait()
            pending.wait()
            return sum(pending.times())
        started = time.perf_counter()
        runner.launch(rows, {}).wait()
        return time.perf_counter() - started
    finally:
        runner.set_draft_length(0)
        for sequence in sequences:
            runner.remove(sequence)
            paged.pool.truncate(sequence.table, 0)
