"""Engines with each policy, built from settings, with a cost table that is shipped, in a file, or measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import write_head

from paceline.build import cost as build_cost
from paceline.build.config import load_config, with_absolute_paths
from paceline.build.engine import build_engine
from paceline.engine.engine import LocalEngine
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.batch import Load
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.das import DasPolicy
from paceline.types import Request, SamplingParams

METHODS = ("ngram", "suffix", "draft_model", "eagle3", "hybrid")
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.5)
REQUESTS = [Request(i, (1, 2, 3, 1, 2), SAMPLING, 0, "p") for i in range(4)]


def cheap(path: Path) -> Path:
    """A cost table in which draft tokens take almost no time."""
    points = [Point(rows, rows * q, 64 * rows, 1e-2 + 1e-6 * rows * q) for rows in (1, 32) for q in (1, 8)]
    CostTable("cheap", points, {"eagle3": [(1, 1, 1e-6)], "draft_model": [(1, 1, 1e-6)]}).save(path)
    return path


@pytest.fixture(scope="module")
def head(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    write_head(folder, model=checkpoint("llama"))
    return folder / "head"


@pytest.fixture
def build(checkpoint: Callable[..., Path], head: Path) -> Callable[..., LocalEngine]:
    def make(method: str, policy: str, *overrides: str) -> LocalEngine:
        settings = [
            f"model.name={checkpoint('llama')}", f"speculation.method={method}", f"speculation.policy={policy}",
            "engine.kv_tokens=1024", "engine.max_num_seqs=4", "engine.max_num_batched_tokens=32",
            *([f"speculation.head={head}"] if method in ("eagle3", "hybrid") else []),
            *(["speculation.draft_model=layers:2"] if method == "draft_model" else []),
        ]  # fmt: skip
        return build_engine(load_config(None, [*settings, *overrides]))

    return make


@pytest.mark.parametrize("method", ["eagle3", "hybrid"])
def test_float8_head_needs_a_gpu(build: Callable[..., LocalEngine], method: str) -> None:
    with pytest.raises(ValueError, match=r'speculation.head_dtype = "float8": needs a head that drafts on a GPU'):
        build(method, "static", "speculation.head_dtype=float8")


@pytest.mark.parametrize("policy", ["das", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_under_every_policy(
    build: Callable[..., LocalEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, policy: str
) -> None:
    for name in ("observe", "observe_drafting"):
        monkeypatch.setattr(CostTable, name, lambda *args: None)  # independent of this machine
    expected = [c.token_ids.tolist() for c in build("none", "static").generate(REQUESTS)]
    engine = build(method, policy, f"speculation.cost_table={cheap(tmp_path / 'costs.json')}")
    assert type(engine.policy) is (DasPolicy if policy == "das" else AutoPolicy)
    for _ in range(2):  # the second pass has a history
        assert [c.token_ids.tolist() for c in engine.generate(REQUESTS)] == expected
    traces = engine.drain_trace()
    assert sum(t.num_draft_tokens for t in traces) > 0
    for t in traces:
        assert t.policy == policy and t.num_draft_tokens <= t.num_proposed <= t.num_planned
        assert sum(n for _, n, _ in t.per_drafter) == t.num_draft_tokens
        assert sum(n for _, _, n in t.per_drafter) == t.num_accepted_tokens
        assert t.draft_s + t.forward_s + t.sample_s <= t.total_s
    names = {"hybrid": {"suffix", "eagle3"}}.get(method, {method})
    assert {name for t in traces for name, _, _ in t.per_drafter} <= names


def test_method_none_needs_no_cost_table(build: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cost, "time_step", None)
    assert build("none", "auto").policy.name == "static"


@pytest.mark.parametrize("policy", ["das", "auto"])
def test_cost_table_by_name_or_path(
    build: Callable[..., LocalEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(build_cost, "time_step", None)  # nothing is measured
    named = build("suffix", policy, "speculation.cost_table=vllm-h200-qwen3-8b").policy
    assert named.costs.name == "vllm-h200-qwen3-8b" and not named.costs.frozen
    path = cheap(tmp_path / "mine.json")
    assert build("suffix", policy, f"speculation.cost_table={path}").policy.costs.name == "cheap"
    with pytest.raises(ValueError, match=r"speculation.cost_table = 'h2000'.*vllm-h200-qwen3-8b"):
        build("suffix", policy, "speculation.cost_table=h2000")


def test_wrong_cost_table_raises_before_a_model_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"speculation.cost_table = 'h2000'"):
        build_engine(load_config(None, ["model.name=/no/such/model", "speculation.cost_table=h2000"]))


def test_cost_table_is_measured_once(
    build: Callable[..., LocalEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    first = build("suffix", "auto").policy.costs
    assert "measured step times" in capsys.readouterr().err and first.step_s(Load(1, 1, 64)) > 0
    monkeypatch.setattr(build_cost, "time_step", None)
    for policy in ("auto", "das"):
        assert build("suffix", policy).policy.costs.points == first.points
    assert not capsys.readouterr().err
    with pytest.raises(TypeError):  # a head's auxiliary hidden states change step times, so it has its own table
        build("eagle3", "auto")


def test_order_longest(build: Callable[..., LocalEngine]) -> None:
    """The problem with the longer earlier completion runs before the one that arrived first."""
    short, long = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 20))
    earlier = [Request(0, (1, 2), short, 0, "short"), Request(1, (1, 3), long, 1, "long")]
    again = [Request(2, (1, 2), long, 0, "short"), Request(3, (1, 3), long, 1, "long")]
    for order, problem in (("arrival", "short"), ("longest", "long")):
        engine = build("none", "static", f"engine.order={order}", "engine.max_num_seqs=1")
        engine.generate(earlier)
        for request in again:
            engine.submit(request)
        engine.step()
        assert [s.request.problem for s in engine.scheduler.running] == [problem]


def test_paths_in_settings_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text("{}")
    found = with_absolute_paths(load_config(None, ["speculation.cost_table=mine.json"]))
    assert found.speculation.cost_table == str(tmp_path / "mine.json")
    (tmp_path / "small").mkdir()
    drafted = with_absolute_paths(
        load_config(None, ["speculation.method=draft_model", "speculation.draft_model=small"])
    )
    assert drafted.speculation.draft_model == str(tmp_path / "small")
    named = with_absolute_paths(load_config(None, ["speculation.cost_table=vllm-h200-qwen3-8b"]))
    assert named.speculation.cost_table == "vllm-h200-qwen3-8b"
