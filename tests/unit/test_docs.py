"""README.md and docs/: links, paths, config keys, commands and options exist, and examples of settings are valid."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.build.config import load_config
from paceline.cli import app
from paceline.config import Config, MixedTaskSection
from paceline.config_io import ConfigError, all_keys, validate
from paceline.sim.simulator import Engine, Pipeline, Speculation, Workload, load_simulation_config, simulate

ROOT = Path(__file__).parents[2]
LOG = ROOT / "docs/log.md"  # of the past: only its links are checked
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATH = re.compile(r"(?<![\w./-])(?:docs|src|configs|examples|benchmarks|tests)/[\w./*-]*[\w*/]")
KEY = re.compile(rf"(?<![\w./-])((?:{'|'.join(Config.model_fields)})\.[a-z]\w*)(?![\w(*]|\.\w+\()")
SUFFIXES = ("bin", "json", "jsonl", "md", "py", "safetensors", "sbatch", "sh", "toml", "yaml")  # train.sh is not a key
METHODS = {"algorithm.prepare", "learner.update"}  # of Python objects
LABELS = "sums|letters"  # of tasks in examples
OF_ONE_TASK = {f"task.{key}" for key in MixedTaskSection.model_fields}
SIMULATOR = {"workload": Workload, "pipeline": Pipeline, "engine": Engine, "speculation": Speculation}
SIMULATOR_KEYS = {f"{name}.{field.name}" for name, kind in SIMULATOR.items() for field in dataclasses.fields(kind)}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
present_pages = pytest.mark.parametrize(
    "page", [page for page in PAGES if page != LOG], ids=lambda page: str(page.relative_to(ROOT))
)


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)


def code(text: str) -> list[str]:
    """Inline code, and lines of blocks that are not Python."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for language, block in code_blocks(text) if language != "python" for line in block.splitlines()]
    return re.findall(r"`([^`\n]+)`", prose) + lines


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings."""
    headings = re.findall(r"^#+ (.+)", re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.M), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def broken_links(page: Path, text: str) -> list[str]:
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    return broken


@pages
def test_links_resolve(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []
    assert broken_links(page, "[a](nowhere.md) ![b](nowhere.png) `[c](d)`") == ["nowhere.md", "nowhere.png"]


def missing_paths(text: str) -> list[str]:
    found = {path for line in code(text) for path in PATH.findall(line)}
    return sorted(path for path in found if not any(ROOT.glob(path.rstrip("/"))))


@present_pages
def test_paths_exist(page: Path) -> None:
    assert missing_paths(page.read_text()) == []
    assert missing_paths("`docs/gone.md`, `src/paceline/config.py`, `benchmarks/*/README.md`") == ["docs/gone.md"]


def unknown_keys(text: str, other: frozenset[str] = frozenset()) -> list[str]:
    known = {*all_keys(Config), *METHODS, *other, *OF_ONE_TASK}
    # The key of one of several tasks, as that of [task]: task.sums.weight as task.weight
    found = {key for line in code(text) for key in KEY.findall(re.sub(rf"\btask\.({LABELS})\.", "task.", line))}
    return sorted(key for key in found - known if key.rpartition(".")[2] not in SUFFIXES)


@present_pages
def test_config_keys_exist(page: Path) -> None:
    simulator = frozenset(SIMULATOR_KEYS) if page.name == "simulator.md" else frozenset()
    text = page.read_text()
    if page.name == "names.md":  # the first column has the names of other libraries
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    assert unknown_keys(text, simulator) == []
    text = "`train.num_stepz`, `train.sh`, `train.seed`, `engine.vllm.x`, `task.sums.weight`, `task.sums.weigth`"
    assert unknown_keys(text) == ["task.weigth", "train.num_stepz"]


def check_toml(text: str) -> None:
    for language, block in code_blocks(text):
        settings = tomllib.loads(block) if language == "toml" else {}
        if set(settings) <= set(Config.model_fields):  # not a file of the simulator
            validate(Config, settings)


@present_pages
def test_toml_examples_are_valid(page: Path) -> None:
    check_toml(page.read_text())


def commands() -> dict[str, set[str]]:
    """The options of every command; of a group, its commands."""
    found: dict[str, set[str]] = {}

    def add(group: Any, prefix: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                found[f"{prefix}{name}"] = set(command.commands)
                add(command, f"{prefix}{name} ")
            else:
                found[f"{prefix}{name}"] = {option for p in command.params for option in p.opts} | {"-h", "--help"}

    add(typer.main.get_command(app), "")
    return found


COMMANDS = commands()


def command_lines(text: str) -> Iterator[list[str]]:
    """The words after `paceline` of every command in backticks or in a block, without comments and pipes."""
    blocks = [line for language, block in code_blocks(text) if language != "python"
              for line in block.replace("\\\n", " ").splitlines()]  # fmt: skip
    inline = [line for line in code(text) if line not in blocks]
    for line in [*inline, *blocks]:
        if match := re.search(r"(?:^|[\s/])paceline ((?:--)?[a-z].*)", line):
            lexer = shlex.shlex(match[1], posix=True, punctuation_chars="|;&<>")
            lexer.whitespace_split, lexer.commenters = True, "#"
            try:
                words = list(lexer)
            except ValueError:  # a quotation that goes on in the next line
                words = match[1].split()
            end = next((i for i, word in enumerate(words) if word and set(word) <= set("|;&<>")), len(words))
            yield words[:end]


def wrong_commands(text: str) -> list[str]:
    wrong = []
    for words in command_lines(text):
        name = words.pop(0)
        if name.startswith("-"):
            known = name in ("--help", "--version", "-h")
        elif name == "bench" and words and re.fullmatch("[a-z]+", words[0]):
            name = f"bench {words.pop(0)}"
            known = name in COMMANDS
        else:
            known = name in COMMANDS
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        if not known:
            wrong.append(name)
        elif not name.startswith("-"):
            wrong += [f"{name} {option}" for option in sorted(options - COMMANDS[name])]
    return wrong


@present_pages
def test_commands_and_options_exist(page: Path) -> None:
    assert wrong_commands(page.read_text()) == []
    text = "`paceline trane x`, `paceline bench roll`, `paceline train --resum RUN`, `paceline eval M T -n 4 | cat -x`"
    assert wrong_commands(text) == ["trane", "bench roll", "train --resum"]


def check_settings(text: str) -> None:
    for name, *words in command_lines(text):
        if name in ("train", "train-draft", "eval", "sweep", "doctor"):
            settings = [word for word in words if re.match(r"\w+\.\w+=", word)]
            paths = [word for word in words if word.startswith("configs/")]
            load_config(ROOT / paths[0] if paths else None, settings)


@present_pages
def test_settings_in_commands_are_valid(page: Path) -> None:
    check_settings(page.read_text())


def test_broken_settings_are_found() -> None:
    check_settings("```bash\npaceline train configs/async.toml \\\n  'reward.functions=[\"exact\"]' # comment\n```")
    for broken in ("`paceline train train.num_steps=x`", "```\npaceline eval M T \\\n  train.num_stepz=1\n```"):
        with pytest.raises(ConfigError):
            check_settings(broken)
    with pytest.raises(ConfigError):
        check_toml("```toml\n[train]\nnum_steps = 0\n```")


def test_simulated_figures_are_current() -> None:
    """Generation and whole step: the table in docs/results.md, and the same figures in README.md."""
    text, readme = (ROOT / "docs/results.md").read_text(), (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `paceline simulate (\S+) ([^`]+)` \|.*\| ([\d.]+)x \| ([\d.]+)x \|$", text, re.M)
    assert len(rows) == 4
    for preset, settings, *printed in rows:
        found = simulate(load_simulation_config(preset, settings.split())).summary()
        speedups = [found["rollout_speedup"], found["step_speedup"]]
        assert [float(figure) for figure in printed] == pytest.approx(speedups, abs=0.006), settings
        if preset == "8b-8xh200":
            assert all(f"{figure}x" in readme for figure in printed), settings
