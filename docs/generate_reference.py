"""Write commands.md, config.md and names.md in docs/reference/ from the code. `make docs` runs it.

Commands, arguments and options come from the typer app; sections, keys, types, ranges and defaults from the pydantic
models. The meaning of a key is the comment above its field in src/paceline/config.py, or the one behind it. The names
of settings in other libraries come from src/paceline/other_names.py. Options
and keys are written as on the command line, with their default: `--batch=1,4`, `train.seed=0`.
tests/unit/test_reference.py checks that the committed pages are up to date.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from paceline.build.key_comments import meaning, sentence
from paceline.cli import app
from paceline.cli.replay import INT32_MAX
from paceline.config import Config
from paceline.config_io import all_keys, as_section, entry_section
from paceline.other_names import ABSENT, LIBRARIES

DIRECTORY = Path(__file__).parent / "reference"
NOTE = "<!-- Do not edit: `make docs` generates this page from the code. -->"
COMMANDS_INTRO = (
    "`paceline COMMAND --help` prints the same text. Every command that reads a config takes settings as arguments or "
    "by `--set`: `train.num_steps=50` and `--set train.num_steps=50` set the key `num_steps` of [section "
    "`train`](config.md). Later ones win, and `--set` wins over arguments. Options are listed with their default: "
    "`--batch=16`. Arguments in brackets are optional. Separate several values by commas: `--batch 1,4,16`."
)
COMMON = "Common options"  # those that several commands share
CONFIG_INTRO = """A config is a TOML file:

```toml
[speculation]
method = "suffix"
num_speculative_tokens = 4
```

`paceline train CONFIG.toml train.num_steps=50` overrides a key. An unknown key or a wrong value is an error.
`paceline config CONFIG.toml` prints all settings, and `paceline config --explain KEY` explains one.

Each key is listed with its default and the allowed values. Keys without a default are not set."""

NAMES_INTRO = (
    "What settings of TRL, verl and vLLM are called in Paceline. A config with one of these names is an error that "
    "tells the right one: `unknown key lr: Paceline's name is learner.learning_rate`."
)


def pages() -> dict[str, str]:
    """The text of every generated page, by file name."""
    return {"commands.md": commands_page(), "config.md": config_page(), "names.md": names_page()}


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, text in pages().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")


# ---- commands ----


def commands_page() -> str:
    commands = {name: (callback, _parameters(callback)) for name, callback in _commands(app, "paceline")}
    counts = Counter(p.line() for _, parameters in commands.values() for p in parameters if not p.is_argument)
    common = {line for line, count in counts.items() if count > 1}
    parts = ["# Commands", NOTE, COMMANDS_INTRO, f"## {COMMON}", "\n".join(line for line in counts if line in common)]
    for name, (callback, parameters) in commands.items():
        parts += [f"## {name}", _help(callback)]
        parts.append("\n".join(p.line() for p in parameters if p.line() not in common))
        if shared := [f"`{p.names()}`" for p in parameters if p.line() in common]:
            anchor = COMMON.lower().replace(" ", "-")
            parts.append(f"[{COMMON}](#{anchor}): {', '.join(shared)}.")
    return _join(parts)


def _parameters(callback: Callable[..., None]) -> list[_Parameter]:
    hints = get_type_hints(callback, include_extras=True)
    return [_Parameter(p, hints[p.name]) for p in inspect.signature(callback).parameters.values()]


def _commands(group: typer.Typer, prefix: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """The full name and the function of every command, those of sub-groups last."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{prefix} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _commands(inner.typer_instance, f"{prefix} {inner.name}")


def _help(callback: Callable[..., None]) -> str:
    """A command's docstring. Its examples become a code block."""
    paragraphs = []
    for paragraph in (inspect.getdoc(callback) or "").split("\n\n"):
        examples = re.findall(r"^(?:- |Example: )`(.+)`$", paragraph, re.MULTILINE)
        if examples:
            paragraphs.append("\n".join(["```bash", *examples, "```"]))
        elif paragraph != "Examples:":
            paragraphs.append(_linked(paragraph.replace("\n", " ")))
    return "\n\n".join(paragraphs)


class _Parameter:
    """An argument or an option of a command."""

    def __init__(self, parameter: inspect.Parameter, hint: Any) -> None:
        self.type, self.info = get_args(hint)
        assert isinstance(self.info, ArgumentInfo | OptionInfo), parameter
        self.name, self.default = parameter.name, parameter.default
        self.is_argument = isinstance(self.info, ArgumentInfo)

    def usage(self) -> str:
        name = self.info.metavar or self.name.upper() + ("…" if "list" in str(self.type) else "")
        return name if self.default is inspect.Parameter.empty or "[" in name else f"[{name}]"

    def line(self) -> str:
        name, details = self.usage() if self.is_argument else self.names(), []
        if not any(self.default is value for value in (None, False, inspect.Parameter.empty)):
            if self.is_argument:
                details.append(f"default `{self.default}`")
            else:
                name += f"{'=' if '--' in name else ' '}{_number(self.default)}"
        elif not self.is_argument and self.type is not bool:
            name += f" {self.info.metavar or self._type()}"
        if isinstance(self.info.show_default, str):
            details.append(f"default: {self.info.show_default}")
        has_max = self.info.max is not None and self.info.max < INT32_MAX  # which only protects an array's type
        if bounds := _range({"ge": self.info.min, "le": self.info.max if has_max else None}):
            details.insert(0, bounds)
        in_brackets = f" ({', '.join(details)})" if details else ""
        return f"- `{name}`{in_brackets}: {_sentence(self.info.help or '')}"

    def names(self) -> str:
        # In an Annotated the first name given to typer.Option is in `default`.
        given = [name for name in (self.info.default, *(self.info.param_decls or ())) if isinstance(name, str)]
        return ", ".join(given or [f"--{self.name.replace('_', '-')}"])

    def _type(self) -> str:
        (name,) = [_type_name(part) for part in get_args(self.type) or (self.type,) if part is not NoneType]
        return {"str": "TEXT"}.get(name, name.upper())


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- config ----


def config_page() -> str:
    parts, described = ["# Configuration", NOTE, CONFIG_INTRO], dict[tuple[type, str], str]()
    for section, field in Config.model_fields.items():
        model = as_section(field.annotation)
        assert model is not None
        parts.append(f"## {section}")
        if intro := model.__dict__.get("__doc__"):
            parts.append(_linked(intro))
        lines = []
        for key in model.model_fields:  # a key that two sections inherit is described once
            origin = next(base for base in reversed(model.__mro__) if key in inspect.get_annotations(base))
            same_as = described.setdefault((origin, key), f"{section}.{key}")
            lines.append(_key_line(f"{section}.{key}", model, key, same_as))
        parts.append("\n".join(lines))
        if (entry := entry_section(field.annotation)) is not None:
            lines = [_key_line(f"{section}.LABEL.{key}", entry, key) for key in inspect.get_annotations(entry)]
            parts += [
                f"## Several {section}s",
                _linked(" ".join((inspect.getdoc(entry) or "").split())),
                "\n".join(lines),
            ]
    return _join(parts)


def _key_line(name: str, model: Any, key: str, same_as: str | None = None) -> str:
    """`train.seed=0` (≥0): Meaning. The type is left out if the default shows it."""
    field = model.model_fields[key]
    if as_section(field.annotation) is not None:
        return f"- `{name}`: {_sentence(meaning(model, key))}"
    is_set = field.default is not None and not field.is_required()
    default = f"={json.dumps(field.default, ensure_ascii=False)}" if is_set else ""
    if same_as not in (None, name):
        return f"- `{name}{default}`: As `{same_as}`."
    values = _describe(field.annotation, field.metadata, with_type=not is_set)
    in_brackets = f" ({values})" if values else ""
    return f"- `{name}{default}`{in_brackets}: {_sentence(meaning(model, key))}"


def _describe(annotation: Any, metadata: Sequence[Any] = (), with_type: bool = True) -> str:
    """Type and allowed values: `Annotated[int, Field(ge=1)] | None` is "int ≥1"; without the type, "≥1"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = [m.metadata if hasattr(m, "metadata") else [m] for m in args[1:]]
        return _describe(args[0], [m for group in nested for m in group], with_type)
    if origin in (Union, UnionType):
        return " or ".join(_describe(arg, (), with_type) for arg in args if arg is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    bounds = {name: getattr(m, name) for m in metadata for name in BOUNDS if getattr(m, name, None) is not None}
    if origin is list:
        if bounds.get("min_length") and bounds.get("min_length") == bounds.get("max_length"):
            return f"{bounds['min_length']} values"
        of = f"list of {_describe(args[0])}" if with_type or get_origin(args[0]) is Literal else ""
        return " ".join(filter(None, ["non-empty" if bounds.get("min_length") else "", of]))
    if origin is dict:
        return "table"
    return " ".join(filter(None, [_type_name(annotation) if with_type else "", _range(bounds)]))


BOUNDS = ("ge", "gt", "le", "lt", "min_length", "max_length")


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    return str(annotation.__name__)


def _range(bounds: Mapping[str, Any]) -> str:
    low, high = bounds.get("ge"), bounds.get("le")
    if low is not None and high is not None:
        return f"{low} to {high}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(f"{sign}{bounds[name]}" for name, sign in signs.items() if bounds.get(name) is not None)


# ---- names of other libraries ----


def names_page() -> str:
    parts = ["# Names in other libraries", NOTE, NAMES_INTRO]
    for library, names in LIBRARIES.items():
        by_text: dict[str, list[str]] = {}
        for name, text in names.items():
            by_text.setdefault(text, []).append(f"`{name}`")
        rows = [f"| {', '.join(found)} | {_marked(text)} |" for text, found in by_text.items()]
        parts += [f"## {library}", "\n".join([f"| {library} | Paceline |", "|---|---|", *rows])]
    absent = [f"- `{name}`: {text.removesuffix('; remove the key')}." for name, text in ABSENT.items()]
    return _join([*parts, "## Without a counterpart", "\n".join(absent)])


def _marked(text: str) -> str:
    """Keys, settings and options in backticks."""
    key, value = rf"(?:{'|'.join(Config.model_fields)})(?:\.\w+)+", r"\"[^\"]*\"|\{[^}]*\}|\[[^]]*\]"
    return re.sub(rf"{key}(?: = (?:{value}))?|(?<!\w)--?\w+(?: [A-Z]+)?", r"`\g<0>`", text)


# ---- text ----


def _sentence(text: str) -> str:
    return sentence(_linked(text))


def _linked(text: str) -> str:
    """Pages of the documentation as links, and config keys in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [KEY.sub(r"`\1`", PAGE.sub(r"[\1](../\1)", part)) for part in parts[::2]]
    return "".join(parts)


PAGE = re.compile(r"\bdocs/([\w/-]+\.md)")
KEY = re.compile(
    rf"(?<![\w./])({'|'.join(map(re.escape, sorted(all_keys(Config), key=len, reverse=True)))})(?![\w.]*\w)"
)


def _join(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    main()
