"""A head and history on the device: each row gets the draft of which more tokens are expected to be accepted."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from paceline.model.cuda.device_state import MAX_DRAFT, DeviceState
from paceline.model.cuda.graph_drafter import DraftStep
from paceline.model.cuda.graph_head import GraphHead
from paceline.model.cuda.graph_history import GraphHistory
from paceline.model.paged import PagedDecoder, Span

HISTORY, HEAD = 0, 1  # in `sources_out`


class GraphHybrid:
    may_draft_less = True  # a draft of the history may be shorter than the head's

    def __init__(self, history: GraphHistory, head: GraphHead, state: DeviceState) -> None:
        self.history, self.head, self.state = history, head, state
        self.aux_layers = head.aux_layers
        # The history drafts into its own buffers. If its draft of a row is the better one, it is moved to the state's.
        history.drafts, history.survival = torch.zeros_like(state.drafts), torch.zeros_like(state.survival)
        # Factor of the history's probabilities, which are less reliable than the head's. The host sets it.
        self.history_factor = torch.ones(1, dtype=torch.float32, device=state.survival.device)

    def prefill(self, spans: list[Span], paged: PagedDecoder) -> None:
        self.head.prefill(spans, paged)

    def draft(self, step: DraftStep) -> None:
        found = replace(step, scores_out=torch.zeros_like(step.scores_out))
        self.history.draft(found)
        self.head.draft(step)
        if not step.draft_length:
            return
        slots = step.inputs.rows.slots
        _choose[(len(slots),)](
            slots, self.history_factor, self.history.drafts, self.history.survival, found.scores_out,
            self.state.drafts, self.state.survival, step.scores_out, step.sources_out, step.draft_length,
            MAX_DRAFT=MAX_DRAFT, WIDTH=triton.next_power_of_2(MAX_DRAFT), HISTORY=HISTORY, HEAD=HEAD, num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["k"])
def _choose(
    slots, history_factor, history_drafts, history_survival, history_probabilities, drafts, survival, probabilities,
    sources, k, MAX_DRAFT: tl.constexpr, WIDTH: tl.constexpr, HISTORY: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """The sum of survival probabilities is the expected number of accepted tokens."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        j = tl.arange(0, WIDTH)
        inside = j < k
        at, out = slot * MAX_DRAFT + j, row * MAX_DRAFT + j
        factor = tl.exp(tl.log(tl.load(history_factor)) * (j + 1))
        of_history = tl.load(history_survival + at, mask=inside, other=0.0) * factor
        of_head = tl.load(survival + at, mask=inside, other=0.0)
        takes_history = tl.sum(of_history) >= tl.sum(of_head)
        tl.store(sources + row, tl.where(takes_history, HISTORY, HEAD))
        moved = inside & takes_history
        tl.store(drafts + at, tl.load(history_drafts + at, mask=moved), mask=moved)
        tl.store(survival + at, of_history, mask=moved)
        tl.store(probabilities + out, tl.load(history_probabilities + out, mask=moved), mask=moved)
