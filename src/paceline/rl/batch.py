"""A step's rollouts as flat streams, which is all that algorithms see.

S sequences of R groups; their tokens after the prompt lie end to end, T in all. Everything per token has suffix _T,
everything per sequence _S. Nothing is padded. A sequence is never divided between two batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from paceline.types import Group, Rollout


@dataclass(slots=True)
class TokenBatch:
    sequence_T: Tensor  # int64, which sequence a token belongs to: 0 … S-1, ascending
    mask_T: Tensor  # bool, whether the policy chose the token and it is to be trained on
    group_S: Tensor  # int64, which group a sequence belongs to: 0 … R-1, ascending
    reward_S: Tensor  # float64
    length_S: Tensor  # int64, tokens after the prompt that the policy wrote, filtered or not
    truncated_S: Tensor  # bool, cut off by the length limit
    engine_logprobs_T: Tensor  # float64, the engine's when it sampled
    old_logprobs_T: Tensor | None = None  # the learner's before this batch's first update; None: on-policy, the same
    ref_logprobs_T: Tensor | None = None  # the reference policy's
    advantages_T: Tensor | None = None  # float64
    weights_T: Tensor | None = None  # float64; the loss is the sum of weight times token loss

    @property
    def num_sequences(self) -> int:
        return len(self.group_S)

    @staticmethod
    def of(groups: Sequence[Group]) -> TokenBatch:
        """The scored rollouts of these groups, in order."""
        rollouts = scored(groups)
        counts = [len(r.token_ids) for r in rollouts]
        sizes = [len(group.scored) for group in groups]
        return TokenBatch(
            sequence_T=torch.repeat_interleave(torch.arange(len(rollouts)), torch.tensor(counts)),
            mask_T=torch.from_numpy(np.concatenate([r.mask for r in rollouts])),
            group_S=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)),
            reward_S=torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
            length_S=torch.tensor([int(r.mask.sum()) for r in rollouts]),
            truncated_S=torch.tensor([r.is_truncated for r in rollouts]),
            engine_logprobs_T=torch.from_numpy(np.concatenate([r.logprobs for r in rollouts]).astype(np.float64)),
        )

    def sequences(self, start: int, end: int) -> TokenBatch:
        """Sequences start … end-1 as a batch of their own, with the weights they have in the whole."""
        first, last = torch.searchsorted(self.sequence_T, torch.tensor([start, end])).tolist()
        part = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                part[field.name] = value[first:last] if field.name.endswith("_T") else value[start:end]
        part["sequence_T"] = part["sequence_T"] - start
        return TokenBatch(**part)


def scored(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.scored]
