"""Least squares on the logarithms of ratios: numbers that are above zero, errors that are relative.

Levenberg-Marquardt over the logarithms of the parameters. Each is held to its start by a weak prior, so that one the
rows say nothing of stays where it was, and none leaves its bounds: more than a machine's peak is no efficiency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Values = Mapping[str, float]
Bounds = Mapping[str, tuple[float, float]]
LEAST = 1e-9  # of a number whose range begins at zero, which has no logarithm
ROUNDS = 40
NUDGE = 1e-4  # of a logarithm, for derivatives
ENOUGH = 1e-6  # of the sum of squares: an improvement below that is none


@dataclass(frozen=True, slots=True)
class Fit:
    values: dict[str, float]
    errors: np.ndarray  # log(simulated / measured) of each row, at these values
    at_bounds: tuple[str, ...] = ()  # values that might have gone on

    @property
    def worst(self) -> float:
        """As a ratio: 0.1 is ten per cent."""
        return float(np.expm1(np.abs(self.errors).max(initial=0.0)))

    @property
    def mean(self) -> float:
        return float(np.expm1(np.abs(self.errors).mean())) if len(self.errors) else 0.0


def fit(
    simulated: Callable[[Values], np.ndarray], measured: np.ndarray, start: Values, prior: float = 1.0,
    weights: np.ndarray | None = None, bounds: Bounds | None = None,
) -> Fit:  # fmt: skip
    """The values under which `simulated` comes nearest to `measured`. `prior`: how far (in logarithms) a value may
    stray as easily as a row may be off by its weight's worth of one. `bounds`: least and most of some values."""
    if not (np.isfinite(measured).all() and (measured > 0).all() and all(value > 0 for value in start.values())):
        raise ValueError("a fit of ratios needs numbers above zero")
    names = list(start)
    lowest, highest = np.log(np.maximum([(bounds or {}).get(name, (0.0, np.inf)) for name in names], LEAST)).T
    origin = np.log([start[name] for name in names]).clip(lowest, highest)
    weigh = np.ones(len(measured)) if weights is None else weights

    def values(x: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(x).tolist(), strict=True))

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = np.log(simulated(values(x)) / measured)
        return np.concatenate([weigh * errors, (x - origin) * 0.01 / prior])

    x, damping = origin.copy(), 1e-2
    now = residuals(x)
    for _ in range(ROUNDS):
        jacobian = np.stack([(residuals(x + NUDGE * unit) - now) / NUDGE for unit in np.eye(len(x))], 1)
        slope = jacobian.T @ now
        # One that stands at its bound and would go beyond stays, and the others go their way without it.
        jacobian[:, ((x <= lowest) & (slope > 0)) | ((x >= highest) & (slope < 0))] = 0.0
        normal, slope = jacobian.T @ jacobian, jacobian.T @ now
        before = float(now @ now)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(x))), -slope)
            there = np.clip(x + np.clip(step, -1, 1), lowest, highest)
            then = residuals(there)
            if then @ then < before:
                x, now, damping = there, then, damping / 3
                break
            damping *= 4
        if before - float(now @ now) < ENOUGH * before:
            break
    at_bounds = tuple(name for name, ends in zip(names, (x <= lowest) | (x >= highest), strict=True) if ends)
    return Fit(values(x), np.log(simulated(values(x)) / measured), at_bounds)
