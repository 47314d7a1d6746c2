"""Budgets for rows of different lengths, compared with a search that does not use the closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripts import load_script

from paceline.speculation.budgets import LEAST, Solver, accepted, as_rows, solve

printed = load_script("history/printed_budgets.py").printed
Instance = tuple[list[float], list[float], list[float], float, float]
GOLDEN = (math.sqrt(5) - 1) / 2


def cost_s(instance_lengths, alpha, k, c_base: float, c_tok: float, budgets) -> float:
    """The cost of budgets, with the steps that they result in."""
    p_B = np.asarray(budgets, np.float64)
    num_steps = (np.asarray(instance_lengths, np.float64) - accepted(instance_lengths, alpha, k, p_B)).max(initial=0.0)
    return float(c_base * num_steps + c_tok * p_B.sum())


def prices(lengths, alpha, k, c_base: float, c_tok: float, num_steps: float) -> np.ndarray:
    """Shadow prices μ_i, float64 [B]: what a row that is one token shorter would save. They add up to c_base (to less
    if tokens are so cheap that N is as small as possible).

    Rows longer than N: μ_i = c_tok · |dp_i/dN| = c_tok / (α_i (k_i − 1 + N/l_i)). A row of length N has no budget yet:
    it gets what the others leave of c_base, because one step less would need it to be shorter too. Rows at the same
    kink share it in proportion to their prices where drafting starts."""
    l_B, alpha_B, k_B = as_rows(lengths, alpha, k)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        least_B = l_B * (1 - k_B * (alpha_B > 0))
        slopes_B = 1 / (alpha_B * k_B * np.maximum((num_steps - least_B) / (k_B * l_B), LEAST))
        at_kink = (np.abs(l_B - num_steps) <= 1e-12 * num_steps) & (l_B > 0)
        prices_B = np.where((l_B > num_steps) & ~at_kink, c_tok * slopes_B, 0.0)
        if at_kink.any():
            limits = slopes_B[at_kink]
            shares = np.isinf(limits) if np.isinf(limits).any() else limits
            prices_B[at_kink] = max(0.0, c_base - prices_B.sum()) * shares / shares.sum()
    return prices_B


# ---- slow reference implementation: golden section over N, each row's budget by bisection of A_i itself ----


def slow_budget(length: float, alpha: float, k: float, num_steps: float) -> float:
    """The least p with length − A(p) ≤ num_steps; inf if there is none."""

    def enough(p: float) -> bool:
        return length - k * length * (1 - math.exp(-alpha * p / length)) <= num_steps

    if length <= num_steps:
        return 0.0
    high = 1.0
    while not enough(high):
        high *= 2
        if high > 1e12:
            return math.inf
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def slow_cost(instance: Instance, num_steps: float) -> float:
    lengths, alpha, k, c_base, c_tok = instance
    return c_base * num_steps + c_tok * sum(
        slow_budget(length, a, share, num_steps) for length, a, share in zip(lengths, alpha, k, strict=True)
    )


def slow_optimum(instance: Instance) -> float:
    low, high = 0.0, max(instance[0])
    best = slow_cost(instance, high)
    for _ in range(70):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        costs = slow_cost(instance, left), slow_cost(instance, right)
        best = min(best, *costs)
        low, high = (low, right) if costs[0] < costs[1] else (left, high)  # if both are inf, N is too small
    return best


@st.composite
def instances(draw: st.DrawFn, max_rows: int = 5) -> Instance:
    num = draw(st.integers(1, max_rows))
    lengths = draw(st.lists(st.sampled_from([1.0, 7.0, 40.0, 300.0]) | st.floats(1, 1000), min_size=num, max_size=num))
    alpha = draw(st.lists(st.floats(0.05, 3), min_size=num, max_size=num))
    k = draw(st.lists(st.just(1.0) | st.floats(0.05, 1), min_size=num, max_size=num))
    return lengths, alpha, k, 1.0, 10 ** draw(st.floats(-4, 1))


@settings(max_examples=150, deadline=None)
@given(instances())
def test_the_solution_is_the_optimum(instance: Instance) -> None:
    lengths, alpha, k, c_base, c_tok = instance
    found = solve(*instance)
    np.testing.assert_array_less(
        np.array(lengths) - accepted(lengths, alpha, k, found.budgets), found.num_steps * (1 + 1e-9) + 1e-9
    )
    assert cost_s(*instance, found.budgets) == pytest.approx(c_base * found.num_steps + c_tok * found.budgets.sum())
    assert cost_s(*instance, found.budgets) == pytest.approx(slow_optimum(instance), rel=1e-7)


@settings(max_examples=200, deadline=None)
@given(instances(max_rows=40))
@example(([1000.0, 999.9999999999999], [2.0, 1.0], [1.0, 1.0], 1.0, 1.0))
def test_the_prices_prove_the_optimum(instance: Instance) -> None:
    """Prices μ ≥ 0 that add up to c_base bound every cost from below: by Σ_i min_p μ_i (l_i − A_i(p)) + c_tok p. Here
    the bound is met. The least p of a term is where μ_i A_i'(p) = c_tok, or 0."""
    lengths, alpha, k, c_base, c_tok = (np.array(part) for part in instance)
    found = solve(*instance)
    prices_B = prices(*instance, found.num_steps)
    assert (prices_B >= 0).all() and prices_B.sum() == pytest.approx(c_base, rel=1e-6)
    with np.errstate(divide="ignore"):
        p = lengths / alpha * np.log(np.maximum(1, prices_B * alpha * k / c_tok))
    bound = (prices_B * (lengths - accepted(lengths, alpha, k, p)) + c_tok * p).sum()
    assert bound == pytest.approx(cost_s(*instance, found.budgets), rel=1e-6)


def test_an_optimum_on_a_kink() -> None:
    """It pays to shorten two long rows to the third's length, but not to shorten all three further."""
    lengths = [100.0, 100.0, 37.3]
    # Slopes just above N = 37.3: 2 · 1/(1 · 0.373) = 5.4 tokens a step; just below, 1/(0.1 · 1) = 10 more.
    instance = lengths, [1.0, 1.0, 0.1], 1.0, 8.0, 1.0
    found = solve(*instance)
    assert found.num_steps == 37.3
    np.testing.assert_allclose(found.budgets, [-100 * math.log(0.373)] * 2 + [0])
    prices_B = prices(*instance, found.num_steps)
    np.testing.assert_allclose(prices_B, [1 / 0.373, 1 / 0.373, 8 - 2 / 0.373])  # the last: what is left of c_base


# ---- special cases ----


def test_long_rows_get_more_and_short_ones_nothing() -> None:
    instance = [900.0, 600.0, 300.0, 50.0], 1.0, 0.7, 1.0, 0.1
    found = solve(*instance)
    assert found.budgets[0] > found.budgets[1] > 0 and found.budgets[3] == 0
    prices_B = prices(*instance, found.num_steps)
    assert prices_B[0] > prices_B[1] > prices_B[3] == 0
    assert found.num_steps > 900 * 0.3


@pytest.mark.parametrize("solver", [solve, printed])
def test_edges(solver: Solver) -> None:
    assert solver([], 1.0, 0.5, 1.0, 0.1).num_steps == 0
    nothing = solver([0.0, 0.0], 1.0, 0.5, 1.0, 0.1)
    assert nothing.num_steps == 0 and not nothing.budgets.any()
    some = solver([0.0, 80.0], [1.0, 0.0], 0.5, 1.0, 0.1)  # drafts do not help the only row with tokens left
    assert some.num_steps == 80 and not some.budgets.any()
    assert prices([0.0, 80.0], [1.0, 0.0], 0.5, 1.0, 0.1, some.num_steps).tolist() == [0, 1]
    hopeless = solver([100.0, 90.0], 1e-300, 0.5, 1.0, 0.1)
    assert hopeless.num_steps == 100 and not hopeless.budgets.any()
    mixed = solver([100.0, 90.0, 20.0], [1.0, 0.0, 1.0], 1.0, 1.0, 1e-3)  # no row needs to end before the second
    assert mixed.num_steps == 90 and mixed.budgets[0] > 0 and mixed.budgets[1:].tolist() == [0, 0]


@pytest.mark.parametrize("solver", [solve, printed])
@pytest.mark.parametrize("c_base", [0.0, 1e-300, 1.0, 1e300])
@pytest.mark.parametrize("c_tok", [0.0, 1e-300, 1.0, 1e300])
@pytest.mark.parametrize("k", [1e-300, 1e-9, 0.5, 1.0])
def test_extreme_costs_give_finite_budgets(solver: Solver, c_base: float, c_tok: float, k: float) -> None:
    if c_base + c_tok == 0:
        return
    instance = np.array([1e6, 300.0, 1.0, 0.0]), np.array([1e-9, 1.0, 50.0, 1.0]), k, c_base, c_tok
    found = solver(*instance)
    assert np.isfinite(found.num_steps) and np.isfinite(found.budgets).all() and (found.budgets >= 0).all()
    if solver is solve:
        assert found.num_steps >= 1e6 * (1 - k)
        assert (prices(*instance, found.num_steps) >= 0).all(), "and none is NaN"


def test_no_budget_for_expensive_tokens_and_the_largest_for_free_ones() -> None:
    lengths = [500.0, 200.0]
    expensive = solve(lengths, 1.0, 0.8, 1.0, 1.0)  # 1 token saves at most α k = 0.8 of a step
    assert expensive.num_steps == 500 and not expensive.budgets.any()
    assert prices(lengths, 1.0, 0.8, 1.0, 1.0, expensive.num_steps).tolist() == [1, 0]
    free = solve(lengths, 1.0, 0.8, 1.0, 0.0)
    assert free.num_steps == pytest.approx(500 * 0.2)


def test_hundreds_of_rows() -> None:
    rng = np.random.default_rng(0)
    lengths, alpha, k = rng.lognormal(5, 1, 500), rng.uniform(0.2, 2, 500), rng.uniform(0.3, 1, 500)
    found = solve(lengths, alpha, k, 1.0, 0.01)
    assert (found.budgets[lengths > found.num_steps] > 0).all() and not found.budgets[lengths <= found.num_steps].any()
    assert (lengths - accepted(lengths, alpha, k, found.budgets)).max() == pytest.approx(found.num_steps)


# ---- the paper's formula ----


@settings(max_examples=60, deadline=None)
@given(instances())
def test_the_printed_formula_is_right_for_k_of_1(instance: Instance) -> None:
    lengths, alpha, _, c_base, c_tok = instance
    right, other = solve(lengths, alpha, 1.0, c_base, c_tok), printed(lengths, alpha, 1.0, c_base, c_tok)
    assert other.num_steps == pytest.approx(right.num_steps)
    np.testing.assert_allclose(other.budgets, right.budgets, rtol=1e-6, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(instances(), st.floats(0.05, 0.95))
def test_the_printed_formula_misses_its_own_constraint(instance: Instance, k: float) -> None:
    """If it drafts at all, its rows take longer than its solution claims; and no budgets beat the optimum."""
    lengths, alpha, _, c_base, c_tok = instance
    other = printed(lengths, alpha, k, c_base, c_tok)
    if other.budgets.max() > 1e-6 * max(lengths):
        steps = np.array(lengths) - accepted(lengths, alpha, k, other.budgets)
        assert steps.max() > other.num_steps
    optimum = cost_s(lengths, alpha, k, c_base, c_tok, solve(lengths, alpha, k, c_base, c_tok).budgets)
    assert cost_s(lengths, alpha, k, c_base, c_tok, other.budgets) >= optimum * (1 - 1e-9)


@pytest.mark.parametrize(("k", "least_loss"), [(0.9, 0.02), (0.7, 0.1), (0.5, 0.2)])
def test_the_printed_formula_misses_the_optimum(k: float, least_loss: float) -> None:
    """A long tail: 30 rows of 200 tokens, two of 2000. A drafted token costs a hundredth of a step."""
    lengths = [200.0] * 30 + [2000.0] * 2
    other, right = printed(lengths, 1.0, k, 1.0, 0.01), solve(lengths, 1.0, k, 1.0, 0.01)
    costs = [cost_s(lengths, 1.0, k, 1.0, 0.01, found.budgets) for found in (other, right)]
    steps = (np.array(lengths) - accepted(lengths, 1.0, k, other.budgets)).max()
    assert steps > 1.3 * other.num_steps, "it counts on fewer steps than its budgets leave"
    assert costs[0] > costs[1] * (1 + least_loss)
