"""Online training of a head, on the hidden states that the policy's update computes anyway.

The trainer observes the learner's update (`rl/observer.py`). It keeps the detached hidden states of some sequences.
Before the optimizer changes the policy it trains the head on them.

Invariants:
  - The policy is not affected: its weights are bit-identical with and without online training.
  - The same rollouts give the same head. Microbatching changes it only by rounding.
  - Training continues bit for bit after `state_dict` and `load_state_dict`.

Shapes: S sequences padded to L tokens, F auxiliary feature size, D the policy's hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from paceline.config import DraftSection
from paceline.draft.batches import batches
from paceline.draft.head_batch import HeadBatch
from paceline.draft.learner import DraftLearner, DraftReport
from paceline.model.decoder import Decoder, Output
from paceline.model.draft_head import DraftHead
from paceline.model.dspark import DSparkHead
from paceline.model.head_files import head_state
from paceline.model.weights import checksum
from paceline.rl.packing import Packed
from paceline.rl.stage_timer import StageTimer
from paceline.types import Rollout

WARMUP_STEPS = 10  # the optimizer's moments start at zero


class OnlineHeadTrainer:
    """Trains `head` in place, during the updates of `decoder`, the policy. Implements `rl.observer.HeadTrainer`."""

    def __init__(self, head: DraftHead, decoder: Decoder, section: DraftSection, temperature: float) -> None:
        self.section = section
        self.learner = DraftLearner(head, online_section(section, head), num_steps=1, temperature=temperature)
        self.decoder = decoder
        self.aux_layers = head.config.aux_layers
        self.base = checksum(self.weights())  # of the head at the start of the run
        self.best = 0.0  # best mean acceptance length of a batch
        self.num_tokens = 0  # trained on so far
        self._lengths: dict[int, int] = {}  # by id of the rollouts to train on in this update: number of tokens
        self._observed: list[_Observed] = []
        self._reports: list[DraftReport] = []
        self._timer = StageTimer()

    @property
    def version(self) -> int:
        return self.learner.version

    def should_train(self, step: int, length: float | None) -> bool:
        self.best = max(self.best, length or 0.0)
        if self.section.online == "every":
            return (step + 1) % self.section.online_every == 0
        return (
            self.section.online == "drop" and length is not None and length < (1 - self.section.online_drop) * self.best
        )

    def begin_update(self, rollouts: Sequence[Rollout], groups: Sequence[int], timer: StageTimer) -> None:
        self._lengths = select_rollouts(rollouts, groups, self.section.online_tokens)
        self._observed, self._reports, self._timer = [], [], timer

    def observe(self, rollouts: Sequence[Rollout], packed: Packed, output: Output) -> None:
        for rollout, (prompt_rows, completion_rows) in zip(rollouts, packed.spans, strict=True):
            length = self._lengths.get(id(rollout), 0)
            if not length:
                continue
            tokens = np.concatenate([np.array(rollout.prompt_ids), rollout.token_ids])[:length].astype(np.int64)
            loss_mask = np.concatenate([np.zeros(len(rollout.prompt_ids), bool), rollout.mask])[:length]
            indices = [*prompt_rows, *completion_rows][: length - 1]
            rows = torch.tensor(indices, dtype=torch.int64, device=output.hidden.device)
            self._observed.append(
                _Observed(
                    torch.from_numpy(tokens),
                    torch.from_numpy(loss_mask),
                    torch.cat([output.aux_hidden_states[layer][rows] for layer in self.aux_layers], -1),
                    output.hidden[rows],
                )
            )

    def discard(self) -> None:
        self._observed = []

    def before_optimizer_step(self) -> None:
        with self._timer.stage("head_training"):
            observed = sorted(self._observed, key=lambda each: len(each.tokens))  # similar lengths: little padding
            self._observed = []
            for rows in batches([len(each.tokens) for each in observed], self.section.tokens_per_batch):
                head_batch = collate_head_batch([observed[row] for row in rows], self.decoder)
                try:
                    self._reports.append(self.learner.update(head_batch, self.decoder.embed))
                    if not all(parameter.isfinite().all() for parameter in self.learner.head.parameters()):
                        raise ValueError("its weights are not finite; lower the learning rate")
                except ValueError as error:
                    raise ValueError(
                        f"draft.online_learning_rate = {self.section.online_learning_rate:g}: the head's update "
                        f"failed: {error}"
                    ) from error
            self.num_tokens += sum(len(each.tokens) for each in observed)

    def metrics(self) -> dict[str, Any]:
        reports = self._reports
        if not reports:
            return {}
        overlaps = np.mean([r.overlap for r in reports], 0).tolist()
        return {
            "loss": float(np.mean([r.loss for r in reports])),
            "grad_norm": float(np.mean([r.grad_norm for r in reports])),  # before clipping
            # By step of the unroll: Σ min(p, q), the overlap of the policy's distribution and the head's.
            "overlap": {str(k + 1): overlap for k, overlap in enumerate(overlaps)},
            "num_updates": len(reports),
            "num_tokens": sum(self._lengths.values()),
            "version": self.version,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return head_state(self.learner.head)

    def state_dict(self) -> dict[str, Tensor]:
        return self.learner.state_dict()

    def metadata(self) -> dict[str, Any]:
        return {
            "base_checksum": self.base,
            "optimizer": self.section.optimizer,
            "best_acceptance_length": self.best,
            "num_tokens": self.num_tokens,
        }

    def load_state_dict(self, state_dict: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        _check_base(self.base, metadata)
        if metadata["optimizer"] != self.section.optimizer:
            raise ValueError(
                f"draft.optimizer = {self.section.optimizer!r}: this run's head was trained with "
                f"{metadata['optimizer']!r}; leave it, or start a new run"
            )
        self.learner.load_state_dict(state_dict)
        self.best, self.num_tokens = metadata["best_acceptance_length"], metadata["num_tokens"]


def check_base(head: DraftHead, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError unless this is the head that the run with this metadata started with."""
    _check_base(checksum(head_state(head)), metadata)


def _check_base(base: str, metadata: Mapping[str, Any]) -> None:
    if metadata["base_checksum"] != base:
        raise ValueError(
            "speculation.head: its weights are not those that this run started with; restore them, or start a new run"
        )


@dataclass(slots=True)
class _Observed:
    """The states of one sequence. The last token has none: it predicts nothing."""

    tokens: Tensor
    loss_mask: Tensor
    aux_hidden_states: Tensor  # [length - 1, F]
    hidden: Tensor  # [length - 1, D]


def online_section(section: DraftSection, head: DraftHead) -> DraftSection:
    """The settings of the head's optimizer: a constant learning rate, with Muon's scaled in proportion. The blocks of a
    DSpark head keep their size."""
    share = section.online_learning_rate / section.learning_rate if section.learning_rate else 1.0
    return section.model_copy(
        update={
            "learning_rate": section.online_learning_rate,
            "muon_learning_rate": section.muon_learning_rate * share,
            "schedule": "constant",
            "warmup_steps": WARMUP_STEPS,
            "unroll": head.config.block_size if isinstance(head, DSparkHead) else section.unroll,
        }
    )


def select_rollouts(rollouts: Sequence[Rollout], groups: Sequence[int], max_tokens: int) -> dict[int, int]:
    """The rollouts to train on, by id, and the number of tokens of each: whole sequences of each group in turn, while
    they fit. If none fits: the beginning of the first."""
    by_group: dict[int, list[Rollout]] = {}
    for rollout, group in zip(rollouts, groups, strict=True):
        if rollout.mask.any():
            by_group.setdefault(group, []).append(rollout)
    in_turn = [r for same in zip_longest(*by_group.values()) for r in same if r is not None]
    lengths: dict[int, int] = {}
    budget = max_tokens
    for rollout in in_turn:
        length = len(rollout.prompt_ids) + int(np.flatnonzero(rollout.mask)[-1]) + 1
        if length <= budget:
            lengths[id(rollout)] = length
            budget -= length
    if in_turn and not lengths:
        lengths[id(in_turn[0])] = max_tokens
    return lengths


def collate_head_batch(observed: Sequence[_Observed], decoder: Decoder) -> HeadBatch:
    """Pad these sequences to one batch. The head learns from the decoder's logits at the time of the update."""
    device = decoder.device
    length = max(len(each.tokens) for each in observed)

    def padded(parts: list[Tensor]) -> Tensor:
        out = pad_sequence(parts, batch_first=True)
        return nn.functional.pad(out, (0, 0) * (out.ndim - 2) + (0, length - out.shape[1])).to(device)

    return HeadBatch(
        padded([each.tokens for each in observed]),
        padded([each.loss_mask for each in observed]),
        padded([each.aux_hidden_states for each in observed]),
        padded([each.hidden for each in observed]),
        decoder.logits,
    )
