"""Schedules conserve tokens; array evaluation and step-by-step simulation agree."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config_io import ConfigError
from paceline.sim.rollout import Rollout, make_schedules, rollout, segment_times, simulate_steps
from paceline.sim.schedule import make_schedule
from paceline.sim.simulated_drafter import SimulatedDrafter
from paceline.sim.simulator import Simulator, load_simulation_config
from paceline.sim.speculation import NO_SPECULATION, Speculation
from paceline.sim.workload import Workload, sample_lengths
from paceline.speculation.batch import Rows

lists = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=30)


def schedule_by_token(requests, max_rows, kv_tokens):
    """Reference implementation, token by token: [(rows, context tokens, computed prompt tokens)]."""
    waiting, running, found = list(requests), [], []
    while waiting or running:
        prompts = 0
        while waiting and len(running) < max_rows and sum(n + p for _, n, p in running) + sum(waiting[0]) <= kv_tokens:
            length, prompt = waiting.pop(0)
            running.append((0, length, prompt))
            prompts += prompt
        found.append((len(running), sum(p + done + 0.5 for done, _, p in running), prompts))
        running = [(done + 1, n, p) for done, n, p in running if done + 1 < n]
    return found


@settings(max_examples=80, deadline=None)
@given(requests=lists, max_rows=st.integers(1, 8), kv_tokens=st.integers(80, 400))
def test_schedule_equals_the_reference(requests, max_rows, kv_tokens):
    lengths, prompts = np.array(requests).T
    schedule = make_schedule([lengths], [prompts], max_rows, kv_tokens)
    assert schedule.num_emitted == lengths.sum()
    assert schedule.prompts.sum() == prompts.sum()
    assert schedule.rows.min() >= 1 and schedule.rows.max() <= max_rows
    by_token = schedule_by_token(requests, max_rows, kv_tokens)
    assert schedule.tokens.sum() == len(by_token)
    assert schedule.rows.repeat(schedule.tokens.astype(int)).tolist() == [rows for rows, _, _ in by_token]
    total = float((schedule.rows * schedule.context * schedule.tokens).sum())
    assert total == pytest.approx(sum(context for _, context, _ in by_token))


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(lists, min_size=1, max_size=6), max_rows=st.integers(1, 8), lag=st.integers(1, 4))
def test_a_stream_emits_all_tokens_and_ends_every_batch(batches, max_rows, lag):
    lengths, prompts = zip(*(np.array(batch).T for batch in batches), strict=True)
    schedule = make_schedule(list(lengths), list(prompts), max_rows, 10_000, lag)
    assert schedule.num_emitted == sum(each.sum() for each in lengths)
    assert schedule.last.max() == len(schedule.rows) - 1 and (schedule.last >= 0).all()


def test_a_sequence_longer_than_the_kv_cache_is_an_error():
    with pytest.raises(ConfigError, match="a sequence has 120 tokens, but an engine's memory holds 100"):
        make_schedule([np.array([100])], [np.array([20])], 8, 100)


def test_memory_limits_the_number_of_rows():
    lengths, prompts = np.full(10, 50), np.full(10, 10)
    assert make_schedule([lengths], [prompts], 10, 10_000).rows.max() == 10
    assert make_schedule([lengths], [prompts], 10, 190).rows.max() == 3


def small(**changes) -> Simulator:
    changes = {"mean_tokens": 300, "max_tokens": 1000, **changes}
    overrides = ["workload.batch=256", "group=16", "pipeline.gpus=8", *(f"{k}={v}" for k, v in changes.items())]
    return Simulator(load_simulation_config("nvidia-8b-scale", overrides))


def test_steps_with_random_acceptance_agree_with_the_schedule():
    """And differ from a schedule with another acceptance."""
    simulator = small(mean_tokens=1500, max_tokens=4000)
    s = simulator.config
    model = simulator.step_model(s.speculation)
    lengths, prompts = (each[0, ::8] for each in sample_lengths(s.workload))
    stepped = simulate_steps(model, s.speculation, s.workload, lengths, prompts)
    schedule = make_schedules(model, s.workload, 8, 0)[0]
    seconds, num_steps = (each.sum() for each in segment_times(schedule, model, s.speculation))
    assert stepped.num_tokens == schedule.num_emitted == lengths.sum()
    assert stepped.seconds == pytest.approx(seconds, rel=0.03)
    assert stepped.num_steps == pytest.approx(num_steps, rel=0.03)
    other = replace(s.speculation, acceptance=3.0)
    assert stepped.seconds != pytest.approx(segment_times(schedule, model, other)[0].sum(), rel=0.05)


@pytest.mark.parametrize(
    "overrides",
    [
        {"software": "nemo-rl-vllm"},
        {"software": "nemo-rl-vllm", "method": "free", "free_row_us": 100},
        {"hardware": "h200", "memory_share": 0.075},
    ],
    ids=["host", "free", "memory"],
)
def test_step_by_step_includes_host_time_draft_time_and_memory_limits(overrides):
    """Each of them is a third of the time or more here."""
    simulator = small(mean_tokens=1500, max_tokens=4000, **overrides)
    s = simulator.config
    lengths, prompts = (each[0, ::8] for each in sample_lengths(s.workload))
    for speculation in (s.speculation, NO_SPECULATION):
        model = simulator.step_model(speculation)
        stepped = simulate_steps(model, speculation, s.workload, lengths, prompts)
        seconds = segment_times(simulator.schedules[0], model, speculation)[0].sum()
        assert stepped.seconds == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize("lag", [1, 3])
def test_auto_is_not_slower_than_no_speculation_when_drafts_are_rejected(lag):
    overrides = {} if lag == 1 else {"lag": lag, "layout": "disaggregated", "generation_gpus": 4}
    simulator = small(k=4, acceptance=1.02, policy="auto", method="hybrid", history_share=0.0, **overrides)
    s = simulator.config
    auto, baseline = simulator.run(s.speculation).rollout, simulator.run(NO_SPECULATION).rollout
    static = simulator.run(replace(s.speculation, policy="static", method="eagle3")).rollout
    assert auto.seconds < 1.03 * baseline.seconds < static.seconds


@pytest.mark.parametrize("experts", [False, True])
def test_das_and_auto_are_faster_with_good_drafts(experts):
    """Also for an engine with expert parallelism, in which each device has its own rows."""
    overrides = {"model": "qwen3-30b-a3b", "engine.gpus": 8} if experts else {}
    simulator = small(k=5, acceptance=4, **overrides)
    baseline = simulator.run(NO_SPECULATION).rollout.seconds
    for policy, share in {"das": 0.7, "auto": 0.6}.items():  # das drafts less for rows that end early
        assert simulator.run(replace(simulator.config.speculation, policy=policy)).rollout.seconds < share * baseline


def test_overlapping_batches_are_faster_than_one_at_a_time():
    layout = {"layout": "disaggregated", "generation_gpus": 4}
    seconds = [small(lag=lag, **layout).run(NO_SPECULATION).rollout.seconds for lag in (1, 2, 4)]
    assert seconds[0] > 1.2 * seconds[1] > 1.2 * seconds[2]


@pytest.mark.parametrize("lag", [2, 4])
def test_time_per_batch_of_a_stream_with_equal_lengths(lag):
    """Requests of one length: a batch ends every 1000 / lag tokens, in steps with the rows of `lag` batches."""
    overrides = {"mean_tokens": 1000, "max_tokens": 1000, "sigma": 0, "prompt_tokens": 1}
    simulator = small(lag=lag, layout="disaggregated", generation_gpus=4, **overrides)
    step_s = float(simulator.step_model(NO_SPECULATION).step_s(64 * lag, 0, 501))
    assert simulator.run(NO_SPECULATION).rollout.seconds == pytest.approx(1000 / lag * step_s, rel=0.01)


def test_lengths_have_the_workloads_distribution():
    workload = Workload(batch=20_000, group=10, mean_tokens=500.0, sigma=0.7, shared_sigma=0.5, max_tokens=100_000)
    lengths, prompts = sample_lengths(workload)
    assert lengths.mean() == pytest.approx(500, rel=0.05) and (prompts == 256).all()
    assert np.log(lengths).std() == pytest.approx(0.7, rel=0.05)
    between = np.log(lengths).reshape(-1, 10).mean(1).std()
    assert between == pytest.approx((0.5**2 + (0.7**2 - 0.5**2) / 10) ** 0.5, rel=0.05)
    assert (lengths == sample_lengths(workload)[0]).all()


def test_lengths_of_recorded_rollouts(tmp_path):
    lines = ['{"prompt_ids": [1, 2], "token_ids": [1, 2, 3]}', '{"prompt_ids": [1], "token_ids": [1, 2, 3, 4, 5]}']
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    workload = Workload(batch=64, group=1, max_tokens=4, rollouts=str(tmp_path / "rollouts.jsonl"))
    lengths, prompts = sample_lengths(workload)
    assert {*zip(lengths[0].tolist(), prompts[0].tolist(), strict=True)} == {(3, 2), (4, 1)}


def test_the_simulated_drafter_is_calibrated():
    speculation = Speculation(k=3, acceptance_probabilities=(0.8, 0.6, 0.5), spread=0.5)
    rows = Rows(np.arange(20_000), [], np.zeros(0), [])
    drafts = SimulatedDrafter(speculation).propose(rows, np.full(20_000, 3, np.int32))
    correct = drafts.tokens == 1
    assert correct.mean(0) == pytest.approx([0.8, 0.6, 0.5], abs=0.02)
    assert drafts.scores[correct].mean() > drafts.scores[~correct].mean() + 0.3
    assert speculation.length(3) == pytest.approx(1 + 0.8 + 0.48 + 0.24)
    hybrid = replace(speculation, method="hybrid", history_share=0.5, history_acceptance=1.0)
    assert hybrid.length(3) == pytest.approx((4 + speculation.length(3)) / 2)


def test_100_000_requests_take_less_than_ten_seconds():
    """Processor time, because the machine may be busy."""
    simulator = Simulator(load_simulation_config("nvidia-8b-scale", ["workload.batch=100000", "max_rows=256"]))
    begin = time.process_time()
    found = simulator.result()
    assert time.process_time() - begin < 10
    assert found.run.rollout.num_tokens == simulator.lengths[0].sum()


def test_cached_prompts_take_less_time_but_count_as_context():
    whole, cached, short = (small(**overrides).run(NO_SPECULATION).rollout.seconds for overrides in (
        {"prompt_tokens": 8000}, {"prompt_tokens": 8000, "cached_tokens": 7900}, {"prompt_tokens": 100},
    ))  # fmt: skip
    assert short < cached < whole


def test_a_batch_is_divided_among_engines():
    simulator = small()
    model, workload = simulator.step_model(NO_SPECULATION), simulator.config.workload
    found = rollout(model, NO_SPECULATION, workload, 8)
    alone = rollout(model, NO_SPECULATION, workload, 1)
    assert isinstance(found, Rollout) and found.num_tokens == alone.num_tokens == sample_lengths(workload)[0].sum()
    assert found.seconds < alone.seconds
    with pytest.raises(ConfigError, match="too few for an engine"):
        rollout(model, NO_SPECULATION, workload, 0)


def test_a_cost_table_replaces_the_step_model():
    """With vLLM's table of an H200, a step with one row takes the measured 5.24 ms, and 6.16 ms with k = 3."""
    overrides = ["hardware=h200", "precision=bf16", "kv_precision=bf16", "engine.table=vllm-h200-qwen3-8b"]
    overrides += ["workload.batch=8", "group=8", "pipeline.gpus=8", "sigma=0", "mean_tokens=400", "max_tokens=400"]
    overrides += ["prompt_tokens=440", "k=3", "acceptance=3"]
    found = Simulator(load_simulation_config("nvidia-8b-scale", overrides)).result()
    assert found.ar.rollout.step_s == pytest.approx(5.24e-3, rel=0.02)
    assert found.run.rollout.step_s == pytest.approx(6.16e-3, rel=0.05)
    with pytest.raises(ValueError, match=r"engine\.table = 'nothing'"):
        Simulator(load_simulation_config("nvidia-8b-scale", ["engine.table=nothing"])).result()
