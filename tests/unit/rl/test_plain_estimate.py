"""The estimated time of plain decoding, from what the policy expected of each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.rl.metrics import estimated_speedup, plain_estimate


def step(**changes: Any) -> Any:
    """4 rows verify 2 draft tokens each and emit 8 tokens in 3 s; without drafts the step would take 2 s."""
    values = {
        "num_rows": 4, "num_query_tokens": 12, "num_draft_tokens": 8, "num_emitted": 8, "plain_s": 2.0, "total_s": 3.0,
        "num_captured": 0, "num_planned": 8,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


PLAIN = {"num_query_tokens": 4, "num_draft_tokens": 0, "num_emitted": 4, "total_s": 2.0, "num_planned": 0}
NOTHING = dict.fromkeys(("decoding_s", "estimated_plain_s", "plain_steps_s", "estimated_plain_steps_s"), 0)


def test_a_step_with_two_tokens_per_row_is_two_plain_steps() -> None:
    assert plain_estimate([step()]) == NOTHING | {"estimated_plain_s": 4.0, "decoding_s": 3.0}


def test_times_are_summed() -> None:
    sums = plain_estimate([step(), step(**PLAIN)])
    assert sums == {
        "estimated_plain_s": 6.0, "decoding_s": 5.0, "plain_steps_s": 2.0, "estimated_plain_steps_s": 2.0,
    }  # fmt: skip
    assert estimated_speedup(sums) == pytest.approx(6 / 5)


def test_a_machine_that_became_slower() -> None:
    """All steps take twice as long as the policy expects."""
    steps = [step(total_s=6.0), step(**PLAIN | {"total_s": 4.0})]
    assert estimated_speedup(plain_estimate(steps)) == pytest.approx(6 / 5)


@pytest.mark.parametrize("steps", [[], [step()]])
def test_no_estimate_without_plain_steps(steps: list[Any]) -> None:
    assert estimated_speedup(plain_estimate(steps)) is None


@pytest.mark.parametrize("changes", [{"plain_s": 0.0}, {"num_query_tokens": 40}, {"num_captured": 1}])
def test_steps_that_do_not_count(changes: dict[str, Any]) -> None:
    """No estimate, prompt tokens, or captured graphs."""
    assert plain_estimate([step(**changes)]) == NOTHING
