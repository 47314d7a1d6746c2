"""Defaults that depend on other settings: every row of the table in docs/how-to/speculation.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.build.config import load_config
from paceline.build.defaults import describe_speculation

PAGE = Path(__file__).parents[2] / "docs/how-to/speculation.md"
ROWS = {  # first cell of the table: settings
    '`engine.kind = "vllm"`': ["engine.kind=vllm"],
    "`num_speculative_tokens = 0`": ["speculation.num_speculative_tokens=0"],
    '`rule = "rejection"` or `"block"`': ["speculation.rule=block"],
    "a table as `num_speculative_tokens`, or `min_confidence`": ["speculation.num_speculative_tokens={8 = 2}"],
    "`head`": ["speculation.head=dir"],
    "`draft_model`": ["speculation.draft_model=layers:2"],
    "nothing": [],
}


def table() -> dict[str, list[str]]:
    lines = PAGE.read_text().partition("| you set |")[2].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    return {first: [cell.strip("`") for cell in rest] for first, *rest in rows}


def resolved(*settings: str) -> tuple[str, str, str]:
    s = load_config(None, settings).speculation
    return s.method, s.policy, s.rule


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_table(row: str) -> None:
    method, policy, rule = table()[row]
    assert resolved(*ROWS[row]) == (method, policy, "block" if rule == "as set" else rule)


def test_the_table_has_no_other_rows() -> None:
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["speculation.min_confidence=0.1"], ("suffix", "static", "coupled")),
        (["speculation.rule=rejection", "speculation.head=dir"], ("hybrid", "static", "rejection")),
        (["engine.kind=vllm", "speculation.method=suffix"], ("suffix", "static", "rejection")),
        (["speculation.method=ngram", "speculation.head=dir"], ("ngram", "auto", "coupled")),
        (["speculation.method=none"], ("none", "static", "coupled")),
        (["speculation.head=dir", "speculation.draft_model=layers:2"], ("hybrid", "auto", "coupled")),
        (["speculation.policy=das"], ("suffix", "das", "coupled")),
        (["speculation.method=eagle3", "speculation.num_speculative_tokens=0"], ("eagle3", "static", "coupled")),
    ],
)
def test_what_is_set_is_used(settings: list[str], expected: tuple[str, ...]) -> None:
    assert resolved(*settings) == expected


def test_defaults_of_a_command_are_below_the_settings() -> None:
    defaults = {"speculation": {"method": "none", "policy": "static"}}
    assert load_config(None, [], defaults).speculation.method == "none"
    given = load_config(None, ["speculation.method=suffix"], defaults).speculation
    assert (given.method, given.policy) == ("suffix", "static")


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ([], r"suffix drafts from .*; policy auto: up to 4 tokens, only if"),
        (["speculation.policy=static"], r"policy static: 4 tokens, in every step$"),
        (["speculation.rule=block"], r'\(auto is not possible with rule = "block"\)$'),
        (["speculation.num_speculative_tokens={8 = 2}"], r"sequences: 2 up to 8, else none \(auto .* a table"),
        (["speculation.method=ngram", "speculation.num_speculative_tokens=0"], r"^no speculation: .*_tokens = 0$"),
        (["speculation.method=none"], r'^no speculation: speculation\.method = "none"$'),
        (["engine.kind=vllm"], r'^no speculation: with engine\.kind = "vllm"'),
    ],
)
def test_a_run_says_how_it_drafts(settings: list[str], pattern: str) -> None:
    assert re.search(pattern, describe_speculation(load_config(None, settings)))


def test_a_section_that_is_a_value_is_reported() -> None:
    with pytest.raises(ValueError, match="speculation = 3: expected a section"):
        load_config(None, ["speculation=3"])


def test_a_drafter_is_not_ignored() -> None:
    settings = ["engine.kind=vllm", "speculation.head=dir"]
    with pytest.raises(ValueError, match=r'with engine\.kind = "vllm" .* set speculation.method'):
        load_config(None, settings)
    assert load_config(None, [*settings, "speculation.method=eagle3"]).speculation.method == "eagle3"
