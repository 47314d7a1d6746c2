"""Level 2: chi-square tests of sampled sequences against the exact distribution or against another sample. Bins are
fixed before anything is drawn; p-values are Holm-corrected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.verify.enumeration import Distribution

Sample = list[tuple[int, ...]]
SIGNIFICANCE = 1e-3  # after Holm's correction: one false alarm in a thousand reports
MIN_EXPECTED = 5.0  # the usual minimum of a chi-square bin


@dataclass(frozen=True, slots=True)
class ChiSquareTest:
    """The result of a test. `total_variation` is the distance between the two compared distributions."""

    statistic: float
    p_value: float
    total_variation: float
    num_bins: int


def goodness_of_fit(sample: Sample, exact: Distribution) -> ChiSquareTest:
    """Test one sample against known probabilities. Rare sequences share a bin."""
    counts = Counter(sample)
    expected = {x: p * len(sample) for x, p in exact.items()}
    common = [x for x, e in expected.items() if e >= MIN_EXPECTED]
    observed = [counts[x] for x in common] + [len(sample) - sum(counts[x] for x in common)]
    wanted = [expected[x] for x in common] + [len(sample) - sum(expected[x] for x in common)]
    if wanted[-1] < MIN_EXPECTED:  # the bin of rare sequences is too small: merge it with the smallest other bin
        rare_observed, rare_wanted = observed.pop(), wanted.pop()
        smallest = int(np.argmin(wanted))
        observed[smallest] += rare_observed
        wanted[smallest] += rare_wanted
    seen, want = np.array(observed, float), np.array(wanted, float)
    statistic = float(((seen - want) ** 2 / want).sum())
    distance = sum(abs(counts[x] / len(sample) - exact.get(x, 0)) for x in exact.keys() | counts.keys()) / 2
    return ChiSquareTest(statistic, _tail(statistic, len(seen) - 1), distance, len(seen))


def homogeneity(a: Sequence[int], b: Sequence[int], num_bins: int) -> ChiSquareTest:
    """Test whether two samples, given as bin numbers, come from the same distribution."""
    counts = np.array([np.bincount(x, minlength=num_bins) for x in (a, b)], float)
    order = np.argsort(counts.sum(0))
    merged = counts[:, order]
    sparse = merged.sum(0).cumsum() < 2 * MIN_EXPECTED * 2
    if sparse.any():  # merge the sparsest bins
        merged = np.concatenate([merged[:, sparse].sum(1, keepdims=True), merged[:, ~sparse]], 1)
    merged = merged[:, merged.sum(0) > 0]
    expected = merged.sum(1, keepdims=True) * merged.sum(0, keepdims=True) / merged.sum()
    statistic = float(((merged - expected) ** 2 / expected).sum())
    distance = float(np.abs(counts[0] / counts[0].sum() - counts[1] / counts[1].sum()).sum() / 2)
    return ChiSquareTest(statistic, _tail(statistic, merged.shape[1] - 1), distance, merged.shape[1])


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction. Returns adjusted p-values in the given order."""
    order = np.argsort(p_values)
    adjusted, running = [0.0] * len(order), 0.0
    for rank, i in enumerate(order.tolist()):
        running = max(running, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def _tail(statistic: float, degrees_of_freedom: int) -> float:
    """P(chi-square with these degrees of freedom > statistic)."""
    import torch

    if degrees_of_freedom < 1:
        return 1.0
    half = torch.tensor([degrees_of_freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
