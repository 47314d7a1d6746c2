"""The rollouts of a step as flat tensors without padding: the input of the algorithms.

Shapes: S sequences, which are the trajectories of M samples of R groups, and T tokens, the concatenated completions of
all sequences. Per-token tensors have the suffix _T, per-sequence tensors _S. A sequence is never split between two
batches; a sample may be split between two microbatches, but not between two minibatches.
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
    sequence_T: Tensor  # int64, the token's sequence: 0 … S-1, ascending
    mask_T: Tensor  # bool, whether to train on the token; false for tokens of the environment
    group_S: Tensor  # int64, the sequence's group: 0 … R-1, ascending
    reward_S: Tensor  # float64, of the sequence's sample
    length_S: Tensor  # int64, number of tokens that the policy sampled, trained on or not
    truncated_S: Tensor  # bool, stopped by the length limit
    engine_logprobs_T: Tensor  # float64, by the engine at sampling time: of the behaviour policy
    version_T: Tensor  # int64, the policy version that the engine sampled the token with
    old_logprobs_T: Tensor | None = None  # by the learner before the first update on this batch; None: on-policy
    ref_logprobs_T: Tensor | None = None  # by the reference policy
    sample_S: Tensor | None = None  # int64, the sequence's sample: 0 … M-1, ascending; None: one sequence per sample
    turn_T: Tensor | None = None  # int64, the token's turn: how many ended before it in its sequence
    past_rewards_T: Tensor | None = None  # float64, the rewards of these turns; None: turns have no rewards
    advantages_T: Tensor | None = None  # float64
    weights_T: Tensor | None = None  # float64; the loss is the sum of weight times token loss

    @property
    def num_sequences(self) -> int:
        return len(self.group_S)

    @property
    def num_samples(self) -> int:
        return self.num_sequences if self.sample_S is None else int(self.sample_S[-1]) + 1

    @staticmethod
    def of(groups: Sequence[Group]) -> TokenBatch:
        """A batch of the scored rollouts of these groups, in order."""
        rollouts = scored(groups)
        counts = [len(r.token_ids) for r in rollouts]
        sizes = [len(group.scored) for group in groups]
        has_branches = any(r.branch for r in rollouts)
        has_turn_rewards = any(r.turn_rewards for r in rollouts)
        turns = [turns_of(r) for r in rollouts] if has_turn_rewards else []
        return TokenBatch(
            sequence_T=torch.repeat_interleave(torch.arange(len(rollouts)), torch.tensor(counts)),
            mask_T=torch.from_numpy(np.concatenate([r.mask for r in rollouts])),
            group_S=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)),
            reward_S=torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
            length_S=torch.tensor([int(r.mask.sum()) for r in rollouts]),
            truncated_S=torch.tensor([r.is_truncated for r in rollouts]),
            engine_logprobs_T=torch.from_numpy(np.concatenate([r.logprobs for r in rollouts]).astype(np.float64)),
            version_T=torch.from_numpy(np.concatenate([r.versions for r in rollouts]).astype(np.int64)),
            sample_S=torch.tensor([not r.branch for r in rollouts]).cumsum(0) - 1 if has_branches else None,
            turn_T=torch.from_numpy(np.concatenate(turns)) if has_turn_rewards else None,
            past_rewards_T=torch.from_numpy(np.concatenate(list(map(_past_rewards, rollouts, turns))))
            if has_turn_rewards
            else None,
        )

    def sequences(self, start: int, end: int) -> TokenBatch:
        """Sequences start … end-1 as a batch. Their weights stay those of the whole batch."""
        first, last = torch.searchsorted(self.sequence_T, torch.tensor([start, end])).tolist()
        part = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                part[field.name] = value[first:last] if field.name.endswith("_T") else value[start:end]
        part["sequence_T"] = part["sequence_T"] - start
        if self.sample_S is not None:
            part["sample_S"] = part["sample_S"] - part["sample_S"][:1]
        return TokenBatch(**part)


def turns_of(rollout: Rollout) -> np.ndarray:
    """int64, the turn of each token. A token between two turns belongs to the one before."""
    ends = np.cumsum(rollout.turn_lengths)
    return np.searchsorted(ends, np.cumsum(rollout.mask) - 1, side="right").clip(min=0)


def _past_rewards(rollout: Rollout, turn_T: np.ndarray) -> np.ndarray:
    rewards = rollout.turn_rewards or (0.0,) * len(rollout.turn_lengths)
    return np.concatenate([[0.0], np.cumsum(rewards)])[turn_T]


def scored(groups: Sequence[Group]) -> list[Rollout]:
    """The rollouts that have a reward."""
    return [rollout for group in groups for rollout in group.scored]
