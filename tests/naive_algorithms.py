"""The reference implementation of the RL algorithms: the papers' equations, as loops over samples and tokens.

A sample's sequences share its reward, so they count once. With turn_rewards = "to_go", the turns of the same index are
compared as the samples are otherwise.

It shares only the settings with `rl/algorithms.py`; it has its own copy of the papers' numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.config import AlgorithmSection
from paceline.rl.batch import TokenBatch

PAPER: dict[str, dict[str, object]] = {
    "grpo": {},
    "dapo": {"epsilon_high": 0.28, "loss_type": "dapo"},
    "dr_grpo": {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "rloo": {"scale_rewards": "none", "kl": "k1", "kl_in": "reward"},
    "reinforce_pp": {"scale_rewards": "batch", "loss_type": "dapo", "kl": "k1", "kl_in": "reward"},
    "reinforce_pp_baseline": {"scale_rewards": "batch", "loss_type": "dapo", "kl": "k2"},
    "gspo": {"epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"epsilon_high": 5.0, "loss_type": "dapo"},
}


def settings(section: AlgorithmSection) -> AlgorithmSection:
    """The section with all defaults filled in."""
    common = {"epsilon": 0.2, "scale_rewards": "group", "loss_type": "grpo", "kl": "k3", "kl_in": "loss"}
    given = {key: value for key, value in section if value is not None}
    full = section.model_copy(update=common | PAPER[section.name] | given)
    return full if full.epsilon_high is not None else full.model_copy(update={"epsilon_high": full.epsilon})


def trained_tokens(section: AlgorithmSection, batch: TokenBatch) -> list[list[int]]:
    """By sequence: the indices of the tokens to train on."""
    tokens: list[list[int]] = [[] for _ in range(batch.num_sequences)]
    for t in range(len(batch.sequence_T)):
        i = int(batch.sequence_T[t])
        filtered = bool(section.mask_truncated_completions) and bool(batch.truncated_S[i])
        if bool(batch.mask_T[t]) and not filtered:
            tokens[i].append(t)
    return tokens


# --- advantages ---


def sample_of(batch: TokenBatch) -> list[int]:
    """By sequence."""
    return list(range(batch.num_sequences)) if batch.sample_S is None else [int(i) for i in batch.sample_S]


def advantages(section: AlgorithmSection, max_tokens: int, batch: TokenBatch) -> list[float]:
    section = settings(section)
    tokens, samples = trained_tokens(section, batch), sample_of(batch)
    longest = {m: max(int(n) for n, j in zip(batch.length_S, samples, strict=True) if j == m) for m in samples}
    rewards = [_reward(section, max_tokens, batch, i, longest[samples[i]]) for i in range(batch.num_sequences)]
    groups = [int(r) for r in batch.group_S]
    result = [0.0] * len(batch.sequence_T)
    if section.turn_rewards == "to_go" and batch.turn_T is not None:
        return _advantages_of_turns(section, batch, tokens, rewards, samples, groups)
    if section.name in ("reinforce_pp", "reinforce_pp_baseline"):
        if section.name == "reinforce_pp_baseline":
            once = _once(rewards, samples, groups)
            rewards = [r - statistics.fmean(once[groups[i]]) for i, r in enumerate(rewards)]
        returns = {}  # A_t = r - sum_{j >= t} beta KL_j
        for i, indices in enumerate(tokens):
            for t in indices:
                returns[t] = rewards[i] - sum(_penalty(section, batch, j) for j in indices if j >= t)
        token_groups = [groups[int(batch.sequence_T[t])] for t in returns]
        values = list(returns.values())
        for k, t in enumerate(returns):
            centred = returns[t] - statistics.fmean(values)
            result[t] = centred / _spread(section, values, _siblings(values, token_groups, k))
        return result
    returns_S = []
    for i in range(len(rewards)):
        of_sample = [t for j, indices in enumerate(tokens) for t in indices if samples[j] == samples[i]]
        returns_S.append(rewards[i] - sum(_penalty(section, batch, t) for t in of_sample))
    once = _once(returns_S, samples, groups)
    everything = [value for of_group in once.values() for value in of_group]
    for i, indices in enumerate(tokens):
        for t in indices:
            result[t] = _advantage(section, returns_S[i], once[groups[i]], everything)
    return result


def _once(values: Sequence[float], samples: Sequence[int], groups: Sequence[int]) -> dict[int, list[float]]:
    """By group: the value of each of its samples."""
    found: dict[int, dict[int, float]] = {}
    for value, sample, group in zip(values, samples, groups, strict=True):
        found.setdefault(group, {})[sample] = value
    return {group: list(of_group.values()) for group, of_group in found.items()}


def _advantage(section: AlgorithmSection, value: float, of_group: list[float], of_batch: list[float]) -> float:
    """Of a sample among those of its group."""
    centred = value - statistics.fmean(of_group)
    if section.name == "rloo":  # minus the mean of the others, if there are any
        num = len(of_group)
        centred = value - (sum(of_group) - value) / (num - 1) if num > 1 else 0.0
    return centred / _spread(section, of_batch, of_group)


def _advantages_of_turns(
    section: AlgorithmSection, batch: TokenBatch, tokens: list[list[int]], rewards: list[float], samples: list[int],
    groups: list[int],
) -> list[float]:  # fmt: skip
    """The return of a turn is the reward without the rewards of the turns before it in its sequence. Its baseline is
    the mean over the group's samples of their returns at turns of this index; of a sample with several, their mean."""
    assert batch.turn_T is not None and batch.past_rewards_T is not None
    returns: dict[tuple[int, int], float] = {(i, 0): reward for i, reward in enumerate(rewards)}  # sequence, turn
    for t, i in enumerate(batch.sequence_T.tolist()):
        returns[i, int(batch.turn_T[t])] = rewards[i] - float(batch.past_rewards_T[t])
    by_turn: dict[tuple[int, int], dict[int, list[float]]] = {}  # group, turn -> sample -> returns
    for (i, turn), value in returns.items():
        by_turn.setdefault((groups[i], turn), {}).setdefault(samples[i], []).append(value)

    def mean(of_samples: list[list[float]]) -> float:
        return statistics.fmean(map(statistics.fmean, of_samples))

    def deviation(of_samples: list[list[float]]) -> float:
        centre = mean(of_samples)
        squares = sum(statistics.fmean([(value - centre) ** 2 for value in values]) for values in of_samples)
        return math.sqrt(squares / max(1, len(of_samples) - 1))

    result = [0.0] * len(batch.sequence_T)
    everything = [values for of_turn in by_turn.values() for values in of_turn.values()]
    centred: dict[int, float] = {}
    for i, indices in enumerate(tokens):
        for t in indices:
            key = groups[i], int(batch.turn_T[t])
            of_turn = list(by_turn[key].values())
            value, centre = returns[i, key[1]], mean(of_turn)
            if section.name == "rloo":
                num = len(of_turn)
                result[t] = (value - centre) * num / max(1, num - 1)
            else:
                result[t] = value - (0.0 if section.name == "reinforce_pp" else centre)
            if not section.name.startswith("reinforce_pp") and section.scale_rewards != "none":
                result[t] /= deviation(of_turn if section.scale_rewards == "group" else everything) + 1e-4
            centred[t] = result[t]
    if section.name.startswith("reinforce_pp"):  # normalised over tokens
        values = list(centred.values())
        token_groups = [(groups[int(batch.sequence_T[t])], int(batch.turn_T[t])) for t in centred]
        numbers = [sorted(set(token_groups)).index(each) for each in token_groups]
        for k, t in enumerate(centred):
            spread = _spread(section, values, _siblings(values, numbers, k))
            result[t] = (centred[t] - statistics.fmean(values)) / spread
    return result


def _reward(section: AlgorithmSection, max_tokens: int, batch: TokenBatch, i: int, length: int) -> float:
    """DAPO eq. 13, case by case. `length`: of the sample's longest sequence."""
    reward, buffer = float(batch.reward_S[i]), section.overlong_buffer
    if buffer == 0 or length <= max_tokens - buffer:
        return reward
    if length <= max_tokens:
        return reward + section.overlong_penalty * ((max_tokens - buffer) - length) / buffer
    return reward - section.overlong_penalty


def _penalty(section: AlgorithmSection, batch: TokenBatch, t: int) -> float:
    if section.beta == 0 or section.kl_in != "reward":
        return 0.0
    assert batch.old_logprobs_T is not None and batch.ref_logprobs_T is not None
    return section.beta * float(_kl(section, batch.old_logprobs_T[t], batch.ref_logprobs_T[t]))


def _siblings(values: Sequence[float], groups: Sequence[int], i: int) -> list[float]:
    return [value for value, group in zip(values, groups, strict=True) if group == groups[i]]


def _spread(section: AlgorithmSection, batch_values: list[float], group_values: list[float]) -> float:
    if section.scale_rewards == "none":
        return 1.0
    values = group_values if section.scale_rewards == "group" else batch_values
    return (statistics.stdev(values) if len(values) > 1 else 0.0) + 1e-4


# --- the loss ---


def loss(section: AlgorithmSection, max_tokens: int, batch: TokenBatch, logprobs_T: Tensor) -> Tensor:
    """Of the batch before `Algorithm.prepare`."""
    advantage_T = advantages(section, max_tokens, batch)
    section = settings(section)
    tokens, samples = trained_tokens(section, batch), sample_of(batch)
    num_tokens, num_samples = sum(map(len, tokens)), len(set(samples))
    total = logprobs_T.double().sum() * 0
    for i, indices in enumerate(tokens):
        num_of_sample = sum(len(others) for j, others in enumerate(tokens) if samples[j] == samples[i])
        old = [_old(batch, logprobs_T, t) for t in indices]
        correction = [_correction(section, batch, indices, old, k) for k in range(len(indices))]
        for k, t in enumerate(indices):
            value = correction[k] * _surrogate(section, logprobs_T, advantage_T[t], indices, old, k)
            if section.beta > 0 and section.kl_in == "loss":
                assert batch.ref_logprobs_T is not None
                value = value + section.beta * _kl(section, logprobs_T[t], batch.ref_logprobs_T[t])
            if section.loss_type == "grpo":  # 1/M sum_i 1/|o_i| sum_t
                total = total + value / num_of_sample / num_samples
            elif section.loss_type == "dapo":  # 1/(sum_i |o_i|) sum_i sum_t
                total = total + value / num_tokens
            else:  # 1/(M L) sum_i sum_t
                total = total + value / (num_samples * max_tokens)
    return total


def _old(batch: TokenBatch, logprobs_T: Tensor, t: int) -> float:
    return float((logprobs_T if batch.old_logprobs_T is None else batch.old_logprobs_T)[t].detach())


def _surrogate(
    section: AlgorithmSection, logprobs_T: Tensor, advantage: float, indices: list[int], old: list[float], k: int
) -> Tensor:
    assert section.epsilon is not None and section.epsilon_high is not None
    ratios = [torch.exp(logprobs_T[t] - old[j]) for j, t in enumerate(indices)]
    if section.name == "cispo":
        return -min(float(ratios[k].detach()), section.epsilon_high) * advantage * logprobs_T[indices[k]]
    weight = ratios[k]
    if section.name in ("rloo", "gspo"):  # of the whole sequence
        weight = math.prod(ratios[1:], start=ratios[0])
    if section.name == "gspo":
        weight = weight ** (1 / len(indices))
    low, high = 1 - section.epsilon, 1 + section.epsilon_high
    if advantage >= 0:
        return -advantage * (weight if weight <= high else weight.new_tensor(high))
    return -advantage * (weight if weight >= low else weight.new_tensor(low))


def _correction(section: AlgorithmSection, batch: TokenBatch, indices: list[int], old: list[float], k: int) -> float:
    if section.correction == "none":
        return 1.0
    ratios = [math.exp(old[j] - float(batch.engine_logprobs_T[t])) for j, t in enumerate(indices)]
    if section.correction == "token_tis":
        return min(ratios[k], section.correction_cap)
    if section.correction == "sequence_tis":
        return min(math.prod(ratios), section.correction_cap)
    if section.correction == "decoupled_ppo":
        return ratios[k]
    return ratios[k] if section.correction_floor <= ratios[k] <= section.correction_cap else 0.0


def _kl(section: AlgorithmSection, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    kinds: dict[str, Callable[[Tensor], Tensor]] = {  # of the ratio reference / policy
        "k1": lambda r: -torch.log(r),
        "k2": lambda r: torch.log(r) ** 2 / 2,
        "k3": lambda r: r - 1 - torch.log(r),
    }
    assert section.kl is not None
    return kinds[section.kl](torch.exp(ref_logprob - logprob))
