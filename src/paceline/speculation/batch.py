"""The hot path's vocabulary: whole batches as structs of arrays. B rows, K draft positions, V vocabulary.

Engine and drafters know each other only through what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paceline.types import Receipt, Request, SamplingParams

NO_LIMIT = 2**31 - 1  # draft tokens
HEAD_WINDOW = 512  # positions that a head computes at most before its first draft for a row


@dataclass(frozen=True, slots=True)
class Load:
    """A step before anything is drafted: what it computes in any case, prompts included."""

    num_rows: int = 0
    num_query_tokens: int = 0
    num_context_tokens: int = 0


@dataclass(slots=True)
class Rows:
    """The rows of a step that may be drafted for. `tokens[i]` is row i's whole sequence so far (prompt and
    emitted tokens, a read-only int32 view); the next token to be emitted has position len(tokens[i])."""

    request_ids: np.ndarray  # int64 [B]
    tokens: Sequence[np.ndarray]  # B x int32 [length]
    noise_keys: np.ndarray  # uint64 [B]
    sampling: Sequence[SamplingParams]
    version: int = 0  # of the policy
    load: Load = Load()  # of the whole step
    # How many tokens each row may be expected to emit yet, for policies with `reads_lengths`; else empty.
    expected_left: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 [B]
    # What drafts that take a model's forward may have at most, where a policy holds them shorter than the caps of
    # `propose`; None: the same.
    head_caps: np.ndarray | None = None  # int32 [B]
    # Draft tokens that the step has room for beside `load` (engine.max_num_batched_tokens), over all rows; and those
    # that each row can use: one less than it may still emit.
    draft_budget: int = NO_LIMIT
    draft_limits: np.ndarray | None = None  # int32 [B]; None: no limit
    is_ahead: bool = False  # whether a model's drafts are made at the end of a step, for the next one
    # For drafters with `wants_hidden`: the target has computed the first num_computed[i] tokens of row i, and
    # features([(i, start, end), …]) gives those layers' outputs, side by side, of rows' tokens start … end-1: [T, F].
    num_computed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of each row, or empty
    features: Callable[[Sequence[tuple[int, int, int]]], Any] | None = None

    def __len__(self) -> int:
        return len(self.request_ids)

    def limited(self, caps: np.ndarray) -> np.ndarray:
        """No more than each row can use: [B]."""
        return caps if self.draft_limits is None else np.minimum(caps, self.draft_limits)


@dataclass(slots=True)
class DraftBatch:
    """Guesses. Row i drafted tokens[i, :num[i]]. `q` is the distribution that each token was sampled from
    ([B, K, V], torch or numpy), or None for drafters that guess deterministically (one-hot q). `sources[i]` is the
    number of the drafter in `names` whose draft row i has, where several draft."""

    tokens: np.ndarray  # int32 [B, K]
    num: np.ndarray  # int32 [B]
    confidence: np.ndarray  # float32 [B, K], estimated probability that the position is accepted given those before
    q: Any = None
    names: tuple[str, ...] = ()
    sources: np.ndarray | None = None  # uint8 [B]
    match: np.ndarray | None = None  # int32 [B], tokens of the context that a draft was found by, where it was found

    @staticmethod
    def empty(num_rows: int, k: int = 0) -> DraftBatch:
        return DraftBatch(
            np.zeros((num_rows, k), np.int32), np.zeros(num_rows, np.int32), np.zeros((num_rows, k), np.float32)
        )


@dataclass(slots=True)
class Commits:
    """What was really emitted: row i gained tokens[i, :num[i]], of which num_accepted[i] had been drafted."""

    request_ids: np.ndarray  # int64 [B]
    tokens: np.ndarray  # int32 [B, K+1]
    num: np.ndarray  # int32 [B]
    num_drafted: np.ndarray  # int32 [B]
    num_accepted: np.ndarray  # int32 [B]
    drafts: DraftBatch | None = None  # what was verified, where that was not known when it was proposed

    @property
    def num_known(self) -> np.ndarray:
        """Drafted positions of which it is known whether they are right: those that stood and the first that did not.
        A draft that its sequence's end cut short was not wrong. int32 [B]."""
        wrong = (self.num_accepted < self.num_drafted) & (self.num > self.num_accepted)
        return self.num_accepted + wrong


def are_same(request_ids: np.ndarray, others: np.ndarray) -> bool:
    """Whether these are the same requests in the same order: often the very same array, step after step."""
    return request_ids is others or request_ids.tobytes() == others.tobytes()  # a tenth of np.array_equal's time


def places_of(request_ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Where each of some requests stands among others, of which it is one: int64. Rows that a step began with may have
    been sent back to wait before its end."""
    if are_same(request_ids, among):
        return np.arange(len(among))
    order = among.argsort()
    return order[among.searchsorted(request_ids, sorter=order)]


def look_up(request_ids: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same where they need not be among these: places, and whether they are. Of some there must be one."""
    order = among.argsort()
    place = order[np.minimum(among.searchsorted(request_ids, sorter=order), len(among) - 1)]
    return place, among[place] == request_ids


class Drafter(Protocol):
    """Guesses what the target will say. `begin` and `end` bracket a request's life; between them every
    emitted token reaches `observe` exactly once and in order. `propose` may be skipped for any row at any
    step, and what it proposed may be cut to any length. `reads_drafts` tells whether what it proposes depends on
    tokens that it sampled and then left out: harmless under `coupled`, a bias under the rejection rules, which refuse
    it."""

    name: str
    version: int
    wants_hidden: tuple[int, ...]  # target layers whose outputs it reads
    reads_drafts: bool

    @property
    def num_bytes(self) -> int: ...  # what it remembers of requests, ended ones included, takes

    def begin(self, request: Request, version: int = 0) -> None: ...  # the policy's version that it begins under
    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch: ...  # caps: int32 [B], num <= caps
    def observe(self, commits: Commits) -> None: ...
    def end(self, request_id: int) -> None: ...
    def update(self, weights: Any, version: int) -> Receipt: ...  # ValueError where it has no weights
    def state(self) -> dict[str, np.ndarray]: ...  # what it learned, for a checkpoint; live requests are no part of it
    def restore(self, state: Mapping[str, np.ndarray]) -> None: ...  # ValueError for another kind of drafter's


@runtime_checkable
class Listener(Protocol):
    """A drafter that drafts from what it observed alone: of the rows that it is shown it reads no tokens."""

    listens: bool

    def observe(self, commits: Commits) -> None: ...


@runtime_checkable
class Ahead(Protocol):
    """A drafter that has drafted when `propose` is called: at the end of the step before, where steps are computed. Its
    tokens are -1, the computing side has them."""

    # What is to be drafted at the end of this step; returns how many tokens behind a row's end that may write.
    def ask(self, rows: Rows, caps: np.ndarray) -> int: ...


@runtime_checkable
class Blind(Ahead, Protocol):
    """One that need not know what a step brought to draft for the next. What it then says of its drafts is of those
    before them; `verified` tells of the true ones, by the step that landed last, when that is over."""

    def verified(self, request_ids: np.ndarray) -> DraftBatch: ...
