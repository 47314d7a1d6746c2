"""Shared by the benchmarks: checks of options, a description of settings and machine, and steps that only decode."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from paceline import __version__
from paceline.types import StepTrace


def check_given(**options: Sequence[Any]) -> None:
    """Each argument is the value of the command-line option with its name, here and below."""
    for name, values in options.items():
        if not values:
            raise ValueError(f"--{name.replace('_', '-')}: give at least one")


def check_choices(known: Sequence[str], **options: str | Sequence[str]) -> None:
    for name, given in options.items():
        values = [given] if isinstance(given, str) else given
        check_given(**{name: values})
        for value in values:
            if value not in known:
                raise ValueError(f"--{name.replace('_', '-')} {value!r}: not one of {', '.join(known)}")


def check_numbers(low: float, high: float = math.inf, **options: float | Sequence[float]) -> None:
    needed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    for name, given in options.items():
        numbers = [given] if isinstance(given, int | float) else given
        check_given(**{name: numbers})
        for number in numbers:
            if not low <= number <= high:
                raise ValueError(f"--{name.replace('_', '-')} {number}: must be {needed}")


def describe(settings: Any) -> dict[str, Any]:
    """The settings and the machine."""
    return {
        **{field.name: getattr(settings, field.name) for field in fields(settings)},
        "config": settings.config.model_dump(mode="json"),
        "machine": {"cpu": platform.machine(), "num_cores": os.cpu_count(), "system": platform.system()},
        "version": __version__,
    }


def decode_steps(traces: Sequence[StepTrace], batch: int) -> list[StepTrace]:
    """The steps with all rows and no prefill."""
    return [t for t in traces if t.num_rows == batch and t.num_query_tokens == batch + t.num_draft_tokens]
