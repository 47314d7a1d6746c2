"""Read and write settings: TOML files, `a.b=c` overrides, and error messages for wrong keys and values.

Works for any tree of pydantic models; a model with keys is called a section. A key may also have a list of sections,
TOML's array of tables; a dotted key names an entry by its `label`: `task.sums.weight`. An unknown key is an error that
names the right or the nearest known key. A value of the wrong type is an error that names the expected type.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from paceline.files import read_text

SectionType = type[BaseModel]
Model = TypeVar("Model", bound=BaseModel)


class ConfigError(ValueError):
    """A setting that can't be used. The message names the key, the value and what to do."""


# ---- reading ----


def read_settings(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a TOML file (none if `path` is None), with `a.b=c` overrides applied in order. Not validated."""
    settings = {} if path is None else read_toml(Path(path))
    for override in overrides:
        apply_override(settings, override)
    return settings


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"config file {path} is not valid TOML: nested too deep") from None
    except ValueError as error:
        raise ConfigError(f"config file {error}") from None


def apply_override(settings: dict[str, Any], override: str) -> None:
    """Set the key of an `a.b=c` override."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    value = _parse_value(key.strip(), text.strip())
    for depth, part in enumerate(parts[:-1], 1):
        settings = _entry(settings, part, override) if isinstance(settings, list) else settings.setdefault(part, {})
        if not isinstance(settings, dict) and not _is_list_of_sections(settings):
            raise ConfigError(f"override {override!r}: {'.'.join(parts[:depth])} is a value, not a section")
    if isinstance(settings, list):
        *section, key = parts
        keys = [".".join([*section, entry_name(entry, i), key]) for i, entry in enumerate(settings)]
        raise ConfigError(f"override {override!r}: {'.'.join(section)} is a list; write {' or '.join(keys)}")
    previous = settings.get(parts[-1])
    if _is_list_of_sections(previous) and isinstance(value, str):  # keep only the entry with this label
        value = [_entry(previous, value, override)]
    settings[parts[-1]] = value


def _is_list_of_sections(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(entry, dict) for entry in value)


def _entry(entries: list[Any], label: str, override: str) -> Any:
    named = {entry_name(entry, i): entry for i, entry in enumerate(entries)}
    if label not in named:
        raise ConfigError(f"override {override!r}: there is no {label!r}; the labels are {', '.join(named)}")
    return named[label]


def entry_name(entry: Any, index: int) -> str:
    """The part of a dotted key for an entry of a list of sections: its label, or without a valid one its number."""
    label = entry.get("label") if isinstance(entry, Mapping) else getattr(entry, "label", None)
    return label if isinstance(label, str) and re.fullmatch(r"[\w-]+", label) else str(index + 1)


def _parse_value(key: str, text: str) -> Any:
    """A TOML value. Text that is not TOML is a string: `model.name=smollm2-135m` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        if text and text[0] not in "[{\"'" and "\n" not in text:
            return text
        raise ConfigError(f"{key} = {text}: not a TOML value; write strings as {key}='\"text\"'") from None


def validate(root: type[Model], settings: Mapping[str, Any], hints: Mapping[str, str] = {}) -> Model:
    """Make a `root` from nested settings. Raises ConfigError with one line per wrong key or value. `hints` has texts
    about unknown keys, by name."""
    try:
        return root.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(root, settings, error, hints))) from None


def check_key(root: SectionType, key: str, hints: Mapping[str, str] = {}) -> None:
    """Raise ConfigError unless this dotted key is a section, a key, or an entry of a table."""
    path = key.split(".")
    for depth in range(1, len(path) + 1):
        section, name = _section_at(root, path[: depth - 1]), path[depth - 1]
        if name not in section.model_fields:
            raise ConfigError("\n".join(_unknown(root, path[:depth], _nested(path[depth:]), hints)))
        if as_section(section.model_fields[name].annotation) is None:
            break  # the rest are keys of a table


def _nested(path: Sequence[str]) -> Any:
    return {path[0]: _nested(path[1:])} if path else None


def all_keys(section: SectionType, prefix: str = "") -> list[str]:
    """Every dotted key of a section and of the sections in it."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        inner = as_section(field.annotation)
        keys += all_keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return keys


def sections_of(config: BaseModel) -> Iterator[tuple[str, str, BaseModel]]:
    """(header in TOML, dotted key, section) of every section that has a value, in order. An entry of a list of sections
    comes before the sections in it."""

    def walk(value: Any, header: str, key: str) -> Iterator[tuple[str, str, BaseModel]]:
        for i, entry in enumerate(value if isinstance(value, list) else []):
            if isinstance(entry, BaseModel):
                name = f"{key}.{entry_name(entry, i)}"
                yield f"[[{header}]]", name, entry
                yield from inner(entry, f"{header}.", f"{name}.")
        if isinstance(value, BaseModel):
            yield f"[{header}]", key, value
            yield from inner(value, f"{header}.", f"{key}.")

    def inner(section: BaseModel, header: str, key: str) -> Iterator[tuple[str, str, BaseModel]]:
        for name in type(section).model_fields:
            yield from walk(getattr(section, name), header + name, key + name)

    yield from inner(config, "", "")


def own_keys(section: BaseModel) -> list[str]:
    """The keys of a section that are no sections themselves; its label first."""
    keys = [name for name, field in type(section).model_fields.items() if as_section(field.annotation) is None]
    return sorted(keys, key=lambda name: name != "label")


# ---- error messages ----


def _explain(
    root: SectionType, settings: Mapping[str, Any], error: ValidationError, hints: Mapping[str, str]
) -> list[str]:
    """One line per key. pydantic reports one error per member of a union; only the first one is used."""
    lines: list[str] = []
    seen: set[str] = set()
    for detail in error.errors():
        path = _key_path(root, settings, detail["loc"])
        key = ".".join(path)
        if key in seen:
            continue
        seen.add(key)
        if detail["type"] == "extra_forbidden":
            lines += _unknown(root, path, look_up(settings, path), hints)
        elif detail["type"] == "missing":
            lines.append(f"{key} is not set: expected {expected(root, key)}")
        elif detail["type"] == "value_error":  # raised by a section's `check`: a complete message
            in_list = any(isinstance(part, int) for part in detail["loc"])
            lines.append((f"{key}: " if in_list else "") + str(detail["ctx"]["error"]))
        else:
            lines.append(f"{key} = {look_up(settings, path)!r}: expected {expected(root, key)}")
    return lines


def _key_path(root: SectionType, settings: Mapping[str, Any], location: tuple[int | str, ...]) -> list[str]:
    """The sections and the key of pydantic's location, without the union members that follow."""
    path: list[str] = []
    section: SectionType | None = root
    parts = iter(location)
    for part in parts:
        path.append(str(part))
        field = section.model_fields.get(str(part)) if section else None
        section = as_section(field.annotation) if field else None
        if section is None:
            break
        if field is not None and entry_section(field.annotation) is not None:
            next(parts, None)  # the form: a section or a list
            if isinstance(look_up(settings, path), list) and isinstance(index := next(parts, None), int):
                path.append(entry_name(look_up(settings, path)[index], index))
                section = entry_section(field.annotation)
    return path


def _unknown(root: SectionType, path: list[str], value: Any, hints: Mapping[str, str]) -> list[str]:
    """One line for an unknown key, or for every key of an unknown section that there is a hint for."""
    if path[0] in root.model_fields:
        return [f"unknown key {'.'.join(path)}: {_hint_in_section(root, path, hints) or _nearest(root, path)}"]
    keys = [".".join(path) + inner for inner in _leaves(value)]
    hinted = [f"unknown key {key}: {hint}" for key in keys if (hint := _hint(key, hints)) is not None]
    return hinted or [f"unknown key {'.'.join(path)}: {_nearest(root, path)}"]


def _hint_in_section(root: SectionType, path: list[str], hints: Mapping[str, str]) -> str | None:
    """For an unknown key of a known section: the hint for the dotted key or its last part. `train.lr` is
    learner.learning_rate, but `draft.lr` is draft.learning_rate, because that section has the key too."""
    *parents, leaf = path
    section, key = ".".join(parents), ".".join(path)
    hint = hints.get(key) or hints.get(leaf)
    if hint is None or key in hints or f"{section}." in hint:
        return hint
    names = [name for name in _section_at(root, parents).model_fields if re.search(rf"\.{name}\b", hint)]
    return f"did you mean {section}.{names[0]}?" if names else hint


def _leaves(value: Any) -> list[str]:
    """The dotted keys in nested settings, each with a dot in front; of a value, an empty one."""
    if not isinstance(value, Mapping):
        return [""]
    return [f".{name}{inner}" for name, content in value.items() for inner in _leaves(content)]


def _hint(key: str, hints: Mapping[str, str]) -> str | None:
    """The hint for the longest end of a dotted key."""
    parts = key.split(".")
    return next((hints[name] for i in range(len(parts)) if (name := ".".join(parts[i:])) in hints), None)


def _nearest(root: SectionType, path: list[str]) -> str:
    *parents, leaf = path
    keys = list(_section_at(root, parents).model_fields)
    in_section = {key: ".".join([*parents, key]) for key in keys}
    anywhere: dict[str, str] = {}
    for key in all_keys(root):
        anywhere.setdefault(key.rpartition(".")[2], key)
    if not parents and (same := [key for key in all_keys(root) if key.rpartition(".")[2] == leaf]):
        return f"its section is missing; write {' or '.join(same)}"
    # The same key in another section, then a similar key in this section, then a similar key in any section.
    for candidates, cutoff in ((anywhere, 1.0), (in_section, 0.5), (anywhere, 0.8)):
        if close := difflib.get_close_matches(leaf, candidates, n=1, cutoff=cutoff):
            return f"did you mean {candidates[close[0]]}?"
    return f"the keys of {'.'.join(parents) or 'a config'} are {', '.join(keys)}"


def as_section(annotation: Any) -> SectionType | None:
    """The section of a key; None if its values are no sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(as_section, _members(annotation))), None)


def entry_section(annotation: Any) -> SectionType | None:
    """The section of each entry, for a key that may be a list of sections."""
    if get_origin(annotation) is list:
        return as_section(get_args(annotation)[0])
    return next(filter(None, map(entry_section, _members(annotation))), None)


def _members(annotation: Any) -> tuple[Any, ...]:
    """Of a union; of an annotated type, the type."""
    origin, args = get_origin(annotation), get_args(annotation)
    return args[:1] if origin is Annotated else args if origin in (Union, UnionType) else ()


def _section_at(root: SectionType, path: Sequence[str]) -> SectionType:
    section, entries = root, None
    for part in path:
        if part not in section.model_fields and entries is not None:
            section, entries = entries, None  # the part is a label
        else:
            annotation = section.model_fields[part].annotation
            section, entries = as_section(annotation) or section, entry_section(annotation)
    return section


def look_up(settings: Any, path: Sequence[str]) -> Any:
    """The value of a dotted key in nested settings or in a config. KeyError if it is missing."""
    for part in path:
        if isinstance(settings, list):
            settings = {entry_name(entry, i): entry for i, entry in enumerate(settings)}[part]
        elif isinstance(settings, BaseModel):
            settings = getattr(settings, part)
        else:
            settings = settings[part]
    return settings


def expected(root: SectionType, key: str) -> str:
    """The values that a dotted key may have, in plain English."""
    *parents, leaf = key.split(".")
    field = _section_at(root, parents).model_fields.get(leaf)
    if field is None:  # an entry of a list
        return _describe(_section_at(root, [*parents, leaf]))
    return _describe(field.annotation, field.metadata)


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation in plain English: `Annotated[int, Field(ge=1)] | None` is "an integer >= 1"."""
    if section := as_section(annotation):
        return f"a section with the keys {', '.join(section.model_fields)}"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        fields = [m.metadata if hasattr(m, "metadata") else [m] for m in args[1:]]
        return _describe(args[0], [m for group in fields for m in group])
    if origin is Literal:
        return "one of " + ", ".join(f'"{arg}"' for arg in args)
    if origin in (Union, UnionType):
        return " or ".join(_describe(arg) for arg in args if arg is not type(None))
    if origin is dict:
        return f"a table from {_describe(args[0])} to {_describe(args[1])}"
    if origin is list:
        item = _describe(args[0])
        return (
            f"a list of {item.partition(' ')[2]}s" if re.fullmatch(r"an? \w+", item) else f"a list; an item is {item}"
        )
    if annotation is Any:
        return "any value"
    type_names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    text = type_names.get(annotation, str(annotation))
    bounds = [
        f"{sign} {bound}"
        for constraint in metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("le", "<="), ("lt", "<"), ("pattern", "matching"))
        if (bound := getattr(constraint, name, None)) is not None
    ]
    return f"{text} {' and '.join(bounds)}" if bounds else text


# ---- writing ----


def dump_config(config: BaseModel, comments: Mapping[str, str] = {}) -> str:
    """All settings as TOML. Reading it gives an equal config. None is left out: it is the default of such keys.
    `comments`: one line for some sections."""
    sections = []
    for header, name, section in sections_of(config):
        comment = [f"# {comments[name]}"] if name in comments else []
        values = {key: getattr(section, key) for key in own_keys(section)}
        lines = [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
        sections.append("\n".join([header, *comment, *lines]))
    return "\n\n".join(sections) + "\n"


def toml_value(value: Any) -> str:
    """A value as it is written in a TOML file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML has JSON's escapes, except surrogate pairs (so non-ASCII characters are not escaped) and DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, date | time):  # datetime is a date
        return value.isoformat()
    assert isinstance(value, int | float), f"no TOML for {value!r}"
    return repr(value)
