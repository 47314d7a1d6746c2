"""`paceline verify` on broken engines: the check that is meant for each fault must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from tiny_run import write_head, write_model
from torch import Tensor
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.cli import app
from paceline.engine import accept
from paceline.engine.engine import LocalEngine
from paceline.model import sample
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Draws, Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.model.weights import checksum, hf_state
from paceline.speculation.policy import StaticPolicy
from paceline.types import Receipt, Request, SamplingParams
from paceline.verify import cases, checks, estimate, identity, known, reference, updates
from paceline.verify import model as model_module

Run = Callable[..., dict[str, Any]]
DRAFTERS = ("suffix", "draft_model", "eagle3")
PROMPTS = [list(text.encode()) for text in ("say a", "abcabcab", "1 2 3 4 5", "def f(x):")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_model(folder / "model", num_layers=2)
    write_head(folder)
    return folder


@pytest.fixture
def run_levels(model: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs some levels of the quick checks on a tiny model, level 1 with few cases. Returns results by name."""
    few = tuple(case for case in known.QUICK_CASES if case.sampling == known.TRUNCATIONS[0])
    assert len(few) == 3
    quick = replace(checks.QUICK, num_prompts=4, cases=few, num_table_samples=40, num_model_samples=32)
    monkeypatch.setattr(checks, "QUICK", quick)

    def run(levels: str, native: bool = True, drafters: tuple[str, ...] = DRAFTERS, **given: Any) -> dict[str, Any]:
        settings = (f"model.name={str(model / 'model')!r}", f"speculation.head={str(model / 'head')!r}")
        config = load_config(None, [*settings, f"engine.native={str(native).lower()}"])
        report = checks.run_checks(config, PROMPTS, drafters, quick=True, levels=levels, **given)
        return {result["name"]: result for result in report["checks"]}

    return run


def problems(results: dict[str, Any]) -> dict[str, list[str]]:
    return {name: result["problems"] for name, result in results.items() if not result["passed"]}


@pytest.mark.parametrize(("native", "levels"), [(True, "1345"), (False, "35")])
def test_a_correct_engine_passes(run_levels: Run, native: bool, levels: str) -> None:
    results = run_levels(levels, native)
    assert problems(results) == {}
    assert len(results) == len(levels) + 1  # level 3 has two checks
    assert results["3 weight update"]["accepted_since"]["eagle3"] > 0
    assert results["5 logprob parity"]["max_abs"]["processed_vs_block_draft_model"] < 1e-4


class Recorder:
    """Observes the share of all checks that is done."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def begin(self, make_estimate: Callable[[], estimate.Estimate]) -> None:
        self.estimate = make_estimate()

    def progress(self, check: str, detail: str, share: float) -> None:
        self.shares.append(self.estimate.share(check, share))


def test_progress_grows_and_never_says_that_all_is_done(run_levels: Run) -> None:
    recorder = Recorder()
    ended: list[dict[str, Any]] = []
    results = run_levels("145", observer=recorder, results=ended)
    assert [result["name"] for result in ended] == recorder.estimate.names == list(results)
    assert recorder.estimate.total_s > 0
    assert recorder.shares == sorted(recorder.shares) and recorder.shares[0] == 0 and recorder.shares[-1] < 1
    assert len(set(recorder.shares)) > 8  # not only one message per check


def test_estimate_of_the_time_that_is_left() -> None:
    found = estimate.Estimate(("a", "b"), (10.0, 30.0))
    assert found.share("a", 0.5) == 0.125 and found.share("b", 0.5) == 0.625
    assert found.left_s(0.0, 0.0) == pytest.approx(40)
    assert found.left_s(0.05, 20.0) == pytest.approx(38 * (1 + 0.15 * 9))  # ten times as slow, but it is early
    assert found.left_s(0.5, 100.0) == pytest.approx(100)
    assert set(estimate.REFERENCE_S) == set(checks.CHECKS)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_short_prompts_are_preempted_too(run_levels: Run, drafter: str) -> None:
    results = run_levels("3", drafters=(drafter,))
    assert problems(results) == {} and results["3 seeded identity"]["num_preemptions"] > 0


def test_an_engine_that_drafts_nothing_is_caught(run_levels: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its tokens and logprobs are correct, so no comparison fails."""
    for module in (cases, model_module):
        monkeypatch.setattr(module, "make_policy", lambda name, k, drafter: StaticPolicy(0))
    found = problems(run_levels("1235"))
    assert set(found) == {
        "1 enumeration", "2 chi-square, known distribution", "2 chi-square, this model", "3 seeded identity",
        "3 weight update", "5 logprob parity",
    }  # fmt: skip
    expected = "eagle3: nothing was drafted, so this run does not test speculation"
    assert any(problem.startswith(expected) for problem in found["3 seeded identity"])


@pytest.mark.parametrize("drafter", ["suffix", "eagle3"])
def test_one_drafter_that_drafts_nothing_is_caught(
    run_levels: Run, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    make_policy = model_module.make_policy
    monkeypatch.setattr(
        model_module, "make_policy", lambda name, k, d: StaticPolicy(0) if d == drafter else make_policy(name, k, d)
    )
    found = problems(run_levels("3"))
    assert all(problem.startswith(drafter) for of_check in found.values() for problem in of_check)
    assert "3 seeded identity" in found


@pytest.mark.parametrize("wrong_receipt", [False, True])
@pytest.mark.parametrize(
    "skipped", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"]
)
def test_a_tensor_skipped_in_update_weights_is_caught(
    run_levels: Run, monkeypatch: pytest.MonkeyPatch, skipped: str, wrong_receipt: bool
) -> None:
    """`wrong_receipt`: the receipt has the checksum of the weights that were sent, not of the engine's weights."""
    update = PagedDecoder.update

    def broken(self: PagedDecoder, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        held, sent = dict(hf_state(self.decoder)), list(weights)
        receipt = update(self, [(name, held[name].clone() if name == skipped else t) for name, t in sent], version)
        return replace(receipt, checksum=checksum(sent)) if wrong_receipt else receipt

    monkeypatch.setattr(PagedDecoder, "update", broken)
    found = problems(run_levels("3", drafters=("suffix",)))
    assert set(found) == {"3 weight update"}
    messages = " ".join(found["3 weight update"])
    assert f"{skipped} is not the tensor that was sent" in messages
    assert "suffix: the largest gap between logprobs" in messages  # its outputs are wrong as well
    assert ("receipt" in messages) != wrong_receipt


def test_kv_of_old_weights_is_caught(run_levels: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: all tensors arrive, but running requests keep the KV of the old ones in spite of `recompute`."""
    update = LocalEngine.update_weights
    monkeypatch.setattr(
        LocalEngine, "update_weights", lambda self, w, v, inflight="recompute": update(self, w, v, "keep")
    )
    found = problems(run_levels("3", drafters=("suffix",)))
    assert set(found) == {"3 weight update"}
    assert not any("tensor" in problem for problem in found["3 weight update"])


class RawForProcessed(Sampler):
    """Broken: reports raw logprobs in place of processed ones."""

    def draw(
        self,
        logits_PV: Tensor,
        keys: np.ndarray,
        positions: np.ndarray,
        params: SamplingArrays,
        *args: Any,
        **kwargs: Any,
    ) -> Draws:
        draws = super().draw(logits_PV, keys, positions, params, *args, **kwargs)
        draws.logprobs = draws.raw_logprobs
        return draws


class ZeroScores(Sampler):
    """Broken: the rejection rules report zeros as raw and processed logprobs."""

    def score(self, logits_PV: Tensor, processed_PV: Tensor, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(tokens)), np.zeros(len(tokens))


@pytest.mark.parametrize(("broken", "pair"), [(RawForProcessed, "processed_vs_decode"), (ZeroScores, "raw_vs_block")])
def test_wrong_logprobs_are_caught(
    run_levels: Run, monkeypatch: pytest.MonkeyPatch, broken: type[Sampler], pair: str
) -> None:
    build = model_module.build_sampler
    monkeypatch.setattr(model_module, "build_sampler", lambda decoder: broken(native=build(decoder).native))
    results = run_levels("5")
    assert any(problem.startswith(pair) for problem in problems(results)["5 logprob parity"])
    if broken is RawForProcessed:  # T=1 without truncation does not reveal it
        assert results["5 logprob parity"]["max_abs"]["learner_vs_decode"] < 1e-4


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ("", "--drafters: give at least one"),
        (" , ", "--drafters: give at least one"),
        ("suffix,sufix", "--drafters 'sufix': not one of ngram, suffix"),
    ],
)
def test_drafters_that_are_none_are_refused(model: Path, drafters: str, message: str) -> None:
    result = CliRunner().invoke(app, ["verify", "--model", str(model / "model"), "--drafters", drafters, "--quick"])
    assert result.exit_code == 2 and message in result.stderr


def test_settings_that_draft_nothing_are_refused_at_once(model: Path) -> None:
    config = load_config(None, [f"model.name={str(model / 'model')!r}", "speculation.num_speculative_tokens=0"])
    with pytest.raises(ValueError, match="num_speculative_tokens = 0"):
        checks.run_checks(config, PROMPTS, ("suffix",), quick=True, levels="1")
    with pytest.raises(ValueError, match="no such drafter"):
        checks.run_checks(load_config(None, [f"model.name={str(model / 'model')!r}"]), PROMPTS, ("sufix",), levels="1")


def test_a_gap_that_is_no_number_is_no_small_gap() -> None:
    fine, wrong = np.zeros(3), np.array([0.0, np.nan, 0.0])
    assert identity.largest_gap([fine, fine], [fine, fine]) == 0
    assert np.isnan(identity.largest_gap([fine, fine], [fine, wrong]))


def test_weights_are_updated_when_every_long_prompt_is_computed() -> None:
    """The engine computes 16 prompt tokens a step, so some requests run long before others."""
    decoder = tiny_decoder()
    engine = LocalEngine(PagedDecoder(decoder, 64), max_num_seqs=4, max_num_batched_tokens=16)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(i, (*range(1, 41), i), sampling, i + 1) for i in range(4)]
    sent = updates.WeightUpdate(updates.perturbed(updates.clone_weights(hf_state(decoder))))
    found, wrong = updates.generate_through_update(engine, requests, sent)
    assert wrong == [] and len(found) == 4


def truncates_first(logits_PV: Tensor, params: SamplingArrays) -> Tensor:
    """Broken: top-k, top-p and min-p are applied before the temperature."""
    untempered = replace(params, temperature=np.where(params.temperature == 0, 0.0, 1.0))
    kept = PROCESS(logits_PV, untempered)
    temperature = torch.as_tensor(np.where(params.temperature == 0, 1.0, params.temperature)).unsqueeze(-1)
    return (kept / temperature).log_softmax(-1)


PROCESS = sample.process


def test_truncation_before_temperature_is_caught(run_levels: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sample, accept):
        monkeypatch.setattr(module, "process", truncates_first)
    found = problems(run_levels("15", native=False))
    assert set(found) == {"1 enumeration", "5 logprob parity"}
    messages = " ".join(found["1 enumeration"])
    assert all(f"{rule}, static" in messages for rule in ("coupled", "rejection", "block"))
    assert any("are not those that the noise draws" in problem for problem in found["5 logprob parity"])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_the_reference_equals_transformers(sampling: dict[str, float]) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    z = logits = 3 * torch.randn(16, 61, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    warpers = {
        "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }  # fmt: skip
    for name, warper in warpers.items():
        if name in sampling:
            z = warper(sampling[name])(torch.zeros(16, 1, dtype=torch.long), z)
    expected = z.log_softmax(-1)
    found = reference.processed_logprobs(logits, SamplingParams(**sampling))
    assert torch.equal(torch.isfinite(found), torch.isfinite(expected))
    kept = torch.isfinite(found)
    assert torch.allclose(found[kept], expected[kept], atol=1e-12)


def test_problems_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"name": "3 weight update", "passed": False, "seconds": 1.0, "problems": ["x is not the tensor [sent]"]}
    monkeypatch.setattr(
        checks,
        "run_checks",
        lambda config, *args, **kwargs: checks.make_report(config, (), False, [result], [], ["the head is slow [x]"]),
    )
    write_model(tmp_path / "model")
    shown = CliRunner().invoke(app, ["verify", "--model", str(tmp_path / "model")], env={"COLUMNS": "200"})
    assert shown.exit_code == 1
    assert "check 3 weight update: x is not the tensor [sent]" in shown.stderr and "NOT exact" in shown.stderr
    assert "ALARM: the head is slow [x]" in shown.stderr
