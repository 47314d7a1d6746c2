"""RL steps: closed forms of the step time, and one stage at a time on every device."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sim.pipeline import Pipeline, Stages, stage_times, steady_step
from paceline.sim.specs import Efficiency, Hardware, Model, Software, load_spec

seconds = st.floats(0, 1000)


def stages(generation=100.0, training=50.0, logprob=20.0, sync=0.0, **more) -> Stages:
    return Stages(**{"data": 0.0, "prepare": 0.0, "reward": 0.0} | more, generation=generation, logprob=logprob,
                  training=training, sync=sync)  # fmt: skip


def disaggregated(lag: int) -> Pipeline:
    return Pipeline(64, "disaggregated", 48, lag)


def test_lag_0_takes_the_sum_of_the_stages():
    step = steady_step(Pipeline(32), stages(sync=1.0, prepare=2.0))
    assert step.seconds == pytest.approx(100 + 50 + 20 + 2 + 1)
    assert step.exposed_s == pytest.approx(101)
    assert step.training_idle == step.generation_idle == pytest.approx(1 / 173)


def test_lag_1_takes_the_longer_of_generation_and_training():
    assert steady_step(disaggregated(1), stages()).seconds == pytest.approx(100)
    assert steady_step(disaggregated(1), stages(generation=30.0)).seconds == pytest.approx(70)
    step = steady_step(disaggregated(1), stages(generation=30.0))
    assert step.exposed_s == pytest.approx(0, abs=1e-9) and step.training_idle == pytest.approx(0, abs=1e-9)
    assert step.generation_idle == pytest.approx(4 / 7)


def test_lag_2_hides_weight_sync():
    """lag + 1 steps take at least the sum of generation, training and weight sync."""
    assert steady_step(disaggregated(1), stages(generation=70.0, sync=5.0)).seconds == pytest.approx(145 / 2)
    assert steady_step(disaggregated(2), stages(generation=70.0, sync=5.0)).seconds == pytest.approx(70)


@settings(max_examples=100, deadline=None)
@given(
    lag=st.integers(0, 8), generation=st.floats(0.1, 1000), training=st.floats(0.1, 1000), logprob=seconds,
    sync=seconds,
    data=seconds, reward=seconds, colocated=st.booleans(),
)  # fmt: skip
def test_devices_run_one_stage_at_a_time_and_the_period_has_its_closed_form(lag, colocated, **times):
    pipeline = Pipeline(64) if colocated else disaggregated(lag)
    step = steady_step(pipeline, stages(**times))
    assert step.exposed_s >= -1e-6 and 0 <= step.generation_idle <= 1 and 0 <= step.training_idle <= 1
    for devices in ("generation", "training"):
        spans = sorted((s.start_s, s.end_s) for s in step.timeline if s.devices == devices and s.end_s > s.start_s)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))
    begins = {s.step: s.start_s for s in step.timeline if s.stage == "generation"}
    ends = {s.step: s.end_s for s in step.timeline if s.stage == "training"}
    for m, begin in begins.items():
        version = m - pipeline.lag
        if version > 0:  # trained by step version - 1
            assert begin >= ends[version - 1] + times["sync"] - 1e-6
    assert len(begins) == len(ends)
    learning = sum(times.values()) - times["generation"] - times["sync"]
    longest = max(times["generation"], learning, sum(times.values()) / (pipeline.lag + 1))
    # With a lag, convergence is slow when stages are nearly equal.
    assert step.seconds == pytest.approx(longest, rel=0.02 if pipeline.lag else 1e-9)


def test_training_time_is_three_forward_passes():
    hardware, model = load_spec(Hardware, "h200", ""), load_spec(Model, "qwen3-8b", "")
    efficiency = replace(load_spec(Efficiency, "published", ""), mfu=0.5)
    lengths, prompts = np.full(1000, 900), np.full(1000, 100)
    times = stage_times(Pipeline(8), hardware, model, Software("", ""), efficiency, 10.0, lengths, prompts)
    forward = 1e6 * (2 * model.active_params + 4 * 36 * 32 * 128 * 500)
    assert times.logprob == pytest.approx(forward / (8 * 989e12 * 0.5))
    assert times.training == pytest.approx(3 * times.logprob)
    assert times.generation == 10.0
    software = Software("", "", wake_s=5.0, stage_s=7.0)
    colocated = stage_times(Pipeline(8), hardware, model, software, efficiency, 10.0, lengths, prompts)
    assert (colocated.generation, colocated.training - times.training) == (15.0, pytest.approx(7.0))
    separate = stage_times(
        Pipeline(16, "disaggregated", 8, 1), hardware, model, software, efficiency, 10.0, lengths, prompts
    )
    assert (separate.generation, separate.training) == (10.0, pytest.approx(times.training))
