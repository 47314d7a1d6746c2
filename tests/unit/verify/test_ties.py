"""If rounding depends on the batch, runs may differ at near-ties. Any other difference is a bug and must be caught."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from tiny_run import write_model
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from paceline.build import model as build_model
from paceline.build.config import load_config
from paceline.cli import app
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder
from paceline.model.layer import Linear
from paceline.model.ops import TorchOps
from paceline.model.paged import PagedDecoder
from paceline.model.sample import PhiloxNoise, Sampler
from paceline.types import Completion, Request, SamplingParams
from paceline.verify import checks, identity, model
from paceline.verify.estimate import Estimate
from paceline.verify.ties import NEAR_TIE_FACTOR, ReferenceScorer, ScoredDifference, score

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without native bfloat16


def generate(decoder: Decoder, temperature: float, num: int = 6) -> list[Completion]:
    sampling = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    requests = [Request(i, tuple(range(1, 5 + i)), sampling, 2**63 + i) for i in range(num)]
    return LocalEngine(PagedDecoder(decoder, 64)).generate(requests)


@pytest.fixture(scope="module")
def exact() -> Decoder:
    return tiny_decoder(torch.float32)


@pytest.fixture(scope="module")
def rounded(exact: Decoder) -> Decoder:
    return copy.deepcopy(exact).to(torch.bfloat16)


@pytest.fixture(scope="module")
def scorer(exact: Decoder, rounded: Decoder) -> ReferenceScorer:
    return ReferenceScorer(exact, PagedDecoder(rounded, 8), generate(rounded, 1.0))


def test_other_logprobs_are_counted_up_to_the_first_other_token() -> None:
    found = generate(tiny_decoder(), 1.0)
    assert identity.num_other_logprobs(found, found) == 0
    changed = replace(found[1], raw_logprobs=found[1].raw_logprobs + 1e-12)
    assert identity.num_other_logprobs(found, [found[0], changed, *found[2:]]) == 24
    tokens = changed.token_ids.copy()
    tokens[5] += 1
    shorter = replace(
        changed, token_ids=tokens[:9], logprobs=changed.logprobs[:9], raw_logprobs=changed.raw_logprobs[:9]
    )
    assert identity.num_other_logprobs(found[1:2], [shorter]) == 5


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_highest_score_is_the_token_that_was_drawn(temperature: float) -> None:
    decoder = tiny_decoder()
    for c in generate(decoder, temperature):
        prompt, tokens = c.request.prompt_ids, c.token_ids.tolist()
        logits = identity.learner_logits(decoder, [*prompt, *tokens[:-1]], len(tokens))
        scores = score(logits, c.request, len(prompt) + np.arange(len(tokens)))
        assert scores.argmax(-1).tolist() == tokens


def test_rounding_is_that_of_the_precision(scorer: ReferenceScorer, exact: Decoder) -> None:
    float32 = ReferenceScorer(exact, PagedDecoder(exact, 8), generate(exact, 1.0))
    assert float32.rounding < 1e-4 < 1e-2 < scorer.rounding < 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_changed_at_a_wide_gap_is_no_near_tie(
    scorer: ReferenceScorer, exact: Decoder, temperature: float
) -> None:
    """Replaces each token of a float32 run in turn by the second-best one, as a broken engine might emit it."""
    near = []
    for c in generate(exact, temperature, num=3):
        prompt, tokens = c.request.prompt_ids, c.token_ids.tolist()
        logits = identity.learner_logits(exact, [*prompt, *tokens[:-1]], len(tokens))
        best = score(logits, c.request, len(prompt) + np.arange(len(tokens))).topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        for at, (gap, second) in enumerate(zip(gaps, best.indices[:, 1].tolist(), strict=True)):
            differences = identity.first_differences([tokens], [[*tokens[:at], second, *tokens[at + 1 :]]])
            (scored,) = scorer.score_differences("broken", [c.request], [tokens], differences)
            assert (scored.position, scored.tokens, scored.ranks_float32) == (at, (tokens[at], second), (0, 1))
            assert scored.gap_float32 == pytest.approx(gap, abs=1e-4)
            assert scored.near == (gap <= NEAR_TIE_FACTOR * scorer.rounding)
            near.append(scored.near)
    assert any(near) and not all(near)


def test_a_run_that_ends_early_is_no_near_tie(scorer: ReferenceScorer) -> None:
    request = Request(0, (1, 2, 3), SamplingParams(), 0)
    differences = identity.first_differences([[4, 5]], [[4]])
    scored = scorer.score_differences("cut", [request], [[4, 5]], differences)
    assert scored == [ScoredDifference("cut", 0, 1, (5, None))]


# -- the checks in bfloat16 -------------------------------------------------------------------------------------------


class SplitOps(TorchOps):
    """A product that sums in two parts if the batch is large, as on a GPU: the last bits depend on the batch."""

    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        if len(x_TK) <= 4:
            return super().linear(x_TK, linear)
        assert linear.weight is not None
        half = x_TK.shape[1] // 2
        return F.linear(x_TK[:, :half], linear.weight[:, :half]) + F.linear(x_TK[:, half:], linear.weight[:, half:])


class NoiseByDraw(PhiloxNoise):
    """Broken: noise from a running counter instead of the position."""

    count = 0

    def race(self, weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        at = self.count + np.arange(len(positions))
        self.count += len(positions)
        return super().race(weights_PV, keys, at, stream)


@pytest.fixture
def run_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs some levels of checks of a tiny model. `change` modifies the weights or ops of its engine."""
    write_model(tmp_path, num_layers=1)
    monkeypatch.setattr(build_model, "check_device", lambda config: None)  # it refuses bfloat16 on a CPU
    monkeypatch.setattr(checks, "QUICK", replace(checks.QUICK, max_tokens=64))
    build = model.build_decoder

    def run(levels: str, change: Callable[[Decoder], object] = lambda decoder: None, dtype: str = "bfloat16") -> Any:
        def changed(*args: Any, **options: Any) -> Decoder:
            decoder = build(*args, **options)
            change(decoder)
            return decoder

        monkeypatch.setattr(model, "build_decoder", changed)
        config = load_config(None, [f"model.name={str(tmp_path)!r}", f"model.dtype={dtype}", "engine.native=false"])
        prompts = [list(text.encode()) for text in ("say a", "abcabcab", "1 2 3 4 5", "def f(x):")]
        return checks.run_checks(config, prompts, ("suffix",), quick=True, levels=levels)

    return run


def split(decoder: Decoder) -> None:
    decoder.ops = SplitOps()


def test_near_ties_are_listed_and_pass(run_levels: Callable[..., dict[str, Any]]) -> None:
    report = run_levels("345", split)
    seeded, _, greedy, parity = report["checks"]
    assert report["passed"]
    assert seeded["near_ties"] and seeded["not_near_ties"] == greedy["not_near_ties"] == 0
    assert len(seeded["near_ties"]) == sum(seeded["differences"].values())
    assert all(abs(tie["gap_float32"]) <= NEAR_TIE_FACTOR * seeded["rounding"] for tie in seeded["near_ties"])
    mean, largest = (parity[key]["learner_vs_decode"] for key in ("mean_abs", "max_abs"))
    assert 0 < mean < parity["tolerance"] < largest
    json.dumps(report, allow_nan=False)


def test_noise_by_draw_is_caught(run_levels: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "build_sampler", lambda decoder: Sampler(NoiseByDraw()))
    seeded, _ = run_levels("3")["checks"]
    assert not seeded["passed"] and seeded["not_near_ties"] > 0
    assert all("near=False" in message for message in seeded["first_differences"])


def test_an_engine_with_a_wrong_norm_fails_parity(run_levels: Callable[..., dict[str, Any]]) -> None:
    """The fault would enlarge `rounding` in levels 3 and 4. Level 5 catches it: the learner does not have the fault."""
    (parity,) = run_levels("5", lambda decoder: decoder.layers[0].post_norm.mul_(1.2))["checks"]
    assert not parity["passed"]


def test_near_ties_fail_if_rounding_does_not_depend_on_the_batch(
    run_levels: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same differences as in `test_near_ties_are_listed_and_pass`."""
    monkeypatch.setattr(model.CheckedModel, "learner_rounds_differently", False)
    seeded, _ = run_levels("3", split)["checks"]
    assert not seeded["passed"] and seeded["first_differences"] and "near_ties" not in seeded


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.float32, False),
        ("cpu", torch.float64, False),
        ("cuda", torch.float64, False),
        ("cuda", torch.float32, True),
        ("cpu", torch.float16, True),
        ("cpu", torch.bfloat16, True),
        ("cuda", torch.bfloat16, True),
    ],
)
def test_learner_rounds_differently(device: str, dtype: torch.dtype, expected: bool) -> None:
    checked = model.CheckedModel.__new__(model.CheckedModel)
    checked.decoder = SimpleNamespace(device=torch.device(device), dtype=dtype)  # type: ignore[assignment]
    assert checked.learner_rounds_differently == expected


# -- command-line output ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "last"),
    [(0, "exact in every check"), (1, "exact up to 1 near-tie of"), (12, "exact up to 12 near-ties of float32 on cpu")],
)
def test_the_widest_ties_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int, last: str) -> None:
    tie = {"run": "suffix", "request": 1, "position": 2, "tokens": (7, 8), "ranks": (1, 0), "ranks_float32": (0, 1)}
    ties = [tie | {"gap_float32": -(i + 1) / 1000, "gap": 0.0} for i in range(num)]
    result = {"name": "3 seeded identity", "passed": True, "seconds": 1.0, "near_ties": ties, "not_near_ties": 0,
              "problems": []}  # fmt: skip
    monkeypatch.setattr(
        checks, "run_checks", lambda config, *args, **given: checks.make_report(config, (), False, [result], [])
    )
    write_model(tmp_path / "model")
    arguments = ["verify", "--model", str(tmp_path / "model"), "--json", str(tmp_path / "all.json")]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout
    assert last in shown.splitlines()[-1]
    assert shown.count("7 8") == min(num, 10)
    assert ("2 narrower ones" in shown and "-0.012" in shown and "-0.002" not in shown) == (num == 12)
    assert len(json.loads((tmp_path / "all.json").read_text())["checks"][0]["near_ties"]) == num


def test_a_log_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **given: Any) -> dict[str, Any]:
        progress = args[-1]
        progress.begin(lambda: Estimate(("1 enumeration", "4 greedy identity with transformers"), (60.0, 180.0)))
        progress.progress("1 enumeration", "", 0.5)
        progress.progress("1 enumeration", "60 of 100", 0.6)  # too little more for another line
        progress.progress("4 greedy identity with transformers", "3 of 6", 0.5)
        raise ValueError("broken")

    monkeypatch.setattr(checks, "run_checks", interrupted)
    write_model(tmp_path / "model")
    log = CliRunner().invoke(app, ["verify", "--model", str(tmp_path / "model")]).stderr
    assert log.splitlines()[:3] == [
        "2 checks, about 4 minutes; Ctrl-C shows the results so far",
        "check 1 enumeration (12% of all)",
        "check 4 greedy identity with transformers: 3 of 6 (62% of all)",
    ]


@pytest.mark.parametrize("passed", [True, False])
def test_ctrl_c_shows_the_checks_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    result = {"name": "1 enumeration", "passed": passed, "seconds": 1.0, "problems": [] if passed else ["it is off"]}

    def interrupted(*args: Any, results: list[dict[str, Any]]) -> dict[str, Any]:
        results.append(result)
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run_checks", interrupted)
    write_model(tmp_path / "model")
    arguments = ["verify", "--model", str(tmp_path / "model"), "--json", str(tmp_path / "part.json")]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert shown.exit_code == 130
    assert shown.stdout.count("not run") == len(checks.CHECKS) - 1 and "exact in every check" not in shown.output
    assert ("1 of 7 checks were run, none failed" in shown.stderr) == passed
    assert ("NOT exact" in shown.stderr) != passed
    report = json.loads((tmp_path / "part.json").read_text())
    assert report["partial"] and not report["passed"] and report["not_run"] == list(checks.CHECKS)[1:]
    assert [check["name"] for check in report["checks"]] == ["1 enumeration"]
