"""Who decides how much is drafted, by speculation.policy."""

from __future__ import annotations

from collections.abc import Callable

from paceline.config import SpeculationSection
from paceline.speculation.cost import CostTable
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy


def build_policy(speculation: SpeculationSection, costs: Callable[[], CostTable]) -> SpeculationPolicy:
    """`costs` is asked only where a policy goes by them."""
    if speculation.policy == "static" or speculation.method == "none":
        return StaticPolicy(speculation.num_speculative_tokens, speculation.min_confidence)
    longest = speculation.num_speculative_tokens
    assert isinstance(longest, int)  # the config checks it
    if speculation.policy == "das":
        from paceline.speculation.das import DasPolicy

        return DasPolicy(costs(), longest)
    from paceline.speculation.auto import AutoPolicy

    return AutoPolicy(costs(), longest, speculation.method)
