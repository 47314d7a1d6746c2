"""The draft learner trains a head. It owns only the head and the head's optimizer.

Invariants: the target is not changed and gets no gradient; the same batches give bit-identical weights; training after
`load_state_dict` continues bit-identically.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.config import DraftSection
from paceline.draft.head_batch import HeadBatch
from paceline.draft.loss import draft_loss
from paceline.draft.unroll import draft_steps
from paceline.model.draft_head import DraftHead
from paceline.model.layer import Linear
from paceline.model.optim import Optimizer


@dataclass(frozen=True, slots=True)
class DraftReport:
    loss: float
    overlap: tuple[float, ...]  # mean Σ min(p, q) by step of the unroll
    grad_norm: float


class DraftLearner:
    """`temperature`: the sampling temperature of the sequences that the head will draft for."""

    def __init__(self, head: DraftHead, section: DraftSection, *, num_steps: int, temperature: float = 1.0) -> None:
        self.head, self.section = head.requires_grad_(True), section
        self.temperature = temperature or 1.0  # for greedy decoding, train at temperature 1
        self.optimizer = Optimizer(head, head.config.layer, section, num_steps)
        self.version = 0  # optimizer steps

    def update(self, head_batch: HeadBatch, embed: Linear) -> DraftReport:
        """One optimizer step."""
        section = self.section
        with torch.no_grad():
            p_TN = self._target_probabilities(head_batch)
        weights = [section.unroll_decay**step for step in range(section.unroll)]
        total = torch.zeros((), device=self.head.device, dtype=self.head.dtype)
        overlaps: list[Tensor] = []
        autocast = torch.autocast("cuda", torch.bfloat16, enabled=self.head.device.type == "cuda")
        with torch.enable_grad(), autocast:
            steps = draft_steps(self.head, embed, head_batch, section.unroll)
            output_weight = self.head.output_weight()
            for weight, (features, _, at_P) in zip(weights, steps, strict=True):
                p_PN = p_TN[at_P - 1]  # position t - 1 predicts token t
                features = features.to(self.head.dtype)
                loss, overlap_P = draft_loss(features, output_weight, p_PN, self.temperature, section.loss)
                if (acceptance := self.head.acceptance_logits(features)) is not None:
                    errors = F.binary_cross_entropy_with_logits(acceptance.to(loss.dtype), overlap_P, reduction="sum")
                    loss = loss + errors / max(1, len(overlap_P))
                total = total + weight / sum(weights) * loss
                overlaps.append(overlap_P.sum() / max(1, len(overlap_P)))
            total.backward()
        norm = self.optimizer.step(self.version)
        if not math.isfinite(norm):
            raise ValueError(f"step {self.version + 1}: the gradient norm is {norm}; lower the learning rate")
        self.version += 1
        return DraftReport(float(total.detach()), tuple(float(o) for o in overlaps), norm)

    def _target_probabilities(self, head_batch: HeadBatch) -> Tensor:
        """The target's probabilities of the draft vocabulary's tokens, at every position: [S * L, N]."""
        out = []
        for hidden in head_batch.hidden_SLD.flatten(0, 1).split(8192):
            logits = head_batch.logits(hidden).to(self.head.dtype)
            out.append(probabilities(logits, self.head.draft_ids, self.temperature))
        return torch.cat(out)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, optimizer state and version. The tensors are not copied: write or copy them before the next
        update."""
        return {"version": torch.tensor(self.version), **self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self.optimizer.load_state_dict({name: tensor for name, tensor in state_dict.items() if name != "version"})
        self.version = int(state_dict["version"])


def probabilities(logits_PV: Tensor, draft_ids_N: Tensor, temperature: float) -> Tensor:
    """Probabilities of the draft vocabulary's tokens in the distribution over the whole vocabulary: [P, N]."""
    logits = logits_PV / temperature
    total = logits.logsumexp(-1, keepdim=True)
    return logits[:, draft_ids_N].sub_(total).exp_()
