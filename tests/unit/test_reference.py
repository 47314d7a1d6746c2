"""The generated reference: up to date, and complete by a count that does not use the generator."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from paceline.cli import app
from paceline.config import Config

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs/generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_pages_are_up_to_date(generator: ModuleType) -> None:
    pages = generator.pages()
    assert set(pages) == {"commands.md", "config.md"}
    for name, text in pages.items():
        assert (REFERENCE / name).read_text() == text, f"docs/reference/{name} is not up to date: run `make docs`"


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def test_every_command_and_option_is_in_the_reference() -> None:
    text = (REFERENCE / "commands.md").read_text()
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", text, re.MULTILINE))
    found = dict(commands(typer.main.get_command(app), "paceline"))
    assert len(found) > 14 and set(sections) == set(found)
    for name, command in found.items():
        # A list item for each: `-n, --samples` or `--json FILE` or `RUN`, with a meaning.
        items = dict(re.findall(r"^- `([^`]+)`(?: \(.*?\))?: (\S+ .+)$", sections[name], re.MULTILINE))
        options = {option: value for item, value in items.items() for option in re.findall(r"(?<!\S)-+[\w-]+", item)}
        wanted = {option for p in command.params if p.param_type_name == "option" for option in p.opts}
        assert wanted - set(options) - {"-h", "--help"} == set(), name
        assert set(options) <= wanted, name
        num_arguments = sum(p.param_type_name == "argument" for p in command.params)
        assert len([item for item in items if not item.startswith("-")]) == num_arguments, name


def test_every_key_is_in_the_reference_with_a_meaning() -> None:
    lines = (REFERENCE / "config.md").read_text().splitlines()
    items = [re.fullmatch(r"- `([a-z_.0-9]+)` \((.+?)[,;] default (.+?)\): (.*)", line) for line in lines]
    found = {item[1]: item[4] for item in items if item is not None}
    keys = [
        f"{section}.{key}" for section, field in Config.model_fields.items() for key in field.annotation.model_fields
    ]
    assert len(keys) > 150 and list(found) == keys
    assert [key for key, meaning in found.items() if len(meaning.split()) < 2] == []


def test_meanings_are_the_comments_of_fields(generator: ModuleType) -> None:
    source = """
class A:
    # Not of a field: a blank line follows.

    # Two lines
    # above.
    x: int = 1
    y: int = 2  # behind
    z: str = "# not a comment"
    # Above, and
    w: list[int] = [
        1,
    ]  # behind.

class B(A):
    x: int = 3
"""
    found = {("A", "x"): "Two lines above.", ("A", "y"): "behind", ("A", "z"): "", ("A", "w"): "Above, and behind."}
    assert generator.field_comments(source) == found | {("B", "x"): ""}


def test_ranges(generator: ModuleType) -> None:
    lines = (REFERENCE / "config.md").read_text()
    for expected in (
        "`engine.max_num_seqs` (int ≥ 1, default `32`)",
        "`speculation.suffix_recency` (float > 0 and ≤ 1, default `0.8`)",
        '`speculation.rule` (`coupled`, `rejection`, `block`; default `"coupled"`)',
        "`model.yarn_factor` (float ≥ 1, default not set)",
        "`draft.betas` (list of 2 float, default `[0.9, 0.95]`)",
    ):
        assert f"- {expected}: " in lines, expected
