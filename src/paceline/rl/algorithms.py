"""The RL algorithms as pure functions of per-token tensors.

An algorithm combines three parts: how rewards become *advantages*, the *objective* of a token, and how token losses are
*weighted*. Everything else is a number. `ALGORITHMS` has the published ones. To add one, add an entry there and its
name to `config.AlgorithmSection`. Parts that differ from GRPO are short functions:

    def no_baseline(batch, reward_S, penalty_T, scale):
        return reward_S[batch.sequence_T]

    ALGORITHMS["reinforce"] = Algorithm("reinforce", advantages=no_baseline, loss_type="dr_grpo")

Invariants:
  - A token whose mask is false contributes nothing.
  - A sample counts once, for any number of sequences (the trajectories of its agent): in baselines, in spreads, and in
    "grpo" and "dr_grpo" averages of the loss.
  - Weights are computed on the whole batch of an optimizer step: the losses and gradients of its microbatches sum to
    those of the batch.
  - The engine's logprobs have no influence unless `correction` is set.
Everything is computed in float64 on the batch's device, for every model dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from paceline.config import AlgorithmSection
from paceline.rl.batch import TokenBatch
from paceline.rl.corrections import engine_weight, kl, sum_by

# (batch, reward_S, penalty_T, scale) -> advantages_T. The penalty is beta * KL if kl_in = "reward", else 0.
Advantages = Callable[[TokenBatch, Tensor, Tensor, str], Tensor]
# (batch, logprobs_T, log_ratio_T, epsilon, epsilon_high) -> token losses_T, and clipped_T: which of them were clipped.
Objective = Callable[[TokenBatch, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]

STD_FLOOR = 1e-4  # added to standard deviations, as in TRL


# --- advantages ---


def group_mean(batch: TokenBatch, reward_S: Tensor, penalty_T: Tensor, scale: str) -> Tensor:
    """GRPO (arXiv 2402.03300, §4.1.2): A_i = (r_i - mean(r)) / std(r) over the group."""
    return_S, share_S = reward_S - _sample_sum(batch, penalty_T), _share(batch)
    centred_S = return_S - _mean(return_S, batch.group_S, share_S)
    return (centred_S / _spread(return_S, batch.group_S, share_S, scale))[batch.sequence_T]


def leave_one_out(batch: TokenBatch, reward_S: Tensor, penalty_T: Tensor, scale: str) -> Tensor:
    """RLOO (arXiv 2402.14740, eq. 8): A_i = r_i - mean of the group's other rewards; 0 in a group of one."""
    return_S, share_S = reward_S - _sample_sum(batch, penalty_T), _share(batch)
    size_S = _total(share_S, batch.group_S)
    advantage_S = (return_S - _mean(return_S, batch.group_S, share_S)) * size_S / (size_S - 1).clamp(min=1)
    return (advantage_S / _spread(return_S, batch.group_S, share_S, scale))[batch.sequence_T]


def batch_mean(batch: TokenBatch, reward_S: Tensor, penalty_T: Tensor, scale: str) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): A_t = r - sum_{i >= t} penalty_i, normalised over the tokens of the batch. The
    penalties are those of the token's own sequence."""
    return_T = reward_S[batch.sequence_T] - _to_go(penalty_T, batch.sequence_T, batch.num_sequences)
    return_N, group_N = return_T[batch.mask_T], batch.group_S[batch.sequence_T][batch.mask_T]
    share_N = torch.ones_like(return_N)
    centred_N = return_N - _mean(return_N, torch.zeros_like(group_N), share_N)
    spread_N = _spread(return_N, group_N, share_N, scale)
    return torch.zeros_like(return_T).masked_scatter(batch.mask_T, centred_N / spread_N)


def group_then_batch_mean(batch: TokenBatch, reward_S: Tensor, penalty_T: Tensor, scale: str) -> Tensor:
    """REINFORCE++ with baseline (same paper): subtract the group's mean, then normalise over the batch."""
    return batch_mean(batch, reward_S - _mean(reward_S, batch.group_S, _share(batch)), penalty_T, scale)


def by_turn(batch: TokenBatch, reward_S: Tensor) -> tuple[TokenBatch, Tensor]:
    """A batch whose sequences are the turns of this one, and their rewards: the sample's reward without the rewards of
    the turns before it in its sequence. Turns with the same index in their sequences are compared within the group."""
    if batch.turn_T is None or batch.past_rewards_T is None:  # no turn has a reward
        return batch, reward_S
    sequence_T, num_turns = batch.sequence_T, int(batch.turn_T.max()) + 1 if len(batch.turn_T) else 1
    samples_S = torch.arange(batch.num_sequences) if batch.sample_S is None else batch.sample_S
    # Sequences without tokens have no turn, but their samples count in the baselines of the first turn.
    first_S = torch.arange(batch.num_sequences) * num_turns
    turns_U, unit_N = torch.cat([first_S, sequence_T * num_turns + batch.turn_T]).unique(return_inverse=True)
    unit_T = unit_N[batch.num_sequences :]
    sequence_U, turn_U = turns_U // num_turns, turns_U % num_turns
    past_U = reward_S.new_zeros(len(turns_U)).index_put((unit_T,), batch.past_rewards_T)
    sample_U = (samples_S[sequence_U] * num_turns + turn_U).unique(return_inverse=True)[1]
    group_U = (batch.group_S[sequence_U] * num_turns + turn_U).unique(return_inverse=True)[1]
    turns = replace(batch, sequence_T=unit_T, group_S=group_U, sample_S=sample_U)
    return turns, reward_S[sequence_U] - past_U


def _sample_sum(batch: TokenBatch, values_T: Tensor) -> Tensor:
    """For each sequence, the sum over the tokens of its sample."""
    sum_S = sum_by(values_T, batch.sequence_T, batch.num_sequences)
    return sum_S if batch.sample_S is None else _total(sum_S, batch.sample_S)


def _share(batch: TokenBatch) -> Tensor:
    """For each sequence, its share in its sample: they sum to 1."""
    ones_S = torch.ones(batch.num_sequences, dtype=torch.float64)
    return ones_S if batch.sample_S is None else ones_S / _total(ones_S, batch.sample_S)


def _to_go(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """For each token, the sum of the values from this token to the end of its sequence."""
    up_to_T = torch.cumsum(values_T, 0)
    at_end_S = torch.cumsum(sum_by(values_T, sequence_T, num_sequences), 0)
    return at_end_S[sequence_T] - up_to_T + values_T


def _total(values_N: Tensor, index_N: Tensor) -> Tensor:
    """For each value, the sum of the values with the same index."""
    return sum_by(values_N, index_N, len(torch.bincount(index_N)))[index_N]


def _mean(values_N: Tensor, index_N: Tensor, share_N: Tensor) -> Tensor:
    """For each value, the weighted mean of the values with the same index."""
    return _total(values_N * share_N, index_N) / _total(share_N, index_N)


def _spread(values_N: Tensor, group_N: Tensor, share_N: Tensor, scale: str) -> Tensor:
    """The divisor of centred values: their unbiased standard deviation over the group or the batch, or 1."""
    if scale == "none":
        return torch.ones_like(values_N)
    index_N = group_N if scale == "group" else torch.zeros_like(group_N)
    square_N, num_N = (values_N - _mean(values_N, index_N, share_N)) ** 2, _total(share_N, index_N)
    return (_mean(square_N, index_N, share_N) * num_N / (num_N - 1).clamp(min=1)).sqrt() + STD_FLOOR


# --- objectives ---


def token_clip(
    batch: TokenBatch, logprobs_T: Tensor, log_ratio_T: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """PPO, per token: -min(w A, clip(w, 1 - ε, 1 + ε_high) A), where w is the token's probability ratio."""
    assert batch.advantages_T is not None
    ratio_T = log_ratio_T.exp()
    free_T = ratio_T * batch.advantages_T
    bound_T = ratio_T.clamp(1 - epsilon, 1 + epsilon_high) * batch.advantages_T
    return -torch.minimum(free_T, bound_T), bound_T < free_T


def sequence_mean_clip(
    batch: TokenBatch, logprobs_T: Tensor, log_ratio_T: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv 2507.18071, eq. 5, 7): like `token_clip`; w is the geometric mean of the sequence's ratios."""
    total_S = sum_by(log_ratio_T, batch.sequence_T, batch.num_sequences)
    mean_S = total_S / _lengths(batch).clamp(min=1)
    return token_clip(batch, logprobs_T, mean_S[batch.sequence_T], epsilon, epsilon_high)


def sequence_clip(
    batch: TokenBatch, logprobs_T: Tensor, log_ratio_T: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """RLOO, where a whole sequence is one action: like `token_clip`; w is the product of the sequence's ratios. At
    w = 1 the gradient is the paper's A ∇log π(completion)."""
    total_S = sum_by(log_ratio_T, batch.sequence_T, batch.num_sequences)
    return token_clip(batch, logprobs_T, total_S[batch.sequence_T], epsilon, epsilon_high)


def capped_weight(
    batch: TokenBatch, logprobs_T: Tensor, log_ratio_T: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO (arXiv 2506.13585, eq. 4-5): -sg(min(w, ε_high)) A log π. As in the paper there is no lower bound. As in
    TRL and ScaleRL (arXiv 2510.13786) ε_high is the cap itself. Every token keeps a gradient."""
    assert batch.advantages_T is not None
    ratio_T = log_ratio_T.detach().exp()
    return -ratio_T.clamp(max=epsilon_high) * batch.advantages_T * logprobs_T, ratio_T > epsilon_high


def _lengths(batch: TokenBatch) -> Tensor:
    """Trained tokens per sequence, int64."""
    return sum_by(batch.mask_T.long(), batch.sequence_T, batch.num_sequences)


# --- the algorithm ---


@dataclass(slots=True)
class LossOutput:
    loss: Tensor  # with gradient; the losses of microbatches sum to the loss of the batch
    stats: dict[str, float]  # sums over the trained tokens; "num_tokens" is their number


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The defaults are GRPO. The field names are those of TRL and `AlgorithmSection`."""

    name: str
    advantages: Advantages = group_mean
    objective: Objective = token_clip
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: as epsilon
    scale_rewards: str = "group"
    loss_type: str = "grpo"
    beta: float = 0.0
    kl: str = "k3"
    kl_in: str = "loss"
    dynamic_sampling: bool = False
    mask_truncated_completions: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    correction: str = "none"
    correction_cap: float = 2.0
    correction_floor: float = 0.5
    turn_rewards: str = "sum"
    max_tokens: int = 1  # sampling.max_tokens

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def needs_old(self) -> bool:
        """Whether `prepare` reads old_logprobs_T, even if the first update is on-policy."""
        return self.beta > 0 and self.kl_in == "reward"

    def keeps(self, rewards: Sequence[float]) -> bool:
        """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): drop groups whose rewards are all equal."""
        return not self.dynamic_sampling or len(set(rewards)) > 1

    def shape_rewards(self, batch: TokenBatch) -> Tensor:
        """The rewards minus the soft overlong penalty (DAPO, eq. 13). It grows from 0 to `overlong_penalty` over the
        last `overlong_buffer` tokens before the length limit, by the sample's longest sequence."""
        if self.overlong_buffer == 0:
            return batch.reward_S
        length_S = batch.length_S
        if (sample_S := batch.sample_S) is not None:
            length_M = length_S.new_zeros(batch.num_samples).scatter_reduce(0, sample_S, length_S, "amax")
            length_S = length_M[sample_S]
        over_S = length_S.double() - (self.max_tokens - self.overlong_buffer)
        return batch.reward_S - self.overlong_penalty * (over_S / self.overlong_buffer).clamp(0, 1)

    def prepare(self, batch: TokenBatch) -> None:
        """Once per step, on the whole batch: narrows mask_T and sets advantages_T and weights_T."""
        if self.mask_truncated_completions:  # their rewards still count in the baselines, their KL does not
            batch.mask_T = batch.mask_T & ~batch.truncated_S[batch.sequence_T]
        penalty_T = torch.zeros_like(batch.engine_logprobs_T)
        if self.needs_old:
            assert batch.old_logprobs_T is not None and batch.ref_logprobs_T is not None
            old_T, ref_T = batch.old_logprobs_T.to(penalty_T), batch.ref_logprobs_T.to(penalty_T)
            penalty_T = torch.where(batch.mask_T, self.beta * kl(self.kl, old_T, ref_T), penalty_T)
        units, reward_S = batch, self.shape_rewards(batch)
        if self.turn_rewards == "to_go":
            units, reward_S = by_turn(batch, reward_S)
        advantages_T = self.advantages(units, reward_S, penalty_T, self.scale_rewards)
        batch.advantages_T = advantages_T.masked_fill(~batch.mask_T, 0)
        batch.weights_T = self.weights(batch)

    def weights(self, batch: TokenBatch) -> Tensor:
        """Token weights of the batch of one optimizer step (a minibatch). The loss is the sum of weight times token
        loss.

        grpo     mean over each sample's tokens, then over samples, including those without tokens
        dapo     mean over all tokens (the same as TRL's bnpo, because here a minibatch is never split)
        dr_grpo  sum over tokens / (samples * max_tokens)
        """
        mask_T = batch.mask_T.double()
        if self.loss_type == "grpo":
            num_S = _sample_sum(batch, batch.mask_T.long())
            return mask_T / (num_S * batch.num_samples)[batch.sequence_T].clamp(min=1)
        if self.loss_type == "dapo":
            return mask_T / mask_T.sum().clamp(min=1)
        assert self.loss_type == "dr_grpo", self.loss_type
        return mask_T / (batch.num_samples * self.max_tokens)

    def loss(self, batch: TokenBatch, logprobs_T: Tensor) -> LossOutput:
        """The loss of a batch or a microbatch. The learner's current logprobs carry the gradient."""
        assert batch.advantages_T is not None and batch.weights_T is not None, "call `prepare` first"
        mask_T = batch.mask_T

        def trained(values_T: Tensor) -> Tensor:  # 0 for untrained tokens, also if the value is NaN
            return torch.where(mask_T, values_T.to(batch.engine_logprobs_T), 0.0)

        logprobs_T = trained(logprobs_T)
        old_T = logprobs_T.detach() if batch.old_logprobs_T is None else trained(batch.old_logprobs_T)
        log_ratio_T = logprobs_T - old_T
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        loss_T, clipped_T = self.objective(batch, logprobs_T, log_ratio_T, self.epsilon, high)
        sums = {"num_tokens": mask_T, "ratio": log_ratio_T.detach().exp() * mask_T, "clip_ratio": clipped_T & mask_T}
        if self.correction != "none":
            weight_T, bounded_T = engine_weight(
                self.correction,
                old_T - trained(batch.engine_logprobs_T),
                batch.sequence_T,
                batch.num_sequences,
                self.correction_floor,
                self.correction_cap,
            )
            loss_T = weight_T * loss_T
            sums |= {"correction_weight": weight_T * mask_T, "correction_clip_ratio": bounded_T & mask_T}
        if self.needs_reference:
            assert batch.ref_logprobs_T is not None
            kl_T = kl(self.kl, logprobs_T, trained(batch.ref_logprobs_T))
            sums["kl"] = kl_T.detach() * mask_T
            if self.kl_in == "loss":
                loss_T = loss_T + self.beta * kl_T
        stats = torch.stack([sum_T.sum().double() for sum_T in sums.values()]).tolist()
        return LossOutput((batch.weights_T * loss_T).sum(), dict(zip(sums, stats, strict=True)))


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo"),
        Algorithm("dapo", epsilon_high=0.28, loss_type="dapo", dynamic_sampling=True),
        Algorithm("dr_grpo", scale_rewards="none", loss_type="dr_grpo"),  # arXiv 2503.20783
        Algorithm("rloo", leave_one_out, sequence_clip, scale_rewards="none", kl="k1", kl_in="reward"),
        Algorithm("reinforce_pp", batch_mean, scale_rewards="batch", loss_type="dapo", kl="k1", kl_in="reward"),
        Algorithm("reinforce_pp_baseline", group_then_batch_mean, scale_rewards="batch", loss_type="dapo", kl="k2"),
        Algorithm("gspo", objective=sequence_mean_clip, epsilon=3e-4, epsilon_high=4e-4),
        Algorithm("cispo", objective=capped_weight, epsilon_high=5.0, loss_type="dapo"),
    )
}


def make_algorithm(section: AlgorithmSection, max_tokens: int) -> Algorithm:
    """The published algorithm, with the section's settings."""
    if section.overlong_buffer > max_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer = {section.overlong_buffer}: must be at most sampling.max_tokens = {max_tokens}"
        )
    if section.correction == "icepop" and section.correction_floor > section.correction_cap:
        raise ValueError(
            f"algorithm.correction_floor = {section.correction_floor}: must be at most algorithm.correction_cap = "
            f"{section.correction_cap}"
        )
    known = {field.name for field in fields(Algorithm)}
    given = {key: value for key, value in section if key in known and value is not None}
    algorithm = replace(ALGORITHMS[section.name], **given, max_tokens=max_tokens)
    if algorithm.turn_rewards == "to_go" and algorithm.needs_old:
        raise ValueError(
            'algorithm.turn_rewards = "to_go": compares single turns, but algorithm.kl_in = "reward" charges the KL of '
            'whole samples; set algorithm.kl_in = "loss", or algorithm.beta = 0'
        )
    return algorithm
