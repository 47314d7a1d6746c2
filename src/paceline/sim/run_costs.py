"""A cost table from the engine steps that a run recorded (trace.jsonl), for replays and simulations of that run.

    T(r, q, c) = fixed + row · r + tokens(q) + context · c        r rows, q query tokens, c context tokens

`tokens` is piecewise linear between powers of two and does not decrease. All terms are positive and are fitted to the
25% quantiles of similar steps (sim/fit.py), because other processes only make a step longer. Prompts are included: a
prompt token counts like any other query token. Draft times are medians by rows and draft length.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paceline.files import number, read_run_lines
from paceline.sim.fit import fit
from paceline.speculation.cost import CostTable, Point, row_bucket

MIN_STEPS = 32  # usable ones; a fit to fewer would be noise
MAX_STEPS = 200_000  # that are read: enough for every kind of step
QUANTILE = 0.25  # of similar steps
PRIOR = 0.1  # weight of the start values (sim/fit.py): one slow step must not become a jump of the table
MAX_WEIGHT_STEPS = 16  # steps of one kind from which on more of them do not weigh more
MIN_GAIN_S = 1e-9  # replaces a start value of zero, which has no logarithm
KEYS = ("num_rows", "num_query_tokens", "num_context_tokens", "num_draft_tokens", "total_s", "draft_s")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    num_rows: int
    num_query_tokens: int
    num_context_tokens: int
    num_draft_tokens: int
    seconds: float  # without drafting
    draft_s: float
    draft_length: int  # of the row with the longest draft; 0 if none was drafted
    drafter: str
    accepted_per_position: tuple[int, ...]  # rows of which 1, 2, … draft tokens were accepted


@dataclass(frozen=True, slots=True)
class RunCosts:
    table: CostTable
    num_steps: int
    max_rows: int
    median_error: float  # relative, of single steps
    # P(draft token accepted | all before it accepted) by position, over all rows of steps that verified drafts: a row
    # without a draft counts like one whose draft was rejected.
    acceptance_rates: list[float]


def costs_of_run(folder: Path, name: str, source: str) -> RunCosts:
    """Raises ValueError if the run has no trace, or too few steps that can be used."""
    return fit_costs(list(read_steps(folder / "trace.jsonl")), name, source)


def read_steps(path: Path) -> Iterator[RecordedStep]:
    """The first MAX_STEPS usable steps. A last line that is cut off is left out: the run may still write."""
    if not os.path.lexists(path):
        raise ValueError(f"{path}: no such file")
    steps = (_step_of(record) for _, record in read_run_lines(path))
    return islice((step for step in steps if step is not None), MAX_STEPS)


def _step_of(record: Mapping[str, Any]) -> RecordedStep | None:
    """None for a step whose time says nothing: it captured CUDA graphs, or a figure is missing."""
    values = [value for key in KEYS if (value := number(record, key)) is not None]
    accepted = record.get("accepted_per_position", [])
    if record.get("num_captured") or len(values) < len(KEYS) or not _are_counts(accepted):
        return None
    rows, query, context, drafted, total_s, draft_s = values
    if not (1 <= rows <= query <= context and drafted >= 0 and 0 <= draft_s < total_s):
        return None
    drafted_per_position = record.get("drafted_per_position")
    length = len(drafted_per_position) if isinstance(drafted_per_position, list) else 0
    if not length:  # drafts of which none was verified take time too
        length = math.ceil(max(0.0, number(record, "num_planned") or 0.0) / int(rows))
    return RecordedStep(
        int(rows), int(query), int(context), int(drafted), total_s - draft_s, draft_s, length,
        str(record.get("drafter", "none")), tuple(map(int, accepted)),
    )  # fmt: skip


def _are_counts(values: Any) -> bool:
    """Whether this is a list of numbers that are not negative."""
    return isinstance(values, list) and all((found := number(value)) is not None and found >= 0 for value in values)


def fit_costs(steps: Sequence[RecordedStep], name: str, source: str) -> RunCosts:
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{len(steps)} usable engine steps, but {MIN_STEPS} or more are needed")
    kinds = _kinds(steps)
    rows, query, context, seconds, num = np.array(kinds, float).T
    knots = 2.0 ** np.arange(int(np.log2(query.max())) + 2)
    start = _start(knots, query, seconds)
    names = list(start)

    def predicted(values: Mapping[str, float], r: np.ndarray, q: np.ndarray, c: np.ndarray) -> np.ndarray:
        gains = np.array([values[each] for each in names[3:]])
        tokens_s = np.interp(q, knots, np.concatenate([[0.0], np.cumsum(gains)]))
        return values["fixed"] + values["row"] * r + values["context"] * c + tokens_s

    weights = np.sqrt(np.minimum(num, MAX_WEIGHT_STEPS) / MAX_WEIGHT_STEPS)
    values = fit(lambda v: predicted(v, rows, query, context), seconds, start, prior=PRIOR, weights=weights).values
    max_rows = max(step.num_rows for step in steps)
    per_row = float(np.median(context / rows))

    def seconds_of(r: int, q: int, c: int) -> float:
        return float(predicted(values, *(np.array([float(each)]) for each in (r, q, c)))[0])

    points = []
    for r in sorted({max_rows, *(2**i for i in range(max_rows.bit_length()))}):
        for q in sorted({r, *(int(knot) for knot in knots if knot > r)}):
            c = max(q, round(r * per_row) + q - r)
            points.append(Point(r, q, c, seconds_of(r, q, c)))
    table = CostTable(name, points, _draft_times(steps), values["context"], source, frozen=True)
    own = np.array([(s.num_rows, s.num_query_tokens, s.num_context_tokens, s.seconds) for s in steps], float).T
    errors = np.abs(predicted(values, *own[:3]) / own[3] - 1)
    return RunCosts(table, len(steps), max_rows, float(np.median(errors)), _acceptance_rates(steps))


def _acceptance_rates(steps: Iterable[RecordedStep]) -> list[float]:
    drafting = [step for step in steps if step.num_draft_tokens]
    length = max((len(step.accepted_per_position) for step in drafting), default=0)
    totals = [sum(step.num_rows for step in drafting)]
    for position in range(length):
        totals.append(sum(step.accepted_per_position[position] for step in drafting
                          if position < len(step.accepted_per_position)))  # fmt: skip
    return [min(1.0, now / before) for before, now in pairwise(totals) if before]


def _kinds(steps: Iterable[RecordedStep]) -> list[tuple[float, ...]]:
    """(rows, query tokens, context tokens, seconds, number of steps) of similar steps: the same rows and draft tokens,
    prompt and context tokens within a factor of two."""
    groups: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    for s in steps:
        num_prompt = s.num_query_tokens - s.num_rows - s.num_draft_tokens
        key = s.num_rows, s.num_draft_tokens, max(0, num_prompt).bit_length(), s.num_context_tokens.bit_length()
        groups.setdefault(key, []).append((s.num_rows, s.num_query_tokens, s.num_context_tokens, s.seconds))
    return [(*np.quantile(np.array(found), QUANTILE, axis=0).tolist(), len(found)) for found in groups.values()]


def _start(knots: np.ndarray, query: np.ndarray, seconds: np.ndarray) -> dict[str, float]:
    """Half of the quickest step is fixed, the rest of the times is proportional to query tokens."""
    fixed_s = 0.5 * float(seconds.min())
    token_s = float(np.median((seconds - fixed_s) / query))
    gains = {f"tokens {knot:g}": max(MIN_GAIN_S, token_s * float(knot)) for knot in knots[:-1]}
    return {"fixed": fixed_s, "row": 0.1 * token_s, "context": 1e-4 * token_s, **gains}


def _draft_times(steps: Iterable[RecordedStep]) -> dict[str, list[tuple[int, int, float]]]:
    """By drafter: (rows, k, seconds), medians of steps with a draft, rows rounded to powers of two."""
    groups: dict[str, dict[tuple[int, int], list[float]]] = {}
    for step in steps:
        if step.draft_length:
            key = 2 ** row_bucket(step.num_rows), step.draft_length
            groups.setdefault(step.drafter, {}).setdefault(key, []).append(step.draft_s)
    return {
        drafter: [(rows, k, statistics.median(times)) for (rows, k), times in sorted(found.items())]
        for drafter, found in groups.items()
    }
