"""What engine, drafters and policies exchange: a step's rows, as arrays, and the protocol of drafters. B rows, K draft
positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.speculation.acceptance import AcceptanceModel
from paceline.speculation.draft_batch import DraftBatch
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
    drafter: str = ""  # its name
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    # How many tokens each row is expected to emit yet, for policies with `reads_lengths`; else empty.
    expected_left: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 [B]
    # The longest drafts of a model, if a policy limits them to less than the caps of `propose`; None: the same.
    head_caps: np.ndarray | None = None  # int32 [B]
    is_head_probe: bool = False  # these are drafts of the model, whatever history has
    # Draft tokens that the step can verify besides `load` (engine.max_num_batched_tokens), over all rows; and those
    # that each row can use: one less than it may still emit.
    draft_budget: int = NO_LIMIT
    draft_limits: np.ndarray | None = None  # int32 [B]; None: no limit
    on_device: bool = False  # the drafter drafts at the end of a step for the next one
    # For drafters with `aux_layers`: the target has computed the first num_computed[i] tokens of row i, and
    # aux_hidden_states([(i, start, end), …]) gives those layers' outputs, concatenated, of rows' tokens
    # start … end-1: [T, F].
    num_computed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of each row, or empty
    aux_hidden_states: Callable[[Sequence[tuple[int, int, int]]], Any] | None = None

    def __len__(self) -> int:
        return len(self.request_ids)

    def limited(self, caps: np.ndarray) -> np.ndarray:
        """No more than each row can use: [B]."""
        return caps if self.draft_limits is None else np.minimum(caps, self.draft_limits)


@dataclass(slots=True)
class Commits:
    """What a step emitted: tokens[i, :num[i]] for row i, of which num_accepted[i] were drafted."""

    request_ids: np.ndarray  # int64 [B]
    tokens: np.ndarray  # int32 [B, K+1]
    num: np.ndarray  # int32 [B]
    num_drafted: np.ndarray  # int32 [B]
    num_accepted: np.ndarray  # int32 [B]

    @property
    def num_known(self) -> np.ndarray:
        """Draft tokens with a known outcome: the accepted ones and the first rejected one. If the sequence ended, the
        next one was not rejected. int32 [B]."""
        wrong = (self.num_accepted < self.num_drafted) & (self.num > self.num_accepted)
        return self.num_accepted + wrong


def are_same(request_ids: np.ndarray, others: np.ndarray) -> bool:
    """Whether these are the same requests in the same order. Often it is the same array, step after step."""
    return request_ids is others or request_ids.tobytes() == others.tobytes()  # a tenth of np.array_equal's time


def places_of(request_ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    """The index of each request in `among`, which contains them all: int64. Rows that were drafted for may have been
    preempted before the step was launched."""
    if are_same(request_ids, among):
        return np.arange(len(among))
    order = among.argsort()
    return order[among.searchsorted(request_ids, sorter=order)]


def look_up(request_ids: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of each request in `among`, which must not be empty, and whether it is there at all."""
    order = among.argsort()
    place = order[np.minimum(among.searchsorted(request_ids, sorter=order), len(among) - 1)]
    return place, among[place] == request_ids


class Drafter(ABC):
    """Base of all drafters; only `propose` must be overridden. `begin` and `end` are called for every request; between
    them, every emitted token reaches `observe` once and in order. `propose` may be skipped for any row at any step, and
    drafts may be cut to any length."""

    name = ""
    version = 0
    aux_layers: tuple[int, ...] = ()  # target layers whose outputs it reads
    # What it proposes depends on tokens that it sampled and then left out: a bias under the rejection rules, which
    # refuse it.
    reads_drafts = False

    @property
    def num_bytes(self) -> int:
        """Of what it keeps of requests, ended ones included."""
        return 0

    def begin(self, request: Request, version: int = 0) -> None:
        """`version` of the policy."""

    @abstractmethod
    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        """At most caps[i] tokens for row i. int32 [B]."""

    def observe(self, commits: Commits) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass

    def update(self, weights: Any, version: int) -> Receipt:
        raise ValueError(f"the {self.name} drafter has no weights to update")

    def state_dict(self) -> dict[str, np.ndarray]:
        """Without running requests."""
        return {}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            raise ValueError(
                f"not a state of the {self.name} drafter, which keeps none: it holds {sorted(state)}; was "
                "speculation.method changed?"
            )
