"""Many settings over the same rollouts. A file is read again for each, or kept in memory where it is small; a pipe,
which can be read only once, goes through all of them at the same time. Settings know nothing of each other, so those
over rounds in memory may go side by side, in processes."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.replay.engine import Replay
from paceline.replay.reader import Reader
from paceline.replay.rounds import Round, Rounds
from paceline.replay.tally import Tally

MAX_KEPT = 1 << 24  # tokens
PLAIN = "none"  # the drafter of a replay without speculation


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: who drafts, who decides how much ("static:3", "auto"), and how many sequences run side by side."""

    drafter: str
    policy: str
    batch: int


@dataclass(slots=True)
class Result:
    cell: Cell
    tally: Tally
    plain: Tally  # the same without speculation

    def figures(self, epochs: slice = slice(None)) -> dict[str, Any]:
        return self.tally.figures(epochs, self.plain)

    @property
    def speedup(self) -> float:
        return float(self.figures()["speedup"] or 1.0)


class Source:
    """A reader's rounds, as often as they are asked for."""

    def __init__(self, reader: Reader, max_tokens: int | None = None) -> None:
        self.reader, self.max_tokens = reader, max_tokens
        self._kept: list[Round] | None = None

    def __iter__(self) -> Iterator[Round]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Round] | None = None if self.reader.is_pipe else []
        num_tokens = num_emitted = 0
        for recorded in Rounds(self.max_tokens).of(self.reader):
            num_tokens += len(recorded.tokens)
            num_emitted += recorded.num_emitted
            if kept is not None:
                kept = [*kept, recorded] if num_tokens <= MAX_KEPT else None
            yield recorded
        if not num_emitted:
            raise ValueError(
                f"{', '.join(self.reader.paths)}: nothing to replay: none of the rollouts has a completion"
            )
        self._kept = kept


def replay(
    source: Iterable[Round],
    once: bool,
    cells: Sequence[Cell],
    make: Callable[[Cell], Replay],
    progress: Callable[[Cell, int], None] = lambda cell, num_bytes: None,
    num_processes: int = 1,
) -> list[Result]:
    """Every cell over all rounds, each with a drafter that begins knowing nothing; and, for comparison, without one at
    every batch size. `once`: the source can't be asked again. `progress(cell, bytes of the file it got through)`.
    `num_processes`: side by side, where the source is a list of rounds and `make` can be pickled."""
    plain = [Cell(PLAIN, "static:0", batch) for batch in dict.fromkeys(cell.batch for cell in cells)]
    wanted = [*plain, *cells]
    tallies: dict[Cell, Tally] = {}
    if num_processes > 1:
        assert not once
        tallies, turns = _side_by_side(list(source), wanted, make, progress, num_processes), []
    else:
        turns = [wanted] if once else [[cell] for cell in wanted]
    for together in turns:
        engines = [(cell, make(cell)) for cell in together]
        for recorded in source:
            for cell, engine in engines:
                engine.play(recorded)
                progress(cell, recorded.num_bytes)
        tallies |= {cell: engine.tally for cell, engine in engines}
    return [Result(cell, tallies[cell], tallies[Cell(PLAIN, "static:0", cell.batch)]) for cell in cells]


def _side_by_side(
    rounds: list[Round],
    cells: Sequence[Cell],
    make: Callable[[Cell], Replay],
    progress: Callable[[Cell, int], None],
    num_processes: int,
) -> dict[Cell, Tally]:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    play = functools.partial(_play, rounds, make)
    with ProcessPoolExecutor(num_processes, get_context("spawn"), _end_at_interrupts) as pool:
        cell_of = {pool.submit(play, cell): cell for cell in cells}
        for future in as_completed(cell_of):
            future.result()
            progress(cell_of[future], sum(recorded.num_bytes for recorded in rounds))
    return {cell: future.result() for future, cell in cell_of.items()}


def _play(rounds: list[Round], make: Callable[[Cell], Replay], cell: Cell) -> Tally:
    engine = make(cell)
    for recorded in rounds:
        engine.play(recorded)
    return engine.tally


def _end_at_interrupts() -> None:
    """Without a word: whoever started this one says what there is to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
