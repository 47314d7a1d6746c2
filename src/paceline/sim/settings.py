"""Frozen dataclasses that are read from TOML. Each number declares its range and unit.

The error for a number out of range names the unit, because a wrong unit is the usual cause. The error for an unknown
key names the closest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from paceline.config_io import ConfigError

T = TypeVar("T")


def number(default: Any = dataclasses.MISSING, *, low: float, high: float, unit: str = "") -> Any:
    """A field with a value from low to high."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "unit": unit})


def field_range(kind: type, name: str) -> tuple[float, float]:
    """(low, high) of a `number` field."""
    rules = {field.name: field.metadata for field in dataclasses.fields(kind)}[name]
    return rules["low"], rules["high"]


def parse_settings(kind: type[T], tree: Mapping[str, Any], where: str = "") -> T:
    """Make a dataclass from parsed TOML. `where`: the section's dotted key or the file's name, for error messages."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where} = {tree!r}: must be a section")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints, given = get_type_hints(kind), {}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(f"unknown key {_dotted(where, key)}: {_nearest(key, list(fields))}")
        given[key] = _value(hints[key], value, _dotted(where, key), fields[key].metadata)
    for key, field in fields.items():
        if key not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_dotted(where, key)} is missing")
    return kind(**given)


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _nearest(key: str, keys: list[str]) -> str:
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"the known keys are {', '.join(keys)}"


def _value(hint: Any, value: Any, key: str, rules: Mapping[str, Any]) -> Any:
    if dataclasses.is_dataclass(hint):
        return parse_settings(hint, value, key)  # type: ignore[arg-type]
    if isinstance(hint, types.UnionType):  # X | None, and TOML has no null
        return _value(get_args(hint)[0], value, key, rules)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{key} = {value!r}: must be a list")
        return tuple(_value(get_args(hint)[0], each, f"{key}[{i}]", rules) for i, each in enumerate(value))
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        type_names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise ConfigError(f"{key} = {value!r}: must be {type_names[hint]}")
    if choices := rules.get("choices"):
        if value not in choices:
            raise ConfigError(f"{key} = {value!r}: must be one of {', '.join(choices)}")
    elif "low" in rules and not (math.isfinite(value) and rules["low"] <= value <= rules["high"]):
        unit = f" in {rules['unit']}; is it in another unit?" if rules["unit"] else ""
        raise ConfigError(f"{key} = {value:g}: must be from {rules['low']:g} to {rules['high']:g}{unit}")
    return value


def choice(default: Any = dataclasses.MISSING, *, of: tuple[str, ...]) -> Any:
    """A field with one of these strings as its value."""
    return dataclasses.field(default=default, metadata={"choices": of})
