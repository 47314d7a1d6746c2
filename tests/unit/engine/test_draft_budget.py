"""If a step can verify fewer draft tokens than rows could use, the policy distributes them over all rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_decoder

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import first_layers
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.das import DasPolicy
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy, shorten_longest
from paceline.types import Completion, Request, SamplingParams, StepTrace

NUM, K = 8, 5


def costs() -> CostTable:
    """Tokens are free, drafts too: everybody is given as much as there is."""
    points = [Point(rows, rows + extra, 1000, 1.0) for rows in (1, 64) for extra in (0, 512)]
    drafts = {"draft_model": [(1, 1, 1e-6), (1, K, 1e-6), (64, 1, 1e-6), (64, K, 1e-6)]}
    return CostTable("test", points, drafts, frozen=True)


POLICIES = {
    "static": lambda: StaticPolicy(K),
    "das": lambda: DasPolicy(costs(), K),
    "auto": lambda: AutoPolicy(costs(), K, "draft_model", "draft_model"),
}


def run(policy: SpeculationPolicy, budget: int) -> tuple[list[StepTrace], list[Completion]]:
    """Rows of the same length with correct drafts, in a step that can verify `budget` draft tokens."""
    decoder = tiny_decoder()
    drafter = DraftModelDrafter(PagedDecoder(first_layers(decoder, 3), 128), Sampler())
    engine = LocalEngine(
        PagedDecoder(decoder, 128), drafter=drafter, policy=policy, max_num_batched_tokens=NUM + budget
    )
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    completions = engine.generate([Request(i, (1 + i,), sampling, i) for i in range(NUM)])
    return engine.drain_trace(), completions


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("budget", [16, 3])
def test_every_row_gets_its_share_and_no_step_more_than_it_has_room_for(name: str, budget: int) -> None:
    traces, completions = run(POLICIES[name](), budget)
    assert max(trace.num_query_tokens for trace in traces) <= NUM + budget
    full = [trace for trace in traces if trace.num_rows == NUM]
    assert max(trace.num_draft_tokens for trace in full) == budget
    assert max(trace.num_drafts for trace in full) == min(NUM, budget), "rows at the end of the batch got nothing"
    drafted = np.array([completion.num_draft_tokens for completion in completions])
    assert drafted.sum() > 30
    if budget >= NUM:
        assert drafted.min() > 0 and drafted.max() <= 2 * drafted.min()


def test_where_nothing_fits_nothing_is_drafted() -> None:
    for name, policy in POLICIES.items():
        traces, _ = run(policy(), 0)
        full = [trace for trace in traces if trace.num_rows == NUM and trace.num_query_tokens == NUM]
        assert full and not any(trace.num_draft_tokens for trace in full), name


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum), st.data())
def test_levels_use_the_budget_and_shorten_the_longest(caps: list[int], data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, sum(caps) - 1))
    found = shorten_longest(np.array(caps, np.int32), budget)
    assert found.sum() == budget and (found <= caps).all() and found.dtype == np.int32
    cut = found < np.array(caps)
    assert found[cut].max() - found[cut].min() <= 1 and found.max() <= found[cut].min() + 1
