"""The part of a drafter that runs inside the CUDA graph: at the end of each step it drafts for the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.model.cuda.device_state import DeviceState, Inputs
from paceline.model.decoder import Decoder
from paceline.model.kv import PagedKV
from paceline.model.paged import PagedDecoder, Span


@dataclass(slots=True)
class DraftStep:
    """The end of a step, for drafting. T tokens, R rows."""

    inputs: Inputs
    max_queries: int  # of a row
    aux_hidden_TF: Tensor | None  # outputs of the drafter's `aux_layers`, concatenated; None: it reads none
    sampled_T: Tensor  # int32, the token sampled at each position
    ends_R: Tensor  # int32, at which of the T positions each row's last token was sampled
    emitted: Tensor  # int32 [R, 2 + MAX_QUERIES], see `DeviceState.commit_tokens`
    draft_length: int
    truncates: bool  # whether a row uses top-k, top-p or min-p
    stops_early: bool  # see `GraphSize.stops_early`
    scores_out: Tensor  # float64 [R, MAX_DRAFT], of each draft token, given that those before it are accepted
    sources_out: Tensor  # int32 [R], index into the drafter's `sources`
    imposed: Tensor | None  # see `DeviceState.commit_tokens`


class GraphDrafter(Protocol):
    """The host's part is a `DeviceDrafter` (speculation/device_drafter.py), which builds it."""

    aux_layers: tuple[int, ...]  # it reads the outputs of these target layers
    may_draft_less: bool  # some of its draft tokens may be missing (score 0), so the next step must select

    def prefill(self, spans: list[Span], paged: PagedDecoder) -> None:
        """Rows that were computed outside of the graph: each span has the tokens after the positions that the target
        has computed."""
        ...

    def draft(self, step: DraftStep) -> None:
        """Write draft tokens and survival probabilities into `DeviceState.drafts` and `.survival` by slot, and scores
        into `step.scores_out` by row. This is captured: no synchronization, and no shape that depends on data."""
        ...


@dataclass(slots=True)
class DeviceContext:
    """What a `DeviceDrafter` builds its part in the graph from."""

    decoder: Decoder
    kv: PagedKV
    num_blocks: int
    state: DeviceState
    max_num_seqs: int
