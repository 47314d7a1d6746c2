"""What steps of an engine take on this machine: measured once, in seconds, and kept.

Steps are timed with nothing but padding in them, in blocks of KV that are free and then free again. The
engine that comes after finds everything as it was. A table is kept beside the models, by all that its times depend on.
How long drafting takes is not measured: policies learn it while they run. But of a head that drafts at the end of a
step nothing shows except that the step is longer, so that is measured, at every start.
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
from typing import TYPE_CHECKING, Any

from paceline import __version__, native
from paceline.config import Config
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.cost_files import cost_table_of

if TYPE_CHECKING:
    from paceline.engine.runner import Runner
    from paceline.model.paged import PagedDecoder

QUERIES = (1, 2, 3, 4, 6, 8)  # tokens of a row that are verified together
CONTEXT, LONG_CONTEXT = 64, 512  # tokens of a row; what a token of context costs shows between the two
BUDGET_S = 8.0  # for measuring everything once, the least work first: what does not fit is extrapolated
AGAIN_S = 10.0  # for measuring again what is quick
QUICK_S = 0.1
NUM_ROUNDS = 3

Timer = Callable[[int, int, int], float]  # rows, their query tokens and their context before those; seconds
DraftTimer = Callable[[int, int, int, int], float]  # and tokens that are drafted at the end


def measured_costs(
    paged: PagedDecoder, runner: Runner, config: Config, heads: Mapping[str, float] | None = None
) -> CostTable:
    """The table that speculation.cost_table names; else this machine's, measured if it was not before. `heads`: what a
    pass of a drafter's own model costs in steps of the target (`head_cost`), until it shows by itself."""
    if config.speculation.cost_table is not None:
        return cost_table_of(config.speculation.cost_table)
    identity = identity_of(paged, config)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = native.cache_dir() / "costs" / f"{digest}.json"
    table = _kept(path) or _measure_and_keep(paged, runner, config, identity, path)
    plain = {p.num_rows: p.seconds for p in table.points if p.num_query_tokens == p.num_rows}
    drafts = {
        drafter: [(rows, k, k * cost * seconds) for rows, seconds in plain.items() for k in (1, 8)]
        for drafter, cost in (heads or {}).items()
    }
    longest, most = config.speculation.num_speculative_tokens, config.engine.max_num_seqs
    if drafts and runner.has_head and isinstance(longest, int):
        some_rows = sorted({min(4**i, most) for i in range(most.bit_length() // 2 + 2)})
        measured = measure_drafts(partial(time_step, paged, runner), partial(_room, paged), some_rows, longest)
        drafts = {drafter: measured or guessed for drafter, guessed in drafts.items()}
    return CostTable(table.name, table.points, drafts, table.per_context_token_s, table.source)


def identity_of(paged: PagedDecoder, config: Config) -> dict[str, Any]:
    """All that the times depend on."""
    import torch

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
        "taps": paged.taps,
        "rows": config.engine.max_num_seqs,
        "tokens": config.engine.max_num_batched_tokens,
    }


def cpu_name() -> str:
    """As the kernel calls it; ARM has numbers for names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    number = " ".join(said[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in said)
    return said.get("model name") or f"{platform.machine()} {number}".strip()


def _kept(path: Path) -> CostTable | None:
    if not path.is_file():
        return None
    try:
        return CostTable.load(path)
    except ValueError as error:
        warnings.warn(f"{error}; measuring anew", stacklevel=4)
        return None


def _measure_and_keep(
    paged: PagedDecoder, runner: Runner, config: Config, identity: dict[str, Any], path: Path
) -> CostTable:
    from paceline.console import SafeConsole

    console = SafeConsole(stderr=True)
    started = time.perf_counter()
    with console.status("measuring what a step takes on this machine (once; some ten seconds)"):
        points, per_context_token_s = measure(
            partial(time_step, paged, runner),
            partial(_room, paged),
            config.engine.max_num_seqs,
            config.engine.max_num_batched_tokens,
        )
    threads = f", {identity['threads']} threads" if identity["threads"] else ""
    source = f"measured on {identity['device']}{threads}, {identity['dtype']}"
    table = CostTable(path.stem, points, {}, per_context_token_s, source)
    console.print(f"measured what a step takes on this machine in {time.perf_counter() - started:.1f} s")
    _keep(table, path)
    return table


def _keep(table: CostTable, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            table.save(Path(scratch) / path.name)
            os.replace(Path(scratch) / path.name, path)
    except OSError as error:
        warnings.warn(
            f"the measured costs can't be kept in {path.parent} ({error.strerror}); set PACELINE_CACHE to a folder of "
            "yours, or they are measured at every start",
            stacklevel=4,
        )


def measure(
    timer: Timer, room: Callable[[int], int], max_num_seqs: int, max_num_batched_tokens: int
) -> tuple[list[Point], float]:
    """Points, and seconds per token of context. `room(rows)`: tokens that each of so many rows may have."""
    all_rows = sorted({min(2**i, max_num_seqs) for i in range(max_num_seqs.bit_length() + 1)})
    context = {rows: min(CONTEXT, room(rows) - max(QUERIES)) for rows in all_rows}
    steps = [(r, q) for r in all_rows for q in QUERIES if r * q <= max_num_batched_tokens and context[r] > 0]
    steps.sort(key=lambda step: (step[1] > 1, step[0] * step[1]))  # plain ones first: nothing stands without them
    if not steps:  # a memory too small for anything but a single token
        context, steps = {1: 0}, [(1, 1)]
    timer(*steps[0], context[steps[0][0]])  # warm up
    best: dict[tuple[int, int], float] = {}
    spent_s, token_s = 0.0, 0.0
    for round in range(NUM_ROUNDS):  # the best of some that lie apart: what else runs here should not count
        for rows, queries in steps:
            known_s = best.get((rows, queries))
            if round and (known_s is None or known_s > QUICK_S):
                continue
            if best and spent_s + token_s * rows * queries > (AGAIN_S if round else BUDGET_S):
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
    return points, _per_context_token_s(timer, room, best)


def _per_context_token_s(timer: Timer, room: Callable[[int], int], best: Mapping[tuple[int, int], float]) -> float:
    """From as many rows as are still quick: the more context, the less it drowns in noise."""
    quick = [rows for (rows, queries), seconds in best.items() if queries == 1 and seconds <= QUICK_S]
    rows = max((rows for rows in quick if room(rows) > LONG_CONTEXT), default=1)
    longer = min(LONG_CONTEXT, room(rows) - 1)
    if longer <= CONTEXT:
        return 0.0
    pairs = [(timer(rows, 1, CONTEXT), timer(rows, 1, longer)) for _ in range(NUM_ROUNDS)]
    short_s, long_s = (min(times) for times in zip(*pairs, strict=True))
    return max(0.0, (long_s - short_s) / (rows * (longer - CONTEXT)))


def measure_drafts(
    timer: DraftTimer, room: Callable[[int], int], all_rows: Iterable[int], k: int
) -> list[tuple[int, int, float]]:
    """(rows, tokens, seconds): what a step takes more at whose end so many tokens are drafted, one and k. Nothing of
    rows for which there is no room."""
    found = []
    for rows in all_rows:
        context = min(CONTEXT, room(rows) - 2 - k)
        if context > 0:
            some = sorted({1, k})
            rounds = [[timer(rows, 1, context, num) for num in (0, *some)] for _ in range(NUM_ROUNDS)]
            plain_s, *drafting_s = (min(times) for times in zip(*rounds, strict=True))
            found += [(rows, num, max(0.0, s - plain_s)) for num, s in zip(some, drafting_s, strict=True)]
    return found


def _room(paged: PagedDecoder, num_rows: int) -> int:
    from paceline.model.kv import BLOCK

    return min(paged.pool.num_free // num_rows * BLOCK, paged.decoder.config.max_positions)


def time_step(
    paged: PagedDecoder, runner: Runner, num_rows: int, num_queries: int, context: int, num_guesses: int = 0
) -> float:
    """Seconds of a step: num_rows rows that verify num_queries - 1 drafted tokens, each after `context` tokens, and at
    its end num_guesses are drafted. Of a GPU the device's: while it computes, the host does the rest."""
    import numpy as np

    from paceline.engine.scheduler import Row
    from paceline.engine.sequence import Sequence
    from paceline.types import Request, SamplingParams

    request = Request(-1, (0,) * (context + 1), SamplingParams(max_tokens=num_queries), noise_key=0)
    room = context + num_queries + num_guesses
    rows = []
    for i in range(num_rows):
        sequence = Sequence(request, -1 - i, 1 + room, ())  # no true one has such a number, nor arrives so early
        sequence.num_computed = context
        rows.append(Row(sequence, 1, True, np.zeros(num_queries - 1, np.int32)))
    runner.guess(num_guesses)
    try:
        for row in rows:
            assert paged.pool.reserve(row.sequence.table, room)
        if paged.decoder.device.type == "cuda":
            runner.launch(rows, {}).land()  # what is compiled and captured at the first time
            flight = runner.launch(rows, {})
            flight.land()
            return sum(flight.took())
        started = time.perf_counter()
        runner.launch(rows, {}).land()
        return time.perf_counter() - started
    finally:
        runner.guess(0)
        for row in rows:
            runner.leave(row.sequence)
            paged.pool.truncate(row.sequence.table, 0)
