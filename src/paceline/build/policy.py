"""Builds the speculation policy, by speculation.policy."""

from __future__ import annotations

from collections.abc import Callable

from paceline.config import SpeculationSection
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.cost import CostTable
from paceline.speculation.das import DasPolicy
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy


def build_policy(
    speculation: SpeculationSection, costs: Callable[[], CostTable], model: str | None
) -> SpeculationPolicy:
    """`costs` is called only for policies that need a cost table. `model`: see AutoPolicy."""
    if speculation.policy == "static" or speculation.method == "none":
        return StaticPolicy(speculation.num_speculative_tokens, speculation.min_confidence)
    k = speculation.num_speculative_tokens
    assert isinstance(k, int)  # checked by SpeculationSection
    if speculation.policy == "das":
        return DasPolicy(costs(), k)
    return AutoPolicy(costs(), k, speculation.method, model)
