"""Step times: closed-form limits and monotonicity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sim.specs import Efficiency, Hardware, Model, Software, load_spec
from paceline.sim.step import Engine, StepModel
from paceline.speculation.batch import Load

IDEAL = Efficiency("ideal", "", 1.0, 1.0, 50.0, 1.0, 1.0, 0.01, 0.01, 1.0, 1.0)
NO_HOST_TIME, ONE_GPU = Software("none", ""), Engine()
H200, QWEN = load_spec(Hardware, "h200", ""), load_spec(Model, "qwen3-8b", "")
MOE, GB200 = load_spec(Model, "qwen3-235b-a22b", ""), load_spec(Hardware, "gb200-nvl72", "")


def model_of(model=QWEN, hardware=H200, efficiency=IDEAL, software=NO_HOST_TIME, engine=ONE_GPU, method="none"):
    return StepModel(hardware, model, software, efficiency, engine, method)


def test_one_row_is_memory_bound():
    """It reads all weights except the embedding once, and the KV cache of the context once."""
    context = 1000
    num_bytes = 2 * (QWEN.active_params + 36 * 2 * 8 * 128 * context)
    assert model_of().forward_s(1, 1, context) == pytest.approx(num_bytes / 4.8e12, rel=0.005)


def test_many_rows_are_compute_bound():
    rows = 1e7
    small = rows * (2 * 36 * (8 * 4096 + 3 * 12288) + 12 * 151936) / 4.8e12  # activations and logits
    found = model_of().forward_s(rows, rows, 0) - small
    assert found == pytest.approx(2 * QWEN.active_params * rows / 989e12, rel=0.005)


def test_verification_is_free_when_memory_bound_and_proportional_when_compute_bound():
    model = model_of()
    assert model.step_s(1, 3, 100) / model.step_s(1, 0, 100) < 1.01
    assert model.step_s(100_000, 3, 0) / model.step_s(100_000, 0, 0) == pytest.approx(4, rel=0.01)


def test_number_of_active_experts():
    """E(1 - (1 - a/E)^n): one token reads eight experts, many tokens read all."""
    engine = Engine(gpus=1, tp=1, precision="fp8", kv_precision="fp8")
    vast = replace(GB200, memory_gb=1000.0, nvlink_gb_s=0.0)
    model = model_of(MOE, vast, engine=engine)

    def experts(tokens):
        seconds = model.forward_s(tokens, tokens, 0) - dense.forward_s(tokens, tokens, 0)
        return float(seconds) * 8e12 / (94 * MOE.expert_params)

    nearly_none = replace(MOE, experts=8, experts_per_token=8, expert_intermediate=1)
    dense = model_of(nearly_none, vast, engine=engine)
    assert experts(1) == pytest.approx(8, rel=0.02)
    assert experts(4) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 4), rel=0.02)
    assert experts(200) == pytest.approx(128, rel=0.02)


def test_tensor_parallelism_divides_reads_and_adds_communication():
    rows, context = 8, 4000
    one_gpu = model_of().forward_s(rows, rows, rows * context)
    free = replace(H200, nvlink_us=0.01, nvlink_gb_s=10_000.0)
    parallel = model_of(hardware=free, engine=Engine(4, 4)).forward_s(rows, rows, rows * context)
    assert parallel == pytest.approx(one_gpu / 4, rel=0.02)
    slow = model_of(hardware=replace(H200, nvlink_us=50.0), engine=Engine(4, 4)).forward_s(rows, rows, rows * context)
    assert slow - parallel == pytest.approx(36 * 2 * 100e-6, rel=0.1)


def test_engines_larger_than_an_nvlink_domain_use_the_network():
    near = model_of(engine=Engine(8, 8)).forward_s(64, 64, 64000)
    far = model_of(hardware=replace(H200, nvlink_gpus=4), engine=Engine(8, 8)).forward_s(64, 64, 64000)
    assert far > near + 36 * 2 * 3 * 3e-6


def test_draft_times():
    head, free = model_of(method="eagle3"), model_of(method="free")
    assert head.draft_s(8, 0, 100) == 0
    one, three = head.draft_s(8, 1, 100), head.draft_s(8, 3, 100)
    assert 0 < one < three < head.forward_s(8, 8, 800)
    assert free.draft_s(8, 5, 100) == pytest.approx(16e-6)
    small = StepModel(H200, QWEN, NO_HOST_TIME, IDEAL, Engine(), "draft_model", load_spec(Model, "qwen3-0.6b", ""))
    assert small.draft_s(1, 4, 100) == pytest.approx(4 * small.draft_s(1, 1, 100))


def test_host_time_per_step_row_token_and_pass():
    without_host = model_of(method="eagle3").step_s(10, 3, 100, 2.5)
    software = Software("host", "", host_step_us=100.0, host_row_us=2.0, host_token_us=4.0, host_pass_us=50.0)
    found = model_of(method="eagle3", software=software).step_s(10, 3, 100, 2.5)
    assert found - without_host == pytest.approx(1e-6 * (100 + 10 * (2 + 4 * 2.5) + 3 * 50))


shipped = load_spec(Efficiency, "published", "")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4096), k=st.integers(0, 16), context=st.integers(1, 40_000), moe=st.booleans(),
    more=st.sampled_from(["rows", "k", "context"]),
)  # fmt: skip
def test_step_time_is_monotonic(rows, k, context, moe, more):
    engine = Engine(16, 4, "fp8", "fp8") if moe else Engine(2, 2)
    model = model_of(MOE if moe else QWEN, GB200, shipped, engine=engine, method="eagle3")
    load = {"rows": rows, "k": k, "context": context}
    larger = load | {more: load[more] + 1}
    assert 0 < model.step_s(**load) <= model.step_s(**larger) * (1 + 1e-12)


def test_arrays_give_the_same_as_scalars():
    model = model_of(MOE, GB200, shipped, engine=Engine(16, 1, "fp8", "fp8"), method="eagle3")
    rows, k, context = np.array([1, 7, 300]), np.array([0, 3, 5]), np.array([10.0, 5000.0, 20000.0])
    single = [float(model.step_s(*each)) for each in zip(rows, k, context, strict=True)]
    assert model.step_s(rows, k, context).tolist() == pytest.approx(single, rel=1e-12)


@pytest.mark.parametrize("experts", [False, True])
def test_the_cost_table_has_the_step_models_times(experts):
    """Within 5%: with fewer rows than groups, a row's context is on one device, which a cost table can't express."""
    model = model_of(efficiency=shipped, method="eagle3")
    if experts:
        model = model_of(MOE, GB200, shipped, engine=Engine(16, 1, "fp8", "fp8"), method="eagle3")
    table = model.cost_table(64, 4, 2000.0)
    for rows, k in ((1, 0), (24, 2), (64, 4)):
        context = rows * (2000 + k)
        found = table.steps_s(Load(rows, rows, rows * 2000), rows * k)[-1]
        assert found == pytest.approx(float(model.forward_s(rows, rows * (1 + k), context)), rel=0.05)
        drafts = float(model.draft_s(rows, k, 2000))
        assert table.draft_s("eagle3", rows, k) == pytest.approx(drafts, rel=0.02, abs=1e-9)
