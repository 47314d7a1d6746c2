"""Prompts of a task: their format, their identity, and `task.template` and `task.system` around them."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from paceline.chat.messages import Prompt, as_messages
from paceline.config import TaskSection

PROMPT_FORMAT = "a non-empty string or a list of messages with `role` and `content`, both strings"


def is_prompt(value: Any) -> TypeGuard[Prompt]:
    """Whether this is a valid prompt: see PROMPT_FORMAT."""
    if isinstance(value, str):
        return bool(value.strip())
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in value)
    )


def prompt_identity(prompt: Prompt) -> str:
    """Equal for equal prompts. A string equals a list with one user message of the same content."""
    return json.dumps(as_messages(prompt), sort_keys=True, default=str)


def apply_template(prompt: Prompt, section: TaskSection) -> Prompt:
    """A task's prompt in `task.template` (strings only), after the system message `task.system` unless the prompt has
    one of its own."""
    if "{prompt}" not in section.template:
        raise ValueError(f'task.template = {section.template!r}: must contain "{{prompt}}" in place of the prompt')
    if isinstance(prompt, str):
        prompt = section.template.replace("{prompt}", prompt)
    if not section.system:
        return prompt
    if not section.chat:
        raise ValueError(
            f"task.system = {section.system!r}: needs the chat template, but task.chat = false; put the text into "
            "task.template"
        )
    if not isinstance(prompt, str) and any(message["role"] == "system" for message in prompt):
        return prompt
    return as_messages(prompt, section.system)
