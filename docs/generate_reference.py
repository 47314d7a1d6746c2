"""Write docs/reference/commands.md and docs/reference/config.md from the code. `make docs` runs it.

Commands, arguments and options come from the typer app; sections, keys, types, ranges and defaults from the pydantic
models. The meaning of a key is the comment above its field in src/paceline/config.py, or the one behind it.
tests/unit/test_reference.py checks that the committed pages are up to date.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from paceline import config as config_module
from paceline.cli import app
from paceline.cli.replay import INT32_MAX
from paceline.config import Config
from paceline.config_io import all_keys

DIRECTORY = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate_reference.py. Do not edit this page: change the code, then run `make docs`. -->"
COMMANDS_INTRO = (
    "`paceline COMMAND --help` prints the same text. `A.B=C` sets key `B` of [section `A`](config.md), for example "
    "`train.num_steps=50`. Separate several values of an option by commas: `--batch 1,4,16`."
)
CONFIG_INTRO = """A config is a TOML file. `paceline train CONFIG.toml train.num_steps=50` overrides a key.

```toml
[speculation]
method = "suffix"
num_speculative_tokens = 4
```

To leave a key unset, do not write it. An unknown key or a wrong value is an error."""


def pages() -> dict[str, str]:
    """The text of every generated page, by file name."""
    return {"commands.md": commands_page(), "config.md": config_page()}


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, text in pages().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")


# ---- commands ----


def commands_page() -> str:
    parts = ["# Commands", NOTE, COMMANDS_INTRO]
    for name, callback in _commands(app, "paceline"):
        hints = get_type_hints(callback, include_extras=True)
        parameters = [_Parameter(p, hints[p.name]) for p in inspect.signature(callback).parameters.values()]
        usage = " ".join([name, *(p.usage() for p in parameters if p.is_argument)])
        parts += [f"## {name}", _help(callback), f"Usage: `{usage} [OPTIONS]`"]
        parts.append("\n".join(p.line() for p in parameters))
    return _join(parts)


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
        name = self.usage() if self.is_argument else self._option_names()
        details = [] if self.type is bool or self.info.metavar else [self._type()]
        if isinstance(self.info.show_default, str):
            details.append(f"default: {self.info.show_default}")
        elif not any(self.default is value for value in (None, False, inspect.Parameter.empty)):
            details.append(f"default `{_number(self.default)}`")
        in_brackets = f" ({', '.join(details)})" if details else ""
        return f"- `{name}`{in_brackets}: {_sentence(self.info.help or '')}"

    def _option_names(self) -> str:
        # In an Annotated the first name given to typer.Option is in `default`.
        given = [name for name in (self.info.default, *(self.info.param_decls or ())) if isinstance(name, str)]
        names = ", ".join(given or [f"--{self.name.replace('_', '-')}"])
        return f"{names} {self.info.metavar}" if self.info.metavar else names

    def _type(self) -> str:
        inner = [_type_name(part) for part in get_args(self.type) or (self.type,) if part is not NoneType]
        names = {"str": "text", "Path": "path", "list of str": "text"}
        (name,) = [names.get(part, part) for part in inner]
        has_max = self.info.max is not None and self.info.max < INT32_MAX  # which only protects an array's type
        return name + _range({"ge": self.info.min, "le": self.info.max if has_max else None})


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- config ----


def config_page() -> str:
    parts = ["# Configuration", NOTE, CONFIG_INTRO]
    for section, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        parts.append(f"## {section}")
        if intro := model.__dict__.get("__doc__"):
            parts.append(_linked(intro))
        parts.append("\n".join(_key_line(f"{section}.{key}", model, key) for key in model.model_fields))
    return _join(parts)


def _key_line(name: str, model: Any, key: str) -> str:
    field = model.model_fields[key]
    type_text = _describe(field.annotation, field.metadata)
    default = "not set" if field.default is None else f"`{json.dumps(field.default, ensure_ascii=False)}`"
    separator = ";" if "`, `" in type_text else ","
    return f"- `{name}` ({type_text}{separator} default {default}): {_sentence(meaning(model, key))}"


def meaning(model: type, key: str) -> str:
    """The comment of a field, or of the field that it overrides; empty if there is none."""
    comments = field_comments(inspect.getsource(config_module))
    return next((text for base in model.__mro__ if (text := comments.get((base.__name__, key)))), "")


@cache
def field_comments(source: str) -> dict[tuple[str, str], str]:
    """The comments above and behind every field, by class and field."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    own_lines = {number for number, token in comments.items() if not token.line[: token.start[1]].strip()}
    found: dict[tuple[str, str], str] = {}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in classes:
        for field in node.body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            first = field.lineno
            while first - 1 in own_lines:
                first -= 1
            numbers = [*range(first, field.lineno), *([field.end_lineno] if field.end_lineno in comments else [])]
            found[node.name, field.target.id] = " ".join(comments[i].string.lstrip("# ") for i in numbers)
    return found


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Type and allowed values: `Annotated[int, Field(ge=1)] | None` is "int ≥ 1"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = [m.metadata if hasattr(m, "metadata") else [m] for m in args[1:]]
        return _describe(args[0], [m for group in nested for m in group])
    if origin in (Union, UnionType):
        return " or ".join(_describe(arg) for arg in args if arg is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    bounds = {name: getattr(m, name) for m in metadata for name in BOUNDS if getattr(m, name, None) is not None}
    if origin is list:
        of = _describe(args[0])
        if bounds.get("min_length") and bounds.get("min_length") == bounds.get("max_length"):
            return f"list of {bounds['min_length']} {of}"
        return f"{'non-empty ' if bounds.get('min_length') else ''}list of {of}"
    if origin is dict:
        return "table" if args[1] is Any else f"table of {_describe(args[0])} to {_describe(args[1])}"
    pattern = f" matching `{bounds['pattern']}`" if "pattern" in bounds else ""
    return _type_name(annotation) + _range(bounds) + pattern


BOUNDS = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    return str(annotation.__name__)


def _range(bounds: Mapping[str, Any]) -> str:
    low, high = bounds.get("ge"), bounds.get("le")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [f"{sign} {bounds[name]}" for name, sign in signs.items() if bounds.get(name) is not None]
    return f" {' and '.join(found)}" if found else ""


# ---- text ----


def _sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    text = _linked(text)
    return text[:1].upper() + text[1:].removesuffix(".") + "."


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
