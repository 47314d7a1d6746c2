"""Rung 2: sampled sequences against the exact distribution (chi-square, total variation), beside a null of the same
size drawn without speculation. Bins are fixed before anything is drawn; p-values are Holm-corrected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.verify.enumeration import Distribution

Sample = list[tuple[int, ...]]
SIGNIFICANCE = 1e-3  # after Holm's correction: one false alarm in a thousand certificates
MIN_EXPECTED = 5.0  # the usual floor for a chi-square bin


@dataclass(frozen=True, slots=True)
class Test:
    """A goodness-of-fit test: its p-value, and the total variation between what was drawn and what should be."""

    statistic: float
    p_value: float
    total_variation: float
    num_bins: int


def against_exact(sample: Sample, exact: Distribution) -> Test:
    """One sample against known probabilities. Rare sequences share a bin."""
    counts = Counter(sample)
    expected = {x: p * len(sample) for x, p in exact.items()}
    common = [x for x, e in expected.items() if e >= MIN_EXPECTED]
    observed = [counts[x] for x in common] + [len(sample) - sum(counts[x] for x in common)]
    wanted = [expected[x] for x in common] + [len(sample) - sum(expected[x] for x in common)]
    if wanted[-1] < MIN_EXPECTED:  # too small a rest to be a bin: it joins the smallest one
        rest_observed, rest_wanted = observed.pop(), wanted.pop()
        smallest = int(np.argmin(wanted))
        observed[smallest] += rest_observed
        wanted[smallest] += rest_wanted
    seen, want = np.array(observed, float), np.array(wanted, float)
    statistic = float(((seen - want) ** 2 / want).sum())
    distance = sum(abs(counts[x] / len(sample) - exact.get(x, 0)) for x in exact.keys() | counts.keys()) / 2
    return Test(statistic, _tail(statistic, len(seen) - 1), distance, len(seen))


def against_sample(a: Sequence[int], b: Sequence[int], num_bins: int) -> Test:
    """Two samples, given as bin numbers: the homogeneity test."""
    counts = np.array([np.bincount(x, minlength=num_bins) for x in (a, b)], float)
    order = np.argsort(counts.sum(0))
    merged = counts[:, order]
    sparse = merged.sum(0).cumsum() < 2 * MIN_EXPECTED * 2
    if sparse.any():  # the sparsest bins become one
        merged = np.concatenate([merged[:, sparse].sum(1, keepdims=True), merged[:, ~sparse]], 1)
    merged = merged[:, merged.sum(0) > 0]
    expected = merged.sum(1, keepdims=True) * merged.sum(0, keepdims=True) / merged.sum()
    statistic = float(((merged - expected) ** 2 / expected).sum())
    distance = float(np.abs(counts[0] / counts[0].sum() - counts[1] / counts[1].sum()).sum() / 2)
    return Test(statistic, _tail(statistic, merged.shape[1] - 1), distance, merged.shape[1])


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p-values in the given order."""
    order = np.argsort(p_values)
    adjusted, running = [0.0] * len(order), 0.0
    for rank, i in enumerate(order.tolist()):
        running = max(running, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def _tail(statistic: float, freedom: int) -> float:
    """P(chi-square with that many degrees of freedom > statistic)."""
    import torch

    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
