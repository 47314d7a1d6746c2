"""The budgets of DAS as its paper prints them, to compare `speculation/budgets.py` with."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from paceline.speculation import budgets


def printed(lengths: ArrayLike, alpha: ArrayLike, k: ArrayLike, c_base: float, c_tok: float) -> budgets.Budgets:
    """The budgets of DAS as printed in arXiv 2511.13841 (eq. 7), for comparison only:

        p_i(N) = −(l_i/α_i) · ln(1 − k_i (1 − N/l_i))

    It multiplies by k_i where the inverse of A_i divides by it: the same for k_i = 1, otherwise too little, so that
    rows take more than N steps. The equation is from a published summary of the paper. The choice of N is a
    reconstruction: the minimum of the same cost over these budgets.
    """
    l_B, alpha_B, k_B = budgets.as_rows(lengths, alpha, k)

    def left(num_steps: float) -> np.ndarray:
        return np.maximum(1 - k_B * (1 - num_steps / l_B), budgets.LEAST)

    def slopes(num_steps: float) -> np.ndarray:
        return k_B / (alpha_B * left(num_steps))

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        num_steps = budgets.find_num_steps(l_B, float(l_B.max(initial=0, where=alpha_B == 0)), c_base, c_tok, slopes)
        budgets_B = np.where(l_B > num_steps, -l_B / alpha_B * np.log(left(num_steps)), 0.0)
    return budgets.Budgets(num_steps, budgets_B)
