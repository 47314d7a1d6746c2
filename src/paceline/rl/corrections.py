"""What a token's loss is corrected by: the distance to a reference policy, and the engine's own logprobs.

Everything here is per token of a flat stream (_T), and a pure function of it.
"""

from __future__ import annotations

from torch import Tensor


def sum_by(values_N: Tensor, index_N: Tensor, num: int) -> Tensor:
    """The sum of the values that share an index, for the indices 0 … num-1."""
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
    """What token losses are multiplied by because the engine sampled from slightly other probabilities than the
    learner's, and which tokens it was bounded for. log_ratio = log(learner / engine), 0 where nothing is trained.

    token_tis     min(ratio, cap)                                          truncated importance sampling
    sequence_tis  min(product of the sequence's ratios, cap)
    icepop        ratio where floor <= ratio <= cap, else 0                M(k; α, β) of IcePop
    """
    if kind == "sequence_tis":
        log_ratio_T = sum_by(log_ratio_T, sequence_T, num_sequences)[sequence_T]
    ratio_T = log_ratio_T.exp()
    if kind == "icepop":
        outside_T = (ratio_T < floor) | (ratio_T > cap)
        return ratio_T.masked_fill(outside_T, 0), outside_T
    assert kind in ("token_tis", "sequence_tis"), kind
    return ratio_T.clamp(max=cap), ratio_T > cap
