"""Schedules conserve tokens, steps and time; the quick way and the slow one agree."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import ConfigError
from paceline.sim.lottery import LotteryDrafter
from paceline.sim.rollout import Rollout, plans_of, play, rollout, seconds_of
from paceline.sim.scenario import Simulator, load
from paceline.sim.schedule import schedule
from paceline.sim.speculation import PLAIN, Speculation
from paceline.sim.workload import Workload, lengths_of
from paceline.speculation.batch import Rows

lists = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=30)


def slowly(requests, max_rows, kv_tokens):
    """Token by token: [(rows, their context in all, prompts computed)]."""
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
@given(requests=lists, max_rows=st.integers(1, 8), room=st.integers(80, 400))
def test_a_schedule_is_what_token_by_token_gives(requests, max_rows, room):
    lengths, prompts = np.array(requests).T
    plan = schedule([lengths], [prompts], max_rows, room)
    assert plan.num_emitted == lengths.sum()
    assert plan.prompts.sum() == prompts.sum()
    assert plan.rows.min() >= 1 and plan.rows.max() <= max_rows
    by_token = slowly(requests, max_rows, room)
    assert plan.tokens.sum() == len(by_token)
    assert plan.rows.repeat(plan.tokens.astype(int)).tolist() == [rows for rows, _, _ in by_token]
    total = float((plan.rows * plan.context * plan.tokens).sum())
    assert total == pytest.approx(sum(context for _, context, _ in by_token))


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(lists, min_size=1, max_size=6), max_rows=st.integers(1, 8), lag=st.integers(1, 4))
def test_a_stream_loses_nothing_and_ends_every_batch(batches, max_rows, lag):
    lengths, prompts = zip(*(np.array(batch).T for batch in batches), strict=True)
    plan = schedule(list(lengths), list(prompts), max_rows, 10_000, lag)
    assert plan.num_emitted == sum(each.sum() for each in lengths)
    assert plan.last.max() == len(plan.rows) - 1 and (plan.last >= 0).all()


def test_a_sequence_that_no_memory_holds_is_refused():
    with pytest.raises(ConfigError, match="a sequence of 120 tokens, but an engine's memory holds 100"):
        schedule([np.array([100])], [np.array([20])], 8, 100)


def test_memory_holds_rows_back():
    lengths, prompts = np.full(10, 50), np.full(10, 10)
    assert schedule([lengths], [prompts], 10, 10_000).rows.max() == 10
    assert schedule([lengths], [prompts], 10, 190).rows.max() == 3


def small(**changes) -> Simulator:
    changes = {"mean_tokens": 300, "max_tokens": 1000, **changes}
    words = ["workload.batch=256", "group=16", "pipeline.gpus=8"]
    return Simulator(load("nvidia-8b-scale", [*words, *(f"{key}={value}" for key, value in changes.items())]))


def test_the_slow_way_agrees_with_the_quick_one():
    """Step by step, with tokens that stand by lot, against from finish to finish; a wrong acceptance is seen."""
    simulator = small(mean_tokens=1500, max_tokens=4000)
    s = simulator.scenario
    model = simulator.step_model(s.speculation)
    lengths, prompts = (each[0, ::8] for each in lengths_of(s.workload))
    stepped = play(model, s.speculation, s.workload, lengths, prompts)
    plan = plans_of(model, s.workload, 8, 0)[0]
    seconds, num_steps = (each.sum() for each in seconds_of(plan, model, s.speculation))
    assert stepped.num_tokens == plan.num_emitted == lengths.sum()
    assert stepped.seconds == pytest.approx(seconds, rel=0.03)
    assert stepped.num_steps == pytest.approx(num_steps, rel=0.03)
    other = replace(s.speculation, acceptance=3.0)
    assert stepped.seconds != pytest.approx(seconds_of(plan, model, other)[0].sum(), rel=0.05)


@pytest.mark.parametrize(
    "words",
    [
        {"software": "nemo-rl-vllm"},
        {"software": "nemo-rl-vllm", "method": "free", "free_row_us": 100},
        {"hardware": "h200", "memory_share": 0.075},
    ],
    ids=["host", "free", "memory"],
)
def test_the_slow_way_knows_the_host_the_drafts_and_the_memory(words):
    """Each of them makes a third of the time or more here."""
    simulator = small(mean_tokens=1500, max_tokens=4000, **words)
    s = simulator.scenario
    lengths, prompts = (each[0, ::8] for each in lengths_of(s.workload))
    for speculation in (s.speculation, PLAIN):
        model = simulator.step_model(speculation)
        stepped = play(model, speculation, s.workload, lengths, prompts)
        seconds = seconds_of(simulator.plans[0], model, speculation)[0].sum()
        assert stepped.seconds == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize("lag", [1, 3])
def test_auto_is_not_slower_than_plain_even_where_drafts_are_worthless(lag):
    words = {} if lag == 1 else {"lag": lag, "layout": "disaggregated", "generation_gpus": 4}
    simulator = small(k=4, acceptance=1.02, policy="auto", method="hybrid", history_share=0.0, **words)
    s = simulator.scenario
    auto, plain = simulator.run(s.speculation).rollout, simulator.run(PLAIN).rollout
    static = simulator.run(replace(s.speculation, policy="static", method="eagle3")).rollout
    assert auto.seconds < 1.03 * plain.seconds < static.seconds


@pytest.mark.parametrize("experts", [False, True])
def test_das_and_auto_gain_where_drafts_are_good(experts):
    """Also where groups of an engine's devices have rows of their own."""
    spread = {"model": "qwen3-30b-a3b", "engine.gpus": 8} if experts else {}
    simulator = small(k=5, acceptance=4, **spread)
    plain = simulator.run(PLAIN).rollout.seconds
    for policy, share in {"das": 0.7, "auto": 0.6}.items():  # das leaves rows alone that nobody waits for
        assert simulator.run(replace(simulator.scenario.speculation, policy=policy)).rollout.seconds < share * plain


def test_streams_are_faster_than_batches_one_after_the_other():
    layout = {"layout": "disaggregated", "generation_gpus": 4}
    taken = [small(lag=lag, **layout).run(PLAIN).rollout.seconds for lag in (1, 2, 4)]
    assert taken[0] > 1.2 * taken[1] > 1.2 * taken[2]


@pytest.mark.parametrize("lag", [2, 4])
def test_a_stream_takes_what_its_tokens_take_beside_all_that_is_under_way(lag):
    """Requests of one length: a batch ends every 1000 / lag tokens, in steps with the rows of `lag` batches."""
    words = {"mean_tokens": 1000, "max_tokens": 1000, "sigma": 0, "prompt_tokens": 1}
    simulator = small(lag=lag, layout="disaggregated", generation_gpus=4, **words)
    step_s = float(simulator.step_model(PLAIN).step_s(64 * lag, 0, 501))
    assert simulator.run(PLAIN).rollout.seconds == pytest.approx(1000 / lag * step_s, rel=0.01)


def test_lengths_are_those_of_the_workload():
    workload = Workload(batch=20_000, group=10, mean_tokens=500.0, sigma=0.7, shared_sigma=0.5, max_tokens=100_000)
    lengths, prompts = lengths_of(workload)
    assert lengths.mean() == pytest.approx(500, rel=0.05) and (prompts == 256).all()
    assert np.log(lengths).std() == pytest.approx(0.7, rel=0.05)
    between = np.log(lengths).reshape(-1, 10).mean(1).std()
    assert between == pytest.approx((0.5**2 + (0.7**2 - 0.5**2) / 10) ** 0.5, rel=0.05)
    assert (lengths == lengths_of(workload)[0]).all()


def test_lengths_of_recorded_rollouts(tmp_path):
    lines = ['{"prompt_ids": [1, 2], "token_ids": [1, 2, 3]}', '{"prompt_ids": [1], "token_ids": [1, 2, 3, 4, 5]}']
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    workload = Workload(batch=64, group=1, max_tokens=4, rollouts=str(tmp_path / "rollouts.jsonl"))
    lengths, prompts = lengths_of(workload)
    assert {*zip(lengths[0].tolist(), prompts[0].tolist(), strict=True)} == {(3, 2), (4, 1)}


def test_a_lottery_draws_what_it_says():
    speculation = Speculation(k=3, chances=(0.8, 0.6, 0.5), spread=0.5)
    rows = Rows(np.arange(20_000), [], np.zeros(0), [])
    drafts = LotteryDrafter(speculation).propose(rows, np.full(20_000, 3, np.int32))
    stands = drafts.tokens == 1
    assert stands.mean(0) == pytest.approx([0.8, 0.6, 0.5], abs=0.02)
    assert drafts.confidence[stands].mean() > drafts.confidence[~stands].mean() + 0.3
    assert speculation.length(3) == pytest.approx(1 + 0.8 + 0.48 + 0.24)
    hybrid = replace(speculation, method="hybrid", history_share=0.5, history_chance=1.0)
    assert hybrid.length(3) == pytest.approx((4 + speculation.length(3)) / 2)


def test_a_hundred_thousand_requests_within_seconds():
    """Ten seconds are promised; this machine may be busy, so its own processor time is counted."""
    simulator = Simulator(load("nvidia-8b-scale", ["workload.batch=100000", "max_rows=256"]))
    begin = time.process_time()
    found = simulator.result()
    assert time.process_time() - begin < 10
    assert found.run.rollout.num_tokens == simulator.lengths[0].sum()


def test_cached_prompts_are_read_but_not_computed():
    whole, cached, short = (small(**words).run(PLAIN).rollout.seconds for words in (
        {"prompt_tokens": 8000}, {"prompt_tokens": 8000, "cached_tokens": 7900}, {"prompt_tokens": 100},
    ))  # fmt: skip
    assert short < cached < whole


def test_engines_share_a_batch_out():
    simulator = small()
    model, workload = simulator.step_model(PLAIN), simulator.scenario.workload
    found = rollout(model, PLAIN, workload, 8)
    alone = rollout(model, PLAIN, workload, 1)
    assert isinstance(found, Rollout) and found.num_tokens == alone.num_tokens == lengths_of(workload)[0].sum()
    assert found.seconds < alone.seconds
    with pytest.raises(ConfigError, match="too few for an engine"):
        rollout(model, PLAIN, workload, 0)


def test_measured_steps_may_stand_for_derived_ones():
    """With the table of vLLM on an H200, a row alone takes what was measured: 5.24 ms, and 6.16 with three drafted."""
    words = ["hardware=h200", "precision=bf16", "kv_precision=bf16", "engine.table=vllm-h200-qwen3-8b"]
    words += ["workload.batch=8", "group=8", "pipeline.gpus=8", "sigma=0", "mean_tokens=400", "max_tokens=400"]
    found = Simulator(load("nvidia-8b-scale", [*words, "prompt_tokens=440", "k=3", "acceptance=3"])).result()
    assert found.ar.rollout.step_s == pytest.approx(5.24e-3, rel=0.02)
    assert found.run.rollout.step_s == pytest.approx(6.16e-3, rel=0.05)
    with pytest.raises(ValueError, match=r"engine\.table = 'nothing'"):
        Simulator(load("nvidia-8b-scale", ["engine.table=nothing"])).result()
