"""Recorded rollouts, split into rounds. A round holds the rollouts of one RL step, which one policy version generated
together.

If rollouts have a step number, consecutive rollouts of the same step form a round. Otherwise the samples of a problem
must be consecutive, and a round ends when a problem appears again after others. Only one round is in memory at a time.
A round of more than MAX_TOKENS is split into several, which are then replayed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

MAX_TOKENS = 1 << 23


@dataclass(slots=True)
class Record:
    """One recorded rollout. `token_ids` is everything after the prompt; tokens of an environment have mask false."""

    problem: str
    prompt_ids: np.ndarray  # int32
    token_ids: np.ndarray  # int32
    mask: np.ndarray | None = None  # bool; None: the policy sampled every token
    # uint8, one per token of token_ids: accepted length of an EAGLE-3 head's draft that starts with this token
    head_accepted: np.ndarray | None = None
    is_cut: bool = False  # it ended at its length limit
    max_tokens: int | None = None
    step: int | None = None
    version: int | None = None
    num_bytes: int = 0  # of the file, since the previous record


@dataclass(slots=True)
class Round:
    """R requests over one flat array. Request i's sequence is tokens[start[i] : start[i] + num_total[i]]; its first
    num_prompt[i] tokens are the prompt. The turns of an episode are requests over the same tokens."""

    version: int
    tokens: np.ndarray  # int32
    start: np.ndarray  # int64 [R]
    num_prompt: np.ndarray  # int64 [R]
    num_total: np.ndarray  # int64 [R]
    limit: np.ndarray  # int64 [R], maximum sequence length, including the prompt
    problems: list[str]
    epochs: np.ndarray  # int64 [R], number of earlier rounds with its problem
    previous_turn: np.ndarray  # int64 [R], the request of the turn before it, which must end first; -1: none
    head_accepted: np.ndarray | None  # uint8 [tokens], as in `Record`
    num_bytes: int = 0  # of the file

    def __len__(self) -> int:
        return len(self.start)

    @property
    def num_emitted(self) -> int:
        return int((self.num_total - self.num_prompt).sum())

    def select_problems(self, problems: set[str]) -> Round | None:
        """The requests of these problems; None if there are none."""
        keep = np.array([problem in problems for problem in self.problems])
        if keep.all():
            return self
        new_index = np.cumsum(keep) - 1  # all turns of an episode have the same problem, so they are kept together
        previous_turn = np.where(self.previous_turn[keep] >= 0, new_index[self.previous_turn[keep]], -1)
        return None if not keep.any() else Round(
            self.version, self.tokens, self.start[keep], self.num_prompt[keep], self.num_total[keep],
            self.limit[keep], [p for p, kept in zip(self.problems, keep, strict=True) if kept], self.epochs[keep],
            previous_turn, self.head_accepted, self.num_bytes,
        )  # fmt: skip


class RoundSplitter:
    """Splits records into rounds. `max_tokens`: the length limit of completions, if the file does not have it. None:
    the longest completion so far that was cut at its limit, or else the longest so far."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self._longest = self._longest_cut = 0
        self._seen: dict[str, tuple[int, int]] = {}  # problem -> (epoch, number of its last round)
        self._num_rounds = 0

    def split(self, records: Iterable[Record]) -> Iterator[Round]:
        """Every record becomes part of one round; empty completions are left out."""
        current: list[Record] = []
        problems: set[str] = set()
        num_tokens = 0
        for record in records:
            ended = bool(current) and (
                record.step != current[-1].step
                or (record.step is None and record.problem != current[-1].problem and record.problem in problems)
            )
            if current and (ended or num_tokens > MAX_TOKENS):
                yield self._round(current)
                current, num_tokens = [], 0
            if ended:
                problems = set()
                self._num_rounds += 1
            current.append(record)
            problems.add(record.problem)
            num_tokens += len(record.prompt_ids) + len(record.token_ids)
        if current:
            yield self._round(current)

    def _round(self, records: list[Record]) -> Round:
        for record in records:
            num = int(record.mask.sum()) if record.mask is not None else len(record.token_ids)
            self._longest = max(self._longest, num)
            if record.is_cut:
                self._longest_cut = max(self._longest_cut, num)
        version = records[0].version
        starts = accumulate((len(record.prompt_ids) + len(record.token_ids) for record in records[:-1]), initial=0)
        turns = [turn for start, record in zip(starts, records, strict=True) for turn in self._turns(start, record)]
        columns = np.array([turn[:4] for turn in turns], np.int64).reshape(-1, 4).T
        previous_turn = np.array([i - 1 if turn[5] else -1 for i, turn in enumerate(turns)], np.int64)
        head_accepted = None
        if any(record.head_accepted is not None for record in records):
            parts: list[np.ndarray] = []
            for record in records:
                parts.append(np.zeros(len(record.prompt_ids), np.uint8))
                none = np.zeros(len(record.token_ids), np.uint8)
                parts.append(record.head_accepted if record.head_accepted is not None else none)
            head_accepted = np.concatenate(parts)
        return Round(
            version=version if version is not None else records[0].step or self._num_rounds,
            tokens=np.concatenate([part for record in records for part in (record.prompt_ids, record.token_ids)]),
            start=columns[0], num_prompt=columns[1], num_total=columns[2], limit=columns[3],
            problems=[turn[4] for turn in turns],
            epochs=np.array([self._epoch(turn[4]) for turn in turns], np.int64),
            previous_turn=previous_turn,
            head_accepted=head_accepted,
            num_bytes=sum(record.num_bytes for record in records),
        )  # fmt: skip

    def _epoch(self, problem: str) -> int:
        epoch, last = self._seen.get(problem, (-1, -1))
        if last != self._num_rounds:
            epoch += 1
            self._seen[problem] = epoch, self._num_rounds
        return epoch

    def _turns(self, start: int, record: Record) -> Iterator[tuple[int, int, int, int, str, bool]]:
        """(start, num_prompt, num_total, limit, problem, whether it has a previous turn)."""
        num_left = record.max_tokens or self.max_tokens or self._longest_cut or self._longest
        num_prompt, num_tokens = len(record.prompt_ids), len(record.token_ids)
        spans = [(0, num_tokens)] if num_tokens else []
        if record.mask is not None:
            edges = np.flatnonzero(np.diff(np.concatenate([[False], record.mask, [False]]).astype(np.int8)))
            spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        for i, (first, last) in enumerate(spans):
            num = last - first
            is_cut = record.is_cut and i == len(spans) - 1
            limit = num if is_cut else max(num_left, num)
            yield start, num_prompt + first, num_prompt + last, num_prompt + first + limit, record.problem, i > 0
            num_left -= num
