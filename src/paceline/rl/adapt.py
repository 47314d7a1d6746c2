"""The head follows the policy: it learns from the states that the policy's own update computes anyway.

During an update the adapter is the learner's observer. It keeps the detached states of some sequences, and before the
weights that gave them move on, it makes lessons of them and takes the draft learner's steps.

What always holds: nothing of the policy is changed, given a gradient, or drawn from: with an adapter or without, its
weights are the same bits. The same rollouts give the same head; how they are cut into microbatches changes it only in
rounding; `state` and `restore` go on bit for bit.

S sequences padded to L tokens, F feature size, D the policy's hidden size.
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
from paceline.draft.learner import DraftLearner, DraftReport
from paceline.draft.lesson import Lesson
from paceline.model.decoder import Decoder, Output
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import head_state
from paceline.model.weights import checksum
from paceline.rl.packing import Packed
from paceline.rl.stopwatch import Stopwatch
from paceline.types import Rollout

WARMUP_STEPS = 10  # of the optimiser, whose averages begin at zero


class Adapter:
    """Trains `head`, in place, beside `decoder`, the policy in training."""

    def __init__(self, head: Eagle3Head, decoder: Decoder, section: DraftSection, temperature: float) -> None:
        self.section = section
        self.learner = DraftLearner(head, online_section(section), num_steps=1, temperature=temperature)
        self.decoder = decoder
        self.taps = head.config.taps
        self.base = checksum(self.weights())  # of the head that the run began with
        self.best = 0.0  # mean acceptance length of a batch
        self.num_tokens = 0  # learned from so far
        self._lengths: dict[int, int] = {}  # of the sequences to learn from in the update under way, by id
        self._seen: list[_Seen] = []
        self._reports: list[DraftReport] = []
        self._watch = Stopwatch()

    @property
    def version(self) -> int:
        """The head's: how often it was changed."""
        return self.learner.version

    def wants(self, step: int, length: float | None) -> bool:
        """Whether the head is to learn in this step, whose batch had this mean acceptance length (None: too few drafts
        to tell). To be asked at every step."""
        self.best = max(self.best, length or 0.0)
        if self.section.online == "every":
            return (step + 1) % self.section.online_every == 0
        return (
            self.section.online == "drop" and length is not None and length < (1 - self.section.online_drop) * self.best
        )

    def begin(self, rollouts: Sequence[Rollout], groups: Sequence[int], watch: Stopwatch) -> None:
        """An update with these rollouts, of these groups, is to come."""
        self._lengths = choose(rollouts, groups, self.section.online_tokens)
        self._seen, self._reports, self._watch = [], [], watch

    def observe(self, rollouts: Sequence[Rollout], packed: Packed, output: Output) -> None:
        for rollout, (prompt, own) in zip(rollouts, packed.spans, strict=True):
            length = self._lengths.get(id(rollout), 0)
            if not length:
                continue
            tokens = np.concatenate([np.array(rollout.prompt_ids), rollout.token_ids])[:length].astype(np.int64)
            chosen = np.concatenate([np.zeros(len(rollout.prompt_ids), bool), rollout.mask])[:length]
            rows = torch.tensor([*prompt, *own][: length - 1], dtype=torch.int64, device=output.hidden.device)
            self._seen.append(
                _Seen(
                    torch.from_numpy(tokens),
                    torch.from_numpy(chosen),
                    torch.cat([output.taps[layer][rows] for layer in self.taps], -1),
                    output.hidden[rows],
                )
            )

    def learn(self) -> None:
        with self._watch.stage("adaptation"):
            seen = sorted(self._seen, key=lambda each: len(each.tokens))  # like lengths together: little is padding
            self._seen = []
            for rows in batches([len(each.tokens) for each in seen], self.section.tokens_per_batch):
                lesson = make_lesson([seen[row] for row in rows], self.decoder)
                try:
                    self._reports.append(self.learner.update(lesson, self.decoder.embed))
                    if not all(parameter.isfinite().all() for parameter in self.learner.head.parameters()):
                        raise ValueError("its weights are not finite any more; lower the rate")
                except ValueError as error:
                    raise ValueError(
                        f"draft.online_learning_rate = {self.section.online_learning_rate:g}: the head's update "
                        f"failed: {error}"
                    ) from error
            self.num_tokens += sum(len(each.tokens) for each in seen)

    def report(self) -> dict[str, Any]:
        """What the last update was to the head, for the metrics."""
        reports = self._reports
        if not reports:
            return {}
        overlaps = np.mean([r.overlap for r in reports], 0).tolist()
        return {
            "loss": float(np.mean([r.loss for r in reports])),
            "grad_norm": float(np.mean([r.grad_norm for r in reports])),  # before clipping
            # By step of the unroll: how much of the policy's distribution the head's covers, Σ min(p, q).
            "overlap": {str(k + 1): overlap for k, overlap in enumerate(overlaps)},
            "num_updates": len(reports),
            "num_tokens": sum(self._lengths.values()),
            "version": self.version,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The head's tensors under their names in files: what a drafter takes."""
        return head_state(self.learner.head)

    def state(self) -> dict[str, Tensor]:
        """Live tensors, to be written or copied before the next update."""
        return self.learner.state()

    def labels(self) -> dict[str, Any]:
        """The rest of the state: what JSON can say."""
        return {
            "head": self.base,
            "optimizer": self.section.optimizer,
            "best": self.best,
            "num_tokens": self.num_tokens,
        }

    def restore(self, state: Mapping[str, Tensor], labels: Mapping[str, Any]) -> None:
        if labels["head"] != self.base:
            raise ValueError(
                "speculation.head: its weights are not those that this run began to adapt; bring them back, or start a "
                "new run"
            )
        if labels["optimizer"] != self.section.optimizer:
            raise ValueError(
                f"draft.optimizer = {self.section.optimizer!r}: this run's head was adapted with "
                f"{labels['optimizer']!r}; leave it, or start a new run"
            )
        self.learner.restore(state)
        self.best, self.num_tokens = labels["best"], labels["num_tokens"]


@dataclass(slots=True)
class _Seen:
    """One sequence. Its last token was never computed: nothing is predicted from there."""

    tokens: Tensor
    chosen: Tensor
    features: Tensor  # [length - 1, F]
    hidden: Tensor  # [length - 1, D]


def online_section(section: DraftSection) -> DraftSection:
    """The settings of the head's optimiser in a run: a constant learning rate, which Muon's follows in proportion."""
    share = section.online_learning_rate / section.learning_rate if section.learning_rate else 1.0
    return section.model_copy(
        update={
            "learning_rate": section.online_learning_rate,
            "muon_learning_rate": section.muon_learning_rate * share,
            "schedule": "constant",
            "warmup_steps": WARMUP_STEPS,
        }
    )


def choose(rollouts: Sequence[Rollout], groups: Sequence[int], max_tokens: int) -> dict[int, int]:
    """Which rollouts to learn from, by id, and how many tokens of each: whole sequences, from the groups in turn, while
    they fit; where not even one does, the beginning of the first."""
    by_group: dict[int, list[Rollout]] = {}
    for rollout, group in zip(rollouts, groups, strict=True):
        if rollout.mask.any():
            by_group.setdefault(group, []).append(rollout)
    in_turn = [r for same in zip_longest(*by_group.values()) for r in same if r is not None]
    found: dict[int, int] = {}
    left = max_tokens
    for rollout in in_turn:
        length = len(rollout.prompt_ids) + int(np.flatnonzero(rollout.mask)[-1]) + 1
        if length <= left:
            found[id(rollout)] = length
            left -= length
    if in_turn and not found:
        found[id(in_turn[0])] = max_tokens
    return found


def make_lesson(seen: Sequence[_Seen], decoder: Decoder) -> Lesson:
    """These sequences side by side. The teacher is the decoder's LM head as it is when the lesson is learned."""
    device = decoder.device
    length = max(len(each.tokens) for each in seen)

    def padded(parts: list[Tensor]) -> Tensor:
        out = pad_sequence(parts, batch_first=True)
        return nn.functional.pad(out, (0, 0) * (out.ndim - 2) + (0, length - out.shape[1])).to(device)

    return Lesson(
        padded([each.tokens for each in seen]),
        padded([each.chosen for each in seen]),
        padded([each.features for each in seen]),
        padded([each.hidden for each in seen]),
        decoder.logits,
    )
