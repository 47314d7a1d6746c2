"""Draft budgets for rows of different lengths: how many tokens to draft for each, so that the last one ends soon.

Row i has l_i tokens left. With a budget of p draft tokens the target accepts

    A_i(p) = k_i · l_i · (1 − e^{−α_i p / l_i})

so the row takes l_i − A_i(p) steps, and all rows end after N. A step takes c_base, a draft token c_tok more:

    minimise  c_base · N + c_tok · Σ p_i    with    l_i − A_i(p_i) ≤ N

Given N, each row's budget is the least that meets it, p_i(N). The cost is convex in N, with kinks at N = l_i, where a
row starts to need drafts. So N is where the derivative of the cost changes its sign, at a kink or between two.

Invariant: rows that end within N steps without drafts have budget 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

HALVINGS = 52  # of the interval that contains N: the precision of float64
LEAST = 1e-15  # least share of what drafts can save that a row does not use; so budgets are finite, even of free tokens


@dataclass(frozen=True, slots=True)
class Budgets:
    num_steps: float  # N
    budgets: np.ndarray  # p_i, float64 [B]: tokens to draft until row i ends


Solver = Callable[[ArrayLike, ArrayLike, ArrayLike, float, float], Budgets]


def accepted(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, budgets: ArrayLike) -> np.ndarray:
    """A_i(p_i): float64 [B]."""
    l_B, alpha_B, k_B = as_rows(lengths, alpha, k)
    spent_B = np.divide(alpha_B * np.asarray(budgets, np.float64), l_B, out=np.zeros_like(l_B), where=l_B > 0)
    return -k_B * l_B * np.expm1(-spent_B)


def needed(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, num_steps: float) -> np.ndarray:
    """p_i(N), the least with which row i takes so many steps: float64 [B].

    p_i(N) = −(l_i/α_i) · ln(1 − (1 − N/l_i)/k_i)    where l_i > N > l_i(1 − k_i), else 0
    """
    l_B, alpha_B, k_B = as_rows(lengths, alpha, k)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(l_B > num_steps, -l_B / alpha_B * np.log(_left(l_B, alpha_B, k_B, num_steps)), 0.0)


def solve(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, c_base: float, c_tok: float) -> Budgets:
    """The optimum. `alpha` and `k`: one per row or one for all; alpha = 0: drafts do not help."""
    l_B, alpha_B, k_B = as_rows(lengths, alpha, k)

    def slopes(num_steps: float) -> np.ndarray:
        return 1 / (alpha_B * k_B * _left(l_B, alpha_B, k_B, num_steps))

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        num_steps = find_num_steps(l_B, float(_least(l_B, alpha_B, k_B).max(initial=0)), c_base, c_tok, slopes)
    return Budgets(num_steps, needed(l_B, alpha_B, k_B, num_steps))


def as_rows(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    l_B = np.asarray(lengths, np.float64)
    alpha_B = np.broadcast_to(np.asarray(alpha, np.float64), l_B.shape)
    k_B = np.broadcast_to(np.asarray(k, np.float64), l_B.shape)
    assert (l_B >= 0).all() and (alpha_B >= 0).all() and (k_B > 0).all() and (k_B <= 1).all()
    return l_B, alpha_B, k_B


def _least(l_B: np.ndarray, alpha_B: np.ndarray, k_B: np.ndarray) -> np.ndarray:
    """Steps that remain with any budget."""
    return l_B * (1 - k_B * (alpha_B > 0))


def _left(l_B: np.ndarray, alpha_B: np.ndarray, k_B: np.ndarray, num_steps: float) -> np.ndarray:
    """1 − (1 − N/l)/k: the share of what drafts can save that a row does not use."""
    return np.maximum((num_steps - _least(l_B, alpha_B, k_B)) / (k_B * l_B), LEAST)


def find_num_steps(
    l_B: np.ndarray, least: float, c_base: float, c_tok: float, slopes: Callable[[float], np.ndarray]
) -> float:
    """The smallest N > least at which one step less does not pay: c_base ≥ c_tok · Σ |dp_i/dN|."""
    assert c_base >= 0 and c_tok >= 0 and c_base + c_tok > 0
    step_cost = np.divide(c_base, c_tok)  # in draft tokens; inf if they are free
    low, high = least, float(l_B.max(initial=0))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if slopes(middle)[l_B > middle].sum() > step_cost:
            low = middle
        else:
            high = middle
    kinks = l_B[(l_B >= low) & (l_B <= high) & (l_B > least)]
    return float(kinks.max()) if len(kinks) else high
