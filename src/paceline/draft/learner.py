"""The draft learner: lessons in, a better head out. It holds the head and the head's optimiser and nothing else.

What always holds: nothing of the target is changed or given a gradient; the same lessons give the same bits; `state`
and `restore` go on bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config import DraftSection
from paceline.draft.lesson import Lesson
from paceline.draft.loss import draft_loss
from paceline.draft.unroll import unroll
from paceline.model.eagle3 import Eagle3Head
from paceline.model.layer import Linear
from paceline.model.optim import Optimizer


@dataclass(frozen=True, slots=True)
class DraftReport:
    loss: float
    overlap: tuple[float, ...]  # mean Σ min(p, q) by step of the unroll
    grad_norm: float


class DraftLearner:
    """`temperature` is that of the sampling that the head will draft for."""

    def __init__(self, head: Eagle3Head, section: DraftSection, *, num_steps: int, temperature: float = 1.0) -> None:
        self.head, self.section = head.requires_grad_(True), section
        self.temperature = temperature or 1.0  # greedy targets are as hard as the head can follow at 1
        self.optimizer = Optimizer(head, head.config.layer, section, num_steps)
        self.version = 0  # optimiser steps made

    def update(self, lesson: Lesson, embed: Linear) -> DraftReport:
        """One optimiser step."""
        section = self.section
        with torch.no_grad():
            p_TN = self._teacher(lesson)
        weights = [section.unroll_decay**step for step in range(section.unroll)]
        total = torch.zeros((), device=self.head.device, dtype=self.head.dtype)
        overlaps: list[Tensor] = []
        assert self.head.lm_head.weight is not None
        half = torch.autocast("cuda", torch.bfloat16, enabled=self.head.device.type == "cuda")
        with torch.enable_grad(), half:
            for weight, (h_PD, _, at_P) in zip(weights, unroll(self.head, embed, lesson, section.unroll), strict=True):
                p_PN = p_TN[at_P - 1]  # the distribution of a token is at the place before it
                loss, overlap = draft_loss(
                    h_PD.to(self.head.dtype), self.head.lm_head.weight, p_PN, self.temperature, section.loss
                )
                total = total + weight / sum(weights) * loss
                overlaps.append(overlap)
            total.backward()
        norm = self.optimizer.step(self.version)
        self.version += 1
        return DraftReport(float(total.detach()), tuple(float(o) for o in overlaps), norm)

    def _teacher(self, lesson: Lesson) -> Tensor:
        """The target's probabilities of the draft vocabulary's tokens, at every place: [S * L, N]."""
        hidden = lesson.hidden_SLD.flatten(0, 1)
        out = []
        for part in hidden.split(8192):
            out.append(probabilities(lesson.logits(part).to(self.head.dtype), self.head.draft_ids, self.temperature))
        return torch.cat(out)

    def state(self) -> dict[str, Tensor]:
        """All that is needed to go on bit for bit: live tensors, to be written or copied before the next update."""
        return {"version": torch.tensor(self.version), **self.optimizer.state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        rest = dict(state)
        version = rest.pop("version")
        self.optimizer.restore(rest)
        self.version = int(version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.head.named_parameters())


def probabilities(logits_PV: Tensor, draft_ids_N: Tensor, temperature: float) -> Tensor:
    """Of the draft vocabulary's tokens, in the distribution over the target's: [P, N]."""
    logits = logits_PV / temperature
    total = logits.logsumexp(-1, keepdim=True)
    return logits[:, draft_ids_N].sub_(total).exp_()
