"""Nonlinear least squares on log ratios, for positive parameters and relative errors.

Levenberg-Marquardt over the logarithms of the parameters. A weak prior pulls each parameter towards its start value,
so a parameter that the data does not determine keeps it. No parameter leaves its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Values = Mapping[str, float]
Bounds = Mapping[str, tuple[float, float]]
MIN_BOUND = 1e-9  # replaces a bound of zero, which has no logarithm
MAX_ITERATIONS = 40
EPSILON = 1e-4  # of a logarithm, for finite differences
MIN_IMPROVEMENT = 1e-6  # of the sum of squares, relative: the fit stops below it


@dataclass(frozen=True, slots=True)
class Fit:
    values: dict[str, float]
    errors: np.ndarray  # log(simulated / measured) of each row
    at_bounds: tuple[str, ...] = ()  # parameters that ended at a bound

    @property
    def max_error(self) -> float:
        """As a ratio: 0.1 is ten per cent."""
        return float(np.expm1(np.abs(self.errors).max(initial=0.0)))


def fit(
    simulated: Callable[[Values], np.ndarray], measured: np.ndarray, start: Values, prior: float = 1.0,
    weights: np.ndarray | None = None, bounds: Bounds | None = None,
) -> Fit:  # fmt: skip
    """Find the values for which `simulated` is closest to `measured`.

    `prior`: a parameter that moves by this much (in logarithms) costs as much as a row of weight 1 that is off by 1%.
    `weights`: one per row. `bounds`: (lowest, highest) of some parameters.
    """
    if not (np.isfinite(measured).all() and (measured > 0).all() and all(value > 0 for value in start.values())):
        raise ValueError("fit: measured and start values must be finite and above zero")
    names = list(start)
    lowest, highest = np.log(np.maximum([(bounds or {}).get(name, (0.0, np.inf)) for name in names], MIN_BOUND)).T
    origin = np.log([start[name] for name in names]).clip(lowest, highest)
    row_weights = np.ones(len(measured)) if weights is None else weights

    def values(x: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(x).tolist(), strict=True))

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = np.log(simulated(values(x)) / measured)
        return np.concatenate([row_weights * errors, (x - origin) * 0.01 / prior])

    x, damping = origin.copy(), 1e-2
    now = residuals(x)
    for _ in range(MAX_ITERATIONS):
        jacobian = np.stack([(residuals(x + EPSILON * unit) - now) / EPSILON for unit in np.eye(len(x))], 1)
        slope = jacobian.T @ now
        # Hold a parameter fixed in this iteration if it is at its bound and its step would leave the bounds.
        jacobian[:, ((x <= lowest) & (slope > 0)) | ((x >= highest) & (slope < 0))] = 0.0
        normal, slope = jacobian.T @ jacobian, jacobian.T @ now
        before = float(now @ now)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(x))), -slope)
            candidate = np.clip(x + np.clip(step, -1, 1), lowest, highest)
            after = residuals(candidate)
            if after @ after < before:
                x, now, damping = candidate, after, damping / 3
                break
            damping *= 4
        if before - float(now @ now) < MIN_IMPROVEMENT * before:
            break
    at_bounds = tuple(name for name, is_bound in zip(names, (x <= lowest) | (x >= highest), strict=True) if is_bound)
    return Fit(values(x), np.log(simulated(values(x)) / measured), at_bounds)
