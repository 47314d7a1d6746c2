"""`paceline config`: print the settings of a run, and explain keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.build.config import load_config
from paceline.build.key_comments import meaning, sentence
from paceline.cli.app import ConfigArguments, ConfigFile, Overrides, command, out, split_arguments
from paceline.config import GPU_DEFAULTS, Config
from paceline.config_io import check_key, expected, look_up, own_keys, read_settings, sections_of, toml_value
from paceline.other_names import HINTS


@command("config")
def config_command(
    arguments: ConfigArguments = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="KEY", help="Explain a key, or all keys of a section.")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Print only the values that are not defaults.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Print all settings as TOML. A comment marks those that are not defaults.

    With `--explain`, print what a key means, which values it takes, its value, and where that comes from.

    Examples:

    - `paceline config configs/gsm8k.toml model.device=cuda --changed`
    - `paceline config --explain train.max_staleness`
    - `paceline config configs/gsm8k.toml --explain speculation`
    """
    resolved = Resolved(*split_arguments(arguments, overrides, config))
    if explain is not None:
        keys = resolved.explained_keys(explain)
        if not keys:
            if explain.startswith(("task.", "reward")) and (weights := resolved.config.task_weights):
                labels = " or ".join(f"task.{label}" for label in weights)
                raise ValueError(f"unknown key {explain}: the config has several tasks; give {labels}, or a key of it")
            check_key(Config, explain, HINTS)
        texts = [resolved.explanation(key) for key in keys]
        out.print("\n\n".join(texts), soft_wrap=True)
        return
    out.print("\n\n".join(resolved.sections(changed)), soft_wrap=True)


class Resolved:
    """The settings of a file and overrides, and where each value comes from."""

    def __init__(self, path: Path | None, overrides: list[str]) -> None:
        self.config = load_config(path, overrides)
        self.sources: list[tuple[str, Mapping[str, Any]]] = []  # the last one that has a key wins
        if path is not None:
            self.sources.append((str(path), read_settings(path)))
        self.sources += [(f"the argument {override}", read_settings(None, [override])) for override in overrides]

    def sections(self, only_changed: bool) -> Iterator[str]:
        """TOML. A key without a value is a comment."""
        for header, name, section in sections_of(self.config):
            keys = [f"{name}.{key}" for key in own_keys(section)]
            shown = [key for key in keys if self.is_changed(key) or not only_changed]
            if shown:
                yield "\n".join([header, *map(self.line, shown)])

    def explained_keys(self, name: str) -> list[str]:
        """The key, the keys of the section, or the table that has this entry."""
        keys = [f"{prefix}.{key}" for _, prefix, section in sections_of(self.config) for key in own_keys(section)]
        if name in keys:
            return [name]
        return [key for key in keys if key.startswith(f"{name}.") or name.startswith(f"{key}.")]

    def line(self, key: str) -> str:
        name, value = key.rpartition(".")[2], self.value(key)
        text = f"{name} = {toml_value(value)}" if value is not None else f"# {name} is not set"
        return (
            f"{text}  # from {one_line(self.source(key))}; default: {shown(self.default(key))}"
            if self.is_changed(key)
            else text
        )

    def explanation(self, key: str) -> str:
        section, _, name = key.rpartition(".")
        gpu_default = GPU_DEFAULTS.get(section, {}).get(name)
        rows = {
            "values": expected(Config, key),
            "default": shown(self.default(key)) + (f"; on a GPU {shown(gpu_default)}" if gpu_default else ""),
            "now": f"{shown(self.value(key))}, from {self.source(key)}",
        }
        about = sentence(meaning(type(look_up(self.config, section.split("."))), name))
        return "\n".join([key, f"  {about}", *(f"  {label:8} {text}" for label, text in rows.items())])

    def is_changed(self, key: str) -> bool:
        return bool(self.value(key) != self.default(key))

    def value(self, key: str) -> Any:
        return look_up(self.config, key.split("."))

    def default(self, key: str) -> Any:
        """None for a key that must be set."""
        section, _, name = key.rpartition(".")
        field = type(look_up(self.config, section.split("."))).model_fields[name]
        return None if field.is_required() else field.default

    def source(self, key: str) -> str:
        section, _, name = key.rpartition(".")
        found = [where for where, settings in self.sources if is_set(settings, key.split("."))]
        if found:
            return found[-1]
        if not self.is_changed(key):
            return "the default"
        return "the default on a GPU" if name in GPU_DEFAULTS.get(section, {}) else "the default with these settings"


def is_set(settings: Mapping[str, Any], path: Sequence[str]) -> bool:
    try:
        look_up(settings, path)
    except (KeyError, TypeError):
        return False
    return True


def one_line(text: str) -> str:
    """For a TOML comment: without line breaks and control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def shown(value: Any) -> str:
    return "not set" if value is None else toml_value(value)
