"""What was recorded, cut into rounds: the rollouts of one step of RL, which one policy made side by side.

Where a file says which step a rollout is of, a round is a run of rollouts of the same step. Where it does not, samples
of a problem are taken to stand together, and a round ends when a problem comes back after others. A round is all that
is held of a file at a time; one of more than MAX_TOKENS is cut into several, which then do not run side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

MAX_TOKENS = 1 << 23


@dataclass(slots=True)
class Record:
    """One recorded rollout. `token_ids` is all that follows the prompt; what an environment said has mask false."""

    problem: str
    prompt_ids: np.ndarray  # int32
    token_ids: np.ndarray  # int32
    mask: np.ndarray | None = None  # bool; None: the policy chose every token
    # How many tokens an EAGLE-3 head would have had accepted after as many tokens: uint8, one per token of token_ids.
    matches: np.ndarray | None = None
    is_cut: bool = False  # it ended because it was as long as it might be
    max_tokens: int | None = None
    step: int | None = None
    version: int | None = None
    num_bytes: int = 0  # of the file, since the record before


@dataclass(slots=True)
class Round:
    """R requests over one flat array. Request i's whole sequence is tokens[start[i] : start[i] + num_total[i]], its
    first num_prompt[i] tokens are the prompt. The turns of an episode are requests over the same tokens."""

    version: int
    tokens: np.ndarray  # int32
    start: np.ndarray  # int64 [R]
    num_prompt: np.ndarray  # int64 [R]
    num_total: np.ndarray  # int64 [R]
    limit: np.ndarray  # int64 [R], tokens in all that it might have become
    problems: list[str]
    epochs: np.ndarray  # int64 [R], in how many rounds before this one its problem was
    follows: np.ndarray  # int64 [R], the request that it begins after, the turn before it; -1: none
    matches: np.ndarray | None  # uint8 [tokens], of a head's draft for the token at that place and those after it
    num_bytes: int = 0  # of the file

    def __len__(self) -> int:
        return len(self.start)

    @property
    def num_emitted(self) -> int:
        return int((self.num_total - self.num_prompt).sum())

    def only(self, problems: set[str]) -> Round | None:
        """The requests of these problems; None: there are none."""
        keep = np.array([problem in problems for problem in self.problems])
        if keep.all():
            return self
        place = np.cumsum(keep) - 1  # turns stay together: they are of one problem
        follows = np.where(self.follows[keep] >= 0, place[self.follows[keep]], -1)
        return None if not keep.any() else Round(
            self.version, self.tokens, self.start[keep], self.num_prompt[keep], self.num_total[keep],
            self.limit[keep], [p for p, kept in zip(self.problems, keep, strict=True) if kept], self.epochs[keep],
            follows, self.matches, self.num_bytes,
        )  # fmt: skip


class Rounds:
    """Records in, rounds out. `max_tokens`: how long a completion might have become, where the file does not say;
    None: as long as the longest so far that was cut there, or else the longest so far."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self._longest = self._longest_cut = 0
        self._seen: dict[
            str, tuple[int, int]
        ] = {}  # problem -> rounds before the last it was in, and that one's number
        self._num_rounds = 0

    def of(self, records: Iterable[Record]) -> Iterator[Round]:
        """Every record belongs to one round; empty completions to none."""
        held: list[Record] = []
        problems: set[str] = set()
        num_tokens = 0
        for record in records:
            ended = bool(held) and (
                record.step != held[-1].step
                or (record.step is None and record.problem != held[-1].problem and record.problem in problems)
            )
            if held and (ended or num_tokens > MAX_TOKENS):
                yield self._round(held)
                held, num_tokens = [], 0
            if ended:
                problems = set()
                self._num_rounds += 1
            held.append(record)
            problems.add(record.problem)
            num_tokens += len(record.prompt_ids) + len(record.token_ids)
        if held:
            yield self._round(held)

    def _round(self, records: list[Record]) -> Round:
        for record in records:
            num = int(record.mask.sum()) if record.mask is not None else len(record.token_ids)
            self._longest = max(self._longest, num)
            if record.is_cut:
                self._longest_cut = max(self._longest_cut, num)
        version = records[0].version
        turns = [turn for at, record in _placed(records) for turn in self._turns(at, record)]
        columns = np.array([turn[:4] for turn in turns], np.int64).reshape(-1, 4).T
        follows = np.array([i - 1 if turn[5] else -1 for i, turn in enumerate(turns)], np.int64)
        matches = None
        if any(record.matches is not None for record in records):
            parts: list[np.ndarray] = []
            for record in records:
                parts.append(np.zeros(len(record.prompt_ids), np.uint8))
                parts.append(
                    record.matches if record.matches is not None else np.zeros(len(record.token_ids), np.uint8)
                )
            matches = np.concatenate(parts)
        return Round(
            version=version if version is not None else records[0].step or self._num_rounds,
            tokens=np.concatenate([part for record in records for part in (record.prompt_ids, record.token_ids)]),
            start=columns[0], num_prompt=columns[1], num_total=columns[2], limit=columns[3],
            problems=[turn[4] for turn in turns],
            epochs=np.array([self._epoch(turn[4]) for turn in turns], np.int64),
            follows=follows,
            matches=matches,
            num_bytes=sum(record.num_bytes for record in records),
        )  # fmt: skip

    def _epoch(self, problem: str) -> int:
        epoch, last = self._seen.get(problem, (-1, -1))
        if last != self._num_rounds:
            epoch += 1
            self._seen[problem] = epoch, self._num_rounds
        return epoch

    def _turns(self, at: int, record: Record) -> Iterator[tuple[int, int, int, int, str, bool]]:
        """(start, num_prompt, num_total, limit, problem, whether another turn was before it)."""
        room = record.max_tokens or self.max_tokens or self._longest_cut or self._longest
        num_prompt, num_tokens = len(record.prompt_ids), len(record.token_ids)
        spans = [(0, num_tokens)] if num_tokens else []
        if record.mask is not None:
            edges = np.flatnonzero(np.diff(np.concatenate([[False], record.mask, [False]]).astype(np.int8)))
            spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        for i, (first, last) in enumerate(spans):
            num = last - first
            is_cut = record.is_cut and i == len(spans) - 1
            limit = num if is_cut else max(room, num)
            yield at, num_prompt + first, num_prompt + last, num_prompt + first + limit, record.problem, i > 0
            room -= num


def _placed(records: list[Record]) -> Iterator[tuple[int, Record]]:
    at = 0
    for record in records:
        yield at, record
        at += len(record.prompt_ids) + len(record.token_ids)
