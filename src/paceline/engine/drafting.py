"""Connects the drafter and the speculation policy to the engine: what each row of a step gets to verify, and what both
observe afterwards.

Invariant: no draft is longer than its sequence may still emit before its last token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from paceline.engine.interface import SpeculationState
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence
from paceline.model.paged import PagedDecoder
from paceline.speculation.acceptance import AcceptanceModel
from paceline.speculation.batch import Commits, Drafter, Load, Rows, are_same, places_of
from paceline.speculation.device_drafter import DeviceDrafter
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import Decision, SpeculationPolicy
from paceline.types import Completion, Request, StepTrace


@dataclass(slots=True)
class StepDrafts:
    """The policy's decision about a step, and its draft tokens."""

    decision: Decision = field(default_factory=Decision)
    num_planned: int = 0
    request_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [B], of the emitting rows
    proposed: DraftBatch | None = None
    draft_budget: int | None = None  # draft tokens that the device selects to verify; None: all
    q: dict[int, Tensor] = field(default_factory=dict)  # by request id

    @property
    def num_proposed(self) -> int:
        return int(self.proposed.num.sum()) if self.proposed is not None else 0


class Drafting:
    """Of one engine. The drafter itself observes emitted tokens directly; see `LocalEngine._commit`."""

    def __init__(
        self,
        paged: PagedDecoder,
        scheduler: Scheduler,
        rule: str,
        lengths: LengthModel,
        drafter: Drafter | None,
        policy: SpeculationPolicy,
    ) -> None:
        self.paged, self.scheduler, self.rule, self.lengths = paged, scheduler, rule, lengths
        self.policy, self.acceptance = policy, AcceptanceModel(policy.has_probes)
        self._rated = drafter  # whose outcomes the acceptance model has
        self._begun: set[int] = set()  # requests that the drafter knows
        self._set(drafter)
        self.check(drafter, policy)

    def _set(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self._device_drafter = drafter if isinstance(drafter, DeviceDrafter) else None

    def check(self, drafter: Drafter | None, policy: SpeculationPolicy) -> None:
        if self.rule == "coupled":
            return
        if policy.reads_drafts:
            raise ValueError(
                f"speculation.rule = {self.rule!r} is biased by a policy that cuts drafts by what is in them; "
                "use rule = 'coupled' with it, or a policy that does not look (speculation.min_confidence = 0)"
            )
        if drafter is not None and drafter.reads_drafts:
            raise ValueError(
                f"speculation.rule = {self.rule!r} is biased by a drafter that chooses among drafts by what it "
                "sampled; use rule = 'coupled' with it, or choose before (speculation.hybrid_choice = 'before')"
            )

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched before the results of the one before it are known on the host."""
        if self._device_drafter is not None:
            return self.policy.takes_best or not self.policy.reads_drafts
        return self.drafter is None

    # -- a request's life -------------------------------------------------------------------------------------------

    def begin(self, request: Request, version: int) -> None:
        self._begin(request, version)  # may raise: a history takes memory
        self.lengths.begin(request)
        self.policy.begin(request)

    def _begin(self, request: Request, version: int) -> None:
        if self.drafter is not None:
            self.drafter.begin(request, version)
            self._begun.add(request.request_id)

    def _end(self, request_id: int) -> None:
        if self.drafter is not None and request_id in self._begun:
            self._begun.discard(request_id)
            self.drafter.end(request_id)

    def end(self, completion: Completion) -> None:
        request_id = completion.request.request_id
        self._end(request_id)
        self.policy.end(request_id)
        self.lengths.end(request_id, len(completion.token_ids), whole=completion.finish_reason != "abort")

    def set_policy(self, policy: SpeculationPolicy, live: list[Sequence]) -> None:
        """Another policy for all requests, the live ones included."""
        for sequence in live:
            self.policy.end(sequence.request.request_id)
            policy.begin(sequence.request)
        self.policy = policy
        self.acceptance.set_probes(policy.has_probes)

    def set_drafter(self, drafter: Drafter | None, live: list[Sequence], version: int) -> None:
        """Another drafter for all requests, or the same one anew. It observes what they have emitted so far; a history
        then has these tokens twice."""
        for sequence in live:
            self._end(sequence.request.request_id)
        self._set(drafter)
        self.scheduler.lookahead = 0
        if drafter is None:
            return
        if drafter is not self._rated:
            self._rated, self.acceptance = drafter, AcceptanceModel(self.policy.has_probes)
        for sequence in live:
            self._begin(sequence.request, version)
            if len(sequence.emitted):
                none, ids = np.zeros(1, np.int32), np.array([sequence.request.request_id])
                num = np.array([len(sequence.emitted)], np.int32)
                drafter.observe(Commits(ids, sequence.emitted[None].copy(), num, none, none))

    # -- a step -----------------------------------------------------------------------------------------------------

    def update_pause(self) -> None:
        """Before a step is scheduled. After a pause no cached prompt is used: the drafter has not read those that were
        computed meanwhile."""
        drafter = self._device_drafter
        if drafter is not None:
            if drafter.is_paused and not self.policy.pauses_drafter:
                self.paged.pool.reset_prefix_cache()
            drafter.is_paused = self.policy.pauses_drafter

    def propose(self, batch: ScheduledBatch, version: int) -> StepDrafts:
        """Give the emitting rows drafts.

        A drafter on the device has drafted for this step at the end of the step before, and drafts for the next one at
        the end of this one. So the policy's caps are used twice: they limit how many of the existing draft tokens are
        verified now, and the longest is how many this step drafts."""
        slots = batch.slots if batch.all_emit else batch.slots[batch.emits]
        if self.drafter is None or not len(slots):
            return StepDrafts()
        rows = self._rows(batch, slots, version)
        self.acceptance.set_version(version)
        caps = self.policy.plan(rows)
        if self._device_drafter is not None:
            assert not (self._device_drafter.is_paused and caps.any())
            self._device_drafter.set_draft_length(rows, caps)
            self.scheduler.lookahead = self._device_drafter.kv_lookahead
        caps = rows.limited(caps)
        # A device that drafts knows best which of its draft tokens are the most probable.
        selects = self._device_drafter is not None and self.overlaps and self.policy.takes_best
        found = StepDrafts(self.policy.decision, num_planned=int(caps.sum()), draft_budget=0 if selects else None)
        if not found.num_planned:
            return found
        drafts = self.drafter.propose(rows, caps)
        assert (drafts.num <= caps).all()  # more could pass the sequence's limit
        if self._device_drafter is None or not self.overlaps:  # else these are the scores of other drafts
            self.acceptance.rate(drafts, self.drafter.name)
            if drafts.caps is None:
                drafts.caps = caps
        lengths = self.policy.select(drafts)
        assert int(lengths.sum()) <= rows.draft_budget
        found.decision, found.proposed, found.request_ids = self.policy.decision, drafts, rows.request_ids
        if selects:
            found.draft_budget = int(lengths.sum())
            lengths = drafts.num if found.draft_budget else lengths
        batch.set_drafts(drafts.tokens, lengths, self._sources(batch, drafts))
        if drafts.q is not None:
            ids = rows.request_ids.tolist()
            found.q = {ids[i]: drafts.q[i, : lengths[i]] for i in np.flatnonzero(lengths).tolist()}
        return found

    def _rows(self, batch: ScheduledBatch, slots: np.ndarray, version: int) -> Rows:
        seq_table, num_query = batch.seq_table, int(batch.num_query.sum())
        num_tokens = seq_table.num_tokens[slots]
        # A drafter on the device reads neither tokens nor sampling parameters.
        sequences = seq_table.of(slots) if self._device_drafter is None else []
        rows = Rows(
            request_ids=seq_table.request_ids(slots),
            tokens=[sequence.tokens for sequence in sequences],
            noise_keys=seq_table.noise_key[slots],
            sampling=[sequence.request.sampling for sequence in sequences],
            version=version,
            drafter=self.drafter.name if self.drafter is not None else "",
            acceptance=self.acceptance,
            load=Load(len(batch), num_query, num_query + int(seq_table.num_computed[batch.slots].sum())),
            draft_budget=max(0, self.scheduler.max_num_batched_tokens - num_query),
            draft_limits=(seq_table.limit[slots] - num_tokens - 1 - seq_table.num_in_flight[slots]).astype(np.int32),
            on_device=self._device_drafter is not None,
            num_computed=seq_table.num_computed[slots],
            num_tokens=num_tokens,
            aux_hidden_states=lambda spans: self.paged.aux_hidden_states(
                [(sequences[i].table, start, end) for i, start, end in spans]
            ),
        )
        if self.policy.reads_lengths:
            num_emitted = num_tokens - seq_table.num_prompt[slots]
            rows.expected_left = self.lengths.expected_left(rows.request_ids, num_emitted)
        return rows

    def _sources(self, batch: ScheduledBatch, drafts: DraftBatch) -> np.ndarray | int:
        """Which drafter each draft is from: index into the sequence table's `drafters`, uint8 [B] or one for all."""
        assert self.drafter is not None
        if drafts.sources is None:
            return batch.seq_table.drafter_index(self.drafter.name)
        return np.array([batch.seq_table.drafter_index(name) for name in drafts.names], np.uint8)[drafts.sources]

    def verified(self, batch: ScheduledBatch) -> DraftBatch | None:
        """The drafts that a step has verified, if the host did not know them before. Sets where they are from."""
        if self._device_drafter is None:
            return None
        drafts = self._device_drafter.verified(batch.seq_table.request_ids(batch.slots))
        if drafts.sources is not None:
            batch.drafters = np.asarray(self._sources(batch, drafts), np.uint8)
        return drafts

    def observe(self, commits: Commits, verified: DraftBatch | None, trace: StepTrace, drafts: StepDrafts) -> None:
        """The outcome of a step, for the acceptance model and the policy."""
        assert self.drafter is not None
        proposed, rows, name = drafts.proposed, None, self.drafter.name
        if self._device_drafter is not None and self.overlaps:
            wanted = self._device_drafter.reads_acceptance or (
                self.policy.reads_acceptance and self.acceptance.needs_outcomes(name)
            )
            if verified is not None and wanted and verified.scores.size:
                self.acceptance.rate(verified, name)
                # A draft that is older than the last step has no scores any more.
                accepted, known = (np.minimum(num, verified.num) for num in (commits.num_accepted, commits.num_known))
                self.acceptance.observe(verified, name, None, accepted, known)
        elif proposed is not None:
            if not are_same(commits.request_ids, drafts.request_ids):
                rows = places_of(commits.request_ids, drafts.request_ids)
            self.acceptance.observe(proposed, name, rows, commits.num_accepted, commits.num_known)
        self.policy.observe(commits, trace, drafts.decision)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> SpeculationState:
        return {
            "drafter": self.drafter.state_dict() if self.drafter is not None else {},
            "policy": self.policy.state_dict(),
            "acceptance": self.acceptance.state_dict(),
            "lengths": self.lengths.state_dict(),
        }

    def load_state_dict(self, state: SpeculationState) -> None:
        """Parts that are not there stay as they are."""
        if self.drafter is not None and "drafter" in state:
            self.drafter.load_state_dict(state["drafter"])
        if "policy" in state:
            self.policy.load_state_dict(state["policy"])
        if "acceptance" in state:
            self.acceptance.load_state_dict(state["acceptance"])
        if "lengths" in state:
            self.lengths.load_state_dict(state["lengths"])
