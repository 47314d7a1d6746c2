"""Where rounding depends on the batch: a near-tie may go either way, any other difference is a bug and is caught."""

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

from paceline.build import engine as build_engine
from paceline.cli import app
from paceline.config import load_config
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder
from paceline.model.layer import Linear
from paceline.model.ops import TorchOps
from paceline.model.paged import PagedDecoder
from paceline.model.sample import PhiloxNoise, Sampler
from paceline.types import Completion, Request, SamplingParams
from paceline.verify import identity, ladder
from paceline.verify.ties import REACH, Referee, Tie, score

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 of its own


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
def referee(exact: Decoder, rounded: Decoder) -> Referee:
    return Referee(exact, PagedDecoder(rounded, 8), generate(rounded, 1.0))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_highest_score_is_the_token_that_was_drawn(temperature: float) -> None:
    decoder = tiny_decoder()
    for c in generate(decoder, temperature):
        prompt, tokens = c.request.prompt_ids, c.token_ids.tolist()
        logits = identity.learner_logits(decoder, [*prompt, *tokens[:-1]], len(tokens))
        scores = score(logits, c.request, len(prompt) + np.arange(len(tokens)))
        assert scores.argmax(-1).tolist() == tokens


def test_rounding_is_that_of_the_precision(referee: Referee, exact: Decoder) -> None:
    float32 = Referee(exact, PagedDecoder(exact, 8), generate(exact, 1.0))
    assert float32.rounding < 1e-4 < 1e-2 < referee.rounding < 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_changed_at_a_wide_gap_is_no_near_tie(referee: Referee, exact: Decoder, temperature: float) -> None:
    """Every place of a float32 run in turn: its token gives way to the runner-up, as a broken run's would."""
    near = []
    for c in generate(exact, temperature, num=3):
        prompt, tokens = c.request.prompt_ids, c.token_ids.tolist()
        logits = identity.learner_logits(exact, [*prompt, *tokens[:-1]], len(tokens))
        best = score(logits, c.request, len(prompt) + np.arange(len(tokens))).topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        for at, (gap, second) in enumerate(zip(gaps, best.indices[:, 1].tolist(), strict=True)):
            parted = identity.first_differences([tokens], [[*tokens[:at], second, *tokens[at + 1 :]]])
            (tie,) = referee.judge("twin", [c.request], [tokens], parted)
            assert (tie.position, tie.tokens, tie.ranks_float32) == (at, (tokens[at], second), (0, 1))
            assert tie.gap_float32 == pytest.approx(gap, abs=1e-4)
            assert tie.near == (gap <= REACH * referee.rounding)
            near.append(tie.near)
    assert any(near) and not all(near)


def test_a_run_that_ends_early_is_no_near_tie(referee: Referee) -> None:
    request = Request(0, (1, 2, 3), SamplingParams(), 0)
    parted = identity.first_differences([[4, 5]], [[4]])
    assert referee.judge("cut", [request], [[4, 5]], parted) == [Tie("cut", 0, 1, (5, None))]


# -- the ladder in bfloat16 -------------------------------------------------------------------------------------------


class SplitOps(TorchOps):
    """A product that sums in two parts when the batch grows, as a GPU's may: the last bits depend on the company."""

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
def climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Some rungs of a ladder of a tiny model, whose engine computes with `change`d weights, or other ops."""
    write_model(tmp_path, num_layers=1)
    monkeypatch.setattr(build_engine, "check_device", lambda config: None)  # which refuses bfloat16 here: slow
    monkeypatch.setattr(ladder, "QUICK", replace(ladder.QUICK, max_tokens=64))
    build = ladder.build_decoder

    def call(rungs: str, change: Callable[[Decoder], object] = lambda decoder: None, dtype: str = "bfloat16") -> Any:
        def changed(*args: Any) -> Decoder:
            decoder = build(*args)
            change(decoder)
            return decoder

        monkeypatch.setattr(ladder, "build_decoder", changed)
        config = load_config(None, [f"model.name={str(tmp_path)!r}", f"model.dtype={dtype}", "engine.native=false"])
        prompts = [list(text.encode()) for text in ("say a", "abcabcab", "1 2 3 4 5", "def f(x):")]
        return ladder.run_ladder(config, prompts, ("suffix",), quick=True, rungs=rungs)

    return call


def split(decoder: Decoder) -> None:
    decoder.ops = SplitOps()


def test_near_ties_are_listed_and_pass(climb: Callable[..., dict[str, Any]]) -> None:
    certificate = climb("345", split)
    seeded, _, greedy, parity = certificate["rungs"]
    assert certificate["passed"]
    assert seeded["near_ties"] and seeded["not_near_ties"] == greedy["not_near_ties"] == 0
    assert len(seeded["near_ties"]) == sum(seeded["differences"].values())
    assert all(abs(tie["gap_float32"]) <= REACH * seeded["rounding"] for tie in seeded["near_ties"])
    mean, largest = (parity[key]["learner_vs_decode"] for key in ("mean_abs", "max_abs"))
    assert 0 < mean < parity["tolerance"] < largest
    json.dumps(certificate, allow_nan=False)


def test_noise_by_draw_is_caught(climb: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "build_sampler", lambda decoder: Sampler(NoiseByDraw()))
    rung, _ = climb("3")["rungs"]
    assert not rung["passed"] and rung["not_near_ties"] > 0
    assert all("near=False" in told for told in rung["first_differences"])


def test_an_engine_that_is_wrong_can_not_hide_behind_its_rounding(climb: Callable[..., dict[str, Any]]) -> None:
    """It would widen the yardstick of rungs 3 and 4; the learner does not share its fault."""
    (rung,) = climb("5", lambda decoder: decoder.layers[0].post_norm.mul_(1.2))["rungs"]
    assert not rung["passed"]


def test_where_rows_do_not_matter_no_difference_is_near_enough(
    climb: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The differences that were near-ties above, asked for outright."""
    monkeypatch.setattr(ladder, "rounds_by_batch", lambda decoder: False)
    rung, _ = climb("3", split)["rungs"]
    assert not rung["passed"] and rung["first_differences"] and "near_ties" not in rung


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
def test_where_rows_matter(device: str, dtype: torch.dtype, expected: bool) -> None:
    decoder: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert ladder.rounds_by_batch(decoder) == expected


# -- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "last"),
    [(0, "exact on every rung"), (1, "exact up to 1 near-tie of"), (12, "exact up to 12 near-ties of float32 on cpu")],
)
def test_the_widest_ties_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int, last: str) -> None:
    tie = {"run": "suffix", "request": 1, "position": 2, "tokens": (7, 8), "ranks": (1, 0), "ranks_float32": (0, 1)}
    ties = [tie | {"gap_float32": -(i + 1) / 1000, "gap": 0.0} for i in range(num)]
    rung = {"name": "3 seeded identity", "passed": True, "seconds": 1.0, "near_ties": ties, "not_near_ties": 0,
            "problems": []}  # fmt: skip
    monkeypatch.setattr(ladder, "run_ladder", lambda *args: {"passed": True, "rungs": [rung], "alarms": []})
    write_model(tmp_path / "model")
    words = ["verify", "--model", str(tmp_path / "model"), "--json", str(tmp_path / "all.json")]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).stdout
    assert last in shown.splitlines()[-1]
    assert shown.count("7 8") == min(num, 10)
    assert ("2 narrower ones" in shown and "-0.012" in shown and "-0.002" not in shown) == (num == 12)
    assert len(json.loads((tmp_path / "all.json").read_text())["rungs"][0]["near_ties"]) == num


def test_a_log_shows_how_far_the_ladder_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def climb(*args: Any) -> dict[str, Any]:
        args[-1]("1 enumeration")
        args[-1]("4 greedy identity with transformers: 3/6")
        raise ValueError("the machine was taken away")

    monkeypatch.setattr(ladder, "run_ladder", climb)
    write_model(tmp_path / "model")
    told = CliRunner().invoke(app, ["verify", "--model", str(tmp_path / "model")]).stderr
    assert told.splitlines()[:2] == ["rung 1 enumeration", "rung 4 greedy identity with transformers: 3/6"]
