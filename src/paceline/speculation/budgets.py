"""The long tail's budgets: how many tokens to draft for each row until it ends, so that the last row ends soon.

Row i has l_i tokens to go. From a budget of p drafted tokens the target accepts

    A_i(p) = k_i · l_i · (1 − e^{−α_i p / l_i})

so the row takes l_i − A_i(p) steps, and all rows are done after N. A step takes c_base, a drafted token c_tok more:

    minimise  c_base · N + c_tok · Σ p_i    with    l_i − A_i(p_i) ≤ N

Given N, each row's budget is the least that meets it, p_i(N). The cost is convex in N, with kinks at N = l_i, where a
row starts to need drafts. So N lies where the cost's derivative changes its sign, on a kink or between two.

Always: rows that end within N steps by themselves have budget 0, and the prices of all rows add up to c_base (to less
where tokens are so cheap that N is as small as it gets).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

HALVINGS = 52  # of the interval that holds N: as fine as float64 is
SAME = 1e-12  # lengths that differ by less, relatively, are one kink: halving does not tell them apart
LEAST = 1e-15  # of what drafts can bring a row, that they leave it; so no budget is infinite, even of free tokens


@dataclass(frozen=True, slots=True)
class Budgets:
    num_steps: float  # N
    budgets: np.ndarray  # p_i, float64 [B]: tokens to draft until row i ends
    prices: np.ndarray  # μ_i, float64 [B]: what one token less of row i would save


Solver = Callable[[ArrayLike, ArrayLike, ArrayLike, float, float], Budgets]


def accepted(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, budgets: ArrayLike) -> np.ndarray:
    """A_i(p_i): float64 [B]."""
    l_B, alpha_B, k_B = _rows(lengths, alpha, k)
    spent_B = np.divide(alpha_B * np.asarray(budgets, np.float64), l_B, out=np.zeros_like(l_B), where=l_B > 0)
    return -k_B * l_B * np.expm1(-spent_B)


def needed(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, num_steps: float) -> np.ndarray:
    """p_i(N), the least that gets row i down to so many steps: float64 [B].

    p_i(N) = −(l_i/α_i) · ln(1 − (1 − N/l_i)/k_i)    where l_i > N > l_i(1 − k_i), else 0
    """
    l_B, alpha_B, k_B = _rows(lengths, alpha, k)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(l_B > num_steps, -l_B / alpha_B * np.log(_left(l_B, alpha_B, k_B, num_steps)), 0.0)


def cost_s(
    lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, c_base: float, c_tok: float, budgets: ArrayLike
) -> float:
    """What budgets come to, with the steps that they really leave."""
    p_B = np.asarray(budgets, np.float64)
    num_steps = (np.asarray(lengths, np.float64) - accepted(lengths, alpha, k, p_B)).max(initial=0.0)
    return float(c_base * num_steps + c_tok * p_B.sum())


def solve(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, c_base: float, c_tok: float) -> Budgets:
    """The optimum. `alpha` and `k` are of each row or of all; alpha = 0 is a row that drafts do not help. Prices are

    μ_i = c_tok · |dp_i/dN| = c_tok / (α_i (k_i − 1 + N/l_i))
    """
    l_B, alpha_B, k_B = _rows(lengths, alpha, k)

    def slopes(num_steps: float) -> np.ndarray:
        return 1 / (alpha_B * k_B * _left(l_B, alpha_B, k_B, num_steps))

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        num_steps = _num_steps(l_B, float(_least(l_B, alpha_B, k_B).max(initial=0)), c_base, c_tok, slopes)
        prices_B = _prices(l_B, num_steps, c_base, c_tok, slopes(num_steps))
    return Budgets(num_steps, needed(l_B, alpha_B, k_B, num_steps), prices_B)


def printed(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, c_base: float, c_tok: float) -> Budgets:
    """The budgets of DAS as arXiv 2511.13841 prints them (eq. 7), for comparison only:

        p_i(N) = −(l_i/α_i) · ln(1 − k_i (1 − N/l_i))

    It multiplies by k_i where inverting A_i divides by it: the same for k_i = 1, too little for any other, so that the
    rows take more than the N steps it counts on. The equation is taken from a published summary of the paper, and the
    choice of N is a reconstruction: the minimum of the same cost over these budgets.
    """
    l_B, alpha_B, k_B = _rows(lengths, alpha, k)

    def left(num_steps: float) -> np.ndarray:
        return np.maximum(1 - k_B * (1 - num_steps / l_B), LEAST)

    def slopes(num_steps: float) -> np.ndarray:
        return k_B / (alpha_B * left(num_steps))

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        num_steps = _num_steps(l_B, float(l_B.max(initial=0, where=alpha_B == 0)), c_base, c_tok, slopes)
        budgets_B = np.where(l_B > num_steps, -l_B / alpha_B * np.log(left(num_steps)), 0.0)
        prices_B = _prices(l_B, num_steps, c_base, c_tok, slopes(num_steps))
    return Budgets(num_steps, budgets_B, prices_B)


def _rows(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    l_B = np.asarray(lengths, np.float64)
    alpha_B = np.broadcast_to(np.asarray(alpha, np.float64), l_B.shape)
    k_B = np.broadcast_to(np.asarray(k, np.float64), l_B.shape)
    assert (l_B >= 0).all() and (alpha_B >= 0).all() and (k_B > 0).all() and (k_B <= 1).all()
    return l_B, alpha_B, k_B


def _least(l_B: np.ndarray, alpha_B: np.ndarray, k_B: np.ndarray) -> np.ndarray:
    """Steps that no budget takes away."""
    return l_B * (1 - k_B * (alpha_B > 0))


def _left(l_B: np.ndarray, alpha_B: np.ndarray, k_B: np.ndarray, num_steps: float) -> np.ndarray:
    """1 − (1 − N/l)/k: of what drafts can bring a row, the share that it does not need."""
    return np.maximum((num_steps - _least(l_B, alpha_B, k_B)) / (k_B * l_B), LEAST)


def _num_steps(
    l_B: np.ndarray, least: float, c_base: float, c_tok: float, slopes: Callable[[float], np.ndarray]
) -> float:
    """The N > least from which on fewer tokens would not pay for one more step: c_base ≥ c_tok · Σ |dp_i/dN|."""
    assert c_base >= 0 and c_tok >= 0 and c_base + c_tok > 0
    worth = np.divide(c_base, c_tok)  # of a step, in drafted tokens; inf where they are free
    low, high = least, float(l_B.max(initial=0))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if slopes(middle)[l_B > middle].sum() > worth:
            low = middle
        else:
            high = middle
    kinks = l_B[(l_B >= low) & (l_B <= high) & (l_B > least)]
    return float(kinks.max()) if len(kinks) else high


def _prices(l_B: np.ndarray, num_steps: float, c_base: float, c_tok: float, slopes_B: np.ndarray) -> np.ndarray:
    """Rows beyond N: c_tok · |dp_i/dN|. Where N is a row's own length, no tokens are bought for it yet: it has what
    the others leave of c_base, for one step less would need it to be shorter too. Rows that share a kink share that
    in proportion to the price at which drafting would begin."""
    at_kink = (np.abs(l_B - num_steps) <= SAME * num_steps) & (l_B > 0)
    prices_B = np.where((l_B > num_steps) & ~at_kink, c_tok * slopes_B, 0.0)
    if at_kink.any():
        limits = slopes_B[at_kink]
        shares = np.isinf(limits) if np.isinf(limits).any() else limits
        prices_B[at_kink] = max(0.0, c_base - prices_B.sum()) * shares / shares.sum()
    return prices_B
