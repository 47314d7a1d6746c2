"""Prompts from a jsonl file. Each line has a string or a list of chat messages under the key `prompt` or `question`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.chat.messages import Prompt
from paceline.files import parse_json, read_lines
from paceline.tasks.prompt import PROMPT_FORMAT, is_prompt

BUILTIN = Path(__file__).with_name("prompts.jsonl")


def read_prompts(path: str | Path = BUILTIN) -> list[Prompt]:
    return parse_prompts(read_lines(Path(path)), str(path))


def parse_prompts(lines: Iterable[tuple[int, str | bytes]], name: str) -> list[Prompt]:
    """`lines`: (number, text), numbered from 1. `name` is used in error messages."""
    prompts: list[Prompt] = []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        prompts.append(_prompt(record, f"{name}, line {number}"))
    if not prompts:
        raise ValueError(f'{name}: it has no prompts; add lines such as {{"prompt": "…"}}')
    return prompts


def _prompt(record: Any, where: str) -> Prompt:
    prompt = record.get("prompt", record.get("question")) if isinstance(record, dict) else None
    if not is_prompt(prompt):
        raise ValueError(f"{where}: needs `prompt` or `question`, {PROMPT_FORMAT}")
    return prompt
