"""Terms of the token loss besides the objective: the KL divergence to the reference policy, and the importance weights
that correct for the engine's logprobs. Pure functions of per-token tensors (_T)."""

from __future__ import annotations

import math

from torch import Tensor


def sum_by(values_N: Tensor, index_N: Tensor, num: int) -> Tensor:
    """Sum the values of each index 0 … num-1."""
    return values_N.new_zeros(num).index_add(0, index_N, values_N)


def kl(kind: str, logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """One-sample estimates of KL(policy, reference), after Schulman's "Approximating KL Divergence"."""
    delta_T = ref_logprobs_T - logprobs_T
    if kind == "k1":
        return -delta_T
    if kind == "k2":
        return delta_T**2 / 2
    assert kind == "k3", kind
    return delta_T.exp() - delta_T - 1


def engine_weight(
    kind: str, log_ratio_T: Tensor, sequence_T: Tensor, num_sequences: int, floor: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Importance weights of the token losses, and which of them were clipped. They correct for the difference between
    the behaviour policy, which is the engine's, and the learner's before the update, which PPO's clipping starts from.
    log_ratio = log(learner / engine), 0 for untrained tokens.

    token_tis     min(ratio, cap)                                          truncated importance sampling
    sequence_tis  min(product of the sequence's ratios, cap)
    icepop        ratio where floor <= ratio <= cap, else 0                M(k; α, β) of IcePop
    decoupled_ppo ratio                                                    arXiv 2110.00641
    """
    if kind == "sequence_tis":
        log_ratio_T = sum_by(log_ratio_T, sequence_T, num_sequences)[sequence_T]
    ratio_T = log_ratio_T.exp()
    if kind == "icepop":
        outside_T = (ratio_T < floor) | (ratio_T > cap)
        return ratio_T.masked_fill(outside_T, 0), outside_T
    if kind == "decoupled_ppo":
        return ratio_T, ratio_T > math.inf
    assert kind in ("token_tis", "sequence_tis"), kind
    return ratio_T.clamp(max=cap), ratio_T > cap
