"""Many settings over the same rollouts. A file is read again for each, or kept in memory where it is small; a pipe,
which can be read only once, goes through all of them at the same time."""

from __future__ import annotations

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
        num_tokens = 0
        for recorded in Rounds(self.max_tokens).of(self.reader):
            num_tokens += len(recorded.tokens)
            if kept is not None:
                kept = [*kept, recorded] if num_tokens <= MAX_KEPT else None
            yield recorded
        self._kept = kept


def replay(
    source: Iterable[Round],
    once: bool,
    cells: Sequence[Cell],
    make: Callable[[Cell], Replay],
    progress: Callable[[Cell, int], None] = lambda cell, num_bytes: None,
) -> list[Result]:
    """Every cell over all rounds, each with a drafter that begins knowing nothing; and, for comparison, without one at
    every batch size. `once`: the source can't be asked again. `progress(cell, bytes of the file it got through)`."""
    plain = [Cell(PLAIN, "static:0", batch) for batch in dict.fromkeys(cell.batch for cell in cells)]
    wanted = [*plain, *cells]
    tallies: dict[Cell, Tally] = {}
    for together in [wanted] if once else [[cell] for cell in wanted]:
        engines = [(cell, make(cell)) for cell in together]
        for recorded in source:
            for cell, engine in engines:
                engine.play(recorded)
                progress(cell, recorded.num_bytes)
        tallies |= {cell: engine.tally for cell, engine in engines}
    return [Result(cell, tallies[cell], tallies[Cell(PLAIN, "static:0", cell.batch)]) for cell in cells]
