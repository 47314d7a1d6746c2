"""Measuring cost tables: which steps are timed, what is cached, and that the engine is unchanged."""

from __future__ import annotations

import pytest
from support import check_blocks, tiny_decoder

from paceline.build import cost as build_cost
from paceline.build.config import load_config
from paceline.build.cost import BUDGET_S, REPEAT_BUDGET_S, measure, measure_drafts, measured_costs
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.batch import Load
from paceline.speculation.cost import CostTable
from paceline.types import Request, SamplingParams


class Clock:
    """A simulated machine with step times from a formula. `noise` makes every second step slower."""

    def __init__(self, token_s: float, noise: float = 0.0) -> None:
        self.token_s, self.noise = token_s, noise
        self.timed: list[tuple[int, int, int]] = []
        self.spent_s = 0.0

    def step_s(self, rows: int, queries: int, context: int) -> float:
        return 0.01 + self.token_s * rows * queries + 1e-8 * rows * context

    def __call__(self, rows: int, queries: int, context: int) -> float:
        self.timed.append((rows, queries, context))
        seconds = self.step_s(rows, queries, context) * (1 + self.noise * (len(self.timed) % 2))
        self.spent_s += seconds
        return seconds


def table(clock: Clock, max_num_seqs: int = 48, max_num_batched_tokens: int = 200) -> CostTable:
    points, per_context_token_s = measure(clock, lambda rows: 4096, max_num_seqs, max_num_batched_tokens)
    return CostTable("t", points, {}, per_context_token_s)


def test_table_gives_the_measured_times():
    clock = Clock(1e-4)
    costs = table(clock)
    assert {p.num_rows for p in costs.points} == {1, 2, 4, 8, 16, 32, 48}
    assert max(rows * queries for rows, queries, _ in clock.timed) == 192
    assert costs.per_context_token_s == pytest.approx(1e-8)
    for rows, queries, context in ((1, 1, 64), (8, 4, 300), (48, 4, 900), (20, 3, 64)):
        load = Load(rows, rows * queries, rows * (context + 1))
        assert costs.step_s(load) == pytest.approx(clock.step_s(rows, queries, context + 1), rel=1e-3)


def test_best_of_several_rounds_is_used():
    assert table(Clock(1e-4, noise=0.5)).step_s(Load(8, 8, 8 * 65)) == pytest.approx(0.01 + 8e-4, rel=0.01)


def test_measuring_a_slow_machine_takes_limited_time():
    clock = Clock(0.02)  # all steps together would take a minute
    costs = table(clock, max_num_batched_tokens=512)
    assert clock.spent_s < REPEAT_BUDGET_S + 1 and clock.spent_s > BUDGET_S / 2
    assert {p.num_rows for p in costs.points} == {1, 2, 4, 8, 16, 32, 48}  # all steps without drafts, and some with
    extrapolated, expected = costs.steps_s(Load(48, 48, 48 * 65), 336)[336], clock.step_s(48, 8, 65)
    assert extrapolated == pytest.approx(expected, rel=0.1)
    very_slow = Clock(20.0)
    table(very_slow)
    assert very_slow.spent_s < 200


def test_small_kv_cache_is_measured_with_short_contexts():
    clock = Clock(1e-4)
    points, slope = measure(clock, lambda rows: 256 // rows // 16 * 16, 64, 512)
    assert all(rows * (context + queries) <= 256 for rows, queries, context in clock.timed)
    assert {p.num_rows for p in points} == {1, 2, 4, 8, 16} and slope == pytest.approx(1e-8)
    assert measure(Clock(1e-4), lambda rows: 1, 4, 8)[0][0].num_rows == 1


def test_draft_time_is_the_additional_time_of_a_step():
    clock = Clock(1e-4)

    def timer(rows: int, queries: int, context: int, draft_length: int) -> float:
        seconds = clock(rows, queries, context) + draft_length * (2e-3 + 1e-5 * rows)
        return seconds * (1.5 if len(clock.timed) % 4 == 0 else 1)  # some steps are slower

    found = measure_drafts(timer, lambda rows: 4096 // rows, [1, 4, 48], 3)
    assert [(rows, k) for rows, k, _ in found] == [(1, 1), (1, 3), (4, 1), (4, 3), (48, 1), (48, 3)]
    for rows, k, seconds in found:
        assert seconds == pytest.approx(k * (2e-3 + 1e-5 * rows), rel=1e-6)
    assert all(context + 1 + 3 < 4096 // rows for rows, _, context in clock.timed)
    assert measure_drafts(timer, lambda rows: 4, [1, 48], 3) == []  # the KV cache is too small


def test_draft_time_of_a_head_on_the_device_is_measured(engine_parts, monkeypatch):
    """`draft_costs` gives an estimate for heads on the host; a head on the device is timed."""
    paged, runner, config = engine_parts
    monkeypatch.setattr(type(runner), "drafts_on_device", True)

    def timer(paged, runner, rows, queries, context, draft_length=0):
        return 0.01 * queries + 1e-3 * rows * draft_length

    monkeypatch.setattr(build_cost, "time_step", timer)
    costs = measured_costs(paged, runner, config, {"eagle3": 0.25})
    k = config.speculation.num_speculative_tokens
    assert costs.draft_s("eagle3", 4, k) == pytest.approx(4e-3 * k)
    assert costs.draft_s("eagle3", 4, 1) == pytest.approx(4e-3)
    assert "eagle3" not in measured_costs(paged, runner, config).drafts  # no head


def test_timed_step_sets_and_resets_the_draft_length(engine_parts, monkeypatch):
    paged, runner, _ = engine_parts
    lengths: list[int] = []
    monkeypatch.setattr(type(runner), "set_draft_length", lambda self, num: lengths.append(num))
    assert build_cost.time_step(paged, runner, 2, 3, 16, 5) > 0
    assert lengths == [5, 0] and not any(paged.pool.ref_counts)


@pytest.fixture
def engine_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    config = load_config(None, ["engine.max_num_seqs=4", "engine.max_num_batched_tokens=16"])
    paged = PagedDecoder(tiny_decoder(), 64)
    return paged, EagerRunner(paged, Sampler(), RULES["coupled"]), config


def test_table_is_cached_and_the_engine_unchanged(engine_parts, monkeypatch, tmp_path, capsys):
    paged, runner, config = engine_parts
    engine = LocalEngine(paged, sampler=runner.sampler, runner=runner)
    requests = [Request(i, (1, 2, 3, 4) * 6, SamplingParams(max_tokens=20), i) for i in range(4)]
    before = [c.token_ids.tolist() for c in engine.generate(requests)]
    engine.drain_trace()
    indexed = dict(paged.pool._child_key)
    costs = measured_costs(paged, runner, config, {"eagle3": 0.25})
    assert "measured" in capsys.readouterr().err
    assert not any(paged.pool.ref_counts) and paged.pool._child_key == indexed and not engine.drain_trace()
    check_blocks(engine)
    assert [c.token_ids.tolist() for c in engine.generate(requests)] == before
    assert costs.step_s(Load(4, 4, 100)) > 0
    plain_s = next(p.seconds for p in costs.points if p.num_rows == p.num_query_tokens == 4)
    assert costs.draft_s("eagle3", 4, 3) == pytest.approx(0.75 * plain_s)
    # The second call reads the cache. Another machine measures again.
    assert len(list((tmp_path / "costs").iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(build_cost, "time_step", None)
        again = measured_costs(paged, runner, config)
        assert again.points == costs.points and again.draft_s("eagle3", 4, 3) == 0
        patched.setattr(build_cost, "cpu_name", lambda: "another")
        with pytest.raises(TypeError):
            measured_costs(paged, runner, config)
    assert capsys.readouterr().err.count("measured step times") == 0


def test_damaged_table_is_measured_again(engine_parts, tmp_path):
    paged, runner, config = engine_parts
    measured_costs(paged, runner, config)
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text("{")
    with pytest.warns(UserWarning, match="measuring again"):
        measured_costs(paged, runner, config)
    CostTable.load(file)


def test_warning_if_the_cache_is_not_writable(engine_parts, tmp_path):
    paged, runner, config = engine_parts
    (tmp_path / "costs").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="PACELINE_CACHE"):
        assert measured_costs(paged, runner, config).points


def test_table_of_the_settings_is_used(engine_parts, monkeypatch):
    paged, runner, _ = engine_parts
    monkeypatch.setattr(build_cost, "time_step", None)
    given = load_config(None, ["speculation.cost_table=vllm-h200-qwen3-8b"])
    assert measured_costs(paged, runner, given).step_s(Load(1, 1, 640)) == pytest.approx(5.24e-3)
    with pytest.raises(ValueError, match=r"speculation.cost_table = 'nothing'.*vllm-h200-qwen3-8b-hosted"):
        measured_costs(paged, runner, load_config(None, ["speculation.cost_table=nothing"]))


def test_cpu_name():
    assert build_cost.cpu_name() and "\n" not in build_cost.cpu_name()
