"""RL steps: closed forms of the pipelines, and devices that never do two things at once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sim.cards import Efficiency, Hardware, Model, Software, card
from paceline.sim.pipeline import Pipeline, Stages, stages_of, steady_step

seconds = st.floats(0, 1000)


def stages(generation=100.0, training=50.0, logprob=20.0, sync=0.0, **more) -> Stages:
    return Stages(**{"data": 0.0, "prepare": 0.0, "reward": 0.0} | more, generation=generation, logprob=logprob,
                  training=training, sync=sync)  # fmt: skip


def apart(lag: int) -> Pipeline:
    return Pipeline(64, "disaggregated", 48, lag)


def test_one_after_the_other_takes_the_sum():
    step = steady_step(Pipeline(32), stages(sync=1.0, prepare=2.0))
    assert step.seconds == pytest.approx(100 + 50 + 20 + 2 + 1)
    assert step.exposed_s == pytest.approx(101)
    assert step.training_idle == step.generation_idle == pytest.approx(1 / 173)


def test_one_behind_takes_the_longer_of_the_two():
    assert steady_step(apart(1), stages()).seconds == pytest.approx(100)
    assert steady_step(apart(1), stages(generation=30.0)).seconds == pytest.approx(70)
    bound = steady_step(apart(1), stages(generation=30.0))
    assert bound.exposed_s == pytest.approx(0, abs=1e-9) and bound.training_idle == pytest.approx(0, abs=1e-9)
    assert bound.generation_idle == pytest.approx(4 / 7)


def test_staleness_hides_the_weights_way_too():
    """One behind, a round of generation, training and weights holds two steps; two behind, three."""
    assert steady_step(apart(1), stages(generation=70.0, sync=5.0)).seconds == pytest.approx(145 / 2)
    assert steady_step(apart(2), stages(generation=70.0, sync=5.0)).seconds == pytest.approx(70)


@settings(max_examples=100, deadline=None)
@given(
    lag=st.integers(0, 8), generation=st.floats(0.1, 1000), training=st.floats(0.1, 1000), logprob=seconds,
    sync=seconds,
    data=seconds, reward=seconds, colocated=st.booleans(),
)  # fmt: skip
def test_nobody_does_two_things_at_once_and_nothing_is_lost(lag, colocated, **times):
    pipeline = Pipeline(64) if colocated else apart(lag)
    step = steady_step(pipeline, stages(**times))
    assert step.exposed_s >= -1e-6 and 0 <= step.generation_idle <= 1 and 0 <= step.training_idle <= 1
    for who in ("generation", "training"):
        mine = sorted((s.start_s, s.end_s) for s in step.timeline if s.who == who and s.end_s > s.start_s)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(mine))
    begins = {s.step: s.start_s for s in step.timeline if s.stage == "generation"}
    ends = {s.step: s.end_s for s in step.timeline if s.stage == "training"}
    for m, begin in begins.items():
        version = m - pipeline.lag
        if version > 0:  # made by step version - 1
            assert begin >= ends[version - 1] + times["sync"] - 1e-6
    assert len(begins) == len(ends)
    learning = sum(times.values()) - times["generation"] - times["sync"]
    longest = max(times["generation"], learning, sum(times.values()) / (pipeline.lag + 1))
    assert step.seconds == pytest.approx(longest, rel=0.02 if pipeline.lag else 1e-9)  # nearly even ones settle slowly


def test_training_is_counted_in_forwards():
    hardware, model = card(Hardware, "h200", ""), card(Model, "qwen3-8b", "")
    efficiency = replace(card(Efficiency, "published", ""), mfu=0.5)
    lengths, prompts = np.full(1000, 900), np.full(1000, 100)
    made = stages_of(Pipeline(8), hardware, model, Software("", ""), efficiency, 10.0, lengths, prompts)
    forward = 1e6 * (2 * model.active_params + 4 * 36 * 32 * 128 * 500)
    assert made.logprob == pytest.approx(forward / (8 * 989e12 * 0.5))
    assert made.training == pytest.approx(3 * made.logprob)
    assert made.generation == 10.0
    woken = Software("", "", wake_s=5.0, stage_s=7.0)
    shared = stages_of(Pipeline(8), hardware, model, woken, efficiency, 10.0, lengths, prompts)
    assert (shared.generation, shared.training - made.training) == (15.0, pytest.approx(7.0))
    of_their_own = stages_of(
        Pipeline(16, "disaggregated", 8, 1), hardware, model, woken, efficiency, 10.0, lengths, prompts
    )
    assert (of_their_own.generation, of_their_own.training) == (10.0, pytest.approx(made.training))
