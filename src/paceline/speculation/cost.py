"""The cost table: the time of a step, T(rows, query tokens, context tokens), from measured points.

    T(r, q, c) = plain(r) + extra_r(q - r) + per_context_token · (c - c_r)

`plain(r)`: r rows that decode one token each, at the context c_r at which they were measured. `extra_r(x)`: what x
query tokens beyond one per row add. Step times jump where kernels change, so it is a table and not a line. It is
interpolated between rows and between extra tokens. After a row count's last point it continues like the next larger row
count, and after the last point of all with the last slope.

More work never takes less time. If points say so, that is noise, and the larger one counts: a policy that searches for
the best number of tokens would find every dip. Steps that are observed while running (`observe`) scale regions of the
table. What is saved stays as it was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np

from paceline.speculation.batch import Load
from paceline.types import StepTrace

NUM_ROW_BUCKETS, NUM_EXTRA_BUCKETS, NUM_DRAFT_BUCKETS = 16, 24, 64
LEVEL_RATE = 0.1  # weight of one step in the level of its row count, after many steps
OFFSET_RATE = 0.02  # and in its region's offset from that level
MAX_ERROR = math.log(2.0)  # larger errors are cut to this: something else delayed the step
BOUND_EVERY = 16  # observations of a region between comparisons with regions of fewer tokens
# A step without drafts is wanted of a row count after so many others; the next after twice as many, up to a limit. When
# there were NUM_PLAIN, their time is known.
FIRST_PLAIN_EVERY, PLAIN_EVERY, NUM_PLAIN = 8, 128, 2
RARE_RATE = 0.5  # weight of such a step in their offset from the level, if they are rare
NUM_FIRST = 4  # steps of a row count whose median is its level: the table itself may be far off
MIN_S, MAX_S, MAX_TOKENS = 1e-9, 86_400, 2**31 - 1  # limits of a table's values


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step, without drafting."""

    num_rows: int
    num_query_tokens: int
    num_context_tokens: int  # of all rows together
    seconds: float


class CostTable:
    def __init__(
        self,
        name: str,
        points: list[Point],
        drafts: Mapping[str, list[tuple[int, int, float]]] | None = None,  # drafter -> (rows, k, seconds)
        per_context_token_s: float = 0.0,
        source: str = "",  # where the numbers come from
        frozen: bool = False,  # ignore `observe`
    ) -> None:
        self.name, self.source, self.frozen = name, source, frozen
        self.points, self.per_context_token_s = points, per_context_token_s
        self.drafts = {drafter: list(times) for drafter, times in (drafts or {}).items()}
        _check(points, self.drafts, per_context_token_s)
        self._surface = _Surface(points, per_context_token_s)
        self._priors = {drafter: _DraftTimes(times) for drafter, times in self.drafts.items()}
        self._steps = _Correction(NUM_EXTRA_BUCKETS)
        self._drafting: dict[str, _Correction] = {}  # by drafter
        self._idling: dict[str, _Correction] = {}  # by drafter: seconds that it takes when it proposes nothing
        # By row bucket: observed steps without drafts, and others since the last of these.
        self._num_plain, self._num_others = [0] * NUM_ROW_BUCKETS, [0] * NUM_ROW_BUCKETS
        self._buckets = np.zeros(0)  # by number of extra tokens

    def step_s(self, load: Load) -> float:
        """A step without drafts: the first element of `steps_s`, without arrays."""
        if load.num_query_tokens > load.num_rows:
            return float(self.steps_s(load, 0)[0])
        seconds = self._measured_s(load, 0)
        return seconds if self._steps.is_new else seconds * math.exp(self._steps.log(load.num_rows, 0))

    def _measured_s(self, load: Load, num_extra: int) -> float:
        """As measured, for rows with one query token each and so many extra tokens."""
        curve, least_s = self._surface.curve(load.num_rows, num_extra + 1)
        return max(float(curve[num_extra]) + self.per_context_token_s * load.num_context_tokens, least_s)

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        """The step with 0 … num_extra further query tokens: float64 [num_extra + 1], not decreasing."""
        seconds = self._measured(load, num_extra)
        if self._steps.is_new:
            return seconds
        first = max(0, load.num_query_tokens - load.num_rows)
        if len(self._buckets) <= first + num_extra:
            self._buckets = np.log2(1.0 + np.arange(2 * (first + num_extra + 1)))
        buckets = self._buckets[first : first + num_extra + 1]
        factors = np.interp(buckets, self._steps.columns, np.exp(self._steps.logs(load.num_rows)))
        return np.maximum.accumulate(seconds * factors)

    def _measured(self, load: Load, num_extra: int) -> np.ndarray:
        first = max(0, load.num_query_tokens - load.num_rows)
        curve, least_s = self._surface.curve(load.num_rows, first + num_extra + 1)
        seconds = curve[first : first + num_extra + 1] + self.per_context_token_s * load.num_context_tokens
        return np.maximum(seconds, least_s)

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        """Time that `drafter` takes to propose k tokens for num_rows rows, beyond what it takes in any case. 0 if k is
        0 or the drafter is not in the table."""
        if k == 0:
            return 0.0
        prior, seen = self._priors.get(drafter), self._drafting.get(drafter)
        if seen is None:
            return prior.seconds(num_rows, k) if prior is not None else 0.0
        expected_s = max(prior.seconds(num_rows, k), 1e-9) if prior is not None else 1.0
        seconds = expected_s * math.exp(seen.log(num_rows, min(k, NUM_DRAFT_BUCKETS - 1)))
        idle = self._idling.get(drafter)
        return max(0.0, seconds - math.exp(idle.log(num_rows, 0))) if idle is not None else seconds

    def needs_plain_step(self, num_rows: int, num_others: int) -> bool:
        """Whether a step without drafts should be observed, after so many others of about so many rows. Without one, an
        error in the time of such a step would stay: all that is observed with drafts is longer."""
        wanted = FIRST_PLAIN_EVERY * 2 ** min(self._num_plain[row_bucket(num_rows)], 16)
        return not self.frozen and num_others >= min(PLAIN_EVERY, wanted)

    def knows_plain(self, num_rows: int) -> bool:
        """Whether enough steps without drafts were observed."""
        return self._num_plain[row_bucket(num_rows)] >= NUM_PLAIN

    def observe(self, trace: StepTrace, draft_s: float) -> None:
        """Adapt to a step, of whose time draft_s was spent on drafting."""
        num_extra = trace.num_draft_tokens
        step_s = trace.total_s - draft_s
        if self.frozen or step_s <= 0 or not is_representative(trace):
            return
        plain = Load(trace.num_rows, trace.num_rows, trace.num_context_tokens - num_extra)
        measured_s, column = self._measured_s(plain, num_extra), round(math.log2(1 + num_extra))
        is_rare = self._count(trace.num_rows, not num_extra)
        num_seen = self._steps.observe(trace.num_rows, column, math.log(step_s / measured_s), is_rare)
        # Fewer tokens take no longer.
        for fewer in range(1, column if num_seen % BOUND_EVERY == 0 else 0):
            ratio = measured_s / self._measured_s(plain, 2**fewer - 1)
            self._steps.bound(trace.num_rows, fewer, column, math.log(ratio))

    def _count(self, num_rows: int, is_plain: bool) -> bool:
        """Count a step. Returns whether it is a plain one after several others."""
        bucket = row_bucket(num_rows)
        is_rare = is_plain and self._num_others[bucket] >= FIRST_PLAIN_EVERY
        self._num_plain[bucket] += is_plain
        self._num_others[bucket] = 0 if is_plain else self._num_others[bucket] + 1
        return is_rare

    def observe_drafting(self, drafter: str, num_rows: int, k: int, seconds: float) -> None:
        """Adapt to the time in which `drafter` proposed at most k tokens (0: it was not asked) for num_rows rows."""
        if self.frozen or seconds <= 0:
            return
        if k == 0:
            if drafter not in self._idling:
                self._idling[drafter] = _Correction(1)
            self._idling[drafter].observe(num_rows, 0, math.log(seconds))
            return
        prior = self._priors.get(drafter)
        expected_s = max(prior.seconds(num_rows, k), 1e-9) if prior is not None else 1.0
        if drafter not in self._drafting:
            # The first draft takes longer: it computes prompts.
            self._drafting[drafter] = _Correction(NUM_DRAFT_BUCKETS, trusts_table=prior is not None)
        self._drafting[drafter].observe(num_rows, k, math.log(seconds / expected_s))

    def save(self, path: Path) -> None:
        """Save the measured table, without what was observed since."""
        drafts = ",\n".join(f"    {json.dumps(drafter)}: {_lines(times, 6)}" for drafter, times in self.drafts.items())
        path.write_text(
            "{\n"
            f'  "name": {json.dumps(self.name)},\n'
            f'  "source": {json.dumps(self.source, ensure_ascii=False)},\n'
            f'  "per_context_token_s": {self.per_context_token_s},\n'
            f'  "points": {_lines([astuple(point) for point in self.points], 4)},\n'
            f'  "drafts": {{\n{drafts}\n  }}\n'
            "}\n",
            encoding="utf-8",
        )

    @staticmethod
    def load(path: Path) -> CostTable:
        try:
            return _of_tree(json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object))
        except OSError as error:
            raise ValueError(f"cost table {path}: {error.strerror}") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"cost table {path} is not JSON: {error}") from None
        except ValueError as error:
            raise ValueError(f"cost table {path}: {error}") from None


def is_representative(trace: StepTrace) -> bool:
    """Not a step that computed prompts, captured CUDA graphs or had rows outside of them."""
    is_decode = trace.num_query_tokens - trace.num_rows == trace.num_draft_tokens
    return trace.num_rows > 0 and is_decode and not trace.num_captured and not trace.num_outside_graph


class _Surface:
    """plain(r) + extra_r(x) without context, over rows and extra tokens."""

    def __init__(self, points: list[Point], per_context_token_s: float) -> None:
        plain = {p.num_rows: p for p in points if p.num_query_tokens == p.num_rows}
        own: dict[int, dict[int, float]] = {num_rows: {} for num_rows in sorted(plain)}
        for p in points:
            extra, at = p.num_query_tokens - p.num_rows, plain[p.num_rows]
            # That extra tokens make the context longer is part of their cost.
            context_s = per_context_token_s * (p.num_context_tokens - at.num_context_tokens - extra)
            own[p.num_rows][extra] = p.seconds - context_s - at.seconds
        self._rows = np.array(list(own))
        self._extras = np.array(sorted({extra for curve in own.values() for extra in curve}))
        self._plain_s = np.maximum.accumulate([plain[r].seconds for r in own])
        base = np.array([p.seconds - per_context_token_s * p.num_context_tokens for _, p in sorted(plain.items())])
        # Time of a row more, above the measured ones; with a single point, time is proportional to rows.
        self._row_s = (
            max(0.0, float((base[-1] - base[-2]) / (self._rows[-1] - self._rows[-2])))
            if len(base) > 1
            else float(self._plain_s[0] / self._rows[0])
        )
        extra_s = np.zeros((len(own), len(self._extras)))
        self._extra_s = self._row_s  # time of an extra token above the measured ones
        for i in reversed(range(len(own))):  # most rows first: fewer rows continue like the next larger count
            curve = sorted(own[int(self._rows[i])].items())
            at_most, last_s = curve[-1]
            extra_s[i] = np.interp(self._extras, [x for x, _ in curve], [s for _, s in curve])
            beyond = self._extras > at_most
            if i + 1 < len(own):
                here = int(np.searchsorted(self._extras, at_most))
                extra_s[i, beyond] = last_s + extra_s[i + 1, beyond] - extra_s[i + 1, here]
            else:
                if len(curve) > 1:
                    before, before_s = curve[-2]
                    self._extra_s = max(0.0, (last_s - before_s) / (at_most - before))
                extra_s[i, beyond] = last_s + self._extra_s * (self._extras[beyond] - at_most)
        whole = base[:, None] + extra_s
        self._seconds = np.maximum.accumulate(np.maximum.accumulate(whole, axis=1), axis=0)  # [rows, extras]
        self._curves: dict[int, tuple[np.ndarray, float]] = {}

    def curve(self, num_rows: int, num: int) -> tuple[np.ndarray, float]:
        """The step with 0, 1, … extra tokens, at least `num` of them; and the least time, for any context."""
        known = self._curves.get(num_rows)
        if known is None or len(known[0]) < num:
            extras = np.arange(max(64, 2 * num))
            between = [float(np.interp(num_rows, self._rows, column)) for column in self._seconds.T]
            more_s = self._row_s * max(0, num_rows - int(self._rows[-1]))
            seconds = np.interp(extras, self._extras, between) + more_s
            seconds += self._extra_s * np.maximum(0, extras - self._extras[-1])
            least_s = 0.1 * (float(np.interp(num_rows, self._rows, self._plain_s)) + more_s)
            known = self._curves[num_rows] = seconds, least_s
        return known


class _DraftTimes:
    """Seconds over (rows, k): 0 for k = 0, interpolated, and extrapolated with the last slope."""

    def __init__(self, times: list[tuple[int, int, float]]) -> None:
        self._curves: dict[int, list[tuple[int, float]]] = {}
        for num_rows, k, seconds in sorted(times):
            self._curves.setdefault(num_rows, [(0, 0.0)]).append((k, seconds))
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, num_rows: int, k: int) -> float:
        key = num_rows, k
        if key not in self._known:
            by_rows = [(rows, _line(curve, k)) for rows, curve in self._curves.items()]
            self._known[key] = by_rows[0][1] if num_rows <= by_rows[0][0] else _line(by_rows, num_rows)
        return self._known[key]


def _line(curve: list[tuple[int, float]], x: int) -> float:
    """Interpolated, and past the end with the last slope, if it is positive."""
    (before, before_s), (last, last_s) = curve[max(0, len(curve) - 2)], curve[-1]
    slope = max(0.0, (last_s - before_s) / (last - before)) if last > before else 0.0
    return float(np.interp(x, [at for at, _ in curve], [s for _, s in curve])) + slope * max(0, x - last)


class _Correction:
    """Logarithms of observed / expected time: a level for each power of two of rows, which adapts fast, and an offset
    from it for each column, which adapts slowly. So a column that was not observed for long changes with its rows, and
    rows that were not observed at all change with their neighbours. Lists, not arrays: every step reads and writes a
    few elements. `trusts_table`: count the table as one observation."""

    def __init__(self, num_columns: int, trusts_table: bool = False) -> None:
        self.columns = np.arange(num_columns)
        self.is_new = True
        self._level, self._num = [0.0] * NUM_ROW_BUCKETS, [0] * NUM_ROW_BUCKETS
        # The first observations.
        self._first: list[list[float]] = [[0.0] if trusts_table else [] for _ in range(NUM_ROW_BUCKETS)]
        self._offset = [[0.0] * num_columns for _ in range(NUM_ROW_BUCKETS)]
        self._num_offset = [[0] * num_columns for _ in range(NUM_ROW_BUCKETS)]

    def logs(self, num_rows: int) -> np.ndarray:
        """By column."""
        bucket = row_bucket(num_rows)
        return self._level_of(bucket) + np.array(self._offset[bucket])

    def log(self, num_rows: int, column: int) -> float:
        bucket = row_bucket(num_rows)
        return self._level_of(bucket) + self._offset[bucket][column]

    def _level_of(self, bucket: int) -> float:
        if self._num[bucket] or self.is_new:
            return self._level[bucket]
        seen = [other for other, num in enumerate(self._num) if num]
        return float(np.interp(bucket, seen, [self._level[other] for other in seen]))

    def observe(self, num_rows: int, column: int, log_ratio: float, is_rare: bool = False) -> int:
        """Returns how often the column was observed. `is_rare`: not for a while, so the level adapted to others."""
        bucket, column = row_bucket(num_rows), min(column, len(self.columns) - 1)
        num, first = self._num[bucket], self._first[bucket]
        level = log_ratio - self._offset[bucket][column]
        if num < NUM_FIRST:
            first.append(level)
            # Of two medians the lower: delays are more frequent than the opposite.
            self._level[bucket] = sorted(first)[(len(first) - 1) // 2]
        else:
            error = min(max(level - self._level[bucket], -MAX_ERROR), MAX_ERROR)
            rate = max(LEVEL_RATE, 1 / (1 + num))
            self._level[bucket] += rate * error
            offset_rate = max(RARE_RATE if is_rare else OFFSET_RATE, 1 / (2 + self._num_offset[bucket][column]))
            self._offset[bucket][column] += offset_rate * (1 - rate) * error
        self._num[bucket] += 1
        self._num_offset[bucket][column] += 1
        self.is_new = False
        return self._num_offset[bucket][column]

    def bound(self, num_rows: int, column: int, by: int, log_ratio: float) -> None:
        """Limit a column to another one plus log_ratio, if the other was observed more often."""
        bucket = row_bucket(num_rows)
        offset, num = self._offset[bucket], self._num_offset[bucket]
        by = min(by, len(offset) - 1)
        if column < by and num[column] < num[by]:
            offset[column] = min(offset[column], offset[by] + log_ratio)


def row_bucket(num_rows: int) -> int:
    """Row counts that are observed together."""
    return min(round(math.log2(max(1, num_rows))), NUM_ROW_BUCKETS - 1)


def _lines(rows: list[tuple[Any, ...]], indent: int) -> str:
    inner = ",\n".join(" " * indent + json.dumps(row) for row in rows)
    return f"[\n{inner}\n{' ' * (indent - 2)}]"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"the key {short(key)} is there twice")
        tree[key] = value
    return tree


def _of_tree(tree: Any) -> CostTable:
    kinds: dict[str, tuple[type, ...]] = {
        "name": (str,), "source": (str,), "per_context_token_s": (int, float), "points": (list,), "drafts": (dict,)
    }  # fmt: skip
    if not isinstance(tree, dict):
        raise ValueError(f"must be an object with {', '.join(kinds)}")
    for key in tree:
        if key not in kinds:
            raise ValueError(f"unknown key {key!r}; it may have {', '.join(kinds)}")
    for key, kind in kinds.items():
        if key not in tree:
            raise ValueError(f"the key {key!r} is missing")
        if not isinstance(tree[key], kind) or isinstance(tree[key], bool):
            raise ValueError(f"{key} = {short(tree[key])}: must be {' or '.join(k.__name__ for k in kind)}")
    points = [Point(*_numbers(f"points[{i}]", row, 4)) for i, row in enumerate(tree["points"])]
    drafts: dict[str, list[tuple[int, int, float]]] = {}
    for drafter, times in tree["drafts"].items():
        if not isinstance(times, list):
            raise ValueError(f"drafts.{drafter} = {short(times)}: must be a list of [rows, k, seconds]")
        drafts[drafter] = [_numbers(f"drafts.{drafter}[{i}]", row, 3) for i, row in enumerate(times)]
    return CostTable(tree["name"], points, drafts, tree["per_context_token_s"], tree["source"])


def _numbers(where: str, row: Any, num: int) -> Any:
    """A row of integers, with seconds at its end."""
    wanted = "[rows, query tokens, context tokens, seconds]" if num == 4 else "[rows, k, seconds]"
    if not isinstance(row, list) or len(row) != num or not all(type(x) in (int, float) for x in row):
        raise ValueError(f"{where} = {short(row)}: must be {wanted}")
    if not all(isinstance(x, int) for x in row[:-1]):
        raise ValueError(f"{where} = {short(row)}: counts must be integers")
    return tuple(row)


def _check(points: list[Point], drafts: Mapping[str, list[tuple[int, int, float]]], per_context_token_s: float) -> None:
    def need(ok: bool, where: str, rule: str) -> None:
        if not ok:
            raise ValueError(f"{where}: {rule}")

    need(bool(points), "points", "there are none; a cost table needs at least one measured step")
    at = f"per_context_token_s = {short(per_context_token_s)}"
    need(0 <= per_context_token_s <= MAX_S, at, f"must be a number from 0 to {MAX_S}")
    seen: set[tuple[int, int]] = set()
    for i, p in enumerate(points):
        at = f"points[{i}] = {short(list(astuple(p)))}"
        need(MIN_S <= p.seconds <= MAX_S, at, f"seconds must be a number from {MIN_S} to {MAX_S}")
        need(p.num_rows >= 1, at, "rows must be at least 1")
        need(p.num_query_tokens >= p.num_rows, at, "every row has at least one query token")
        need(p.num_context_tokens >= p.num_query_tokens, at, "the query tokens are part of the context")
        need(p.num_context_tokens <= MAX_TOKENS, at, f"there may be {MAX_TOKENS} tokens at most")
        need((p.num_rows, p.num_query_tokens) not in seen, at, "these rows and query tokens are there already")
        seen.add((p.num_rows, p.num_query_tokens))
    for num_rows in sorted({p.num_rows for p in points}):
        need((num_rows, num_rows) in seen, "points", f"{num_rows} rows with one query token each is missing")
    for drafter, times in drafts.items():
        need(bool(times), f"drafts.{drafter}", "there are none; leave the drafter out")
        drafted: set[tuple[int, int]] = set()
        for i, (num_rows, k, seconds) in enumerate(times):
            at = f"drafts.{drafter}[{i}] = {short([num_rows, k, seconds])}"
            need(num_rows >= 1 and k >= 1, at, "rows and k must be at least 1")
            need(num_rows <= MAX_TOKENS and k <= MAX_TOKENS, at, f"rows and k may be {MAX_TOKENS} at most")
            need(0 <= seconds <= MAX_S, at, f"seconds must be a number from 0 to {MAX_S}")
            need((num_rows, k) not in drafted, at, "these rows and k are there already")
            drafted.add((num_rows, k))
