"""Least squares on the logarithms of ratios: numbers that are above zero, errors that are relative.

Levenberg-Marquardt over the logarithms of the parameters. Each is held to its start by a weak prior, so that one the
rows say nothing of stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Values = Mapping[str, float]
ROUNDS = 40
NUDGE = 1e-4  # of a logarithm, for derivatives
ENOUGH = 1e-6  # of the sum of squares: an improvement below that is none


@dataclass(frozen=True, slots=True)
class Fit:
    values: dict[str, float]
    errors: np.ndarray  # log(simulated / measured) of each row, at these values

    @property
    def worst(self) -> float:
        """As a ratio: 0.1 is ten per cent."""
        return float(np.expm1(np.abs(self.errors).max(initial=0.0)))

    @property
    def mean(self) -> float:
        return float(np.expm1(np.abs(self.errors).mean())) if len(self.errors) else 0.0


def fit(
    simulated: Callable[[Values], np.ndarray], measured: np.ndarray, start: Values, prior: float = 1.0,
    weights: np.ndarray | None = None,
) -> Fit:  # fmt: skip
    """The values under which `simulated` comes nearest to `measured`. `prior`: how far (in logarithms) a value may
    stray as easily as a row may be off by its weight's worth of one."""
    if (measured <= 0).any() or any(value <= 0 for value in start.values()):
        raise ValueError("a fit of ratios needs numbers above zero")
    names = list(start)
    origin = np.log([start[name] for name in names])
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
        normal, slope = jacobian.T @ jacobian, jacobian.T @ now
        before = float(now @ now)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(x))), -slope)
            then = residuals(x + np.clip(step, -1, 1))
            if then @ then < before:
                x, now, damping = x + np.clip(step, -1, 1), then, damping / 3
                break
            damping *= 4
        if before - float(now @ now) < ENOUGH * before:
            break
    return Fit(values(x), np.log(simulated(values(x)) / measured))
