"""Replay many settings over the same rollouts.

A small file is kept in memory; a larger one is read again for each setting. A pipe can be read only once, so each of
its rounds is replayed with all settings before the next is read. Settings are independent, so rounds in memory can be
replayed in several processes.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.replay.engine import Replay
from paceline.replay.reader import Reader
from paceline.replay.rounds import Round, RoundSplitter
from paceline.replay.stats import ReplayStats

MAX_KEPT = 1 << 24  # tokens
NO_DRAFTER = "none"  # the drafter of a replay without speculation


@dataclass(frozen=True, slots=True)
class Cell:
    """The settings of one replay."""

    drafter: str
    policy: str  # "static:3", "auto", …
    batch: int  # sequences that run at a time


@dataclass(slots=True)
class Result:
    cell: Cell
    stats: ReplayStats
    baseline: ReplayStats  # the same without speculation

    def summary(self, epochs: slice = slice(None)) -> dict[str, Any]:
        return self.stats.summary(epochs, self.baseline)

    @property
    def speedup(self) -> float:
        return float(self.summary()["speedup"] or 1.0)


class RoundSource:
    """Iterates over a reader's rounds, any number of times unless it reads a pipe."""

    def __init__(self, reader: Reader, max_tokens: int | None = None) -> None:
        self.reader, self.max_tokens = reader, max_tokens
        self._kept: list[Round] | None = None

    def __iter__(self) -> Iterator[Round]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Round] | None = None if self.reader.is_pipe else []
        num_tokens = num_emitted = 0
        for recorded in RoundSplitter(self.max_tokens).split(self.reader):
            num_tokens += len(recorded.tokens)
            num_emitted += recorded.num_emitted
            if kept is not None:
                kept = [*kept, recorded] if num_tokens <= MAX_KEPT else None
            yield recorded
        if not num_emitted:
            raise ValueError(f"{', '.join(self.reader.paths)}: nothing to replay, because no rollout has a completion")
        self._kept = kept


def replay(
    source: Iterable[Round],
    single_pass: bool,
    cells: Sequence[Cell],
    make: Callable[[Cell], Replay],
    progress: Callable[[Cell, int], None] = lambda cell, num_bytes: None,
    num_processes: int = 1,
) -> list[Result]:
    """Replay all rounds with every cell, each with a new drafter, and without speculation at every batch size.

    `single_pass`: the source can be iterated only once. `progress(cell, num_bytes)` is called with the bytes of the
    file that a cell has processed since the last call. `num_processes` > 1 requires a list of rounds and a `make` that
    can be pickled.
    """
    baselines = {batch: Cell(NO_DRAFTER, "static:0", batch) for batch in dict.fromkeys(cell.batch for cell in cells)}
    all_cells = [*baselines.values(), *cells]
    stats: dict[Cell, ReplayStats] = {}
    if num_processes > 1:
        assert not single_pass
        stats, passes = _replay_in_processes(list(source), all_cells, make, progress, num_processes), []
    else:
        passes = [all_cells] if single_pass else [[cell] for cell in all_cells]
    for cells_of_pass in passes:
        engines = [(cell, make(cell)) for cell in cells_of_pass]
        for recorded in source:
            for cell, engine in engines:
                engine.run_round(recorded)
                progress(cell, recorded.num_bytes)
        stats |= {cell: engine.stats for cell, engine in engines}
    return [Result(cell, stats[cell], stats[baselines[cell.batch]]) for cell in cells]


def _replay_in_processes(
    rounds: list[Round],
    cells: Sequence[Cell],
    make: Callable[[Cell], Replay],
    progress: Callable[[Cell, int], None],
    num_processes: int,
) -> dict[Cell, ReplayStats]:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    run_cell = functools.partial(_run_cell, rounds, make)
    # The parent process reports Ctrl-C, so a worker ends without a traceback.
    on_interrupt = signal.SIGINT, signal.SIG_DFL
    with ProcessPoolExecutor(num_processes, get_context("spawn"), signal.signal, on_interrupt) as pool:
        cell_of = {pool.submit(run_cell, cell): cell for cell in cells}
        for future in as_completed(cell_of):
            future.result()
            progress(cell_of[future], sum(recorded.num_bytes for recorded in rounds))
    return {cell: future.result() for future, cell in cell_of.items()}


def _run_cell(rounds: list[Round], make: Callable[[Cell], Replay], cell: Cell) -> ReplayStats:
    engine = make(cell)
    for recorded in rounds:
        engine.run_round(recorded)
    return engine.stats
