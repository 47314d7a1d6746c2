"""What a run says about speculation when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.build.config import load_config
from paceline.cli.gain import describe_gain

AUDITED = {"generation_speedup": 1.5, "estimated_speedup": 1.4, "tail_speedup": {"1": 2.0, "4": 1.7}}
NOT_AUDITED = {"generation_speedup": None, "estimated_speedup": 1.25, "tail_speedup": {}}
NOT_MEASURED = NOT_AUDITED | {"estimated_speedup": None}


def gain(summary: dict[str, Any], *settings: str, share: float = 0.4, shipped: bool = False) -> str:
    stages = {"exposed_generation": {"seconds": 4.0, "share": share}}
    return "\n".join(describe_gain(load_config(None, settings), {"num_steps": 3, "stages": stages} | summary, shipped))


def test_audited() -> None:
    """Generation of 0.4 would be 0.6 without drafts: a step of 1 would be 1.2, so it is 1/6 shorter."""
    text = gain(AUDITED)
    assert "generation 1.50x as fast" in text and "2.00x with 1 sequence at a time" in text
    assert "Generation took 40% of the time, so the steps were 16.7% shorter." in text


def test_a_loss_is_not_called_a_gain() -> None:
    """Generation of 0.4 would be 0.32."""
    assert "steps were 8.7% longer" in gain(AUDITED | {"generation_speedup": 0.8})


@pytest.mark.parametrize("ratio", [0.99, 1.0, 1.01])
def test_noise_is_not_a_difference(ratio: float) -> None:
    text = gain(AUDITED | {"generation_speedup": ratio})
    assert "no measurable difference" in text and "the steps were" not in text


def test_an_estimate_is_called_one() -> None:
    text = gain(NOT_AUDITED)
    assert "By estimate, speculation made generation 1.25x" in text and "may differ from the estimate" in text
    assert "so the steps were 9.1% shorter" in text


def test_not_measured() -> None:
    assert "The gain of speculation was not measured." in gain(NOT_MEASURED, "speculation.policy=static")


@pytest.mark.parametrize(("shipped", "how"), [(True, "speculation.method=hybrid"), (False, "speculation.head=DIR")])
def test_what_a_head_would_add(shipped: bool, how: str) -> None:
    """Two thirds of a generation of 0.3 remain."""
    text = gain(AUDITED, share=0.3, shipped=shipped)
    assert "If it made generation 1.5x as fast (not measured here), a step would be 10% shorter" in text
    assert how in text and ("paceline train-draft" in text) == (not shipped)


def test_no_head_is_recommended_to_a_run_that_has_one() -> None:
    assert "head" not in gain(AUDITED, "speculation.method=eagle3")


def test_without_speculation() -> None:
    assert gain(NOT_MEASURED, "speculation.method=none") == "Nothing was drafted. Generation took 40% of the time."


def test_resumed_without_speculation() -> None:
    assert "generation 1.50x as fast" in gain(AUDITED, "speculation.method=none")


def test_nothing_is_said_about_no_steps() -> None:
    assert gain(AUDITED | {"num_steps": 0}) == ""
