"""Who drafts, and who says how much: what the rows of a step are given to verify, and what both hear when it is over.

Always: no draft is longer than what its sequence may still emit before its last token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from paceline.engine.interface import Learned
from paceline.engine.lineup import Each, Lineup
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence
from paceline.model.paged import PagedDecoder
from paceline.speculation.batch import Ahead, Blind, Commits, DraftBatch, Drafter, Listener, Load, Rows
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import Decision, SpeculationPolicy
from paceline.types import Completion, Request


@dataclass(slots=True)
class Drafts:
    """What drafting came to: the policy's decision, and the drafts' distributions by request where there are any."""

    decision: Decision = field(default_factory=Decision)
    num_planned: int = 0
    proposed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [B], to each row that decides
    num_slots: int | None = None  # drafted tokens to be verified, the best; None: all that the rows have
    q: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_proposed(self) -> int:
        return int(self.proposed.sum())


@dataclass(slots=True)
class Plan:
    """A step's rows; those that decide as drafters see them, and how much they may be given; what comes of it."""

    rows: Lineup
    view: Rows | None
    caps: np.ndarray  # int32 [B]
    drafts: Drafts


class Drafting:
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
        self.policy = policy
        self._equip(drafter)
        self.check(drafter, policy)

    def _equip(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self._ahead = drafter if isinstance(drafter, Ahead) else None
        self._blind = drafter if isinstance(drafter, Blind) else None
        self.listens = isinstance(drafter, Listener) and drafter.listens

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
        """Whether a step can be launched before it is known what the one before it brought."""
        if self._blind is not None:
            return self.policy.takes_best or not self.policy.reads_drafts
        return self.drafter is None

    # -- a request's life -------------------------------------------------------------------------------------------

    def begin(self, request: Request, version: int) -> None:
        self.lengths.begin(request)
        self.policy.begin(request)
        if self.drafter is not None:
            self.drafter.begin(request, version)

    def end(self, completion: Completion) -> None:
        request_id = completion.request.request_id
        if self.drafter is not None:
            self.drafter.end(request_id)
        self.policy.end(request_id)
        self.lengths.end(request_id, len(completion.token_ids), whole=completion.finish_reason != "abort")

    def set_policy(self, policy: SpeculationPolicy, live: list[Sequence]) -> None:
        """Another policy for all requests, the live ones included."""
        for sequence in live:
            self.policy.end(sequence.request.request_id)
            policy.begin(sequence.request)
        self.policy = policy

    def set_drafter(self, drafter: Drafter | None, live: list[Sequence], version: int) -> None:
        """Another drafter for all requests; it observes what the live ones have emitted so far."""
        for sequence in live if self.drafter is not None else ():
            assert self.drafter is not None
            self.drafter.end(sequence.request.request_id)
        self._equip(drafter)
        self.scheduler.lookahead = 0
        for sequence in live if drafter is not None else ():
            assert drafter is not None
            drafter.begin(sequence.request, version)
            emitted = sequence.tokens[sequence.num_prompt :]
            if len(emitted):
                none, ids = np.zeros(1, np.int32), np.array([sequence.request.request_id])
                drafter.observe(Commits(ids, emitted[None].copy(), np.array([len(emitted)], np.int32), none, none))

    # -- a step -----------------------------------------------------------------------------------------------------

    def plan(self, rows: Lineup, version: int) -> Plan:
        """How long the drafts of the rows that decide tokens may be."""
        seats, at = rows.seats, rows.at if rows.all_decide else rows.at[rows.decides]
        none = np.zeros(len(at), np.int32)
        if self.drafter is None or not len(at):
            return Plan(rows, None, none, Drafts())
        num_query, num_tokens = int(rows.num_query.sum()), seats.num_tokens[at]
        view = Rows(
            request_ids=seats.request_ids(at),
            tokens=Each(len(at), lambda i: seats[at[i]].tokens),
            noise_keys=seats.noise_key[at],
            sampling=Each(len(at), lambda i: seats[at[i]].request.sampling),
            version=version,
            load=Load(len(rows), num_query, num_query + int(seats.num_computed[rows.at].sum())),
            draft_budget=max(0, self.scheduler.max_num_batched_tokens - num_query),
            draft_limits=(seats.limit[at] - num_tokens - 1 - seats.num_flying[at]).astype(np.int32),
            is_ahead=self._ahead is not None,
            num_computed=seats.num_computed[at],
            num_tokens=num_tokens,
            features=lambda spans: self.paged.features([(seats[at[i]].table, start, end) for i, start, end in spans]),
        )
        if self.policy.reads_lengths:
            view.expected_left = self.lengths.expected_left(view.request_ids, num_tokens - seats.num_prompt[at])
        caps = self.policy.plan(view)
        if self._ahead is not None:
            self.scheduler.lookahead = self._ahead.ask(view, caps)
        if not caps.any():
            return Plan(rows, view, none, Drafts(self.policy.decision))
        caps = view.limited(caps)
        return Plan(rows, view, caps, Drafts(self.policy.decision, num_planned=int(caps.sum())))

    def propose(self, plan: Plan) -> Drafts:
        """Put drafts on the rows."""
        found = plan.drafts
        # A device that has drafted knows, when they are verified, which are the best.
        chooses = self._ahead is not None and self.overlaps and self.policy.takes_best
        if not found.num_planned:
            found.num_slots = 0 if chooses else None
            return found
        assert self.drafter is not None and plan.view is not None
        drafts = self.drafter.propose(plan.view, plan.caps)
        assert (drafts.num <= plan.caps).all()  # there are no pages for more
        lengths = self.policy.select(drafts)
        assert int(lengths.sum()) <= plan.view.draft_budget
        found.decision, found.proposed = self.policy.decision, drafts.num
        if chooses:
            found.num_slots = int(lengths.sum())
            lengths = drafts.num if found.num_slots else lengths
        plan.rows.give(drafts.tokens, lengths, self._numbers(plan.rows, drafts))
        if drafts.q is not None:
            ids = plan.view.request_ids.tolist()
            found.q = {ids[i]: drafts.q[i, : lengths[i]] for i in np.flatnonzero(lengths).tolist()}
        return found

    def _numbers(self, rows: Lineup, drafts: DraftBatch) -> np.ndarray | int:
        """Whose drafts they are, by the numbers of the rows' seats: uint8 [B], or one for all."""
        assert self.drafter is not None
        if drafts.sources is None:
            return rows.seats.number_of(self.drafter.name)
        return np.array([rows.seats.number_of(name) for name in drafts.names], np.uint8)[drafts.sources]

    def hear(self, commits: Commits) -> None:
        """The drafter is told what a step brought."""
        assert self.drafter is not None
        if self._blind is not None:
            commits.drafts = self._blind.verified(commits.request_ids)
        self.drafter.observe(commits)

    # -- for a checkpoint -------------------------------------------------------------------------------------------

    def learned(self) -> Learned:
        return {
            "drafter": self.drafter.state() if self.drafter is not None else {},
            "policy": self.policy.state(),
            "lengths": self.lengths.state(),
        }

    def teach(self, learned: Learned) -> None:
        if self.drafter is not None and "drafter" in learned:
            self.drafter.restore(learned["drafter"])
        if "policy" in learned:
            self.policy.restore(learned["policy"])
        if "lengths" in learned:
            self.lengths.restore(learned["lengths"])
