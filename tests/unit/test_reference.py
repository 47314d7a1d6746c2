"""The generated reference: up to date, and complete by a count that does not use the generator."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from paceline.build.config import load_config
from paceline.build.key_comments import field_comments
from paceline.cli import app
from paceline.config import Config
from paceline.config_io import as_section

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
    assert set(pages) == {"commands.md", "config.md", "names.md"}
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
    assert len(found) > 14 and set(sections) == {*found, "Common options"}
    common = list_items(sections["Common options"])
    for name, command in found.items():
        items = list_items(sections[name])
        for option in re.findall(r"`(-+[\w-]+)`", "".join(re.findall(r"\(#common-options\): (.+)", sections[name]))):
            items |= {item: text for item, text in common.items() if re.split("[ =]", item)[0] == option}
        listed = {option: item for item in items for option in re.findall(r"(?<!\S)-+[\w-]+", item)}
        params = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        assert set(listed) == {option for p in params for option in p.opts}, name
        for p in params:  # `--batch=1,4` has a default, and so has `-n 1`
            value = re.search(r"-[\w-]+(?:=| (?=\d))(.+)", listed[p.opts[-1]])
            if p.default is None or p.default is False:
                assert value is None, (name, p.opts)
            else:
                assert value is not None and type(p.default)(value[1]) == p.default, (name, p.opts)
        num_arguments = sum(p.param_type_name == "argument" for p in command.params)
        assert len([item for item in items if not item.startswith("-")]) == num_arguments, name


def list_items(section: str) -> dict[str, str]:
    """The meaning of each list item: `-n, --samples=4` or `--json FILE` or `RUN`."""
    return dict(re.findall(r"^- `([^`]+)`(?: \(.*?\))?: (\S+ .+)$", section, re.MULTILINE))


def test_every_key_is_in_the_reference_with_a_meaning() -> None:
    lines = (REFERENCE / "config.md").read_text().splitlines()
    items = [re.fullmatch(r"- `([a-z_.0-9]+)(?:=(.+?))?`(?: \((.+?)\))?: (.*)", line) for line in lines]
    found = {item[1]: item[4] for item in items if item is not None}
    keys = [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in as_section(field.annotation).model_fields
    ]
    assert len(keys) > 150 and list(found) == keys
    assert [key for key, meaning in found.items() if len(meaning.split()) < 2] == []
    written = {item[1]: item[2] for item in items if item is not None}
    for key, default in written.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(Config(), section), name) == (None if default is None else json.loads(default)), key
    # The defaults are written as overrides of the command line.
    assert load_config(None, [f"{key}={default}" for key, default in written.items() if default]) == Config()


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
    assert field_comments(source) == found | {("B", "x"): ""}


def test_ranges(generator: ModuleType) -> None:
    lines = (REFERENCE / "config.md").read_text()
    for expected in (
        "`engine.max_num_seqs=32` (≥1)",
        "`speculation.suffix_recency=0.8` (>0, ≤1)",
        '`speculation.rule="coupled"` (`coupled`, `rejection`, `block`)',
        "`speculation.num_speculative_tokens=4` (0 to 256 or table)",
        "`model.yarn_factor` (float ≥1)",
        "`learner.betas=[0.9, 0.999]` (2 values)",
        "`draft.betas=[0.9, 0.95]`: As `learner.betas`.",
        "`draft.layer_ids` (list of int ≥1)",
    ):
        assert f"- {expected}" in lines, expected
