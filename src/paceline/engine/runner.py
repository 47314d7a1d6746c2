"""Who computes a step: from rows to what each of them emits.

A step is launched, flies, and lands. Here it is over when it is launched; `graph_runner` has one that lets the host go
on meanwhile. Rows that do not decide tokens (a prefill chunk that stops short) have no part in the verdict.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from paceline.engine.accept import Proposal, Rule, Verdict
from paceline.engine.lineup import Row
from paceline.engine.sequence import Sequence
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler, SamplingArrays
from paceline.speculation.batch import Drafter


@dataclass(slots=True)
class Landed:
    """What became of a step: of its deciding rows, in their order."""

    verdict: Verdict
    num_verified: np.ndarray | None = None  # int [B], drafted tokens; None: all that were there
    num_guessed: int = 0  # tokens that a head drafted for each row at its end


class Flight(Protocol):
    @property
    def may_wait(self) -> bool: ...  # whether the next step may be launched before this one lands

    def land(self) -> Landed: ...

    def took(self) -> tuple[float, float]:
        """Seconds of its forward and of its draws. It has landed."""
        ...


class Runner(Protocol):
    @property
    def num_captured(self) -> int: ...  # sizes of steps that were made ready on first use, which takes a while

    def equip(self, drafter: Drafter | None) -> None:
        """This is who drafts from now on. Nothing flies."""
        ...

    @property
    def has_head(self) -> bool: ...  # whether one drafts at the end of steps

    def guess(self, num: int) -> None:
        """From now on it drafts so many tokens, if there is one. Whoever plans steps asks the drafter itself."""
        ...

    def prepare(self, rows: Seq[Row]) -> None:
        """These rows fly, and will likely be launched next; only their drafts are not known yet."""
        ...

    def launch(self, rows: Seq[Row], q: dict[int, Tensor], num_slots: int | None = None) -> Flight:
        """q: by request, what its draft was sampled from, where it was. num_slots: of what the rows have drafted so
        many tokens are to be verified in all, the likeliest; which these were is known when it lands."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """It does not run any more, or its tokens will be computed again."""
        ...

    def forget(self) -> None:
        """The KV was given back; when there is memory again it lies elsewhere."""
        ...


@dataclass(slots=True)
class Over:
    """A step that was over when it was launched."""

    landed: Landed
    forward_s: float
    sample_s: float
    may_wait: bool = False

    def land(self) -> Landed:
        return self.landed

    def took(self) -> tuple[float, float]:
        return self.forward_s, self.sample_s


class EagerRunner:
    """Any device, any rule: forward, then acceptance, and the host waits for both."""

    num_captured = 0
    has_head = False

    def __init__(self, paged: PagedDecoder, sampler: Sampler, rule: Rule) -> None:
        self.paged, self.sampler, self.rule = paged, sampler, rule

    def launch(self, rows: Seq[Row], q: dict[int, Tensor], num_slots: int | None = None) -> Over:
        assert num_slots is None, "whoever knows better than the host what is likely"
        rows, started = list(rows), time.perf_counter()
        logits_PV = self.paged.forward([row.span() for row in rows])
        forwarded = time.perf_counter()
        deciding = [row for row in rows if row.decides]
        verdict = self._accept(deciding, q, logits_PV) if deciding else Verdict.empty(0, 1)
        return Over(Landed(verdict), forwarded - started, time.perf_counter() - forwarded)

    def _accept(self, rows: list[Row], q: dict[int, Tensor], logits_PV: Tensor) -> Verdict:
        sizes = np.array([1 + len(row.draft) for row in rows])
        return self.rule(
            Proposal(
                logits_PV=logits_PV,
                drafts=[row.draft for row in rows],
                q=[
                    q[row.sequence.request.request_id][: len(row.draft)] if q and len(row.draft) else None
                    for row in rows
                ],
                noise_keys=np.array([row.sequence.request.noise_key for row in rows], np.uint64),
                lengths=np.array([row.sequence.num_tokens for row in rows], np.int64),
                params=SamplingArrays.of([row.sequence.request.sampling for row in rows], sizes),
                starts=np.concatenate([[0], np.cumsum(sizes)]),
            ),
            self.sampler,
        )

    def equip(self, drafter: Drafter | None) -> None:
        pass

    def guess(self, num: int) -> None:
        pass

    def prepare(self, rows: Seq[Row]) -> None:
        pass

    def leave(self, sequence: Sequence) -> None:
        pass

    def forget(self) -> None:
        pass
