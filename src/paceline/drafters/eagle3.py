"""An EAGLE-3 head drafts: one pass of one layer per token, batched over all rows, from the target's own states.

The target's features lie in its paged memory (Rows.features), so the head computes a row only when it is drafted for,
and then catches up: at position i it takes (feature i, token i + 1). For its own guesses it goes on from its own state;
what it computed for them is overwritten with true features later. Its KV is its own, shared between rows that begin
alike and dropped when the policy or the head changes, since states of other weights tell it little.

Under `coupled` it draws with the target's own noise, so that it guesses what the target will draw, not merely what is
likely, and says how sure of it that noise makes it; under the rejection rules it draws with noise of its own, and hands
over q. Its confidences are calibrated on how its drafts fared. With `min_confidence` it stops where a draft is less
likely than that to get so far, which saves the passes that would have followed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import assign_head, head_state
from paceline.model.kv import BLOCK, BlockTable
from paceline.model.layer import Linear
from paceline.model.paged import PagedMemory, Span, make_plan, receipt_of
from paceline.model.sample import Sampler, SamplingArrays, Stream, with_round
from paceline.model.surety import surety
from paceline.speculation.batch import HEAD_WINDOW, Commits, DraftBatch, Rows, places_of
from paceline.speculation.calibration import of_draws
from paceline.types import Receipt, Request


@dataclass(slots=True)
class _State:
    """Positions are counted from `start`, where the head came in: its attention knows distances only."""

    start: int = 0
    num_computed: int = 0  # positions from there whose KV comes from true features
    table: BlockTable = field(default_factory=BlockTable)


class Calibrated:
    """What a drafter with a head learns of its drafts, and under which policy it did."""

    def __init__(self) -> None:
        self.calibration = of_draws()
        self._policy_version = -1  # none yet

    def state(self) -> dict[str, np.ndarray]:
        """Its weights come from where they came from, and its KV is computed again."""
        return {"calibration": self.calibration.counts.copy(), "policy_version": np.array([self._policy_version])}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state.keys() != {"calibration", "policy_version"}:
            raise ValueError(
                f"not a state of the eagle3 drafter: it holds {sorted(state) or 'nothing'}; was speculation.method "
                "changed?"
            )
        self.calibration.counts = state["calibration"].copy()
        self._policy_version = int(state["policy_version"][0])


class Eagle3Drafter(Calibrated):
    """`embed` is the target's embedding, which the head shares."""

    name = "eagle3"
    num_bytes = 0  # keeps nothing of ended requests; its KV pool is of fixed size

    def __init__(
        self,
        head: Eagle3Head,
        embed: Linear,
        sampler: Sampler,
        num_blocks: int,
        coupled: bool = True,
        min_confidence: float = 0.0,
        window: int = HEAD_WINDOW,
        version: int = 0,
    ) -> None:
        super().__init__()
        self.head, self.embed, self.sampler, self.coupled, self.version = head, embed, sampler, coupled, version
        self.window = window
        self.wants_hidden = head.config.taps
        self.min_confidence = min_confidence
        self.reads_drafts = min_confidence > 0
        native = head.lm_head.panels is not None
        self.memory = PagedMemory(head.config.layer, num_blocks, head.dtype, head.device, native)
        self._states: dict[int, _State] = {}
        self._ids = np.zeros(0, np.int64)  # of the rows drafted for last, …
        self._said = np.zeros((0, 0), np.float32)  # … and how sure it was of each of their tokens

    def begin(self, request: Request, version: int = 0) -> None:
        self._states[request.request_id] = _State()

    def end(self, request_id: int) -> None:
        self.memory.pool.truncate(self._states.pop(request_id).table, 0)

    def observe(self, commits: Commits) -> None:
        drafted = np.flatnonzero((commits.num_drafted > 0) & np.isin(commits.request_ids, self._ids))
        if len(drafted):
            said = self._said[places_of(commits.request_ids[drafted], self._ids)]
            self.calibration.observe_many(said, commits.num_accepted[drafted], commits.num_known[drafted])

    @torch.inference_mode()
    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        if rows.version != self._policy_version:
            self._start_again()
            if self._policy_version >= 0:
                self.calibration.fade()
            self._policy_version = rows.version
        drafts = DraftBatch.empty(len(rows), int(caps.max(initial=0)))
        active = [i for i in range(len(rows)) if caps[i] and self._reserve(rows, i, int(caps[i]))]
        if not active:
            return drafts
        chances: list[Tensor] = []
        said = np.zeros_like(drafts.confidence)
        reach = np.ones(len(rows))  # how likely each row's draft is to get so far
        x, h = self._catch_up(rows, active)
        for step in range(drafts.tokens.shape[1]):
            self._draw(rows, active, h, step, drafts, said, chances)
            reach[active] *= drafts.confidence[active, step]
            worth = [n for n, i in enumerate(active) if reach[i] >= self.min_confidence]
            drafts.num[[active[n] for n in worth]] = step + 1
            keep = [n for n in worth if caps[active[n]] > step + 1]
            if not keep:
                break
            if len(keep) < len(active):
                active, x = [active[n] for n in keep], x[keep]
            spans = []
            for i in active:
                state = self._state(rows, i)
                spans.append(Span(drafts.tokens[i, step : step + 1], state.num_computed + step, state.table, 1))
            x, h = self._forward(spans, x)
        self._ids, self._said = rows.request_ids, said
        if chances:
            drafts.q = torch.stack(chances, 1)
        return drafts

    def _state(self, rows: Rows, i: int) -> _State:
        return self._states[int(rows.request_ids[i])]

    def _reserve(self, rows: Rows, i: int, cap: int) -> bool:
        """Whether row i can be drafted for: the target has computed all but its last token, and there is room."""
        num_tokens = len(rows.tokens[i])
        if num_tokens < 2 or rows.num_computed[i] < num_tokens - 1:
            return False
        state = self._state(rows, i)
        if not state.table.blocks:
            state.start, state.num_computed = 0, self.memory.adopt(state.table, _pairs(rows.tokens[i]))
        if num_tokens - 1 - state.start - state.num_computed > self.window:  # too much to catch up with: come in later
            self.memory.pool.truncate(state.table, 0)
            state.start, state.num_computed = num_tokens - 1 - self.window, 0
        reach = num_tokens - 1 - state.start + cap - 1  # the last draft needs no KV
        return reach <= self.head.config.layer.max_positions and self.memory.pool.reserve(state.table, reach)

    def _catch_up(self, rows: Rows, active: list[int]) -> tuple[Tensor, Tensor]:
        """Take in what the target has computed meanwhile; the states at each row's last position, and their norms."""
        spans, wanted = [], []
        for i in active:
            state, tokens = self._state(rows, i), rows.tokens[i]
            # At least the last position is computed again: its state is where the draft begins.
            start = min(state.start + state.num_computed, len(tokens) - 2)
            spans.append(Span(tokens[start + 1 :], start - state.start, state.table, 1))
            wanted.append((i, start, len(tokens) - 1))
        assert rows.features is not None
        features = rows.features(wanted)
        x, h = self._forward(spans, self.head.fuse(features.to(self.head.dtype)))
        for i in active:
            state = self._state(rows, i)
            before, state.num_computed = state.num_computed, len(rows.tokens[i]) - 1 - state.start
            if state.start == 0 and state.num_computed // BLOCK > before // BLOCK:
                self.memory.pool.index(state.table, _pairs(rows.tokens[i]))
        return x, h

    def _forward(self, spans: list[Span], x: Tensor) -> tuple[Tensor, Tensor]:
        plan = make_plan(spans)
        device = self.head.device
        x, h = self.head(
            x,
            torch.as_tensor(plan.tokens, device=device),
            torch.as_tensor(plan.positions, device=device),
            self.memory.attention(plan),
            self.embed,
        )
        if len(plan.logits_at) < len(x):
            last = torch.as_tensor(plan.logits_at, device=device)
            x, h = x[last], h[last]
        return x, h

    def _draw(
        self,
        rows: Rows,
        active: list[int],
        h: Tensor,
        step: int,
        drafts: DraftBatch,
        said: np.ndarray,
        chances: list[Tensor],
    ) -> None:
        """The next token of each active row."""
        logits = self.head.spread(self.head.logits(h))
        lengths = np.array([len(rows.tokens[i]) for i in active], np.int64)
        params = SamplingArrays.of([rows.sampling[i] for i in active])
        at, stream = lengths + step, Stream.SAMPLE
        if not self.coupled:
            at, stream = with_round(at, lengths), Stream.DRAFT
            q = self.sampler.distribution(logits, params)
            chances.append(q.new_zeros(len(rows), q.shape[-1]))
            chances[-1][active] = q
        draws = self.sampler.draw(logits, rows.noise_keys[active], at, params, stream, leads=self.coupled)
        drafts.tokens[active, step] = draws.tokens
        said[active, step] = surety(draws)
        drafts.confidence[active, step] = self.calibration(said[active, step])

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        started = time.perf_counter()
        assign_head(self.head, weights)
        self._start_again()
        self.version = version
        return receipt_of(head_state(self.head), version, started)

    def _start_again(self) -> None:
        self.memory.pool.forget_all()
        for state in self._states.values():
            self.memory.pool.truncate(state.table, 0)
            state.start = state.num_computed = 0


def _pairs(tokens: np.ndarray) -> np.ndarray:
    """What the KV of each position but the last depends on, given that of the positions before: the token after it,
    and for the first the token itself too. int64, one less than the tokens."""
    keys = tokens[1:].astype(np.int64)
    keys[0] += int(tokens[0]) << 32
    return keys
